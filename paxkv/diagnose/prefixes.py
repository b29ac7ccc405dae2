"""What prompts have in common over time, if the pages of ended requests are kept."""

import collections
import dataclasses

from paxkv.diagnose.trace import Trace


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Blocks of prompts, and how many of them were there already."""

    num_blocks: int
    num_reused: int

    @property
    def percent(self) -> float:
        """Of all blocks."""
        return 100 * self.num_reused / max(self.num_blocks, 1)


def reuse_over_time(trace: Trace, *, capacity_tokens: int | None = None) -> Reuse:
    """How many prompt blocks an earlier request has stored already.

    Args:
        trace: With prefixes.
        capacity_tokens: What is kept, the least recently used block going first; None keeps all.
    """
    assert trace.prefixes is not None
    block_tokens = trace.prefixes.block_tokens
    capacity = None if capacity_tokens is None else capacity_tokens // block_tokens
    kept: collections.OrderedDict[int, None] = collections.OrderedDict()
    num_reused = num_blocks = 0
    for request in range(len(trace)):
        blocks = trace.prefixes.of(request).tolist()
        num_blocks += len(blocks)
        is_prefix = True  # a block behind a missing one is of no use
        for block in blocks:
            is_prefix = is_prefix and block in kept
            num_reused += is_prefix
        # From the last one on, so that a prefix outlives what builds on it.
        for block in reversed(blocks):
            kept[block] = None
            kept.move_to_end(block)
        while capacity is not None and len(kept) > capacity:
            kept.popitem(last=False)
    return Reuse(num_blocks=num_blocks, num_reused=num_reused)
