"""What the compilers say of the attention kernels, without a chip: one table per chip.

    PAXKV_AOT_PYTHON=/path/to/python python -m benchmarks.bench_kernels_static --json static.json

TPU: VLIW bundles, each about one cycle, for one more tile of keys and values of a long sequence,
with all that is repeated for it, and for a whole sequence of 4,096 tokens, with what it takes to
begin and end one (`tile_trips` says what runs how often). Beside them the time in which the memory
moves those tokens' bytes: bundles that take less are not what a kernel waits for. GPU: registers
and spills of each kernel by ptxas, and the shared memory that a program asks for; what of that is a
ring of stages can be in flight.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.aot import PYTHON_VARIABLE, Compiled, aot_python, compile_all
from benchmarks.bundles import UNITS
from benchmarks.chips import CHIPS, Chip
from benchmarks.common import describe_run, tell
from benchmarks.static_jobs import PAGE_SIZES, TOKENS, decode_case, names, tile_of
from benchmarks.tile_trips import count


def tpu_figures(name: str, result: Compiled, chip: Chip) -> dict[str, Any]:
    """The bundles of a tile and of a sequence, and the time of their bytes."""
    tile = tile_of(name, result.scratch)
    (kernel,) = (x for x in result.bundles if x.startswith(tile.kernel))
    regions, capacity = result.bundles[kernel]
    by_tile, by_sequence = count(regions, tile.steps)
    case = decode_case(int(name.split(":")[2]))
    token_seconds = 2 * case.num_kv_heads * case.head_dim * 2 / chip.bandwidth

    def per_token(bundles: float, tokens: int) -> dict[str, float]:
        seconds = bundles / (chip.clock_ghz * 1e9)
        return {
            "tokens": tokens,
            "bundles": bundles,
            "bundles_per_token": bundles / tokens,
            "share_of_memory_time": seconds / (tokens * token_seconds),
        }

    return {
        "name": name,
        "kernel": kernel,
        "tile": per_token(by_tile.bundles, tile.tokens),
        "sequence": per_token(by_sequence.bundles, TOKENS),
        "utilisation": {
            unit: used / (by_tile.bundles * most)
            for unit, used, most in zip(UNITS, by_tile.use, capacity, strict=True)
        },
        "seconds_to_compile": result.seconds,
    }


def reaches_bars(results: list[dict[str, Any]], page_size: int) -> bool | None:
    """Whether our decode on TPU waits for memory alone and takes fewer bundles than the others.

    None if not all of them were compiled.
    """
    wanted = [f"{who}:decode:{page_size}" for who in ("paxkv", "jax", "tpu-inference")]
    found = {x["name"]: x for x in results if x["name"] in wanted and "error" not in x}
    if len(found) < len(wanted):
        return None
    ours, *others = (found[name] for name in wanted)
    return all(
        ours[what]["share_of_memory_time"] <= 1
        and ours[what]["bundles_per_token"] < other[what]["bundles_per_token"]
        for what in ("tile", "sequence")
        for other in others
    )


def gpu_figures(name: str, result: Compiled, chip: Chip) -> dict[str, Any]:
    """Registers, spills and shared memory of the kernels, and how much of it is in flight."""
    shared = [x for x in result.scratch if x.space == "smem"]
    shared_bytes = sum(x.num_bytes for x in shared)
    rings = [x for x in shared if x.is_ring]
    ring_bytes = sum(x.num_bytes for x in rings)
    return {
        "name": name,
        "kernels": [kernel._asdict() for kernel in result.ptxas],
        "registers": max((kernel.registers for kernel in result.ptxas), default=None),
        "spill_bytes": sum(kernel.spill_bytes for kernel in result.ptxas),
        "shared_bytes": shared_bytes,
        "stages": max((x.shape[0] for x in rings), default=None),
        "stage_bytes": sum(x.num_bytes // x.shape[0] for x in rings),
        "in_flight_bytes": ring_bytes,
        "share_of_multiprocessor": shared_bytes / chip.shared_memory_bytes,
        "seconds_to_compile": result.seconds,
    }


_TPU_COLUMNS = {
    "tile": lambda x: f"{x['tile']['tokens']:,}",
    "bundles": lambda x: f"{x['tile']['bundles']:,.0f}",
    "a token": lambda x: f"{x['tile']['bundles_per_token']:.2f}",
    "of memory time": lambda x: f"{x['tile']['share_of_memory_time']:.2f}",
    "sequence": lambda x: f"{x['sequence']['tokens']:,}",
    "its bundles": lambda x: f"{x['sequence']['bundles']:,.0f}",
    "a token of it": lambda x: f"{x['sequence']['bundles_per_token']:.2f}",
    "of its memory time": lambda x: f"{x['sequence']['share_of_memory_time']:.2f}",
}
_USE_COLUMNS = {unit: lambda x, unit=unit: f"{x['utilisation'][unit]:.0%}" for unit in UNITS}
_GPU_COLUMNS = {
    "registers": lambda x: str(x["registers"]),
    "spilled bytes": lambda x: str(x["spill_bytes"]),
    "shared KB": lambda x: f"{x['shared_bytes'] / 1024:.1f}",
    "stages": lambda x: str(x["stages"]),
    "KB a stage": lambda x: f"{x['stage_bytes'] / 1024:.1f}",
    "KB in flight": lambda x: f"{x['in_flight_bytes'] / 1024:.1f}",
}


def tables_of(chip: Chip, results: list[dict[str, Any]], *, has_use: bool) -> list[Table]:
    """What was counted and, if wanted, how far a tile's bundles use the units of a TPU."""
    title = f"{chip.name}: {chip.clock_ghz} GHz, {chip.bandwidth / 1e9:,.0f} GB/s"
    if chip.platform != "tpu":
        return [_table(title, _GPU_COLUMNS, results)]
    tables = [_table(title, _TPU_COLUMNS, results)]
    if has_use:
        title = f"{chip.name}: share of what the bundles of a tile could ask of each unit"
        tables.append(_table(title, _USE_COLUMNS, results))
    return tables


def _table(title: str, columns: dict[str, Any], results: list[dict[str, Any]]) -> Table:
    table = Table("name", title=title)
    for heading in columns:
        table.add_column(heading, justify="right")
    for result in results:
        failed = ["failed"] * len(columns)
        cells = failed if "error" in result else [show(result) for show in columns.values()]
        table.add_row(result["name"], *cells)
    return table


def run_chip(name: str, patterns: list[str]) -> list[dict[str, Any]]:
    """The figures of one chip's jobs."""
    chip = CHIPS[name]
    wanted = [x for x in names(chip.platform) if any(p in x for p in patterns or [""])]
    compiled = compile_all(name, "benchmarks.static_jobs:jobs", wanted, wants_figures=True)
    figures = tpu_figures if chip.platform == "tpu" else gpu_figures
    return [
        {"name": name, "error": result.error} if result.error else figures(name, result, chip)
        for name, result in compiled.items()
    ]


def main() -> None:
    options = parse_options()
    if aot_python() is None:
        raise SystemExit(f"{PYTHON_VARIABLE} names no interpreter that has the compilers")
    console, results = Console(width=200), []
    for name in options.chips:
        figures = run_chip(name, options.only)
        for table in tables_of(CHIPS[name], figures, has_use=options.utilisation):
            console.print(table)
        for result in figures:
            if "error" in result:
                console.print(f"{result['name']}: {result['error'][-300:]}", markup=False)
        record = CHIPS[name].describe() | {"kernels": figures}
        if CHIPS[name].platform == "tpu":
            bars = {str(size): reaches_bars(figures, size) for size in PAGE_SIZES}
            console.print(f"fewer bundles than others and than memory lasts, by page size: {bars}")
            record["reaches_bars"] = bars
        results.append(record)
    tell({"benchmark": "kernels_static", "run": describe_run(), "results": results}, options.json)


def parse_options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", choices=list(CHIPS), default=list(CHIPS))
    parser.add_argument("--only", nargs="+", default=[], help="parts of names, such as decode:16")
    parser.add_argument("--utilisation", action="store_true", help="of a TPU's units, too")
    parser.add_argument("--json", type=Path, help="a file for the record that is also printed last")
    return parser.parse_args()


if __name__ == "__main__":
    main()
