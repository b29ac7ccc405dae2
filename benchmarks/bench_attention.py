"""Decode attention alone at SmolLM2-135M's shape, beside dense attention on contiguous K and V.

    python -m benchmarks.bench_attention --json attention.json

One call runs decode steps in a compiled loop, every layer with arrays of its own, as a decoder
does. Each layer writes its new token before it attends: in a loop that changed no page, XLA would
gather the pages once and for all, and time nothing. The dense floor has each sequence in one
piece, padded to the longest, and no table; it is what paging may cost nothing beside.
"""

import argparse
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoints import SMOLLM2_135M
from benchmarks.common import (
    CpuWatch,
    describe_run,
    memory_bandwidth,
    seconds_of,
    spread,
    tell,
    tell_if_disturbed,
)
from paxkv.pallas_kernels import paged_attention

_EVEN_LENGTH = 320  # tokens
_UNEVEN_LENGTHS = 16, 2000  # tokens, the shortest and the longest there may be
_MASKED = -1e30

type Layers = list[tuple[jax.Array, jax.Array]]  # each layer's keys and values
type Attend = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def lengths_of(kind: str, batch: int) -> np.ndarray:
    """Tokens of each sequence, `i32[B]`; uneven ones are the quantiles of a lognormal."""
    if kind == "even":
        return np.full(batch, _EVEN_LENGTH, np.int32)
    shares = (np.arange(batch) + 0.5) / batch
    quantiles = [NormalDist(5.0, 1.3).inv_cdf(share) for share in shares]
    return np.clip(np.exp(quantiles), *_UNEVEN_LENGTHS).astype(np.int32)


def paged(lengths: np.ndarray, page_size: int) -> tuple[tuple[int, ...], Attend]:
    """The shape of a layer's pool, pages in random order, and attention over it."""
    batch = len(lengths)
    num_pages = -(-lengths // page_size)
    pool_pages = 1 + int(num_pages.sum())
    ids = np.random.default_rng(2).permutation(np.arange(1, pool_pages, dtype=np.int32))
    tables = np.zeros((batch, -(-_UNEVEN_LENGTHS[1] // page_size)), np.int32)
    for row, pages in zip(tables, np.split(ids, np.cumsum(num_pages)[:-1]), strict=True):
        row[: len(pages)] = pages
    block_tables, cu_q_lens = jnp.asarray(tables), jnp.arange(batch + 1, dtype=jnp.int32)

    def attend(queries, new_keys, new_values, keys, values, kv_lens):
        result = paged_attention(
            queries, new_keys, new_values, keys, values, block_tables, kv_lens, cu_q_lens,
            max_q_len=1,
        )  # fmt: skip
        return result.out, result.key_pages, result.value_pages

    config = SMOLLM2_135M
    return (pool_pages, config.num_kv_heads, page_size, config.head_dim), attend


def contiguous(lengths: np.ndarray) -> tuple[tuple[int, ...], Attend]:
    """The shape of a layer's keys, padded to the longest sequence, and dense attention."""
    batch, longest = len(lengths), int(lengths.max())
    config = SMOLLM2_135M
    row = jnp.arange(batch)

    def attend(queries, new_keys, new_values, keys, values, kv_lens):
        keys = keys.at[row, :, kv_lens - 1].set(new_keys, unique_indices=True)
        values = values.at[row, :, kv_lens - 1].set(new_values, unique_indices=True)
        grouped = queries.reshape(batch, config.num_kv_heads, -1, config.head_dim)
        einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        scores = einsum("bkgh,bkth->bkgt", grouped, keys) * config.head_dim**-0.5
        visible = jnp.arange(longest)[None] < kv_lens[:, None]
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, _MASKED), axis=-1)
        out = einsum("bkgt,bkth->bkgh", weights.astype(values.dtype), values)
        return out.reshape(queries.shape).astype(queries.dtype), keys, values

    return (batch, config.num_kv_heads, longest, config.head_dim), attend


class Steps:
    """Decode steps of one way to attend, compiled and warm."""

    def __init__(
        self, shape: tuple[int, ...], attend: Attend, lengths: np.ndarray, dtype: str, steps: int
    ):
        config = SMOLLM2_135M
        key = jax.random.key(0)
        self._steps = steps
        self._kv_lens = jnp.asarray(lengths)
        self._queries = jax.random.normal(
            key, (len(lengths), config.num_heads, config.head_dim), jnp.dtype(dtype)
        )
        self._layers: Layers = [
            (jax.random.normal(k, shape, dtype), jax.random.normal(v, shape, dtype))
            for k, v in jax.random.split(key, (config.num_layers, 2))
        ]
        self._run = jax.jit(functools.partial(run_steps, attend), donate_argnums=1)
        self.milliseconds()

    def milliseconds(self) -> float:
        """Of one step."""

        def call() -> jax.Array:
            out, self._layers = self._run(self._queries, self._layers, self._kv_lens, self._steps)
            return out

        return 1e3 * seconds_of(call) / self._steps


def run_steps(
    attend: Attend, queries: jax.Array, layers: Layers, kv_lens: jax.Array, steps: jax.Array
) -> tuple[jax.Array, Layers]:
    """Attends `steps` times through all layers, each on what the one before gave."""

    def step(_: jax.Array, state: tuple[jax.Array, Layers]) -> tuple[jax.Array, Layers]:
        queries, layers = state
        changed = []
        for keys, values in layers:
            new = queries[:, : SMOLLM2_135M.num_kv_heads]
            out, keys, values = attend(queries, new, new, keys, values, kv_lens)
            queries = (queries + out) * jnp.asarray(0.5, queries.dtype)
            changed.append((keys, values))
        return queries, changed

    return lax.fori_loop(0, steps, step, (queries, layers))


def run_case(
    dtype: str, batch: int, kind: str, options: argparse.Namespace, bandwidth: float
) -> dict[str, Any]:
    """Milliseconds of a step for each page size, and ratios to the floor within rounds."""
    lengths = lengths_of(kind, batch)
    ways = {f"S={size}": paged(lengths, size) for size in options.page_sizes}
    ways["contiguous"] = contiguous(lengths)
    runners = {
        name: Steps(*way, lengths=lengths, dtype=dtype, steps=options.steps)
        for name, way in ways.items()
    }
    watch = CpuWatch()
    rounds = [
        {name: runner.milliseconds() for name, runner in runners.items()}
        for _ in range(options.rounds)
    ]
    token_bytes = SMOLLM2_135M.kv_bytes_per_token(jnp.dtype(dtype).itemsize)
    return {
        "dtype": dtype,
        "batch": batch,
        "lengths": kind,
        "tokens": int(lengths.sum()),
        "longest": int(lengths.max()),
        "milliseconds": {name: spread([r[name] for r in rounds])._asdict() for name in ways},
        "ratio_to_contiguous": {
            name: median(r[name] / r["contiguous"] for r in rounds) for name in ways
        },
        "limit_milliseconds": 1e3 * int(lengths.sum()) * token_bytes / bandwidth,
        "others_share": watch.others_share(),
    }


def table_of(results: list[dict[str, Any]]) -> Table:
    ways = list(results[0]["milliseconds"])
    table = Table(title="Attention of all layers: ms per decode step, by page size S")
    for heading in ("dtype", "lengths"):
        table.add_column(heading)
    for heading in ("batch", "tokens", "limit", *ways):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result["dtype"],
            result["lengths"],
            str(result["batch"]),
            f"{result['tokens']:,}",
            f"{result['limit_milliseconds']:.1f}",
            *(
                f"{result['milliseconds'][way]['median']:.1f}\n"
                f"x {result['ratio_to_contiguous'][way]:.2f}"
                for way in ways
            ),
        )
    return table


def main() -> None:
    options = parse_options()
    run, console, results = describe_run(), Console(), []
    bandwidth = memory_bandwidth()
    for dtype, batch, kind in itertools.product(options.dtypes, options.batches, options.lengths):
        results.append(run_case(dtype, batch, kind, options, bandwidth))
        medians = {k: round(v["median"], 1) for k, v in results[-1]["milliseconds"].items()}
        console.print(f"{dtype} batch {batch} {kind}, ms: {medians}")
    console.print(table_of(results))
    console.print(f"The limit reads every key and value once, at {bandwidth / 1e9:.1f} GB/s.")
    tell_if_disturbed(max(result["others_share"] for result in results))
    settings = {k: v for k, v in vars(options).items() if k != "json"}
    record = {"benchmark": "attention", "run": run, "settings": settings}
    tell(record | {"bandwidth": bandwidth, "results": results}, options.json)


def parse_options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    dtypes, kinds = ["bfloat16", "float32"], ["even", "uneven"]
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--lengths", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--page-sizes", nargs="+", type=int, default=[16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="decode steps in one timed call")
    parser.add_argument("--json", type=Path, help="a file for the record that is also printed last")
    return parser.parse_args()


if __name__ == "__main__":
    main()
