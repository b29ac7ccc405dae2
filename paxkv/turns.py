"""Methods that take turns: one thread at a time, and Ctrl-C after it."""

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Has Ctrl-C wait for the end of the block; a second one does not wait.

    Steps donate the cache: an interrupt between a step and the naming of its result would leave
    an engine without one. And jax loses an interrupt that comes while it collects garbage.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # no interrupt is raised here, or the program sees to them itself
        return
    came = False

    def wait(signal_number: int, frame: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def alone[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """Has a method wait for its object's `lock`, and Ctrl-C for the method's end."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        owner: Any = args[0]
        with owner.lock, uninterrupted():
            return method(*args, **kwargs)

    return run
