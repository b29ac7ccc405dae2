"""What it costs to note the memory's use at every decode step, beside the step itself.

    python -m benchmarks.bench_memory_trace --json memory_trace.json

Both parts of the cost are timed by themselves, since they are far smaller than the difference of
two decode steps from minute to minute: the account within the compiled loop, and the log's lines
on the host, once a burst. The bar is 1 % of a decode step; without `memory_trace` the loop does
not have the account at all.
"""

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from benchmarks.checkpoints import SMOLLM2_135M
from benchmarks.common import CpuWatch, describe_run, seconds_of, spread, tell, tell_if_disturbed
from paxkv import Engine, SamplingParams
from paxkv.cache import PagedCache
from paxkv.config import pages_of
from paxkv.decoder import LayerGroup
from paxkv.memory_series import MemorySeries, init_series, note_step
from paxkv.memory_trace import MemoryTrace, describe
from paxkv.models.generation import GenerationConfig
from paxkv.models.llama import LlamaDecoder
from paxkv.request_state import Request

BAR = 0.01  # of a decode step
BURST = 32
PAGE_SIZE = 16
_ACCOUNTS = 1000  # in one compiled loop
_LINES = 200


class Sizes(NamedTuple):
    """A batch in the middle of its answers."""

    slots: int
    prompt_tokens: int
    new_tokens: int
    layers: int


def make_engine(sizes: Sizes, dtype: str) -> Engine:
    """An engine of random weights with all slots decoding."""
    config = dataclasses.replace(SMOLLM2_135M, num_layers=sizes.layers)
    max_length = sizes.prompt_tokens + sizes.new_tokens
    engine = Engine(
        LlamaDecoder(config, dtype=dtype, rngs=nnx.Rngs(0)),
        num_slots=sizes.slots, max_length=max_length, page_size=PAGE_SIZE, dtype=dtype,
        num_pages=1 + sizes.slots * pages_of(max_length, PAGE_SIZE), max_burst=BURST,
    )  # fmt: skip
    params = SamplingParams(max_tokens=sizes.new_tokens, temperature=0.0, ignore_eos=True)
    rng = np.random.default_rng(0)
    for _ in range(sizes.slots):
        prompt = rng.integers(0, config.vocab_size, sizes.prompt_tokens).tolist()
        engine.add(Request(prompt=prompt, params=params.with_defaults(GenerationConfig())))
    engine.step()  # stores the prompts, and compiles
    return engine


def step_seconds(engine: Engine, num_bursts: int) -> list[float]:
    """Seconds of a decode step, burst by burst."""
    found = []
    for _ in range(num_bursts):
        before = dataclasses.replace(engine.stats)
        engine.step()
        steps = (engine.stats.decode_tokens - before.decode_tokens) / engine.num_slots
        found.append((engine.stats.decode_seconds - before.decode_seconds) / steps)
    return found


def account_seconds(engine: Engine, repeats: int) -> list[float]:
    """Seconds of one account, in a loop of many on the cache as it is."""
    groups, cache = tuple(engine.decoder.layer_groups), engine._runner.cache

    @jax.jit
    def accounts(cache: PagedCache) -> MemorySeries:
        def note(step: jax.Array, series: MemorySeries) -> MemorySeries:
            return _note(series, _one_shorter(cache, step % 2), step % BURST, groups)

        return lax.fori_loop(0, _ACCOUNTS, note, init_series(len(cache), BURST))

    seconds_of(lambda: accounts(cache))
    return [seconds_of(lambda: accounts(cache)) / _ACCOUNTS for _ in range(repeats)]


def line_seconds(engine: Engine, repeats: int) -> list[float]:
    """Seconds that fetching and logging takes, for each of a burst's steps."""
    groups = engine.decoder.layer_groups
    series = init_series(len(groups), BURST)
    found = []
    with tempfile.TemporaryDirectory() as folder, MemoryTrace(Path(folder) / "log") as trace:
        trace.write_header(**describe(groups, engine._runner.cache))
        for _ in range(repeats):
            begin = time.perf_counter()
            for _ in range(_LINES):
                trace.write_steps(
                    jax.device_get(series), BURST, waiting=0, preemptions=0, recomputed_tokens=0
                )
            found.append((time.perf_counter() - begin) / _LINES / BURST)
    return found


def _one_shorter(cache: PagedCache, shorter: jax.Array) -> PagedCache:
    """Other lengths at every step, or one account would do for all of a loop."""
    return tuple(
        (pool, dataclasses.replace(table, lengths=jnp.maximum(table.lengths - shorter, 0)))
        for pool, table in cache
    )


def _note(
    series: MemorySeries, cache: PagedCache, step: jax.Array, groups: tuple[LayerGroup, ...]
) -> MemorySeries:
    slots = cache[0][1].lengths.shape[0]
    return note_step(
        series, cache, step, layer_groups=groups, is_live=jnp.ones(slots, bool),
        num_running=jnp.int32(slots), is_waiting=False,
    )  # fmt: skip


def main() -> None:
    """Measures, prints the share and ends with one JSON line."""
    parser = argparse.ArgumentParser(description="The cost of noting the memory's use.")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=SMOLLM2_135M.num_layers)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the JSON line to this file")
    arguments = parser.parse_args()
    sizes = Sizes(
        arguments.slots, arguments.prompt_tokens, BURST * (arguments.repeats + 2), arguments.layers
    )
    watch, engine = CpuWatch(), make_engine(sizes, arguments.dtype)
    found = {
        "step": spread(step_seconds(engine, arguments.repeats)),
        "account": spread(account_seconds(engine, arguments.repeats)),
        "line": spread(line_seconds(engine, arguments.repeats)),
    }
    share = (found["account"].median + found["line"].median) / found["step"].median
    for name, seconds in found.items():
        print(f"{name:8} {1e6 * seconds.median:10.1f} us a step "
              f"({1e6 * seconds.lowest:.1f} to {1e6 * seconds.highest:.1f})")  # fmt: skip
    print(f"noting takes {share:.2%} of a decode step; the bar is {BAR:.0%}")
    tell_if_disturbed(others := watch.others_share())
    seconds = {name: value._asdict() for name, value in found.items()}
    record = {"benchmark": "memory_trace", "run": describe_run(), "sizes": sizes._asdict()}
    record |= {"seconds": seconds, "share": share, "bar": BAR, "others_share": others}
    tell(record, arguments.json)


if __name__ == "__main__":
    main()
