"""What a simulation asks of those who hand out memory, and what they answer."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from paxkv.diagnose.counted_request import CountedRequest


class Account(NamedTuple):
    """Token slots of a pool by kind, `i64[steps]` each; they add up to the pool.

    Reserved is what a running request holds and will still fill, internal what it holds and never
    will, external what is outside of requests and cannot serve the one that waits (and rounding),
    free what could serve.
    """

    used: np.ndarray
    reserved: np.ndarray
    internal: np.ndarray
    external: np.ndarray
    free: np.ndarray


class Policy(Protocol):
    """Keeps the requests that wait and those that run, and accounts for their memory."""

    num_slots: int  # tokens of the pool

    def add(self, request: CountedRequest) -> None:
        """Queues a request.

        Raises:
            ValueError: It can never run in this pool.
        """
        ...

    def admit(self, step: int) -> None:
        """Lets requests from the front of the queue begin, until one does not fit."""
        ...

    def is_blocked(self) -> bool:
        """Whether a request waits for memory, and not only for its turn."""
        ...

    def running(self) -> Iterable[CountedRequest]:
        """The requests that run, oldest first."""
        ...

    def account(self, step: int, num_steps: int) -> Account:
        """The accounts of the coming steps, up to the first for which there is no memory."""
        ...

    def finish(self, request: CountedRequest) -> None:
        """Takes back the memory of a request that has ended."""
        ...

    def preempt(self, step: int) -> int:
        """Sends the newest request back to the queue; the tokens to be computed again."""
        ...

    def duplicate_tokens(self) -> int:
        """Used slots whose content stands elsewhere too, all copies but one."""
        ...
