"""Reads what compilers write about what they made: XLA's text, ptxas's lines."""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend import core as jex_core

_HOST_TRANSFER = re.compile(
    r" (?:infeed|outfeed|send|recv|copy-start)(?:-done)?\(.*is_host_transfer=true"
    r"| (?:infeed|outfeed)\("
    r'|custom_call_target="[^"]*(?:callback|MoveToHost|MoveToDevice)[^"]*"'
    r"|\{[^{}]*:[^{}]*S\(5\)\}"  # the memory space of the host
)


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
        """Whether it is stages `[stages, rows, columns]`, rows and columns in tiles or not."""
        return self.space == "smem" and len(self.shape) in (3, 5) and self.shape[0] > 1


def count_copies(text: str, shape: tuple[int, ...]) -> int:
    """Copies of an array of this shape in a compiled program, to other types of number too."""
    sizes = ",".join(map(str, shape))
    instructions = r"(?:copy|copy-start|bitcast-convert|convert)"
    return len(re.findall(rf"= \(?\w+\[{sizes}\]\S* {instructions}\(", text))


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
