"""The command `paxkv`: in this process with a tiny model, and as a real one."""

import contextlib
import dataclasses
import json
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import Result

import paxkv
from helpers import StubDecoder
from helpers_checkpoints import write_folder
from helpers_cli import run
from helpers_smollm2 import smollm2_path
from helpers_text import byte_level_tokenizer
from reference.make_llama_cases import WINDOW_CASES, make_weights

QUICK = ("--max-tokens", "6", "--temperature", "0")
HIDDEN = ("samples", "score")  # of one sample, these say nothing


@pytest.fixture(autouse=True)
def without_compilation_cache(monkeypatch):
    monkeypatch.setenv("PAXKV_COMPILATION_CACHE", "0")
    monkeypatch.setenv("COLUMNS", "120")


def generate(model: Path, *args: str | Path, exit_code: int = 0) -> Result:
    result = run("generate", "--model", model, "--dtype", "float32", *args)
    assert result.exit_code == exit_code, result.output
    return result


def assert_refused(result: Result, told: str) -> None:
    """One short message, no traceback, nothing on standard output."""
    assert result.exit_code == 2 and result.stdout == ""
    assert re.search(told, " ".join(result.stderr.split())), result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr) < 1500


# generate


def test_the_answer_is_on_standard_output_and_the_summary_is_not(tiny_model):
    result = generate(tiny_model, *QUICK, "Hello")
    llm = paxkv.LLM(tiny_model, dtype="float32", max_slots=1, compilation_cache=False)
    [expected] = llm.generate("Hello", paxkv.SamplingParams(max_tokens=6, temperature=0.0))
    assert result.stdout == expected.text + "\n"
    summary = " ".join(result.stderr.split())
    assert re.search(
        r"4 tokens prefilled at \d+/s, 6 new tokens at [\d.]+/s; 1 of 6 pages used, "
        r"tokens in \d+\.\d% of the KV memory",
        summary,
    ), summary


def test_a_file_has_one_prompt_per_line(tiny_model, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("first\n\nsecond ü\r\nthird\n")
    result = generate(tiny_model, *QUICK, "--file", file, "--max-slots", "2", "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    prompts = [bytes(line["prompt_token_ids"]).decode() for line in lines]
    assert prompts == ["first", "second ü", "third"]
    text = generate(tiny_model, *QUICK, "--file", file, "--max-slots", "2").stdout
    assert text == "".join(f"[{line['index'] + 1}] {line['text']}\n" for line in lines)


def test_json_is_a_completion(tiny_model):
    result = generate(tiny_model, *QUICK, "--json", "Hello")
    completion = json.loads(result.stdout)
    assert list(completion) == [
        "index",
        *(f.name for f in dataclasses.fields(paxkv.Completion) if f.name not in HIDDEN),
    ]
    assert bytes(completion["prompt_token_ids"]) == b"Hello"
    assert completion["finish_reason"] in ("stop", "length") and completion["error"] is None
    assert completion["text"] + "\n" == generate(tiny_model, *QUICK, "Hello").stdout


def test_a_prompt_that_cannot_be_served_does_not_stop_the_others(tiny_model, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("first\n" + "long" * 30 + "\nthird\n")
    result = generate(tiny_model, *QUICK, "--file", file, "--json", exit_code=1)
    first, second, third = (json.loads(line) for line in result.stdout.splitlines())
    assert second["finish_reason"] == "error" and "120 tokens" in second["error"]
    assert len(first["token_ids"]) == len(third["token_ids"]) == 6
    result = generate(tiny_model, *QUICK, "--file", file, exit_code=1)
    assert "prompt 2 was not served" in " ".join(result.stderr.split())


def test_the_same_seed_gives_the_same_text(tiny_model):
    def sampled(seed: str) -> str:
        flags = ("--json", "--max-tokens", "12", "--temperature", "2", "--top-p", "0.95")
        result = generate(tiny_model, *flags, "--seed", seed, "Hello")
        return json.loads(result.stdout)["token_ids"]

    assert sampled("1") == sampled("1") != sampled("2")


def test_chat_is_the_default_where_the_model_has_a_format(tiny_model, tiny_chat_model):
    def prompt_of(model: Path, *flags: str) -> str:
        result = generate(model, *QUICK, "--json", *flags, "Hi")
        return bytes(json.loads(result.stdout)["prompt_token_ids"]).decode()

    assert prompt_of(tiny_chat_model) == prompt_of(tiny_chat_model, "--chat") == "Q:Hi\nA:"
    assert prompt_of(tiny_chat_model, "--raw") == prompt_of(tiny_model) == "Hi"
    refused = run("generate", "--model", tiny_model, "--chat", "Hi")
    assert_refused(refused, "no chat template")


def test_sizes_may_be_chosen(tiny_model):
    flags = ("--kv-memory", "64KiB", "--page-size", "4", "--max-slots", "1")
    result = generate(tiny_model, *QUICK, *flags, "Hello")
    assert re.search(r"3 of 31 pages used", " ".join(result.stderr.split()))


def test_a_stop_string_ends_the_text(tiny_model):
    text = generate(tiny_model, "--max-tokens", "12", "--temperature", "0", "Hello").stdout[:-1]
    stop = text[3]
    stopped = generate(
        tiny_model, "--max-tokens", "12", "--temperature", "0", "--stop", stop, "Hello"
    )
    assert stopped.stdout == text.split(stop)[0] + "\n"


def test_log_probabilities_that_are_infinite_are_null_in_json(monkeypatch):
    table = np.full((264, 264), -np.inf, np.float32)
    table[:, 65] = 1.0
    llm = paxkv.LLM(
        StubDecoder(table), tokenizer=byte_level_tokenizer(), dtype="float32", max_slots=1,
        max_length=64, compilation_cache=False,
    )  # fmt: skip
    monkeypatch.setattr("paxkv.cli.load_llm", lambda *args, **sizes: llm)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for flags in ((), ("--logprobs", "0"), ("--logprobs", "3")):
        result = run("generate", "--json", "--max-tokens", "2", *flags, "A")
        assert result.exit_code == 0, result.output
        logprobs = json.loads(result.stdout, parse_constant=refuse)["logprobs"]
        if not flags:
            assert logprobs is None
            continue
        top = [[65, 0.0], [0, None], [1, None]] if flags[1] == "3" else []
        assert logprobs == [{"token_id": 65, "logprob": 0.0, "top": top}] * 2


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((), "give either a PROMPT or --file"),
        (("Hi", "--file", "prompts.txt"), "give either a PROMPT or --file"),
        (("Hi", "--model", "no/such/folder.gguf"), "no/such/folder.gguf is neither"),
        (("Hi", "--model", "[/red].gguf"), r"\[/red\]\.gguf is neither"),
        (("Hi", "--kv-memory", "plenty"), "'plenty' is not a memory size: .*such as 512MiB"),
        (("Hi", "--kv-memory", "1kB"), "1000 bytes hold 0 pages"),
        (("Hi", "--page-size", "0"), "page_size=0"),
        (("Hi", "--dtype", "float12"), "'float12' is not one of bfloat16"),
        (("Hi", "--max-length", "97"), "max_length=97, but the model was made for 96 tokens"),
        (("Hi", "--dtype", "int8"), "int8 is not one of bfloat16"),
        (("Hi", "--top-p", "2"), r"top_p=2\.0 must be above 0 and at most 1"),
        (("Hi", "--max-tokens", "0"), "max_tokens=0 must be 1 or more"),
        (("Hi", "--logprobs", "21", "--json"), "logprobs=21 must be from 0 to 20"),
        (("Hi", "--logprobs", "3"), "--logprobs.*--json"),
        (("Hi", "--temperature", "hot"), "--temperature.*valid number"),
        (("Hi", "--unknown"), "--unknown"),
        (("--file", "no/such/file"), "no/such/file"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(args, told, tiny_model, tmp_path):
    if "--model" not in args:
        args = (*args, "--model", tiny_model)
    assert_refused(run("generate", *args), told)


def test_one_prompt_that_cannot_be_served_is_told_like_one_of_many(tiny_model):
    result = generate(tiny_model, "--raw", "--json", "x" * 200, exit_code=1)
    told = json.loads(result.stdout)
    assert told["finish_reason"] == "error" and "200 tokens" in told["error"]
    assert "prompt 1 was not served" in result.stderr
    result = generate(tiny_model, "--raw", "", exit_code=1)
    assert result.stdout == "\n" and "no tokens" in result.stderr


def test_prompts_come_from_standard_input(tiny_model):
    args = ("generate", "--model", tiny_model, "--dtype", "float32", *QUICK, "--file", "-")
    result = run(*args, stdin="Hello\nHi\n")
    assert result.exit_code == 0 and result.stdout.startswith("[1] ") and "[2] " in result.stdout


def test_an_empty_model_name_is_refused():
    assert_refused(run("generate", "Hi", "--model", ""), "name is empty")


@pytest.mark.parametrize("content", [b"", b"\n  \n", b"\xff\xfe"], ids=["empty", "blank", "bytes"])
def test_a_file_without_prompts_is_refused(content, tmp_path, tiny_model):
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    assert_refused(run("generate", "--model", tiny_model, "--file", file), "prompts.txt")


def test_no_model_is_named_and_none_is_bundled(monkeypatch):
    monkeypatch.setattr("paxkv.models.bundled.bundled_model_path", lambda: None)
    assert_refused(run("generate", "Hi"), "name a model folder.*hub id.*pip install")


# The rest of the command.


def test_version_is_the_packages():
    assert run("--version").stdout == f"paxkv {paxkv.__version__}\n"


def test_python_m_paxkv_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["paxkv", "--version"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module("paxkv", run_name="__main__")
    assert capsys.readouterr().out == f"paxkv {paxkv.__version__}\n"


def test_help_teaches():
    top = run("--help").stdout
    assert "generate" in top and "info" in top and 'paxkv generate "Why' in top
    assert run().output.strip().startswith("Usage")
    text = run("generate", "--help").stdout
    for flag in ("--file", "--model", "--chat", "--raw", "--max-tokens", "--seed", "--kv-memory"):
        assert flag in text
    assert "paxkv generate --file questions.txt --json" in text
    assert "hub id" in run("info", "--help").stdout


def test_info_tells_what_the_bundled_model_needs():
    result = run("info", "--model", smollm2_path(), "--kv-memory", "1GiB")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "30 layers, 9 query and 3 KV heads of 64, vocabulary 49152, made for 8192 tokens" in text
    assert "weights: 134,515,008 numbers, 256.6 MiB in bfloat16" in text
    assert "KV cache: 22.5 KiB per token in bfloat16" in text
    rows = re.findall(r"(\d+) │ ([\d.]+ [KM]iB) │ +([\d,]+) │ +([\d,]+) │ +([\d,]+)", text)
    page_size, page_bytes, pages, tokens, requests = rows[1]
    assert (page_size, page_bytes) == ("16", "360.0 KiB")
    assert pages == f"{2**30 // (360 * 1024) - 1:,}" and tokens == f"{2911 * 16:,}"
    assert requests == str(2911 // 64)
    assert [row[0] for row in rows] == ["8", "16", "32", "64", "128"]


def test_info_tells_which_layers_are_windowed(tmp_path):
    case = WINDOW_CASES["qwen2_by_layer_types"]
    result = run("info", "--model", write_folder(tmp_path, case, make_weights(case)))
    assert result.exit_code == 0, result.output
    assert "sliding window: 2 of the layers see 8 tokens" in result.stdout


def test_info_counts_the_memory_that_is_free(tiny_model):
    result = run("info", "--model", tiny_model, "--dtype", "float32")
    assert result.exit_code == 0 and "free on cpu" in result.stdout


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--model", "no/such/folder.gguf"), "is neither a folder"),
        (("--kv-memory", "plenty"), "not a memory size"),
        (("--dtype", "float12"), "float12"),
    ],
)
def test_info_refuses_in_a_line(args, told, tiny_model):
    args = args if "--model" in args else ("--model", tiny_model, *args)
    assert_refused(run("info", *args), told)


# As a process of its own.

COMMAND = (sys.executable, "-m", "paxkv.cli")


def test_as_a_process(tiny_model):
    command = [*COMMAND, "generate", "--model", tiny_model, "--dtype", "float32", *QUICK, "Hello"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == generate(tiny_model, *QUICK, "Hello").stdout
    assert "new tokens at" in result.stderr and "Warning" not in result.stderr
    result = subprocess.run([*COMMAND, "info", "--dtype", "x"], capture_output=True, check=False)
    assert result.returncode == 2 and not result.stdout


def interrupt(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Presses Ctrl-C until it is heard: jax loses one that comes while it collects garbage."""
    for _ in range(10):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=10)
    process.kill()
    raise AssertionError("Ctrl-C does not end the command")


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
def test_ctrl_c_keeps_what_is_done(flags, tiny_model, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(f"prompt {i}" for i in range(20000)))
    command = [
        *COMMAND, "generate", "--model", tiny_model, "--dtype", "float32", "--file", file,
        "--max-tokens", "40", "--temperature", "0", "--max-slots", "4", *flags,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    begin = [process.stdout.readline() for _ in range(3)]
    rest, errors = interrupt(process)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and "stopped" in errors and "new tokens at" in errors
    lines = (("".join(begin)) + rest).splitlines()
    if flags:
        indices = [json.loads(line)["index"] for line in lines]
        assert indices == sorted(set(indices)) and 3 <= len(indices) < 20000
    else:
        assert lines[0].startswith("[1] ")
