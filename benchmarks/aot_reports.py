"""Reads what compilers write about what they made: XLA's text, ptxas's lines, libtpu's bundles."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.extend import core as jex_core

UNITS = (  # of a TPU core, as libtpu lists their use by each bundle
    "MATMUL", "MATPUSH", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL", "VSTORE",
    "VSTORE:SPILL", "SALU",
)  # fmt: skip

_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +([A-Z]{2})? *:([> ]*)\{")
_HOST_TRANSFER = re.compile(
    r" (?:infeed|outfeed|send|recv|copy-start)(?:-done)?\(.*is_host_transfer=true"
    r"| (?:infeed|outfeed)\("
    r'|custom_call_target="[^"]*(?:callback|MoveToHost|MoveToDevice)[^"]*"'
    r"|\{[^{}]*:[^{}]*S\(5\)\}"  # the memory space of the host
)


class Loop(NamedTuple):
    """A loop of a TPU kernel; at depth 0, what stands outside of all loops."""

    depth: int
    first: int  # number of the first bundle
    bundles: int  # of one trip, inner loops left out
    use: tuple[int, ...]  # how often those bundles use each of `UNITS`


class Ptxas(NamedTuple):
    """What ptxas says of one GPU kernel."""

    kernel: str
    registers: int
    spill_bytes: int  # stored and loaded
    shared_bytes: int  # static ones


class Scratch(NamedTuple):
    """Memory on the chip that a kernel asks for."""

    space: str  # "vmem" of a TPU, "smem" of either
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def is_ring(self) -> bool:
        """Whether it is stages `[stages, rows, columns]` that tiles are copied to in turn."""
        return self.space == "smem" and len(self.shape) > 2 and self.num_bytes > 16 * 1024


def count_copies(text: str, shape: tuple[int, ...]) -> int:
    """Copies of an array of this shape in a compiled program."""
    sizes = ",".join(map(str, shape))
    return len(re.findall(rf"= \(?\w+\[{sizes}\]\S* copy(?:-start)?\(", text))


def count_host_transfers(text: str) -> int:
    """Instructions of a compiled program that move data to or from the host, or call it."""
    return sum(bool(_HOST_TRANSFER.search(line)) for line in text.splitlines())


def custom_calls(text: str) -> tuple[str, ...]:
    """The targets of a compiled program's custom calls, each once."""
    return tuple(sorted(set(re.findall(r'custom_call_target="([^"]+)"', text))))


def scratch_of(jaxpr: jex_core.Jaxpr) -> tuple[Scratch, ...]:
    """What all kernels of a traced program ask for."""
    found = []
    for equation in _equations(jaxpr):
        if equation.primitive.name not in ("pallas_call", "run_scoped"):
            continue
        for inner in jex_core.jaxprs_in_params(equation.params):
            refs: list[Any] = [x.aval for x in inner.invars]  # of a class that has no public name
            for ref in refs:
                space = str(getattr(ref, "memory_space", None)).lower()
                if space in ("vmem", "smem") and hasattr(ref.dtype, "itemsize"):
                    size = math.prod(ref.shape) * ref.dtype.itemsize
                    found.append(Scratch(space, tuple(ref.shape), size))
    return tuple(found)


def _equations(jaxpr: jex_core.Jaxpr) -> Iterator[jex_core.JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jex_core.jaxprs_in_params(equation.params):
            yield from _equations(inner)


def read_ptxas(log: str) -> tuple[Ptxas, ...]:
    """The kernels that ptxas reports on."""
    kernels = []
    for part in re.split(r"Compiling entry function '", log)[1:]:
        used = re.search(r"Used (\d+) registers", part)
        if used is None:
            continue
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        shared = re.search(r"(\d+) bytes smem", part)
        kernels.append(
            Ptxas(
                kernel=part.split("'", 1)[0],
                registers=int(used[1]),
                spill_bytes=sum(map(int, spills.groups())) if spills else 0,
                shared_bytes=int(shared[1]) if shared else 0,
            )
        )
    return tuple(kernels)


def read_loops(files: Iterable[Path]) -> dict[str, tuple[Loop, ...]]:
    """The loops of each kernel in libtpu's dump."""
    loops = {}
    for path in files:
        # 1795983684739964564-<kernel>-72-final_bundles.txt
        match = re.fullmatch(r"\d+-(.+)-\d+-final_bundles\.txt", path.name)
        if match and not match[1].startswith("<") and match[1] != "TLP":
            (use,) = path.parent.glob(
                path.name.split("-", 1)[0] + f"-{match[1]}-*-final_hlo-static-per-bundle-*.txt"
            )
            with path.open(errors="replace") as bundles:
                loops[match[1]] = loops_of(bundles, _read_use(use))
    return loops


def loops_of(lines: Iterable[str], use: Sequence[tuple[int, ...]]) -> tuple[Loop, ...]:
    """The loops in the lines of a `final_bundles` file, in the order of their first bundles.

    A bundle's line has as many `>` as loops are around it, and `LB` where the body of one begins.
    """
    found: list[list[int]] = [[0, 0]]  # depth, number of the first bundle
    members: list[list[int]] = [[]]
    open_loops = [0]
    number = 0
    for line in lines:
        match = _BUNDLE.match(line)
        if match is None:
            continue
        depth = match[2].count(">")
        del open_loops[depth + 1 :]
        if match[1] == "LB" and len(open_loops) == depth + 1 > 1:
            open_loops.pop()  # right after another loop of this depth
        while len(open_loops) <= depth:
            open_loops.append(len(found))
            found.append([len(open_loops) - 1, number])
            members.append([])
        members[open_loops[-1]].append(number)
        number += 1
    return tuple(
        Loop(
            depth, first, len(own),
            tuple(sum(use[i][unit] for i in own if i < len(use)) for unit in range(len(UNITS))),
        )
        for (depth, first), own in zip(found, members, strict=True)
    )  # fmt: skip


def _read_use(path: Path) -> list[tuple[int, ...]]:
    text = path.read_text(errors="replace")
    names = re.search(r"CAPA[A-Z]*:\n(.*)\n", text)
    assert names is not None and tuple(re.split(r",\s*", names[1].strip())) == UNITS, path.name
    rows = text.split("UTILIZATION:\n", 1)[1].splitlines()
    return [tuple(map(int, row.split())) for row in rows if row.strip()]
