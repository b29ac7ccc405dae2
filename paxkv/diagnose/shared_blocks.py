"""Blocks that prompts begin with, by id, and how many of the running requests have each."""

import collections
from collections.abc import Iterable

import numpy as np


class SharedBlocks:
    """Counts the holders of every block, and so how many blocks sharing would save.

    Args:
        block_tokens: Tokens of a block.
    """

    def __init__(self, block_tokens: int = 0) -> None:
        self.block_tokens = block_tokens
        self.num_surplus = 0  # copies beyond the first, over all blocks
        self._holders: collections.Counter[int] = collections.Counter()

    @property
    def num_blocks(self) -> int:
        """Different blocks that somebody holds."""
        return len(self._holders)

    def num_new(self, ids: np.ndarray) -> int:
        """How many of these nobody holds yet."""
        return sum(block not in self._holders for block in ids.tolist())

    def add(self, ids: np.ndarray) -> None:
        """Counts one more holder of each."""
        for block in ids.tolist():
            self.num_surplus += block in self._holders
            self._holders[block] += 1

    def remove(self, ids: Iterable[int] | np.ndarray) -> None:
        """Counts one holder less of each."""
        for block in np.asarray(ids).tolist():
            self._holders[block] -= 1
            if self._holders[block]:
                self.num_surplus -= 1
            else:
                del self._holders[block]
