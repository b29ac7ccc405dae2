"""A system prompt that 64 requests begin with: stored once, computed once.

    python -m benchmarks.bench_prefix --json prefix.json

The first request stores the system prompt, then the others come, each with a suffix of its own.
Their prefill computes the suffixes only, so it should take less time by the factor that the tokens
say; the same requests are served with prefix caching off beside it, round by round. SmolLM2-135M's
shape, random weights.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Table

from benchmarks.bars import Bar, tell_bars
from benchmarks.checkpoints import SMOLLM2_135M, TINY
from benchmarks.common import (
    CpuWatch,
    describe_run,
    parse_sizes,
    spread,
    tell_if_disturbed,
    tell_results,
)
from benchmarks.servers import queue, run
from benchmarks.serving_load import Asked, draw_prompts
from paxkv.config import pages_of
from paxkv.decoder import Decoder
from paxkv.engine import Engine
from paxkv.models.llama import LlamaDecoder

_ALLOWED = 0.3  # share that the saving may miss what the tokens predict by
_TINY_SIZES = {
    "requests": 4, "system_tokens": 32, "suffix_tokens": 8, "new_tokens": 2, "rounds": 1,
}  # fmt: skip
ON, OFF = "on", "off"

type Round = dict[str, dict[str, float]]


def draw_requests(options: argparse.Namespace, vocab_size: int, seed: int) -> list[Asked]:
    """Requests that begin alike and go on differently."""
    lengths = [options.system_tokens] + [options.suffix_tokens] * options.requests
    system, *suffixes = draw_prompts(lengths, vocab_size=vocab_size, seed=seed)
    return [Asked(system + suffix, options.new_tokens) for suffix in suffixes]


def make_engine(
    decoder: Decoder, dtype: str, options: argparse.Namespace, *, prefix_caching: bool
) -> Engine:
    """An engine with room for all requests, without sharing too; warm."""
    max_length = options.system_tokens + options.suffix_tokens + options.new_tokens
    engine = Engine(
        decoder,
        num_slots=options.requests,
        max_length=max_length,
        num_pages=1 + options.requests * (pages_of(max_length, options.page_size) + 1),
        page_size=options.page_size,
        dtype=dtype,
        prefix_caching=prefix_caching,
    )
    engine.compile()
    return engine


def serve(engine: Engine, requests: Sequence[Asked]) -> dict[str, float]:
    """Serves the first request, then the others; figures are of the others, besides `seconds`."""
    stats = engine.stats
    stats.peak_pages = 0
    begin = time.perf_counter()
    queue(engine, requests[0].prompt, requests[0].new_tokens)
    run(engine)
    seconds_before, tokens_before = stats.prefill_seconds, stats.prefill_tokens
    hit_before = stats.prefix_tokens_hit
    for asked in requests[1:]:
        queue(engine, asked.prompt, asked.new_tokens)
    run(engine)
    seconds = time.perf_counter() - begin
    engine.clear_prefixes()
    return {
        "prefill_seconds": stats.prefill_seconds - seconds_before,
        "prefill_tokens": stats.prefill_tokens - tokens_before,
        "prefix_tokens_hit": stats.prefix_tokens_hit - hit_before,
        "seconds": seconds,
        "peak_pages": stats.peak_pages,
    }


def run_dtype(dtype: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Both ways in turn, round by round."""
    config = TINY if options.tiny else SMOLLM2_135M
    decoder = LlamaDecoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    engines = {
        name: make_engine(decoder, dtype, options, prefix_caching=name == ON) for name in (ON, OFF)
    }
    watch, rounds = CpuWatch(), []
    for seed in range(1, options.rounds + 1):
        requests = draw_requests(options, config.vocab_size, seed)
        rounds.append({name: serve(engine, requests) for name, engine in engines.items()})
    console.print(table_of(rounds, dtype))
    return {
        "dtype": dtype,
        "rounds": rounds,
        "bars": tell_bars(bars_of(rounds, options), console),
        "others_share": watch.others_share(),
    }


def bars_of(rounds: Sequence[Round], options: argparse.Namespace) -> list[Bar]:
    """The saving in time over the one in tokens, and whether the prompt was stored once."""

    def ratio(one: Round, figure: str) -> float:
        return one[OFF][figure] / one[ON][figure]

    own_pages = pages_of(options.suffix_tokens + options.new_tokens - 1, options.page_size) + 1
    most_pages = options.system_tokens // options.page_size + options.requests * own_pages
    return [
        Bar(
            what="prefill is faster by this share of the factor that the skipped tokens predict:",
            found=[ratio(one, "prefill_seconds") / ratio(one, "prefill_tokens") for one in rounds],
            least=1 - _ALLOWED,
            most=1 + _ALLOWED,
        ),
        Bar(
            what="pages in use at most, the system prompt stored once:",
            found=[one[ON]["peak_pages"] for one in rounds],
            most=most_pages,
        ),
    ]


def table_of(rounds: Sequence[Round], dtype: str) -> Table:
    table = Table(title=f"Requests after the first, {dtype}: median (lowest to highest)")
    for heading in ("prefix caching", "prefill s", "prefill tokens", "all s, end to end", "pages"):
        table.add_column(heading, justify="right")

    def cell(name: str, figure: str, form: str) -> str:
        values = spread([one[name][figure] for one in rounds])
        middle, lowest, highest = (format(value, form) for value in values)
        return f"{middle} ({lowest} to {highest})"

    for name in (ON, OFF):
        table.add_row(
            name,
            cell(name, "prefill_seconds", ".3g"),
            f"{rounds[0][name]['prefill_tokens']:,}",
            cell(name, "seconds", ".3g"),
            f"{rounds[0][name]['peak_pages']:,}",
        )
    return table


def main() -> None:
    options = parse_options()
    console, about = Console(), describe_run()
    results = [run_dtype(dtype, options, console) for dtype in options.dtypes]
    tell_if_disturbed(max(result["others_share"] for result in results))
    tell_results("prefix", about, options, results=results)


def parse_options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    dtypes = ["bfloat16", "float32"]
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--system-tokens", type=int, default=512)
    parser.add_argument("--suffix-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=16, help="output of each request")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    return parse_sizes(parser, _TINY_SIZES)


if __name__ == "__main__":
    main()
