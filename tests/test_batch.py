"""`paxkv batch`: each request has exactly one result, however often the run is stopped."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import StubDecoder
from helpers_cli import run
from helpers_llm import make_llm
from helpers_text import byte_level_tokenizer
from paxkv import SamplingParams
from paxkv.batch import BatchRequest, Results, read_requests, run_batch
from paxkv.openai_format import CHAT, COMPLETIONS

GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def llm():
    table = np.random.default_rng(0).normal(size=(264, 264))
    return make_llm(StubDecoder(np.float32(table)), byte_level_tokenizer())


@pytest.fixture(autouse=True)
def without_compilation_cache(monkeypatch):
    monkeypatch.setenv("PAXKV_COMPILATION_CACHE", "0")


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    return path


def results_of(path: Path) -> dict[str, dict[str, Any]]:
    """The results by `custom_id`, which must each be there once."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    results = {result["custom_id"]: result["response"] for result in lines}
    assert len(results) == len(lines)
    return results


def serve(llm, path: Path, *lines: dict[str, Any]) -> dict[str, dict[str, Any]]:
    results = Results(path)
    requests = [BatchRequest(x["custom_id"], x["url"], x["body"]) for x in lines]
    list(run_batch(llm, requests, results, model="tiny"))
    results.close()
    return results_of(path)


# Requests and answers


def test_result_is_what_generate_gives(llm, tmp_path):
    asked = line("a", prompt="Hello", logprobs=2, **GREEDY)
    response = serve(llm, tmp_path / "out.jsonl", asked)["a"]
    [completion] = llm.generate("Hello", SamplingParams(**GREEDY, logprobs=2))
    assert response["status_code"] == 200
    body = response["body"]
    [choice] = body["choices"]
    assert choice["text"] == completion.text
    assert choice["finish_reason"] == completion.finish_reason == "length"
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    assert body["object"] == "text_completion" and body["model"] == "tiny"
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["top_logprobs"]) == 4


def test_samples_are_choices(llm, tmp_path):
    asked = line("a", prompt="Hello", n=2, max_tokens=4, seed=1)
    body = serve(llm, tmp_path / "out.jsonl", asked)["a"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["total_tokens"] == 5 + body["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"prompt": None}, "the body has no 'prompt'"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": "hot"}, "must be a number"),
        ({"n": 3, "best_of": 2}, "best_of=2"),
        ({"stream": True}, "stream=True is not served"),
        ({"tools": [1]}, "fields that are not known: tools"),
        ({"logit_bias": {"x": 1}}, "must have token ids for keys"),
        ({"top_logprobs": 2}, "top_logprobs is for /v1/chat/completions"),
        ({"prompt": "x" * 100}, "100 tokens"),
        ({"prompt": ["a", "b"]}, "must be text or a list of token ids"),
        ({"prompt": 5}, "prompt=5 must be text or a list of token ids"),
        ({"prompt": True}, "prompt=True must be text or a list of token ids"),
        ({"prompt": [True, False]}, "a list of token ids, found [True, False]"),
    ],
)
def test_refused_request_says_why_and_others_are_served(llm, tmp_path, changes, told):
    good = line("good", prompt="ab", **GREEDY)
    bad = line("bad", **({"prompt": "ab"} | GREEDY | changes))
    results = serve(llm, tmp_path / "out.jsonl", bad, good)
    assert results["good"]["status_code"] == 200
    assert results["bad"]["status_code"] == 400
    assert told in results["bad"]["body"]["error"]["message"]


def test_exit_status_tells_of_what_was_refused_by_an_earlier_run_too(tiny_model, tmp_path):
    lines = line("good", prompt="ab", max_tokens=1), line("bad", prompt="ab", n=0)
    file = write_lines(tmp_path / "in.jsonl", *lines)
    for _ in range(2):
        result = run("batch", file, "--model", tiny_model, "--dtype", "float32")
        assert result.exit_code == 1 and "2 results in" in result.stderr, result.output
        assert "of which 1 say why" in result.stderr


def test_unknown_url_is_refused(llm, tmp_path):
    results = serve(llm, tmp_path / "out.jsonl", line("a", "/v1/embeddings", input="x"))
    assert "'/v1/embeddings'" in results["a"]["body"]["error"]["message"]


def test_chat_request_goes_through_the_template(tiny_chat_model, tmp_path):
    message = [{"role": "user", "content": "Hi"}]
    body = {"messages": message, "logprobs": True, "top_logprobs": 1, "max_completion_tokens": 3}
    file = write_lines(tmp_path / "in.jsonl", line("a", CHAT, **body))
    result = run("batch", file, "--model", tiny_chat_model, "--dtype", "float32")
    assert result.exit_code == 0, result.output
    [choice] = results_of(tmp_path / "in.results.jsonl")["a"]["body"]["choices"]
    assert choice["message"]["role"] == "assistant" and len(choice["logprobs"]["content"]) <= 3
    result = run("batch", file, "--model", tiny_chat_model)  # nothing is left to do
    assert result.exit_code == 0 and "1 results stand in" in result.stderr


# Files


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no request"),
        ("{", ":1 is not JSON"),
        ("[" * 100_000, ":1 is not JSON"),
        ("\n[1]\n", ":2 holds [1]"),
        ('{"custom_id": ""}', "custom_id is ''"),
        (r'{"custom_id": "\ud800"}', r"custom_id is '\ud800'"),
        (json.dumps(line("a") | {"method": "GET"}), "method is 'GET'"),
        (json.dumps(line("a") | {"body": 1}), "body an object"),
        ((json.dumps(line("a")) + "\n") * 2, ":2: custom_id 'a' was there before"),
    ],
)
def test_file_that_is_none_is_refused_with_the_line(tmp_path, text, told):
    file = tmp_path / "in.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        read_requests(file)
    assert told in str(error.value)


def test_unfinished_line_is_cut_and_served_again(llm, tmp_path):
    path = tmp_path / "out.jsonl"
    lines = [line(x, prompt=x, **GREEDY) for x in "abc"]
    whole = serve(llm, path, *lines)
    text = path.read_text()
    for cut in (1, 15, len(text) // 3, len(text) - 1):
        path.write_text(text[:cut])
        assert serve(llm, path, *lines).keys() == whole.keys()


@pytest.mark.parametrize(
    "text",
    [
        "my notes",
        '{"custom_id": "a"}\n',
        '{"custom_id": "a", "response": null}\n',
        '{"custom_id": "a", "response": {}}\n',
        '{"custom_id": 1, "response": {"status_code": 200}}\n',
        "[]\n",
        "[" * 100_000 + "\n",
    ],
    ids=range(7),
)
def test_file_of_something_else_is_left_alone(tmp_path, text):
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no result of a batch"):
        Results(path)
    assert path.read_text() == text


def test_half_a_character_in_a_conversation_is_refused_alone(tiny_chat_model, tmp_path):
    chats = [
        line(text, CHAT, messages=[{"role": "user", "content": content}], max_tokens=1)
        for text, content in (("bad", "\ud800"), ("good", "Hi"))
    ]
    file = write_lines(tmp_path / "in.jsonl", *chats)
    result = run("batch", file, "--model", tiny_chat_model, "--dtype", "float32")
    assert result.exit_code == 1, result.output
    results = results_of(tmp_path / "in.results.jsonl")
    assert results["good"]["status_code"] == 200
    assert "is no Unicode text" in results["bad"]["body"]["error"]["message"]


def test_results_go_on_in_a_line_of_their_own_though_the_last_has_no_end(llm, tmp_path):
    path, asked = tmp_path / "out.jsonl", [line("a", prompt="ab", max_tokens=1)]
    before = serve(llm, path, *asked)
    [result] = map(json.loads, path.read_text().splitlines())
    path.write_text(json.dumps(dict(reversed(result.items()))))  # as another program writes it
    both = serve(llm, path, *asked, line("b", prompt="cd", max_tokens=1))
    assert both["a"] == before["a"] and both["b"]["status_code"] == 200


def test_results_of_other_requests_are_refused(llm, tmp_path):
    path = tmp_path / "out.jsonl"
    serve(llm, path, line("a", prompt="a", **GREEDY))
    with pytest.raises(ValueError, match="1 results of other requests, such as 'a'"):
        serve(llm, path, line("b", prompt="b", **GREEDY))


def test_as_many_results_of_other_requests_are_refused_too(tmp_path):
    file, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text(json.dumps(line("b", prompt="b")) + "\n")
    path.write_text('{"custom_id": "a", "response": {"status_code": 200}}\n')
    result = run("batch", file, "--output", path)
    assert result.exit_code == 2 and "results of other requests" in result.stderr


def test_second_process_is_refused(tmp_path):
    results = Results(tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="another process"):
        Results(tmp_path / "out.jsonl")
    results.close()


# Stopping


def start(file: Path, model: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "paxkv.cli", "batch", file, "--model", model, "--dtype", "float32",
        "--max-slots", "4",
    ]  # fmt: skip
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until the file has so many lines, or the process has ended."""
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return


def test_killed_five_times_and_resumed_gives_one_result_per_request(tiny_model, tmp_path):
    lines = [line(f"request-{i}", prompt=f"Say {i}", max_tokens=40) for i in range(300)]
    file, output = write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "in.results.jsonl"
    rng = random.Random(0)
    seen = 0
    for _ in range(5):
        process = start(file, tiny_model)
        wait_for_lines(output, seen + rng.randint(1, 40), process)
        process.kill()
        process.communicate()
        seen = output.read_bytes().count(b"\n")
        assert 0 < seen < 300
    process = start(file, tiny_model)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    results = results_of(output)
    assert results.keys() == {x["custom_id"] for x in lines}
    assert all(response["status_code"] == 200 for response in results.values())


def test_ctrl_c_leaves_a_valid_file(tiny_model, tmp_path):
    lines = [line(f"request-{i}", prompt=f"Say {i}", max_tokens=40) for i in range(5000)]
    file, output = write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "in.results.jsonl"
    process = start(file, tiny_model)
    wait_for_lines(output, 3, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and "run it again" in errors
    assert 3 <= len(results_of(output)) < 5000
