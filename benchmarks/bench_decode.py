"""Decode speed of fixed batches, beside transformers and llama.cpp and the memory's limit.

    python -m benchmarks.bench_decode --json decode.json

A peer joins in where an environment variable names an interpreter that has it:
`PAXKV_REFERENCE_PYTHON` for transformers, `PAXKV_LLAMA_CPP_PYTHON` for llama-cpp-python. All get
the same weights, prompts and threads, decode greedily past any end of text, and are timed from
the first token to the last: prefill is left out. A round measures the memory, paxkv and each peer
in turn and never two at once, so that a change of the machine's mood meets all of them; ratios
are taken within a round.

A decode step reads all weights and every stored key and value once, so no implementation decodes
faster than `batch * bandwidth / (weight bytes + KV bytes)`.
"""

import argparse
import dataclasses
import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoints import Checkpoint, Weights, write_checkpoint
from benchmarks.common import (
    CpuWatch,
    describe_run,
    memory_bandwidth,
    num_cpus,
    spread,
    tell,
    tell_if_disturbed,
)
from benchmarks.peer_process import PEER_PYTHONS, named_peers, run_peer
from paxkv import LLM, SamplingParams
from paxkv.models.load import load_model

BARS = {  # how many times transformers' speed is asked of paxkv, by dtype and batch
    "bfloat16": {1: 1.5, 8: 2.0, 32: 2.7},
    "float32": {1: 2.4, 8: 1.9, 32: 2.0},
}
_WARM_UP_TOKENS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One batch to decode, as the peers' scripts read it."""

    folder: str  # weights as Hugging Face has them
    gguf: str  # the same in `dtype`
    dtype: str
    prompts: list[list[int]]  # of equal length
    new_tokens: int  # decode steps that are timed
    repeats: int
    num_threads: int


class Paxkv:
    """paxkv, made and compiled once for all rounds of a case."""

    def __init__(self, case: Case, page_size: int):
        self._case = case
        self._llm = LLM(
            load_model(case.folder, dtype=case.dtype).decoder,
            dtype=case.dtype,
            page_size=page_size,
            max_slots=len(case.prompts),
            max_length=len(case.prompts[0]) + case.new_tokens,
        )
        self._decode(min(_WARM_UP_TOKENS, case.new_tokens))

    def measure(self) -> dict[str, Any]:
        runs = [self._decode(self._case.new_tokens) for _ in range(self._case.repeats)]
        return {"seconds": [seconds for seconds, _ in runs], "tokens": runs[0][1]}

    def _decode(self, new_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds besides prefill, the host's work among them, and the tokens."""
        stats = self._llm.engine.stats
        prefill_before = stats.prefill_seconds
        begin = time.perf_counter()
        completions = self._llm.generate(
            self._case.prompts,
            SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True),
        )
        seconds = time.perf_counter() - begin - (stats.prefill_seconds - prefill_before)
        assert all(len(c.token_ids) == new_tokens for c in completions), completions[0].error
        return seconds, [c.token_ids for c in completions]


def run_case(
    case: Case, peers: Sequence[str], *, num_rounds: int, page_size: int
) -> tuple[list[float], dict[str, list[dict[str, Any]]]]:
    """The memory bandwidth of each round, and what each contender measured in each."""
    bandwidths: list[float] = []
    ours = Paxkv(case, page_size)
    contenders: dict[str, Callable[[], dict[str, Any]]] = {
        "paxkv": ours.measure,
        **{name: functools.partial(run_peer, name, "decode", case) for name in peers},
    }
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for _ in range(num_rounds):
        bandwidths.append(memory_bandwidth())
        for name, measure in contenders.items():
            watch = CpuWatch()
            rounds[name].append({**measure(), "others_share": watch.others_share()})
    return bandwidths, rounds


def summarise(
    case: Case,
    checkpoint: Checkpoint,
    bandwidths: list[float],
    rounds: dict[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    """Tokens per second, their range, the limit, and ratios within rounds."""
    batch, prompt_tokens = len(case.prompts), len(case.prompts[0])
    number_bytes = {"bfloat16": 2, "float32": 4}[case.dtype]
    mean_length = prompt_tokens + (case.new_tokens - 1) / 2
    step_bytes = checkpoint.config.weight_bytes(number_bytes)
    step_bytes += batch * mean_length * checkpoint.config.kv_bytes_per_token(number_bytes)
    speeds = {
        name: [[batch * case.new_tokens / s for s in measured["seconds"]] for measured in of_name]
        for name, of_name in rounds.items()
    }
    ours = [median(speed) for speed in speeds["paxkv"]]
    ratios = {
        name: spread([mine / median(its) for mine, its in zip(ours, theirs, strict=True)])
        for name, theirs in speeds.items()
        if name != "paxkv"
    }
    bandwidth = max(bandwidths)
    return {
        "tokens_per_second": {
            name: spread(list(itertools.chain(*its)))._asdict()
            | {"round_medians": [median(speed) for speed in its]}
            for name, its in speeds.items()
        },
        "ratio_to": {name: ratio._asdict() for name, ratio in ratios.items()},
        "bar": BARS[case.dtype].get(batch),
        "bandwidths": bandwidths,
        "step_bytes": step_bytes,
        "limit_tokens_per_second": batch * bandwidth / step_bytes,
        "others_share": max(m["others_share"] for of_name in rounds.values() for m in of_name),
        "same_tokens_as": {
            name: same_tokens(rounds["paxkv"][0]["tokens"], rounds[name][0]["tokens"])
            for name in ratios
        },
    }


def same_tokens(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of each sequence before the first difference, on average.

    Near ties part ways, in 16 bits soon; in float32 a small share says that something is wrong.
    """

    def share(mine: list[int], its: list[int]) -> float:
        same = [a == b for a, b in zip(mine, its, strict=False)]
        return len(list(itertools.takewhile(bool, same))) / len(same)

    return mean(map(share, ours, theirs))


def table_of(results: list[dict[str, Any]], peers: Sequence[str]) -> Table:
    table = Table(title="Decode tokens/s, median (lowest to highest); x: paxkv's to theirs")
    for heading in ("weights", "batch"):
        table.add_column(heading)
    for heading in ("paxkv", "limit", *peers):
        table.add_column(heading, justify="right")
    for result in results:
        speeds, limit = result["tokens_per_second"], result["limit_tokens_per_second"]
        table.add_row(
            f"{result['weights']}\n{result['dtype']}",
            str(result["batch"]),
            speed_cell(speeds["paxkv"]),
            f"{limit:,.0f}\n{speeds['paxkv']['median'] / limit:.0%} of it",
            *(f"{speed_cell(speeds[name])}\n{ratio_cell(result, name)}" for name in peers),
        )
    return table


def speed_cell(speed: dict[str, float]) -> str:
    return f"{speed['median']:,.0f} ({speed['lowest']:,.0f} to {speed['highest']:,.0f})"


def ratio_cell(result: dict[str, Any], name: str) -> str:
    ratio, bar = result["ratio_to"][name]["median"], result["bar"]
    if name != "transformers" or bar is None:
        return f"x {ratio:.2f}"
    return f"[{'green' if ratio >= bar else 'red'}]x {ratio:.2f}[/], bar {bar}"


def main() -> None:
    options = parse_options()
    console = Console()
    run, results = describe_run(), []
    rng = np.random.default_rng(0)
    for weights in options.weights:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = write_checkpoint(weights, Path(folder), options.dtypes)
            for dtype, batch in itertools.product(options.dtypes, options.batches):
                case = Case(
                    folder=str(checkpoint.folder),
                    gguf=str(checkpoint.ggufs[dtype]),
                    dtype=dtype,
                    prompts=rng.integers(
                        0, checkpoint.config.vocab_size, (batch, options.prompt_tokens)
                    ).tolist(),
                    new_tokens=options.new_tokens,
                    repeats=options.repeats,
                    num_threads=num_cpus(),
                )
                bandwidths, rounds = run_case(
                    case, options.peers, num_rounds=options.rounds, page_size=options.page_size
                )
                for name in options.peers:
                    run["versions"] |= rounds[name][0]["versions"]
                result = {"weights": weights, "dtype": dtype, "batch": batch}
                result |= summarise(case, checkpoint, bandwidths, rounds)
                results.append(result)
                medians = {k: round(v["median"]) for k, v in result["tokens_per_second"].items()}
                console.print(f"{weights} {dtype} batch {batch}, tokens/s: {medians}")
    console.print(table_of(results, options.peers))
    bandwidth = max(b for result in results for b in result["bandwidths"])
    console.print(f"Memory reads at {bandwidth / 1e9:.1f} GB/s on {run['num_cpus']} CPUs.")
    tell_if_disturbed(max(result["others_share"] for result in results))
    settings = {k: v for k, v in vars(options).items() if k != "json"}
    record = {"benchmark": "decode", "run": run, "settings": settings, "results": results}
    tell(record, options.json)


def parse_options() -> argparse.Namespace:
    assert __doc__ is not None
    named = named_peers()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    weights: tuple[Weights, ...] = ("random", "real")
    parser.add_argument("--weights", nargs="+", choices=weights, default=list(weights))
    parser.add_argument("--dtypes", nargs="+", choices=list(BARS), default=list(BARS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--peers", nargs="*", choices=list(PEER_PYTHONS), default=named)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2, help="measurements within a round")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--json", type=Path, help="a file for the record that is also printed last")
    options = parser.parse_args()
    for name in set(options.peers) - set(named):
        parser.error(f"{name} needs {PEER_PYTHONS[name]} to name an interpreter that has it")
    return options


if __name__ == "__main__":
    main()
