"""Counts the programs that jax makes ready to run."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(slots=True)
class Compilations:
    """How many programs were compiled, or read from the cache of compiled ones."""

    count: int = 0


@contextlib.contextmanager
def counted_compilations() -> Iterator[Compilations]:
    """Counts those of the whole process, until the block ends."""
    compilations = Compilations()

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        compilations.count += event == _EVENT

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield compilations
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
