"""What is compiled ahead of time for which chip, `jobs`: attention, movers, the decode loop."""

import dataclasses
import os
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.aot import Job
from benchmarks.aot_attention import (
    ATTENTION_CASES,
    BIG_CASES,
    IMPLEMENTATIONS,
    attention_job,
    attention_shapes,
)
from benchmarks.aot_loops import loop_jobs, loop_names
from benchmarks.aot_movers import mover_jobs, mover_names
from benchmarks.chips import Chip
from paxkv.pallas_kernels import tpu_tiles
from paxkv.pallas_kernels.attention_cases import CASES
from paxkv.pallas_kernels.tpu_tiles import decode_tile_pages, prefill_tile_pages

# Of each kernel what the number of bytes and the way into registers may change.
_EVERY_DTYPE = (
    "shape_page_8", "shape_page_16", "shape_head_dim_256", "head_dim_80", "chunks_page_8",
    "mixed_list",
)  # fmt: skip
_OTHER_DTYPES = {"tpu": ("float16", "float32"), "cuda": ("float16",)}
# Chips that no other stands in for. v5e, v5p and tpu7x get the kernels of v6e in tiles of other
# sizes; sm_100a gets that of sm_80 with another way to copy pages.
_OWN_KERNELS = ("v6e", "sm_80", "sm_90a")
# What the others compile in any case: the ends of each range.
_ENDS = (
    "shape_page_8", "shape_page_16", "shape_page_256", "shape_head_dim_64", "shape_head_dim_80",
    "shape_head_dim_256", "shape_group_16_1", "shape_group_9_3", "decode_all_settings",
    "mixed_all_settings", "mixed_list", *BIG_CASES,
)  # fmt: skip


def attention_names(chip: Chip, *, every_case: bool) -> list[str]:
    """The names of `attention_jobs`: `decode:` where one query a sequence is promised.

    Args:
        chip: What is compiled for.
        every_case: All of them; otherwise chips that share their kernels with another one leave
            out what the other compiles in the same tiles, but for the ends of each range.
    """
    names = _every_attention_name(chip.platform)
    if every_case or chip.name in _OWN_KERNELS:
        return names
    return [name for name in names if name.split(":")[1] in _ENDS or _has_own_tiles(chip, name)]


def _every_attention_name(platform: str) -> list[str]:
    decodes = [name for name, case in ATTENTION_CASES.items() if case.is_decode]
    others = [name for name in ATTENTION_CASES if name not in decodes]
    names = [f"decode:{name}:bfloat16" for name in decodes]
    names += [f"mixed:{name}:bfloat16" for name in (*others, *decodes) if name in CASES]
    names += [f"mixed:{name}:bfloat16" for name in others if name not in CASES]
    for name in _EVERY_DTYPE:
        kind = "decode" if ATTENTION_CASES[name].is_decode else "mixed"
        names += [f"{kind}:{name}:{dtype}" for dtype in _OTHER_DTYPES[platform]]
    programs: dict[tuple[Hashable, ...], str] = {}
    for name in names:  # cases that differ in lengths alone are one program
        programs.setdefault(_program_of(name), name)
    return list(programs.values())


def _program_of(name: str) -> tuple[Hashable, ...]:
    """All that the program of one of `attention_jobs` depends on."""
    kind, case_name, dtype = name.split(":")
    case = ATTENTION_CASES[case_name]
    shapes = [(x.shape, x.dtype) for x in attention_shapes(case, dtype).values()]
    return kind, *shapes, case.scale, case.window, case.soft_cap


def _has_own_tiles(chip: Chip, name: str) -> bool:
    """Whether a TPU computes one of `attention_jobs` in other tiles than v6e does."""
    return chip.platform == "tpu" and _tile_pages(chip.name, name) != _tile_pages("v6e", name)


def _tile_pages(chip_name: str, name: str) -> int:
    kind, case_name, dtype = name.split(":")
    arguments = attention_shapes(ATTENTION_CASES[case_name], dtype)
    choose = decode_tile_pages if kind == "decode" else prefill_tile_pages
    chip = tpu_tiles.Chip(chip_name.removeprefix("tpu"), num_cores=1, vmem_bytes=0)
    pages: Any = arguments["key_pages"]  # a shape is enough
    return choose(chip, pages, arguments["block_tables"].shape[1])


def attention_jobs(chip: Chip) -> dict[str, Job]:
    """Attention on each case, by the platform's implementation."""
    jobs = {}
    for job_name in attention_names(chip, every_case=True):
        kind, name, dtype = job_name.split(":")
        jobs[job_name] = attention_job(
            ATTENTION_CASES[name],
            max_q_len=1 if kind == "decode" else None,
            implementation=IMPLEMENTATIONS[chip.platform],
            dtype=dtype,
        )
    return jobs


def names(chip: Chip, *, every_case: bool) -> list[str]:
    """The names of `jobs`, see `attention_names`."""
    return [
        *attention_names(chip, every_case=every_case),
        *mover_names(),
        *loop_names(chip.platform),
    ]


def jobs(chip: Chip) -> dict[str, Job]:
    """All that is compiled for a chip."""
    return attention_jobs(chip) | mover_jobs() | loop_jobs(chip)


def broken_jobs(chip: Chip) -> dict[str, Job]:
    """Jobs that show what becomes of those that fail."""
    del chip
    pool = (4096, 64)
    pages = jax.ShapeDtypeStruct(pool, jnp.float32)

    def write(pages):
        return pages.at[3].set(1.0)

    good = Job(function=write, arguments=(pages,), donated=(0,), pool=pool)
    return {
        "good": good,
        "abort": dataclasses.replace(good, function=lambda pages: os.abort()),
        "raise": dataclasses.replace(good, function=lambda pages: pages * (1 // 0)),
        "last": good,
        "copies": dataclasses.replace(good, donated=()),
    }
