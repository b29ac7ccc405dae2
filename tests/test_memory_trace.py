"""The log of an engine's memory: written, read as a trace, and followed while it grows."""

import io
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from helpers import settled
from paxkv.cli import app
from paxkv.diagnose.engine_log import EngineLog
from paxkv.diagnose.live import render, watch
from paxkv.diagnose.readers import read_trace
from paxkv.memory_series import KINDS, MemorySeries
from paxkv.memory_trace import MemoryTrace
from paxkv.prefix_index import PrefixKey
from paxkv.request_state import Request

SIZES = {"num_pages": 25, "padding_bytes": 0}
GROUPS = [
    {"layers": 2, "window": None, "bytes_per_token": 6} | SIZES,
    {"layers": 1, "window": 8, "bytes_per_token": 2} | SIZES,
]
ABOUT = {"page_size": 4, "num_slots": 2, "max_length": 64, "groups": GROUPS}


def account(used: list[int], tail: list[int]) -> np.ndarray:
    """`i32[steps, kinds]` of a pool of 100 tokens."""
    kinds = {"used": np.array(used), "tail": np.array(tail)}
    kinds["free"] = 100 - kinds["used"] - kinds["tail"]
    return np.stack([kinds.get(kind, 0 * kinds["used"]) for kind in KINDS], axis=1)


def request(id: int, prompt: list[int], num_output: int, **more) -> Request:
    made = Request(id=id, prompt=prompt, params=settled(), **more)
    made.output, made.finish_reason = [0] * num_output, "length"
    return made


@pytest.fixture
def path(tmp_path):
    """A log of two bursts and three requests that ended in another order than they came."""
    path = tmp_path / "log.jsonl"
    trace = MemoryTrace(path, model="tiny")
    trace.write_header(**ABOUT)
    prompt = list(range(10))
    requests = [request(0, prompt, 5), request(1, prompt[:9], 2), request(2, [3, *prompt], 1)]
    trace.note_arrival(requests[0])
    trace.note_arrival(requests[1])
    series = MemorySeries(
        tokens=jnp.stack(
            [account([20, 40, 7], [4, 0, 7]), account([10, 10, 7], [6, 6, 7])], axis=1
        ),
        running=jnp.array([2, 2, 7]),
    )
    counts = {"preemptions": 1, "recomputed_tokens": 3}
    trace.write_steps(series, 2, waiting=1, **counts)  # the third step was not made
    trace.note_arrival(requests[2])
    trace.write_request(requests[1])
    trace.write_steps(series, 1, waiting=0, **counts)
    trace.write_steps(series, 0, waiting=0, **counts)
    for ended in (requests[2], requests[0], request(7, prompt, 3)):  # the last one never came
        trace.write_request(ended)
    trace.close()
    trace.close()
    return path


def test_a_log_is_a_trace_in_the_order_of_arrival(path):
    trace = read_trace(path)
    assert trace.prompt_tokens.tolist() == [10, 9, 11]
    assert trace.output_tokens.tolist() == [5, 2, 1]
    assert trace.arrival_seconds is not None and (np.diff(trace.arrival_seconds) >= 0).all()
    steps = read_trace(path, columns={"arrival": "arrival_step"})
    assert steps.arrival_seconds is not None and steps.arrival_seconds.tolist() == [0, 0, 2]
    [note] = trace.notes
    assert "over 3 steps" in note and "1 preemptions" in note


def test_a_log_tells_which_prompts_begin_alike_and_not_what_they_say(path):
    prefixes = read_trace(path).prefixes
    assert prefixes is not None and prefixes.block_tokens == 4
    first, second, third = (prefixes.of(i).tolist() for i in range(3))
    assert len(first) == len(second) == len(third) == 2  # full pages only
    assert first == second and not set(first) & set(third)
    assert not re.search(r"\[0,1,2", path.read_text())


def test_a_file_of_another_kind_is_not_overwritten(path, tmp_path):
    MemoryTrace(path).close()
    assert path.read_text() == ""  # begun anew, and nothing came
    (tmp_path / "questions.txt").write_text("Why?\n")
    with pytest.raises(ValueError, match="exists and is no log of this kind"):
        MemoryTrace(tmp_path / "questions.txt")
    assert (tmp_path / "questions.txt").read_text() == "Why?\n"


def test_a_key_of_prefixes_tells_equal_prompts_apart(tmp_path):
    trace = MemoryTrace(tmp_path / "log")
    trace.write_header(**ABOUT)
    for id, key in enumerate([PrefixKey(), PrefixKey(salt="a"), PrefixKey(salt="a")]):
        made = request(id, [1, 2, 3, 4], 1, prefix_key=key)
        trace.note_arrival(made)
        trace.write_request(made)
    trace.close()
    prefixes = read_trace(tmp_path / "log").prefixes
    assert prefixes is not None
    [none], [one], [other] = (prefixes.of(i).tolist() for i in range(3))
    assert none != one == other


def test_percents_are_of_the_bytes_of_all_groups(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    log = EngineLog(lines[0])
    assert [log.take(line) for line in lines[1:]].count(True) == 3
    assert log.pool_bytes == 100 * 8 and log.num_steps == 3 and log.output_tokens == 6
    # Steps use 20, 40, 20 of 100 tokens of 6 bytes, and 10 each time of 100 tokens of 2 bytes.
    assert log.peak_used == 100 * (40 * 6 + 10 * 2) / 800
    assert log.mean["used"] == pytest.approx(100 * (80 * 6 + 30 * 2) / 800 / 3)
    assert log.now["tail"] == 100 * (4 * 6 + 6 * 2) / 800
    assert log.is_closed and log.recomputed_share == 0.5 and not log.is_thrashing


def shown(log: EngineLog) -> str:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    console.print(render(log))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_log_is_shown_in_80_columns(path):
    console = Console(file=io.StringIO(), width=80, highlight=False)
    log = watch(str(path), console)
    text = shown(log)
    assert max(map(len, text.splitlines())) <= 80
    assert "tiny, closed: 800 B of keys and values, pages of 4" in text
    assert "0 running, 0 waiting, 3 ended; 3 steps" in text
    assert "1 preemptions, 3 tokens redone (50 % of new ones)" in text
    assert "thrashes" not in text
    log.recomputed_tokens = 4
    assert "thrashes" in shown(log)


def test_a_log_is_followed_while_it_grows(path, tmp_path):
    whole, growing = path.read_bytes(), tmp_path / "growing.jsonl"
    growing.write_bytes(b"")
    parts = iter([whole[:30], whole[30:400], whole[400:-5], whole[-5:]])

    def sleep(seconds: float) -> None:
        with growing.open("ab") as file:
            file.write(next(parts))

    log = watch(str(growing), Console(file=io.StringIO()), sleep=sleep)
    assert log.is_closed and log.num_steps == 3 and log.num_requests == 3
    assert list(parts) == []


def test_ctrl_c_leaves_the_view_cleanly(path, monkeypatch):
    text = path.read_text().splitlines()[:-1]  # as of an engine that runs
    path.write_text("\n".join(text) + "\n")

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    result = CliRunner().invoke(app, ["diagnose", str(path), "--live"])
    assert result.exit_code == 0 and "tiny, live" in result.stdout


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"prompt_tokens": 3, "output_tokens": 4}\n', "is no log of an engine"),
        ('{"paxkv_memory_trace": 9}\n', "line 1: the log is of version 9"),
        ("nonsense\n", "is no log of an engine"),
        ('{"paxkv_memory_trace": 1, "page_size": 4}\n', "line 1: its first line describes no pool"),
    ],
)
def test_what_is_no_log_is_told(tmp_path, text, told):
    (tmp_path / "log").write_text(text)
    with pytest.raises(ValueError, match=told):
        watch(str(tmp_path / "log"), Console(file=io.StringIO()))
    with pytest.raises(ValueError, match="there is no log"):
        watch(str(tmp_path / "none"), Console())


def test_a_broken_line_of_a_log_is_told(path):
    path.write_text(path.read_text().replace('"groups":[{"used"', '"groups":[{"usd"'))
    with pytest.raises(ValueError, match=r"line 2: not a line of an engine's log: KeyError"):
        read_trace(path)
    with pytest.raises(ValueError, match=r"line 2: not a line of an engine's log: KeyError"):
        watch(str(path), Console(file=io.StringIO()))
