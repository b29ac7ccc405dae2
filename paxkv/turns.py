"""Methods that take turns: one thread at a time, and Ctrl-C after it."""

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Turns:
    """What methods that take turns share: whose turn it is, and what is put off until it ends."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.put_off: list[Callable[[], Any]] | None = None  # None: no method runs

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """One turn; within another one of the same thread, a part of it."""
        with self.lock, uninterrupted():
            if self.put_off is not None:
                yield
                return
            self.put_off = []
            try:
                yield
            finally:
                # Nothing is lost that is put off between these two: it is in the same list.
                calls, self.put_off = self.put_off, None
                for call in calls:
                    call()


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
    """Has a method wait for its turn, by its object's `turns`, and Ctrl-C for the method's end."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        owner: Any = args[0]
        with owner.turns.take():
            return method(*args, **kwargs)

    return run


def between[**P](method: Callable[P, None]) -> Callable[P, None]:
    """Like `alone`, but never within another method: then it is put off until that one's end.

    A thread may call such a method while it is in the middle of another one: a signal handler
    does, or a generator's `finally` when the garbage collector finds it.
    """

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        owner: Any = args[0]
        with owner.turns.lock:
            if owner.turns.put_off is not None:
                owner.turns.put_off.append(functools.partial(run, *args, **kwargs))
                return
            with owner.turns.take():
                method(*args, **kwargs)

    return run
