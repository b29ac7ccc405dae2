"""How many bundles the TPU decode kernel takes by the size of its tiles, without a chip.

    PAXKV_AOT_PYTHON=/path/to/python python -m benchmarks.bench_tiles_static --chips v6e

What `paxkv.pallas_kernels.tpu_tiles` holds was chosen by this. Bundles a token are those of a
whole sequence of 4,096 tokens, beginning and end included, at 32 query and 8 KV heads; in brackets
those of one more tile of a longer sequence.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from rich.console import Console
from rich.table import Table

from benchmarks.aot import PYTHON_VARIABLE, Compiled, Job, aot_python, compile_all
from benchmarks.aot_attention import attention_shapes
from benchmarks.chips import CHIPS, Chip
from benchmarks.common import describe_run, tell
from benchmarks.static_jobs import TOKENS, decode_case, paxkv_tile
from benchmarks.tile_trips import count
from paxkv.pallas_kernels import tpu_decode
from paxkv.pallas_kernels.attention_call import AttentionArrays, AttentionSettings
from paxkv.pallas_kernels.tpu import paged_attention_tpu

TILE_TOKENS = (256, 512, 1024, 2048)


class Shape(NamedTuple):
    """What tiles depend on, besides the chip."""

    head_dim: int
    dtype: str
    page_size: int


SHAPES = [
    *itertools.starmap(Shape, itertools.product((128, 256), ("bfloat16", "float32"), (16, 64))),
    Shape(128, "float16", 16),
    Shape(64, "bfloat16", 16),
    Shape(128, "bfloat16", 128),
]


def jobs(chip: Chip) -> dict[str, Job]:
    """Decode at each shape and size of tiles, by `head_dim:dtype:page size:tokens`."""
    del chip
    return {
        _name(shape, tokens): _job(shape, tokens)
        for shape, tokens in itertools.product(SHAPES, TILE_TOKENS)
    }


def _name(shape: Shape, tokens: int) -> str:
    return ":".join(map(str, (*shape, tokens)))


def _job(shape: Shape, tokens: int) -> Job:
    case = decode_case(shape.page_size, head_dim=shape.head_dim)
    arguments = attention_shapes(case, shape.dtype)

    def attend(arguments, key_pages, value_pages):
        arrays = AttentionArrays(**arguments, key_pages=key_pages, value_pages=value_pages)
        pages = tokens // shape.page_size
        with mock.patch.object(tpu_decode, "decode_tile_pages", lambda *_: pages):
            return paged_attention_tpu(arrays, AttentionSettings(1.0, max_q_len=1))

    pools = [arguments.pop(name) for name in ("key_pages", "value_pages")]
    return Job(function=attend, arguments=(arguments, *pools), donated=(1, 2), pool=pools[0].shape)


def figures(shape: Shape, result: Compiled) -> dict[str, Any]:
    """Bundles a token, or why there are none."""
    if result.error is not None:
        return {"name": result.name, "error": result.error}
    tile = paxkv_tile(shape.page_size, result.scratch)
    (regions,) = (
        bundles.regions for name, bundles in result.bundles.items() if name.startswith(tile.kernel)
    )
    by_tile, by_sequence = count(regions, tile.steps)
    return {
        "name": result.name,
        "tile": by_tile.bundles / tile.tokens,
        "sequence": by_sequence.bundles / TOKENS,
    }


def table_of(chip: Chip, results: dict[str, dict[str, Any]]) -> Table:
    """A row for each shape, a column for each size."""

    def cell(shape: Shape, tokens: int) -> str:
        found = results[_name(shape, tokens)]
        return "-" if "error" in found else f"{found['sequence']:.2f} ({found['tile']:.2f})"

    table = Table("shape", *(f"{tokens:,}" for tokens in TILE_TOKENS), title=chip.name)
    for shape in SHAPES:
        if _name(shape, TILE_TOKENS[0]) in results:
            table.add_row(str(tuple(shape)), *(cell(shape, tokens) for tokens in TILE_TOKENS))
    return table


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tpus = [name for name, chip in CHIPS.items() if chip.platform == "tpu"]
    parser.add_argument("--chips", nargs="+", choices=tpus, default=tpus)
    parser.add_argument("--only", nargs="+", default=[""], help="how names begin: 128:bfloat16")
    parser.add_argument("--json", type=Path, help="a file for the record that is also printed last")
    options = parser.parse_args()
    if aot_python() is None:
        raise SystemExit(f"{PYTHON_VARIABLE} names no interpreter that has the compilers")
    shapes = [shape for shape in SHAPES if _name(shape, 0).startswith(tuple(options.only))]
    wanted = {_name(*pair): pair[0] for pair in itertools.product(shapes, TILE_TOKENS)}
    console, records = Console(width=120), []
    for name in options.chips:
        done = compile_all(name, "benchmarks.bench_tiles_static:jobs", wanted, wants_figures=True)
        results = {job: figures(wanted[job], result) for job, result in done.items()}
        console.print(table_of(CHIPS[name], results))
        records.append(CHIPS[name].describe() | {"tiles": list(results.values())})
    tell({"benchmark": "tiles_static", "run": describe_run(), "results": records}, options.json)


if __name__ == "__main__":
    main()
