"""Traces from files: the public formats, any columns by name, and errors with the line."""

import itertools
import json

import numpy as np
import pytest

from helpers_diagnose import make_trace, trace_path
from paxkv.diagnose import readers
from paxkv.diagnose.readers import read_trace
from paxkv.diagnose.trace import fit_to_context

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
SHAREGPT = "TIMESTAMP,ContextTokens,GeneratedTokens\nXXX,42,285\nXXX,19,82\n"
BURST = "Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,472,18\n45,ChatGPT,1087,230\n"
MOONCAKE = (
    '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 27500, "input_length": 1024, "output_length": 3, "hash_ids": [0, 2]}\n'
)


def batch_input(**body) -> str:
    return json.dumps({"custom_id": "1", "method": "POST", "url": "/v1", "body": body})


def batch_output(prompt: int, completion: int) -> str:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": 0}
    response = {"status_code": 200, "body": {"usage": usage}}
    return json.dumps({"id": "a", "custom_id": "1", "response": response, "error": None})


@pytest.fixture
def read(tmp_path):
    """Writes a text to a file and reads it as a trace."""

    def read(text: str | bytes, **how):
        path = tmp_path / "trace"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_trace(path, **how)

    return read


@pytest.mark.parametrize(
    ("text", "prompts", "outputs", "seconds"),
    [
        (AZURE, [4808, 3180], [10, 8], [0.0, 0.052]),
        (AZURE.replace("\n", "\r\n"), [4808, 3180], [10, 8], [0.0, 0.052]),
        ("\ufeff" + AZURE, [4808, 3180], [10, 8], [0.0, 0.052]),
        (SHAREGPT, [42, 19], [285, 82], None),
        (BURST, [472, 1087], [18, 230], [0.0, 40.0]),
        (MOONCAKE, [700, 1024], [5, 3], [0.0, 27.5]),
        ('{"prompt_tokens": 3, "output_tokens": 4}\n\n', [3], [4], None),
        ("prompt_tokens, output_tokens\n3, 4\n\n5, 6", [3, 5], [4, 6], None),
    ],
    ids=["azure", "crlf", "bom", "sharegpt", "burst", "mooncake", "jsonl", "spaces"],
)
def test_public_formats_are_known_by_their_columns(read, text, prompts, outputs, seconds):
    trace = read(text)
    assert trace.prompt_tokens.tolist() == prompts and trace.output_tokens.tolist() == outputs
    if seconds is None:
        assert trace.arrival_seconds is None
    else:
        assert trace.arrival_seconds == pytest.approx(seconds, abs=1e-5)


def test_hashes_of_prompt_blocks_are_read(read):
    prefixes = read(MOONCAKE).prefixes
    assert prefixes is not None and prefixes.block_tokens == 512
    assert prefixes.of(0).tolist() == [0, 1] and prefixes.of(1).tolist() == [0, 2]
    assert prefixes.take(np.array([1])).of(0).tolist() == [0, 2]


def test_other_columns_are_named(read):
    text = "when_ms,a,b\n1000,3,4\n3500,5,6\n"
    columns = {"prompt": "a", "output": "b", "arrival": "when_ms"}
    trace = read(text, columns=columns)
    assert trace.output_tokens.tolist() == [4, 6]
    assert trace.arrival_seconds is not None and trace.arrival_seconds.tolist() == [0, 2.5]


@pytest.mark.parametrize(
    ("unit", "stamps", "gap"),
    [
        (None, (1700000000, 1700000002), 2.0),
        (None, (1700000000000, 1700000002000), 2.0),
        (None, (1.5, 3.0), 1.5),
        ("ms", (1, 501), 0.5),
        ("us", (0, 2_000_000), 2.0),
    ],
)
def test_units_of_time_follow_from_size_or_are_named(read, unit, stamps, gap):
    rows = "".join(f"{stamp},1,1\n" for stamp in stamps)
    trace = read("timestamp,prompt_tokens,output_tokens\n" + rows, time_unit=unit)
    assert trace.arrival_seconds is not None and trace.arrival_seconds[1] == pytest.approx(gap)


def test_requests_are_put_in_order_of_arrival(read):
    trace = read("timestamp,prompt_tokens,output_tokens\n9,1,1\n4,2,2\n6,3,3\n")
    assert trace.prompt_tokens.tolist() == [2, 3, 1]
    assert trace.arrival_seconds is not None and trace.arrival_seconds.tolist() == [0, 2, 5]
    assert "sorted by arrival" in trace.notes


def test_a_batch_that_is_asked_for_is_estimated_from_its_text(read):
    messages = [
        {"role": "system", "content": "a" * 40},
        {"role": "user", "content": [{"type": "text", "text": "b" * 20}]},
    ]
    lines = [
        batch_input(messages=messages, max_tokens=7),
        batch_input(prompt=[5, 6, 7], max_completion_tokens=8),
    ]
    trace = read("\n".join(lines))
    assert trace.prompt_tokens.tolist() == [15, 3] and trace.output_tokens.tolist() == [7, 8]
    assert "4 bytes a token" in trace.notes[0]


def test_a_batch_that_came_back_says_its_true_lengths(read):
    failed = json.dumps({"custom_id": "2", "response": None, "error": {"message": "no"}})
    trace = read("\n".join([batch_output(12, 34), failed, batch_output(5, 6)]))
    assert trace.prompt_tokens.tolist() == [12, 5] and trace.output_tokens.tolist() == [34, 6]
    assert any("1 requests of the batch failed" in note for note in trace.notes)


HEAD = "prompt_tokens,output_tokens,timestamp\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "is empty: a trace has a header"),
        (b" \n\n", "is empty"),
        (HEAD, "has no requests"),
        ("a,b\n1,2\n", "line 1: no column of prompt lengths. It has a, b. Say which.*--columns"),
        ("prompt_tokens,b\n1,2\n", "no column of output lengths"),
        ('{"input_length": 3}\n', "line 1: no column of output lengths"),
        (HEAD + "1,2,3\n-4,2,3\n", "line 3: prompt_tokens is -4; .* 0 or more"),
        (HEAD + "1,2.5,3\n", "line 2: output_tokens is '2.5'; a whole number"),
        (HEAD + "1,2,3\n1,2k,3\n", "line 3: output_tokens is '2k'"),
        (HEAD + "1,,3\n", "line 2: output_tokens is ''"),
        (HEAD + "1,999999999,3\n", "more than 100000000 tokens: is it in bytes"),
        (HEAD + "1,2\n", "line 2: 2 of 3 columns"),
        (HEAD + "1,2,3\n1,2,2023-11-16 18:17:03\n", "line 3: timestamp .* is a date, but .* num"),
        (HEAD + "1,2,1700000000\n1,2,1700000000500\n", "line 3: .* number of ms since 1970, but"),
        (HEAD + "1,2,3\n1,2,\n", "line 3: timestamp '' is missing, but"),
        (HEAD + "1,2,-3\n", "line 2: timestamp '-3' must be 0 or more"),
        (HEAD + "1,2,soon\n", "line 2: timestamp 'soon' is neither a number nor a date"),
        ("[{}]", "is one JSON array: write one object per line"),
        ('{"a": \n', "line 1: "),
        ('{"input_length": 1, "output_length": 1.5}\n', "line 1: output_length is 1.5"),
        ('{"input_length": 1, "output_length": null}\n', "line 1: output_length is None"),
        (MOONCAKE + "[1]\n", "line 3: list where an object"),
        (MOONCAKE.replace("[0, 2]", "[0]").replace("1024", "2048"), "line 2: hash_ids has 1 ids"),
        (MOONCAKE.replace("[0, 2]", '"x"'), "line 2: hash_ids is 'x'"),
        (MOONCAKE.replace("[0, 2]", f"[0, {2**63}]"), "line 2: hash_ids is .* whole numbers"),
        ('{"input_length": 1, "output_length": NaN}\n', "line 1: output_length is nan"),
        ('{"custom_id": "a", "response": "x"}\n', "line 1: its response is not one of OpenAI's"),
        ('{"custom_id": "a", "response": {"body": {"usage": 3}}}\n', "line 1: its usage is no"),
        (HEAD.encode("utf-16"), "is not text in UTF-8: name a trace"),
        (batch_input(messages=[]), "line 1: it names neither max_tokens nor"),
        (batch_input(max_tokens=3), "line 1: it has neither messages nor a prompt"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(read, text, told):
    with pytest.raises(ValueError, match=f"(?s)trace.*{told}"):
        read(text)


def test_whole_numbers_with_a_point_are_read(read):
    trace = read("prompt_tokens,output_tokens\n10.0,3\n")
    assert trace.prompt_tokens.tolist() == [10]


def test_columns_that_are_not_there_are_told(read):
    with pytest.raises(ValueError, match="no column 'tokens' for prompt"):
        read(AZURE, columns={"prompt": "tokens"})
    with pytest.raises(ValueError, match="'promt' is not one of prompt, output"):
        read(AZURE, columns={"promt": "tokens"})


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.csv is not a file: name a trace"):
        read_trace(tmp_path / "nowhere.csv")
    with pytest.raises(ValueError, match="is not a file"):
        read_trace(tmp_path)


def test_a_huge_file_is_read_line_by_line_and_no_further_than_asked(tmp_path, monkeypatch):
    path = tmp_path / "huge.csv"
    path.write_text(HEAD + "1,2,3\n" * 1000)
    with path.open("r+b") as file:
        file.truncate(5 * 10**9)  # a hole: it takes no room on disk
    read_lines = []
    lines = readers._lines

    def counting(*args):
        for text in lines(*args):
            read_lines.append(len(text))
            yield text

    monkeypatch.setattr(readers, "_lines", counting)
    trace = read_trace(path, max_requests=500)
    assert len(trace) == 500 and len(read_lines) < 520
    assert any("first 500 requests of huge.csv" in note for note in trace.notes)


def test_a_line_that_never_ends_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_MAX_LINE", 100)
    path = tmp_path / "long.csv"
    path.write_text(HEAD + "1" * 1000)
    with pytest.raises(ValueError, match=r"long.csv, line 2: longer than 100 characters"):
        read_trace(path)


# What a model can serve.


def test_requests_beyond_the_context_are_told_or_left_out():
    trace = make_trace((10, 5), (30, 5), (0, 5), (10, 0))
    with pytest.raises(ValueError, match=r"1 of 4 requests .* of 32 tokens \(request 2: 30 .*--sk"):
        fit_to_context(trace, 32, skips_longer=False)
    kept = fit_to_context(trace, 32, skips_longer=True)
    assert kept.prompt_tokens.tolist() == [10]
    assert kept.notes == ("left out: 1 longer than 32 tokens, 2 without prompt or output",)
    with pytest.raises(ValueError, match="none of the 4 requests"):
        fit_to_context(trace, 8, skips_longer=True)


def test_a_trace_that_fits_stays_as_it_is():
    trace = make_trace((10, 5))
    assert fit_to_context(trace, 15, skips_longer=False) is trace


@pytest.mark.parametrize(
    ("name", "rows", "prompt", "output"),
    [
        ("azure_llm_2023/AzureLLMInferenceTrace_code.csv", 8819, 2047.9, 27.9),
        ("azure_llm_2023/AzureLLMInferenceTrace_conv.csv", 19366, 1154.7, 211.1),
        ("mooncake_fast25/conversation_trace.jsonl", 12031, None, None),
        ("sharegpt_lengths/sharegpt.csv", 58787, None, None),
    ],
    ids=itertools.count(),
)
def test_real_traces_are_read(name, rows, prompt, output):
    trace = read_trace(trace_path(name))
    assert len(trace) == rows
    if prompt is not None:
        assert trace.prompt_tokens.mean() == pytest.approx(prompt, abs=0.06)
        assert trace.output_tokens.mean() == pytest.approx(output, abs=0.05)
