"""An engine's log against the simulation of it, the same series token for token; and reports."""

import gc
import json

import numpy as np
import pytest

import paxkv
from helpers import StubDecoder, add, make_engine, random_prompts, run, settled
from helpers_cli import run as run_command
from helpers_cli import write_tiny_model
from paxkv.decoder import LayerGroup
from paxkv.diagnose.footprint import Footprint
from paxkv.diagnose.paged import PagedPolicy
from paxkv.diagnose.readers import read_trace
from paxkv.diagnose.simulate import Simulation, simulate
from paxkv.memory_trace import KINDS, MemoryTrace

LENGTHS = [(9, 12), (5, 20), (1, 3), (17, 9), (2, 30), (12, 1), (4, 25), (30, 6), (7, 14)]
WINDOW = 8


class WindowedStub(StubDecoder):
    """Its only layer sees a window."""

    layer_groups = (LayerGroup(layers=(0,), num_kv_heads=1, head_dim=1, window=WINDOW),)


class MixedStub(StubDecoder):
    """The layer that it has, and two that keep a window of nothing, for their tables."""

    layer_groups = (
        *StubDecoder.layer_groups,
        LayerGroup(layers=(1, 2), num_kv_heads=1, head_dim=1, window=WINDOW),
    )


@pytest.fixture
def serve(tmp_path):
    """Serves requests of `LENGTHS`; returns the engine, the series of its log, and the log."""

    def serve(kind: type[StubDecoder] = StubDecoder, max_steps: int | None = 1, **sizes):
        path = tmp_path / "engine.jsonl"
        with MemoryTrace(path) as trace:
            # Prompts of a step in one call: the simulation stores them at once.
            engine = make_engine(
                kind(np.zeros(1000, np.float32)), memory_trace=trace, max_prefill_tokens=256,
                preemption="recompute", **sizes,
            )  # fmt: skip
            prompts = random_prompts([prompt for prompt, _ in LENGTHS])
            for prompt, (_, output) in zip(prompts, LENGTHS, strict=True):
                add(engine, prompt, settled(max_tokens=output))
            run(engine, max_steps)
        bursts = [b for b in map(json.loads, path.read_text().splitlines()) if "running" in b]
        series = {
            kind: np.array([[n for b in bursts for n in b["groups"][group][kind]]
                            for group in range(len(groups_of(engine)))])
            for kind in KINDS
        }  # fmt: skip
        series["running"] = np.array([n for burst in bursts for n in burst["running"]])
        return engine, series, path

    return serve


def groups_of(engine):
    return engine.decoder.layer_groups


def replayed(path, engine, **more) -> Simulation:
    """The log as a trace, a step a second, in a cache like the engine's."""
    trace = read_trace(path, columns={"arrival": "arrival_step"})
    policy = PagedPolicy(engine.capacity, page_size=engine.page_size, max_running=4, **more)
    return simulate(policy, trace, step_seconds=1.0)


@pytest.mark.parametrize("num_pages", [65, 15], ids=["roomy", "preempting"])
def test_a_log_and_its_simulation_agree_token_for_token(serve, num_pages):
    engine, series, path = serve(num_pages=num_pages, prefix_caching=False)
    simulated = replayed(path, engine)
    account = simulated.account
    assert account.used.tolist() == series["used"][0].tolist()
    assert (account.reserved + account.internal).tolist() == series["tail"][0].tolist()
    assert account.external.tolist() == series["external"][0].tolist()
    assert account.free.tolist() == series["free"][0].tolist()
    assert simulated.running.tolist() == series["running"].tolist()
    assert simulated.num_preemptions == engine.stats.num_preemptions
    assert simulated.recomputed_tokens == engine.stats.recomputed_tokens
    assert (engine.stats.num_preemptions > 0) == (num_pages == 15)


@pytest.mark.parametrize("num_pages", [65, 15], ids=["roomy", "preempting"])
def test_pages_that_are_kept_for_their_prefix_are_reusable(serve, num_pages):
    engine, series, path = serve(num_pages=num_pages)
    simulated = replayed(path, engine)
    account = simulated.account
    assert account.used.tolist() == series["used"][0].tolist()
    assert (account.reserved + account.internal).tolist() == series["tail"][0].tolist()
    outside = series["external"] + series["free"] + series["reusable"]
    assert (account.external + account.free).tolist() == outside[0].tolist()
    assert series["reusable"].max() > 0


@pytest.mark.parametrize("kind", [WindowedStub, MixedStub])
def test_layers_with_a_window_agree_too(serve, kind):
    engine, series, path = serve(kind)
    for group, used, tail in zip(groups_of(engine), series["used"], series["tail"], strict=True):
        simulated = replayed(path, engine, footprint=Footprint(((1, group.window),))).account
        assert simulated.used.tolist() == used.tolist()
        assert (simulated.reserved + simulated.internal).tolist() == tail.tolist()


def test_steps_of_long_bursts_add_up_to_the_pool(serve):
    engine, series, path = serve(max_steps=None)
    kinds = sum(series[kind] for kind in KINDS)
    assert np.all(kinds == engine.capacity)
    assert series["running"].sum() == sum(output for _, output in LENGTHS)
    trace = read_trace(path)
    assert list(zip(trace.prompt_tokens, trace.output_tokens, strict=True)) == LENGTHS


def test_nothing_is_noted_where_nobody_asked():
    engine = make_engine(StubDecoder(np.zeros(1000, np.float32)))
    add(engine, [1, 2], settled())
    assert engine._runner.decode(1, num_decoding=1).memory is None


# The report of one moment.


def test_a_report_adds_up_and_finds_what_stands_there_twice():
    engine = make_engine(StubDecoder(np.zeros(1000, np.float32)), prefix_caching=False)
    prompt = list(range(10))
    for tokens in (prompt, prompt, prompt[:9]):
        add(engine, tokens, settled(max_tokens=20))
    assert engine.memory_report().pools[0].tokens["external"] == 0  # they are about to be admitted
    engine.step(max_steps=1)
    report = engine.memory_report()
    [pool] = report.pools
    assert sum(pool.tokens.values()) == engine.capacity + engine.page_size
    assert pool.tokens["used"] == 29 and pool.tokens["tail"] == 7
    # Two pages of each are alike, and the third of the first two.
    assert pool.duplicate == 2 * 4 + 2 * 4 + 2
    assert pool.bytes_per_token == 8 and report.bytes["used"] == 29 * 8
    assert report.bytes["duplicate"] == 18 * 8 and report.bytes["padding"] == 0
    assert [r.used for r in report.requests] == [(10,), (10,), (9,)]
    assert [r.tail for r in report.requests] == [(2,), (2,), (3,)]
    assert [r.shared for r in report.requests] == [(0,)] * 3


def test_a_report_counts_what_is_shared_once():
    engine = make_engine(StubDecoder(np.zeros(1000, np.float32)))
    prompt = list(range(10))
    engine.warm(prompt)
    for tokens in (prompt, prompt):
        add(engine, tokens, settled(max_tokens=20))
    engine.step(max_steps=1)
    [pool] = engine.memory_report().pools
    assert pool.tokens["used"] == 8 + 2 * 2 and pool.duplicate == 2
    assert [r.shared for r in engine.memory_report().requests] == [(8,)] * 2
    run(engine)
    [pool] = engine.memory_report().pools
    assert pool.tokens["used"] == 0 and pool.tokens["reusable"] > 0


# The commands.


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), has_chat_format=False)


def test_an_llm_logs_to_a_file_of_that_name(model, tmp_path):
    path = tmp_path / "log.jsonl"
    llm = paxkv.LLM(model, dtype="float32", max_slots=2, memory_trace=path, compilation_cache=False)
    llm.generate(["Hello", "Hello"], paxkv.SamplingParams(max_tokens=3, temperature=0.0))
    assert read_trace(path).output_tokens.tolist() == [3, 3]
    del llm
    gc.collect()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["model"] == str(model) and lines[-1] == {"closed": True}


def test_the_commands_write_what_diagnose_reads(model, tmp_path, monkeypatch):
    monkeypatch.setenv("PAXKV_COMPILATION_CACHE", "0")
    log, asked = tmp_path / "log.jsonl", tmp_path / "asked.jsonl"
    common = ("--model", model, "--dtype", "float32", "--memory-trace", log)
    result = run_command("generate", *common, "--max-tokens", "6", "Hello")
    assert result.exit_code == 0, result.output
    trace = read_trace(log)
    assert trace.prompt_tokens.tolist() == [5] and trace.output_tokens.tolist() == [6]
    body = {"prompt": "Why?", "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    asked.write_text(json.dumps(line) + "\n")
    result = run_command("batch", asked, *common)
    assert result.exit_code == 0, result.output
    assert read_trace(log).prompt_tokens.tolist() == [4]
    result = run_command("diagnose", log, "--live")
    assert result.exit_code == 0 and "closed" in result.stdout and "1 ended" in result.stdout
    result = run_command("diagnose", log, "--model", "opt-13b", "--kv-memory", "1GiB")
    assert result.exit_code == 0 and "measured by the engine" in " ".join(result.stdout.split())
    result = run_command("generate", *common[:-1], asked, "Hello")
    assert result.exit_code == 2 and "no log of this kind" in result.stderr
