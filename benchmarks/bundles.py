"""Reads libtpu's dump of a kernel: its VLIW bundles, each about one cycle, by loop and branch.

    0x98 LB: >> { %s1 = sld [smem:[#allocation3]] } /* Start region 799 :: ... */
    ...
    0x95d  : >> { %365 = sbr.rel (!%p6) target = $region799 }  and some bundles more, run either way

A branch back to where a region starts closes a loop; one forward skips what is between. From these
follow the regions, each within another. (The `>` before a bundle say how deep in loops it is, but
empty bundles have none.)
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

UNITS = (  # of a core, as libtpu lists their use by each bundle
    "MATMUL", "MATPUSH", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL", "VSTORE",
    "VSTORE:SPILL", "SALU",
)  # fmt: skip

_BUNDLE = re.compile(r" *(?:0x[0-9a-f]+|0) +([A-Z]{2})? *:[> ]*\{")
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"\bsbr\.rel [^;}]*target = \$region(\d+)")
_COPY = re.compile(r"= dma\.(?:hbm_to_vmem|vmem_to_hbm)|\bdma\.(?:hbm_to_vmem|vmem_to_hbm) \[")


class Region(NamedTuple):
    """A whole kernel at depth 0; within it loops, and bundles that a branch may skip."""

    depth: int
    is_loop: bool
    first: int  # number of the first bundle
    bundles: int  # of one run, regions within left out, as are the others
    copies: int  # that those bundles start between HBM and VMEM
    use: tuple[int, ...]  # how often those bundles use each of `UNITS`


class Bundles(NamedTuple):
    """What a dump says of one kernel."""

    regions: tuple[Region, ...]  # each before those within it
    capacity: tuple[int, ...]  # how often one bundle can use each of `UNITS`


def read_bundles(files: Iterable[Path], branch_delay: int) -> dict[str, Bundles]:
    """The kernels in libtpu's dump that multiply matrices; see `regions_of`."""
    kernels = {}
    for path in files:
        # 1795983684739964564-<kernel>-72-final_bundles.txt
        match = re.fullmatch(r"(\d+)-(.+)-\d+-final_bundles\.txt", path.name)
        if match is None or match[2].startswith("<") or match[2] == "TLP":
            continue
        (use_path,) = path.parent.glob(f"{match[1]}-{match[2]}-*-final_hlo-static-per-bundle-*.txt")
        capacity, use = _read_use(use_path)
        if any(row[0] for row in use):
            with path.open(errors="replace") as lines:
                kernels[match[2]] = Bundles(regions_of(lines, use, branch_delay), capacity)
    return kernels


def regions_of(
    lines: Iterable[str], use: Sequence[tuple[int, ...]], branch_delay: int
) -> tuple[Region, ...]:
    """The regions in the lines of a `final_bundles` file.

    Args:
        lines: The file's.
        use: Of each unit by each bundle.
        branch_delay: How many bundles after a branch run before it takes effect, unless a label
            comes sooner: where they have nothing to do, v7 has one for all.

    Raises:
        ValueError: The control flow is not what is described above.
    """
    starts: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    copies: list[int] = []
    labels: list[int] = []
    for line in lines:
        bundle = _BUNDLE.match(line)
        if bundle is None:
            continue
        number = len(copies)
        if bundle[1]:
            labels.append(number)
        for region in _START.findall(line):
            starts.setdefault(region, number)
        branches += [(number, target) for target in _BRANCH.findall(line)]
        copies.append(len(_COPY.findall(line)))
    size = len(copies)
    spans = [(0, size, False)]
    for number, target in branches:
        begin, after = starts.get(target, size), number + 1 + branch_delay
        after = min([after, *(label for label in labels if label > number)])
        spans.append((begin, after, True) if begin <= number else (after, begin, False))
    # Of two that begin together, the longer one holds the other: a branch around a loop, the loop.
    spans = sorted({span for span in spans if span[0] < span[1]}, key=lambda x: (x[0], -x[1], x[2]))
    owner = [0] * size
    depths: list[int] = []
    around: list[int] = []
    for index, (begin, end, _) in enumerate(spans):
        while around and spans[around[-1]][1] <= begin:
            around.pop()
        if around and spans[around[-1]][1] < end:
            raise ValueError(f"bundles {begin} to {end} are neither within a region nor around it")
        depths.append(len(around))
        around.append(index)
        owner[begin:end] = [index] * (end - begin)
    members: list[list[int]] = [[] for _ in spans]
    for number, index in enumerate(owner):
        members[index].append(number)
    return tuple(
        Region(
            depth, is_loop, begin, len(own), sum(copies[i] for i in own),
            tuple(sum(use[i][unit] for i in own if i < len(use)) for unit in range(len(UNITS))),
        )
        for depth, (begin, _, is_loop), own in zip(depths, spans, members, strict=True)
    )  # fmt: skip


def _read_use(path: Path) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """What bundles can use, and what each does."""
    head, rows = path.read_text(errors="replace").split("UTILIZATION:\n", 1)
    names, capacity = head.strip().splitlines()[1:3]
    if tuple(re.split(r",\s*", names.strip())) != UNITS:
        raise ValueError(f"{path.name} lists other units: {names}")
    return (
        tuple(map(int, capacity.split())),
        [tuple(map(int, row.split())) for row in rows.splitlines() if row.strip()],
    )
