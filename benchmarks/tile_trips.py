"""How often the loops of a decode kernel run for one tile of keys and values, and for a sequence.

A compiled kernel says which bundles a loop has, not how often it runs: that is known to who reads
the kernel. `Step`s write it down, nested as the loops are, and `count` holds them against a dump.
What a branch skips is counted as if it were run, but for the start of the first tile of all.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.bundles import UNITS, Region


class Step(NamedTuple):
    """A loop of a kernel, and how often its body runs in all."""

    what: str
    per_tile: float  # for one more tile of a sequence that goes on
    per_sequence: float  # for one sequence among many
    multiplies: bool = False  # whether its own bundles multiply matrices
    copies: int = 0  # at least so many are started by its own bundles and those of its branches
    # A branch in it that starts at least so many copies, and has no loops, is taken once per call.
    copies_of_prologue: float = math.inf
    inner: tuple["Step", ...] = ()


class Count(NamedTuple):
    """Bundles that run for one thing, and how often they use each of `UNITS`."""

    bundles: float
    use: tuple[float, ...]


def paxkv_steps(*, pages: int, parts: int, tiles: int) -> tuple[Step, ...]:
    """Our decode kernel (`tpu_decode_kernel`).

    A tile between others is one loop, which starts the copies of the next tile's pages. A
    sequence's last tile is masked and attended part by part, and the pages of the next sequence's
    first tile are started one by one. Were the last page not full, its part would also go through
    its pages to clear what is unseen.

    Args:
        pages: Of a tile.
        parts: Of a tile.
        tiles: Of a sequence, all full.
    """
    return (
        Step("look for the first sequence", 0, 0),
        Step("start a page of the first tile of all", 0, 0, copies=2),
        Step(
            "sequence", 0, 1,
            inner=(
                Step("look for the next sequence, which is right there", 0, 0),
                Step(
                    "inner tiles, then one at an edge", 0, 1,
                    inner=(
                        Step("inner tile", 1, tiles - 1, multiplies=True, copies=2 * pages),
                        Step("start a page of the tile after an edge", 0, 0, copies=2),
                        Step("start a page of the next sequence", 0, pages, copies=2),
                        Step(
                            "part of an edge", 0, parts, multiplies=True,
                            inner=(Step("clear a page that is not all seen", 0, 0),),
                        ),
                    ),
                ),
            ),
        ),
    )  # fmt: skip


def tpu_inference_steps(*, pages: int, tiles: int) -> tuple[Step, ...]:
    """The third kernel of tpu-inference: all tiles alike, one of which writes the new token."""
    return (
        Step(
            "sequence", 0, 1, copies_of_prologue=pages,
            inner=(
                Step(
                    "tile", 1, tiles, copies=pages,
                    inner=(
                        Step("page with new tokens", 0, 1, copies=1),
                        Step("computed part, here the whole tile", 1, tiles, multiplies=True),
                    ),
                ),
            ),
        ),
    )  # fmt: skip


def jax_steps(*, pages: int, tiles: int, sequences: int) -> tuple[Step, ...]:
    """JAX's kernel, which takes the queries of several `sequences` at a time."""
    return (
        Step(
            "queries", 0, 1 / sequences, copies_of_prologue=pages,
            inner=(
                Step(
                    "sequence", 0, 1,
                    inner=(Step("tile", 1, tiles, multiplies=True, copies=pages),),
                ),
            ),
        ),
    )  # fmt: skip


def count(regions: Sequence[Region], steps: Sequence[Step]) -> tuple[Count, Count]:
    """The bundles of one tile and of one sequence.

    Args:
        regions: Of a kernel, each before those within it.
        steps: Its outermost loops.

    Raises:
        ValueError: The kernel's loops are others.
    """
    whole = Step("call", 0, 0, inner=tuple(steps))
    trips = _trips(regions, 0, whole)
    return (
        _total(regions, {index: step.per_tile for index, step in trips.items()}),
        _total(regions, {index: step.per_sequence for index, step in trips.items()}),
    )


def _trips(regions: Sequence[Region], top: int, step: Step) -> dict[int, Step]:
    """The step that each region from `top` down belongs to; of prologues, none."""
    found, loops, copies = {top: step}, [], regions[top].copies
    is_multiplying = regions[top].use[0] > 0
    waiting = _children(regions, top)
    while waiting:
        index = waiting.pop(0)
        region = regions[index]
        if region.is_loop:
            loops.append(index)
        elif region.copies < step.copies_of_prologue or _children(regions, index):
            found[index] = step
            copies += region.copies
            is_multiplying |= region.use[0] > 0
            waiting = _children(regions, index) + waiting
    if len(loops) != len(step.inner):
        raise ValueError(
            f"{len(loops)} loops within '{step.what}', not {len(step.inner)}: "
            + "; ".join(str(regions[index]) for index in loops)
        )
    if is_multiplying != step.multiplies or copies < step.copies:
        raise ValueError(f"'{step.what}' does not what it should: {regions[top]}, {copies=}")
    for index, inner in zip(loops, step.inner, strict=True):
        found |= _trips(regions, index, inner)
    return found


def _children(regions: Sequence[Region], top: int) -> list[int]:
    found = []
    for index in range(top + 1, len(regions)):
        if regions[index].depth <= regions[top].depth:
            break
        if regions[index].depth == regions[top].depth + 1:
            found.append(index)
    return found


def _total(regions: Sequence[Region], times: dict[int, float]) -> Count:
    return Count(
        sum(regions[index].bundles * n for index, n in times.items()),
        tuple(
            sum(regions[index].use[unit] * n for index, n in times.items())
            for unit in range(len(UNITS))
        ),
    )
