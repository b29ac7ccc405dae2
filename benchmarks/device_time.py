"""How much of the time is the host's: what is not spent waiting for compiled programs."""

import contextlib
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax


class DeviceWatch:
    """Counts the seconds for which compiled programs were waited for."""

    def __init__(self) -> None:
        self.waited_seconds = 0.0

    def call(self, program: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Calls a compiled program and waits for its results.

        The call itself, in which Python flattens the arguments and hands them over, is the host's
        time; so are small programs, which JAX runs within the call on a CPU. Only what is left to
        wait for afterwards is the device's.
        """
        result = program(*args, **options)
        begin = time.perf_counter()
        jax.block_until_ready(result)
        self.waited_seconds += time.perf_counter() - begin
        return result


@contextlib.contextmanager
def watch_programs(module: ModuleType) -> Iterator[DeviceWatch]:
    """Watches the compiled programs that a module calls: those it knows by a name in `_jit`."""
    watch = DeviceWatch()
    programs = {name: it for name, it in vars(module).items() if name.endswith("_jit")}

    def watched(program: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: watch.call(program, *args, **options)

    try:
        for name, program in programs.items():
            setattr(module, name, watched(program))
        yield watch
    finally:
        for name, program in programs.items():
            setattr(module, name, program)


@contextlib.contextmanager
def count_compilations() -> Iterator[list[str]]:
    """Notes every program that is compiled: in a timed run there should be none."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
