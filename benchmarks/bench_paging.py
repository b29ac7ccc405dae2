"""What paging costs: a decode step of paxkv beside one over a contiguous cache, same lengths.

    python -m benchmarks.bench_paging --json paging.json

Both decode the same sequences, each in a batch of its own, and take turns burst by burst. The
lengths grow around `--tokens`, so the median is that of sequences of this length. The contiguous
cache is in one piece that is just long enough: none could be read faster. A step is timed with
what the host does around it, and once more without (see `benchmarks.device_time`).
"""

import argparse
import itertools
import time
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Table

import paxkv.runner
from benchmarks import contiguous_engine
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
from benchmarks.contiguous_engine import ContiguousEngine
from benchmarks.device_time import watch_programs
from benchmarks.servers import Steps, queue
from benchmarks.serving_load import draw_prompts
from paxkv.config import pages_of
from paxkv.decoder import Decoder
from paxkv.engine import Engine
from paxkv.models.llama import LlamaDecoder

_MOST = {("bfloat16", 32): 1.25}  # times the contiguous step, by dtype and batch
_SPARE_TOKENS = 64  # those stored first may decode a little while the others' prompts are stored
_TINY_SIZES = {"batches": [2], "tokens": 32, "rounds": 2, "burst": 4}


def paged_engine(
    decoder: Decoder, prompts: Sequence[list[int]], new_tokens: int, dtype: str, page_size: int
) -> tuple[Engine, int]:
    """An engine with these prompts stored, and how many new tokens each has by then at most."""
    max_length = len(prompts[0]) + new_tokens + _SPARE_TOKENS
    engine = Engine(
        decoder,
        num_slots=len(prompts),
        max_length=max_length,
        num_pages=1 + len(prompts) * (pages_of(max_length, page_size) + 1),
        page_size=page_size,
        dtype=dtype,
    )
    requests = [queue(engine, prompt, max_length - len(prompt)) for prompt in prompts]
    while not all(request.output for request in requests):
        engine.step(1)
    return engine, max(len(request.output) for request in requests)


def contiguous(
    decoder: Decoder, prompts: Sequence[list[int]], num_made: int, new_tokens: int, dtype: str
) -> ContiguousEngine:
    """The contiguous cache as far with the same requests."""
    max_length = len(prompts[0]) + num_made + new_tokens
    engine = ContiguousEngine(
        decoder,
        num_slots=len(prompts),
        max_length=max_length,
        dtype=dtype,
        max_burst=32,
        smallest_piece=max_length,
    )
    for prompt in prompts:
        engine.add(prompt, max_length - len(prompt))
    for _ in range(num_made):
        engine.step(1)
    return engine


def milliseconds(engine: Steps, batch: int, burst: int) -> tuple[float, float]:
    """Of one decode step: all of it, and what compiled programs take of that."""
    module = contiguous_engine if isinstance(engine, ContiguousEngine) else paxkv.runner
    with watch_programs(module) as watch:
        begin = time.perf_counter()
        changed = engine.step(burst)
        seconds = time.perf_counter() - begin
    assert len(changed) == batch
    return 1e3 * seconds / burst, 1e3 * watch.waited_seconds / burst


def run_case(decoder: LlamaDecoder, dtype: str, batch: int, options: argparse.Namespace) -> dict:
    """Milliseconds of a step for each cache, and ratios to the contiguous one within rounds."""
    new_tokens = options.rounds * options.burst
    prompt_tokens = options.tokens - new_tokens // 2
    prompts = draw_prompts([prompt_tokens] * batch, vocab_size=decoder.vocab_size)
    engines: dict[str, Steps] = {}
    num_made = 1
    for size in options.page_sizes:
        engine, num_made = paged_engine(decoder, prompts, new_tokens, dtype, size)
        engines[f"paxkv S={size}"] = engine
    engines["contiguous"] = contiguous(decoder, prompts, num_made, new_tokens, dtype)
    watch = CpuWatch()
    rounds = [
        {name: milliseconds(engine, batch, options.burst) for name, engine in engines.items()}
        for _ in range(options.rounds)
    ]
    return {
        "dtype": dtype,
        "batch": batch,
        "tokens": options.tokens,
        "milliseconds": {n: spread([r[n][0] for r in rounds])._asdict() for n in engines},
        "of_programs": {n: spread([r[n][1] for r in rounds])._asdict() for n in engines},
        "ratios": {n: [r[n][0] / r["contiguous"][0] for r in rounds] for n in engines},
        "ratios_of_programs": {n: [r[n][1] / r["contiguous"][1] for r in rounds] for n in engines},
        "others_share": watch.others_share(),
    }


def bars_of(result: dict[str, Any]) -> list[Bar]:
    """What paging may cost, where a bar is set."""
    most = _MOST.get((result["dtype"], result["batch"]))
    if most is None:
        return []
    where = f"{result['dtype']}, batch {result['batch']}, {result['tokens']} tokens"
    return [
        Bar(what=f"{name}, step to the contiguous cache's ({where})", found=ratios, most=most)
        for name, ratios in result["ratios"].items()
        if name != "contiguous"
    ]


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Milliseconds of a decode step, median (lowest to highest)")
    for heading in ("dtype", "batch", "cache", "step", "ratio", "programs", "ratio"):
        table.add_column(heading)
    for result, name in itertools.product(results, list(results[0]["milliseconds"])):
        ms, programs = result["milliseconds"][name], result["of_programs"][name]
        table.add_row(
            result["dtype"],
            str(result["batch"]),
            name,
            f"{ms['median']:.1f} ({ms['lowest']:.1f} to {ms['highest']:.1f})",
            f"{spread(result['ratios'][name]).median:.2f}",
            f"{programs['median']:.1f}",
            f"{spread(result['ratios_of_programs'][name]).median:.2f}",
        )
    return table


def main() -> None:
    options = parse_options()
    console, run, results = Console(), describe_run(), []
    for dtype in options.dtypes:
        config = TINY if options.tiny else SMOLLM2_135M
        decoder = LlamaDecoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
        results += [run_case(decoder, dtype, batch, options) for batch in options.batches]
    console.print(table_of(results))
    bars = tell_bars([bar for result in results for bar in bars_of(result)], console)
    tell_if_disturbed(max(result["others_share"] for result in results))
    tell_results("paging", run, options, results=results, bars=bars)


def parse_options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    dtypes = ["bfloat16", "float32"]
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--batches", nargs="+", type=int, default=[32])
    parser.add_argument("--tokens", type=int, default=512, help="of each sequence")
    parser.add_argument("--page-sizes", nargs="+", type=int, default=[16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--burst", type=int, default=16, help="decode steps in one timed call")
    return parse_sizes(parser, _TINY_SIZES)


if __name__ == "__main__":
    main()
