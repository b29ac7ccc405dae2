"""How much of the memory a sequence takes, where some layers keep a window of it only.

A windowed layer keeps what the next query will see of what is stored: `window - 1` tokens. Memory
is counted in slots: one token in the layers of one *share*. A model whose layers all keep
the same has one share, and a slot is a token. Of 26 layers of which 22 keep a window, 2 shares
keep every token and 11 the last ones: a short sequence takes 13 slots per token, a long one 2 for
each more.
"""

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Footprint:
    """Layer groups as (shares, window): the layers that keep every token have no window."""

    groups: tuple[tuple[int, int | None], ...] = ((1, None),)

    @classmethod
    def of_layers(cls, windows: Sequence[int | None]) -> "Footprint":
        """That of a model with these windows, layer by layer."""
        layers = collections.Counter(windows)
        unit = math.gcd(*layers.values())
        return cls(tuple((number // unit, window) for window, number in layers.items()))

    @property
    def shares(self) -> int:
        """Slots of a token that all layers keep."""
        return sum(shares for shares, _ in self.groups)

    @property
    def full_shares(self) -> int:
        """Slots of a token that has left all windows."""
        return sum(shares for shares, window in self.groups if window is None)

    def used[T: (int, float, np.ndarray)](self, tokens: T) -> T:
        """Slots that a sequence's tokens fill, elementwise."""
        return _total(
            shares * (tokens - _num_left(tokens, window)) for shares, window in self.groups
        )

    def pages[T: (int, np.ndarray)](self, tokens: T, page_size: int) -> T:
        """Pages of `page_size` slots that hold them; those that have left a window are free."""
        filled = -(-tokens // page_size)
        return _total(
            shares * (filled - _num_left(tokens, window) // page_size)
            for shares, window in self.groups
        )

    def never_filled(self, tokens: np.ndarray, totals: np.ndarray, page_size: int) -> np.ndarray:
        """Slots of these pages that hold nothing, and will not until the sequence ends.

        They lie behind what a sequence will ever have (`totals`), or before a window.
        """
        beyond = np.maximum(-(-tokens // page_size) * page_size - totals, 0)
        return _total(
            shares * (beyond + _num_left(tokens, window) % page_size)
            for shares, window in self.groups
        )

    def most_pages(self, tokens: int, page_size: int) -> int:
        """Most pages that a sequence holds until it has so many tokens.

        A window may lie across one page more than it fills.
        """
        pages = -(-tokens // page_size)
        return sum(
            shares * (pages if window is None else min(pages, -(-(window - 1) // page_size) + 1))
            for shares, window in self.groups
        )


def _num_left(tokens: Any, window: int | None) -> Any:
    """Tokens that no query to come sees."""
    if window is None:
        return 0
    left = tokens - (window - 1)
    return np.maximum(left, 0) if isinstance(left, np.ndarray) else max(left, 0)


def _total(slots: Iterable[Any]) -> Any:
    """The sum over groups. There is at least one, mostly just that, and it may be large."""
    return functools.reduce(operator.add, slots)
