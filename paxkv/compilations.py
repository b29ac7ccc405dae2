"""How many programs jax makes ready to run."""

import jax


class _Counter:
    """Counts in this process, from when it is made: jax has no end to listening."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_: object) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


_COUNTER = _Counter()


def num_compilations() -> int:
    """Programs compiled so far, or read from the compilation cache, by whoever in this process."""
    return _COUNTER.count
