"""What the compilers say of the attention kernels, without a chip: one table per chip.

    PAXKV_AOT_PYTHON=/path/to/python python -m benchmarks.bench_kernels_static --json static.json

TPU: VLIW bundles, each about one cycle, of one tile of keys and values beside the time in which the
memory moves its bytes. "bundles" has those of all loops once, as a sequence of a single tile needs
them. "inner" has those of the one loop that multiplies most, which is all that a further tile of a
long sequence costs where the loop is a tile. GPU: registers and spills of each kernel by ptxas, and
the shared memory that it asks for; what of that is a ring of stages can be in flight.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.aot import PYTHON_VARIABLE, Compiled, aot_python, compile_all
from benchmarks.aot_reports import UNITS, Loop
from benchmarks.chips import CHIPS, Chip
from benchmarks.common import describe_run, tell
from benchmarks.static_jobs import decode_case, names, tile_tokens


def tpu_figures(name: str, result: Compiled, chip: Chip) -> dict[str, Any]:
    """The bundles of a tile of the kernel that multiplies most, and the time of its bytes."""
    kernels = _attention_kernels(result)
    if not kernels:  # plain JAX
        return {"name": name, "seconds_to_compile": result.seconds}
    kernel, loops = max(kernels.items(), key=_products)
    inner = max(loops, key=lambda loop: loop.use[0])
    by_depth: dict[int, int] = {}
    for loop in loops:
        by_depth[loop.depth] = by_depth.get(loop.depth, 0) + loop.bundles
    case = decode_case(int(name.split(":")[2]))
    tokens = tile_tokens(name) or _our_tile_tokens(result, case.num_kv_heads, case.head_dim)
    figures = {
        "name": name,
        "kernel": kernel,
        "bundles_by_depth": [by_depth.get(depth, 0) for depth in range(max(by_depth) + 1)],
        "inner_bundles": inner.bundles,
        "inner_use": dict(zip(UNITS, inner.use, strict=True)),
        "seconds_to_compile": result.seconds,
    }
    if tokens is None:
        return figures
    in_loops = sum(bundles for depth, bundles in by_depth.items() if depth > 0)
    tile_bytes = 2 * case.num_kv_heads * case.head_dim * 2 * tokens
    memory_seconds = tile_bytes / chip.bandwidth
    return figures | {
        "tile_tokens": tokens,
        "tile_bundles": in_loops,
        "bundles_per_token": in_loops / tokens,
        "inner_per_token": inner.bundles / tokens,
        "memory_seconds": memory_seconds,
        "ratio": in_loops / (chip.clock_ghz * 1e9) / memory_seconds,
        "inner_ratio": inner.bundles / (chip.clock_ghz * 1e9) / memory_seconds,
    }


def gpu_figures(name: str, result: Compiled, chip: Chip) -> dict[str, Any]:
    """Registers, spills and shared memory of the kernels, and how much of it is in flight."""
    shared = [x for x in result.scratch if x.space == "smem"]
    rings = [x for x in shared if x.is_ring]
    return {
        "name": name,
        "kernels": [kernel._asdict() for kernel in result.ptxas],
        "registers": max((kernel.registers for kernel in result.ptxas), default=None),
        "spill_bytes": sum(kernel.spill_bytes for kernel in result.ptxas),
        "shared_bytes": sum(x.num_bytes for x in shared),
        "stages": max((x.shape[0] for x in rings), default=None),
        "stage_bytes": sum(x.num_bytes // x.shape[0] for x in rings),
        "in_flight_bytes": sum(x.num_bytes for x in rings),
        "share_of_multiprocessor": sum(x.num_bytes for x in shared) / chip.shared_memory_bytes,
        "seconds_to_compile": result.seconds,
    }


def _attention_kernels(result: Compiled) -> dict[str, tuple[Loop, ...]]:
    """The kernels that multiply; of tpu-inference's, which also has one for prefill, the first."""
    found = {name: loops for name, loops in result.loops.items() if _products((name, loops))}
    return {name: x for name, x in found.items() if not name.startswith("RPAm")} or found


def _products(kernel: tuple[str, tuple[Loop, ...]]) -> int:
    return sum(loop.use[0] for loop in kernel[1])


def _our_tile_tokens(result: Compiled, num_kv_heads: int, head_dim: int) -> int | None:
    """Tokens of one of the two tiles of keys `[2, pages, K, S, H]` in VMEM."""
    for x in result.scratch:
        if x.space == "vmem" and len(x.shape) == 5 and x.shape[0] == 2:
            return math.prod(x.shape[1:]) // (num_kv_heads * head_dim)
    return None


_TPU_COLUMNS = {
    "kernel": lambda x: x["kernel"],
    "bundles by depth": lambda x: " ".join(f"{count:,}" for count in x["bundles_by_depth"]),
    "tile": lambda x: f"{x['tile_tokens']:,}",
    "bundles": lambda x: f"{x['tile_bundles']:,}",
    "inner": lambda x: f"{x['inner_bundles']:,}",
    "per token": lambda x: f"{x['bundles_per_token']:.2f}",
    "inner per token": lambda x: f"{x['inner_per_token']:.2f}",
    "of memory time": lambda x: f"{x['ratio']:.2f}",
    "inner of it": lambda x: f"{x['inner_ratio']:.2f}",
}
_GPU_COLUMNS = {
    "registers": lambda x: str(x["registers"]),
    "spilled bytes": lambda x: str(x["spill_bytes"]),
    "shared KB": lambda x: f"{x['shared_bytes'] / 1024:.1f}",
    "stages": lambda x: str(x["stages"]),
    "KB a stage": lambda x: f"{x['stage_bytes'] / 1024:.1f}",
    "KB in flight": lambda x: f"{x['in_flight_bytes'] / 1024:.1f}",
}


def table_of(chip: Chip, results: list[dict[str, Any]]) -> Table:
    title = f"{chip.name}: {chip.clock_ghz} GHz, {chip.bandwidth / 1e9:,.0f} GB/s"
    columns = _TPU_COLUMNS if chip.platform == "tpu" else _GPU_COLUMNS
    table = Table("name", title=title)
    for heading in columns:
        table.add_column(heading, justify="right")
    for result in results:
        cells = [_cell(show, result) for show in columns.values()]
        table.add_row(result["name"], *cells)
    return table


def _cell(show: Callable[[dict[str, Any]], str], result: dict[str, Any]) -> str:
    if "error" in result:
        return "failed"
    try:
        return show(result)
    except KeyError:  # of a kernel whose tile is not known, or of plain JAX
        return "-"


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
        console.print(table_of(CHIPS[name], figures))
        for result in figures:
            if "error" in result:
                console.print(f"{result['name']}: {result['error'][-300:]}", markup=False)
        results.append(CHIPS[name].describe() | {"kernels": figures})
    tell({"benchmark": "kernels_static", "run": describe_run(), "results": results}, options.json)


def parse_options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", choices=list(CHIPS), default=list(CHIPS))
    parser.add_argument("--only", nargs="+", default=[], help="parts of names, such as decode:16")
    parser.add_argument("--json", type=Path, help="a file for the record that is also printed last")
    return parser.parse_args()


if __name__ == "__main__":
    main()
