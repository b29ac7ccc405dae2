"""The GPU kernels on a GPU, in at most 8 minutes: right on every case, then how fast.

    python -m benchmarks.bench_kernels_gpu --json kernels_gpu.json

First every test case on inputs that no run had before. Then decode steps at several batches and
lengths, beside other ways to attend over the same pages, and prefill. A timed call is a compiled
loop over several sets of sequences in turn, together larger than the L2 cache. Bytes are those of
the keys and values that must be read; their rate is given as a share of a measured copy's.
"""

import argparse
import dataclasses
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from benchmarks.common import describe_run, seconds_of, spread, tell
from benchmarks.gpu_peers import Batch, Pools, Way, our_settings, ways
from paxkv.pallas_kernels import paged_attention
from paxkv.pallas_kernels.attention_cases import CASES
from paxkv.pallas_kernels.attention_inputs import random_inputs
from paxkv.pallas_kernels.testing import assert_right

type Prefill = Callable[[jax.Array, Pools], tuple[jax.Array, Pools]]

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
_L2_BYTES = 60 << 20
_TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
_INTERPRETED_CASES = ("decode_plain", "mixed_all_settings")
# Batch and tokens, what matters most first, in case the time runs out.
_DECODE = (
    (64, 4096), (1, 4096), (8, 4096), (256, 4096), (64, 512), (64, 32768), (1, 32768), (1, 512),
    (8, 512), (8, 32768), (256, 512), (256, 32768),
)  # fmt: skip


def check_cases(interpret: bool, deadline: float, seed: int) -> dict[str, str]:
    """What went wrong on the test cases, by name; "ok" where nothing did."""
    found = {}
    settings = our_settings(interpret)
    names = _INTERPRETED_CASES if interpret else CASES
    for name in names:
        case = CASES[name]
        if case.page_size < 8:
            continue
        inputs = random_inputs(case, jnp.bfloat16, seed)
        for max_q_len in (1, None) if case.is_decode else (None,):
            what = f"{'decode' if max_q_len else 'mixed'}:{name}"
            if time.monotonic() > deadline:
                found[what] = "skipped"
                continue
            call = jax.jit(
                lambda arguments, options=inputs.settings | {"max_q_len": max_q_len}: (
                    paged_attention(**arguments, **options, **settings)
                )
            )
            try:
                assert_right(inputs, call(inputs.arguments))
                found[what] = "ok"
            except Exception as error:  # of any kind: the others are still to be run
                found[what] = f"{type(error).__name__}: {error}"[:500]
    return found


def copy_bandwidth(num_bytes: int) -> float:
    """Bytes per second, read and written, of an elementwise copy."""
    array = jnp.zeros(num_bytes // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    jax.block_until_ready(copy(array))
    return 2 * array.nbytes / min(seconds_of(lambda: copy(array)) for _ in range(20))


def make_batch(batch: int, kv_len: int, page_size: int, seed: int) -> tuple[Pools, Batch]:
    """Pools in bfloat16 with pages in random order, and the tables."""
    columns = -(-kv_len // page_size)
    num_pages = batch * columns
    key = jax.random.key(seed)
    some = jax.random.normal(key, (256, KV_HEADS, page_size, HEAD_DIM), jnp.bfloat16)
    keys, values = (
        jnp.take(some, (jnp.arange(num_pages + 1) + shift) % 256, axis=0) for shift in (0, 7)
    )
    order = np.random.default_rng(seed).permutation(num_pages).astype(np.int32) + 1
    return (keys, values), Batch(
        block_tables=jnp.asarray(order.reshape(batch, columns)),
        kv_lens=jnp.full((batch,), kv_len, jnp.int32),
        new=jax.random.normal(key, (batch, KV_HEADS, HEAD_DIM), jnp.bfloat16),
    )


def time_way(
    way: Way, batch: int, kv_len: int, page_size: int, *, rounds: int, target_seconds: float
) -> tuple[list[float], jax.Array]:
    """Seconds of a step, over and over, and the queries after the first step.

    The steps turn to sequences after sequences of one pool, together larger than the L2 cache.
    """
    set_bytes = batch * kv_len * _TOKEN_BYTES
    num_sets = 2 if target_seconds == 0 else max(1, math.ceil(2 * _L2_BYTES / set_bytes))
    pools, whole = make_batch(batch * num_sets, kv_len, page_size, seed=0)
    pools = jax.tree.map(jax.jit(way.lay_out), pools)
    tables = whole.block_tables.reshape(num_sets, batch, -1)
    sequences = dataclasses.replace(
        whole, block_tables=tables[0], kv_lens=whole.kv_lens[:batch], new=whole.new[:batch]
    )
    queries = jax.random.normal(jax.random.key(1), (batch, HEADS, HEAD_DIM), jnp.bfloat16)

    def steps(num_steps, queries, pools, sequences, tables):
        def step(number, state):
            queries, pools = state
            one = dataclasses.replace(sequences, block_tables=tables[number % num_sets])
            out, pools = way.step(queries, pools, one)
            return queries + out * jnp.asarray(1e-3, out.dtype), pools  # each needs the last

        return lax.fori_loop(0, num_steps, step, (queries, pools))

    run = jax.jit(steps, donate_argnums=2)
    first, pools = run(1, queries, pools, sequences, tables)
    samples, num_steps = [], num_sets
    for number in range(rounds + 1):
        begin = time.perf_counter()
        out, pools = run(num_steps, queries, pools, sequences, tables)
        jax.block_until_ready(out)
        seconds = (time.perf_counter() - begin) / num_steps
        if number:
            samples.append(seconds)
        else:  # how many steps are worth a measurement
            num_steps = num_sets * max(1, min(1000, round(target_seconds / seconds / num_sets)))
    return samples, first


def run_decode(options: argparse.Namespace, deadline: float, bandwidth: float, console: Console):
    """One record for each shape."""
    results = []
    shapes = ((2, 40),) if options.interpret else _DECODE
    page_sizes = _page_sizes(options)
    for (batch, kv_len), page_size in ((s, size) for s in shapes for size in page_sizes):
        record: dict[str, Any] = {"batch": batch, "kv_len": kv_len, "page_size": page_size}
        expected = None
        for name, way in ways(interpret=options.interpret).items():
            if time.monotonic() > deadline:
                record[name] = {"error": "no time was left"}
                continue
            try:
                samples, out = time_way(
                    way, batch, kv_len, page_size,
                    rounds=options.rounds, target_seconds=0 if options.interpret else 0.02,
                )  # fmt: skip
            except Exception as error:  # a peer that cannot run here
                record[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
                continue
            seconds = spread(samples)
            rate = batch * kv_len * _TOKEN_BYTES / seconds.median
            out = np.asarray(out, np.float32)
            expected = out if expected is None else expected
            record[name] = {
                "microseconds": [1e6 * x for x in seconds],
                "share_of_copy": rate / bandwidth,
                "differs_from_ours": float(np.abs(out - expected).max()),
            }
        results.append(record)
        console.print(_line(record))
    return results


def _page_sizes(options: argparse.Namespace) -> tuple[int, ...]:
    return (16,) if options.interpret else (16, 64)


def _line(record: dict[str, Any]) -> str:
    parts = [f"batch {record['batch']} kv {record['kv_len']} S={record['page_size']}:"]
    for name, figures in record.items():
        if isinstance(figures, dict):
            is_run = "microseconds" in figures
            took = f"{figures['microseconds'][0]:.1f} us" if is_run else "failed"
            share = f" {figures['share_of_copy']:.2f}" if is_run else ""
            parts.append(f"{name} {took}{share};")
    return " ".join(parts)


def run_prefill(options: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    """Prompts from nothing, beside dense attention on K and V in one piece."""
    results = []
    lengths = (24,) if options.interpret else (2048, 8192)
    for length, page_size in ((n, size) for n in lengths for size in _page_sizes(options)):
        record: dict[str, Any] = {"tokens": length, "page_size": page_size}
        pools, tables = make_batch(1, length, page_size, 0)
        key = jax.random.key(2)
        queries = jax.random.normal(key, (length, HEADS, HEAD_DIM), jnp.bfloat16)
        new = jax.random.normal(key, (length, KV_HEADS, HEAD_DIM), jnp.bfloat16)
        cu_q_lens = jnp.array([0, length], jnp.int32)

        flops = 4 * HEADS * HEAD_DIM * length * (length + 1) / 2
        calls = {
            "paxkv": _paged_prefill(new, tables, cu_q_lens, options.interpret),
            "dense": _dense_prefill(new, "xla"),
            "dense cuDNN": _dense_prefill(new, "cudnn"),
        }
        for name, call in calls.items():
            if time.monotonic() > deadline:
                record[name] = {"error": "no time was left"}
                continue
            try:
                seconds = spread(_time_prefill(call, queries, pools, options))
            except Exception as error:  # a peer that cannot run here
                record[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
                continue
            record[name] = {
                "microseconds": [1e6 * x for x in seconds],
                "tflops": flops / seconds.median / 1e12,
            }
        results.append(record)
    return results


def _paged_prefill(new, tables: Batch, cu_q_lens, interpret: bool) -> Prefill:
    def attend(queries, pools):
        keys, values = pools
        result = paged_attention(
            queries, new, new, keys, values, tables.block_tables, tables.kv_lens, cu_q_lens,
            **our_settings(interpret),
        )  # fmt: skip
        return result.out, (result.key_pages, result.value_pages)

    return attend


def _dense_prefill(new, implementation: Literal["xla", "cudnn"]) -> Prefill:
    def attend(queries, pools):
        out = jax.nn.dot_product_attention(
            queries[None], new[None], new[None], is_causal=True, implementation=implementation
        )
        return out[0], pools

    return attend


def _time_prefill(call, queries, pools: Pools, options: argparse.Namespace) -> list[float]:
    num_turns = 1 if options.interpret else 20
    pools = (pools[0].copy(), pools[1].copy())  # the others need theirs

    def turns(queries, pools):
        def turn(_, state):
            queries, pools = state
            out, pools = call(queries, pools)
            return queries + out * jnp.asarray(1e-3, out.dtype), pools

        return lax.fori_loop(0, num_turns, turn, (queries, pools))

    run = jax.jit(turns, donate_argnums=1)
    samples = []
    for _ in range(options.rounds + 1):
        begin = time.perf_counter()
        out, pools = run(queries, pools)
        jax.block_until_ready(out)
        samples.append((time.perf_counter() - begin) / num_turns)
    return samples[1:]


def table_of(decode: list[dict[str, Any]]) -> Table:
    names = [name for name, x in decode[0].items() if isinstance(x, dict)]
    table = Table("batch", "tokens", "S", *names, title="Microseconds a step, share of copy rate")
    for record in decode:
        cells = [
            f"{x['microseconds'][0]:.1f} {x['share_of_copy']:.2f}" if "microseconds" in x else "-"
            for x in (record[name] for name in names)
        ]
        table.add_row(str(record["batch"]), str(record["kv_len"]), str(record["page_size"]), *cells)
    return table


def main() -> None:
    options = parse_options()
    begin = time.monotonic()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    console = Console(width=180)
    seed = time.time_ns() % 2**32
    bandwidth = copy_bandwidth(1 << (20 if options.interpret else 31))
    console.print(f"{jax.devices()[0].device_kind}: a copy moves {bandwidth / 1e9:,.0f} GB/s")
    cases = check_cases(options.interpret, begin + 0.4 * options.seconds, seed)
    wrong = {name: found for name, found in cases.items() if found != "ok"}
    console.print(f"{len(cases) - len(wrong)} of {len(cases)} cases are right (seed {seed})")
    for name, found in wrong.items():
        console.print(f"  {name}: {found}", markup=False)
    prefill = run_prefill(options, begin + 0.55 * options.seconds)
    decode = run_decode(options, begin + options.seconds - 20, bandwidth, console)
    console.print(table_of(decode))
    tell(
        {
            "benchmark": "kernels_gpu",
            "run": describe_run(),
            "copy_bandwidth": bandwidth,
            "seed": seed,
            "cases": cases,
            "prefill": prefill,
            "decode": decode,
            "seconds": time.monotonic() - begin,
        },
        options.json,
    )


def parse_options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--seconds", type=float, default=470, help="after which shapes are left")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="a file for the record that is also printed last")
    return parser.parse_args()


if __name__ == "__main__":
    main()
