"""The benchmarks of the engine run through on tiny models, and count right."""

import json
import sys

import numpy as np
import pytest

from benchmarks import bench_paging, bench_prefix, bench_serving, bench_sharing
from benchmarks.bars import Bar
from benchmarks.serving_load import Held, MemoryUse, draw_requests


@pytest.fixture
def run_tiny(monkeypatch, capsys):
    """Runs a benchmark on a tiny model; its record."""

    def run(module, *options: str) -> dict:
        monkeypatch.setattr(sys, "argv", [module.__name__, "--tiny", *options])
        module.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_serving_runs_through_with_every_cache(run_tiny):
    record = run_tiny(bench_serving, "--dtypes", "float32", "--peers")
    [result] = record["results"]
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [
        "contiguous, static",
        "contiguous, continuous",
        "paxkv",
        "paxkv, room for all",
    ]
    for row in rows.values():
        shares = [row[kind] for kind in ("used", "reserved", "internal", "nobodys")]
        assert sum(shares) == pytest.approx(1) and min(shares) >= 0
        assert row["compilations"] == 0 and 0 < row["host_share"]["median"] <= 1
    assert rows["contiguous, continuous"]["sequences_peak"] == 2
    assert rows["paxkv"]["sequences_peak"] == 4 and rows["paxkv"]["recomputed_tokens"] == 0
    assert rows["paxkv, room for all"]["sequences_peak"] == 6
    steps = [row["decode_steps"] for row in rows.values()]
    assert steps == sorted(steps, reverse=True)
    assert len(result["bars"]) == 4


def test_paging_runs_through(run_tiny):
    record = run_tiny(bench_paging, "--dtypes", "float32", "--page-sizes", "8")
    [result] = record["results"]
    assert set(result["ratios"]) == {"paxkv S=8", "contiguous"}
    assert record["bars"] == []  # none is set for so small a batch


def test_prefix_is_stored_and_computed_once(run_tiny):
    record = run_tiny(bench_prefix, "--dtypes", "float32")
    [result] = record["results"]
    [both] = result["rounds"]
    later, system, suffix = 3, 32, 8
    assert both["on"]["prefill_tokens"] == later * (suffix - 1)
    assert both["on"]["prefix_tokens_hit"] == later * system
    assert both["off"]["prefill_tokens"] == later * (system + suffix - 1)
    assert both["on"]["peak_pages"] < both["off"]["peak_pages"]
    assert result["bars"][1]["is_reached"]


def test_beams_share_pages(run_tiny):
    record = run_tiny(bench_sharing, "--dtype", "float32")
    [result] = record["results"]
    assert result["prompts"] == 3
    assert 0 < result["of_prompts"]["lowest"] <= result["saved"] <= result["of_prompts"]["highest"]
    assert result["saved"] < 1 / 2  # two beams that shared everything


def test_there_are_50_different_prompts():
    prompts = bench_sharing._PROMPTS.read_text().splitlines()
    assert len(set(prompts)) == 50 and all(prompts)


def test_requests_are_as_long_as_was_said():
    requests = draw_requests(64, vocab_size=49152)
    prompt_lens = [len(asked.prompt) for asked in requests]
    output_lens = [asked.new_tokens for asked in requests]
    assert np.mean(prompt_lens) == pytest.approx(160, rel=0.1)
    assert np.mean(output_lens) == pytest.approx(200, rel=0.1)
    assert max(prompt_lens) <= 1024 and max(output_lens) <= 1024
    assert requests == draw_requests(64, vocab_size=49152)


def test_memory_use_sorts_every_slot():
    memory = MemoryUse(capacity=32, room_of=lambda tokens: -(-tokens // 4) * 4)
    burst = [Held(num_stored=3, most_stored=6, num_steps=3), Held(num_stored=8, most_stored=9,
             num_steps=1)]  # fmt: skip
    memory.note(burst, is_waiting=True)
    # The first holds 4, 5, 6 tokens in 4, 8, 8 slots, the second 9 in 12.
    found = memory.summary()
    assert found["used"] * 3 * 32 == pytest.approx(4 + 5 + 6 + 9)
    assert found["reserved"] * 3 * 32 == pytest.approx(1)  # the 6th token's, once
    assert found["internal"] * 3 * 32 == pytest.approx(2 + 2 + 3)
    assert (found["sequences_mean"], found["sequences_peak"]) == (pytest.approx(4 / 3), 2)


@pytest.mark.parametrize(("found", "is_reached"), [(0.9, False), (1.0, True), (1.3, False)])
def test_bar_has_two_sides(found, is_reached):
    bar = Bar(what="ratio", found=[found, 0.0, 2.0], least=1.0, most=1.2)
    assert bar.is_reached == is_reached
    assert str(bar).startswith("reached" if is_reached else "missed")
