"""Serving 64 requests of wildly different lengths: paging beside caches of maximum length.

    python -m benchmarks.bench_serving --json serving.json

All requests come at once; prompts and answers are lognormal in length, and every answer is exactly
as long as was asked. The first four rows are one decoder (SmolLM2-135M's shape, random weights) on
two kinds of cache. Three of them have memory for 8,192 tokens: a contiguous cache makes it four
slots of the model's context of 2,048, paxkv pages. The fourth is paxkv with room for all requests
at once, beside transformers in padded batches of 16 and llama.cpp with such room too, each where an
interpreter is named (see `bench_decode`). What has to be compiled is compiled before.

A round measures each in turn, and ratios are taken within a round. The host's share is the time of
`step` outside of waiting for compiled programs; see `benchmarks.device_time`.
"""

import argparse
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.bars import Bar, tell_bars
from benchmarks.checkpoints import SMOLLM2_135M, TINY, Checkpoint, write_checkpoint
from benchmarks.common import (
    CpuWatch,
    describe_run,
    num_cpus,
    parse_sizes,
    spread,
    tell_if_disturbed,
    tell_results,
)
from benchmarks.peer_process import PEER_PYTHONS, named_peers, run_peer
from benchmarks.servers import contiguous_server, paxkv_server, serve
from benchmarks.serving_load import Asked, draw_requests
from paxkv.config import pages_of
from paxkv.decoder import Decoder
from paxkv.models.load import load_model

STATIC, CONTINUOUS = "contiguous, static", "contiguous, continuous"  # batching
PAGED, ROOMY = "paxkv", "paxkv, room for all"
_TINY_SIZES = {
    "requests": 6, "prompt_mean": 12.0, "output_mean": 8.0, "longest": 40, "context": 128,
    "budget": 256, "max_slots": 4, "transformers_batch": 3, "rounds": 1,
}  # fmt: skip

type Measure = Callable[[], dict[str, Any]]
type Rounds = dict[str, list[dict[str, Any]]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeerCase:
    """What is served, as the peers' scripts read it."""

    folder: str  # weights as Hugging Face has them
    gguf: str  # the same in `dtype`
    dtype: str
    prompts: list[list[int]]
    new_tokens: list[int]
    batch: int  # requests that transformers serves together
    num_threads: int


def contenders(
    decoder: Decoder,
    checkpoint: Checkpoint,
    requests: Sequence[Asked],
    dtype: str,
    options: argparse.Namespace,
) -> dict[str, Measure]:
    """Who serves, each compiled and warm."""
    same = {"max_length": options.context, "dtype": dtype, "max_burst": options.burst}
    contiguous = functools.partial(
        contiguous_server, decoder, requests, num_slots=options.budget // options.context, **same
    )
    paged = functools.partial(paxkv_server, decoder, page_size=options.page_size, **same)
    pages_of_all = sum(pages_of(asked.most_stored, options.page_size) + 1 for asked in requests)
    servers = {
        STATIC: contiguous(is_static=True),
        CONTINUOUS: contiguous(is_static=False),
        PAGED: paged(num_slots=options.max_slots, num_pages=options.budget // options.page_size),
        ROOMY: paged(num_slots=len(requests), num_pages=pages_of_all),
    }
    measures = {name: functools.partial(serve, its, requests) for name, its in servers.items()}
    case = PeerCase(
        folder=str(checkpoint.folder),
        gguf=str(checkpoint.ggufs.get(dtype, "")),
        dtype=dtype,
        prompts=[asked.prompt for asked in requests],
        new_tokens=[asked.new_tokens for asked in requests],
        batch=options.transformers_batch,
        num_threads=num_cpus(),
    )
    peers = {name: functools.partial(run_peer, name, "serving", case) for name in options.peers}
    return measures | peers


def run_rounds(measures: dict[str, Measure], num_rounds: int, console: Console) -> Rounds:
    """What each measured in each round."""
    rounds: Rounds = {name: [] for name in measures}
    for _ in range(num_rounds):
        for name, measure in measures.items():
            watch = CpuWatch()
            rounds[name].append({**measure(), "others_share": watch.others_share()})
            console.print(f"{name}: {rounds[name][-1]['seconds']:.3g} s")
    return rounds


def bars_of(rounds: Rounds, dtype: str) -> list[Bar]:
    """What is asked of paxkv, and what came of it."""

    def ratios(name: str, other: str, figure: str) -> list[float]:
        return [a[figure] / b[figure] for a, b in zip(rounds[name], rounds[other], strict=True)]

    held, seconds = "sequences_mean", "seconds"
    bars = [
        Bar(what="sequences held at once, paxkv to contiguous with continuous batching",
            least=2.5, found=ratios(PAGED, CONTINUOUS, held)),
        Bar(what="speed in the same memory, paxkv to contiguous with continuous batching",
            least=1.0, found=ratios(CONTINUOUS, PAGED, seconds)),
        *(
            Bar(what=f"the host's share of the time, {name}", most=0.05,
                found=[one["host_share"] for one in rounds[name]])
            for name in (PAGED, ROOMY)
        ),
    ]  # fmt: skip
    if "transformers" in rounds and dtype == "bfloat16":
        what = "speed with room for all, paxkv to transformers"
        bars.append(Bar(what=what, least=5.0, found=ratios("transformers", ROOMY, seconds)))
    return bars


def summarise(name: str, of_name: list[dict[str, Any]], num_tokens: int) -> dict[str, Any]:
    """Medians and ranges over rounds; counts are those of the first."""
    seconds = [one["seconds"] for one in of_name]
    summary = of_name[0] | {
        "name": name,
        "seconds": spread(seconds)._asdict(),
        "tokens_per_second": spread([num_tokens / s for s in seconds])._asdict(),
        "others_share": max(one["others_share"] for one in of_name),
    }
    if "host_share" in summary:
        summary["host_share"] = spread([one["host_share"] for one in of_name])._asdict()
    return summary


def table_of(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Percentages are of the memory: holding a token; a request's, still to be filled, or never.

    The last column has the tokens that were computed again after preemptions, and how many these
    were.
    """
    table = Table(title=title)
    table.add_column("served by")
    for heading in (
        "seconds", "tokens/s", "sequences\nmean, peak", "used, res.,\ninternal %", "host %",
        "tokens\nagain",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [f"{row['seconds']['median']:.3g}", f"{row['tokens_per_second']['median']:.0f}"]
        if "used" in row:
            cells.append(f"{row['sequences_mean']:.1f}, {row['sequences_peak']}")
            kinds = ("used", "reserved", "internal")
            cells.append(", ".join(f"{100 * row[kind]:.1f}" for kind in kinds))
            cells.append(f"{100 * row['host_share']['median']:.1f}")
        if "preemptions" in row:
            cells.append(f"{row['recomputed_tokens']} ({row['preemptions']})")
        table.add_row(row["name"], *cells)
    return table


def run_dtype(dtype: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All rows of a dtype, and its bars."""
    config = TINY if options.tiny else SMOLLM2_135M
    ggufs = [dtype] if "llama.cpp" in options.peers else []
    requests = draw_requests(
        options.requests,
        vocab_size=config.vocab_size,
        prompt_mean=options.prompt_mean,
        output_mean=options.output_mean,
        longest=options.longest,
    )
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint("random", Path(folder), ggufs, config)
        decoder = load_model(str(checkpoint.folder), dtype=dtype).decoder
        measures = contenders(decoder, checkpoint, requests, dtype, options)
        rounds = run_rounds(measures, options.rounds, console)
    num_tokens = sum(asked.new_tokens for asked in requests)
    rows = [summarise(name, of_name, num_tokens) for name, of_name in rounds.items()]
    bars = bars_of(rounds, dtype)
    console.print(table_of(rows, f"{len(requests)} requests, {num_tokens} new tokens, {dtype}"))
    return {
        "dtype": dtype,
        "new_tokens": num_tokens,
        "rows": rows,
        "bars": tell_bars(bars, console),
    }


def main() -> None:
    options = parse_options()
    console, run = Console(), describe_run()
    results = [run_dtype(dtype, options, console) for dtype in options.dtypes]
    tell_if_disturbed(max(row["others_share"] for its in results for row in its["rows"]))
    tell_results("serving", run, options, results=results)


def parse_options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    dtypes = ["bfloat16", "float32"]
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--peers", nargs="*", choices=list(PEER_PYTHONS), default=named_peers())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-mean", type=float, default=160.0, help="tokens")
    parser.add_argument("--output-mean", type=float, default=200.0, help="tokens")
    parser.add_argument("--longest", type=int, default=1024, help="prompt, and output, in tokens")
    parser.add_argument("--context", type=int, default=2048, help="prompt and output, in tokens")
    parser.add_argument("--budget", type=int, default=8192, help="tokens that the memory holds")
    parser.add_argument("--max-slots", type=int, default=24, help="paxkv's, within that memory")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--burst", type=int, default=16, help="steps between two looks of the host")
    parser.add_argument("--transformers-batch", type=int, default=16)
    options = parse_sizes(parser, _TINY_SIZES)
    for name in set(options.peers) - set(named_peers()):
        parser.error(f"{name} needs {PEER_PYTHONS[name]} to name an interpreter that has it")
    return options


if __name__ == "__main__":
    main()
