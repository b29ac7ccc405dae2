"""The KV cache without pages: a chunk in one piece per request, as long as it may become."""

import collections
from collections.abc import Iterable
from typing import Literal

import numpy as np

from paxkv.diagnose.allocators import Allocator, BuddyAllocator, HoleAllocator
from paxkv.diagnose.counted_request import CountedRequest
from paxkv.diagnose.footprint import Footprint
from paxkv.diagnose.policy import Account
from paxkv.diagnose.shared_blocks import SharedBlocks

type Want = Literal["max", "pow2", "oracle"]
type AllocatorName = Literal["buddy", "first-fit", "best-fit"]


def make_allocator(name: AllocatorName, num_slots: int) -> Allocator:
    """An allocator by name, with all of its pool free."""
    if name == "buddy":
        return BuddyAllocator(num_slots)
    return HoleAllocator(num_slots, choice="first" if name == "first-fit" else "best")


class ContiguousPolicy:
    """Reserves a chunk when a request begins. First come, first served; nothing is preempted.

    Args:
        num_slots: Slots of the pool, see `Footprint`.
        max_length: Tokens of one request at most.
        want: How large a chunk is. "max": `max_length`; "pow2": the prompt and the output rounded
            up to a power of two; "oracle": what the request will turn out to need.
        allocator: Who cuts the chunks.
        footprint: What a sequence takes.
        max_running: Requests that run at once.
        block_tokens: Tokens of a block that prompts may begin with.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_length: int,
        want: Want,
        allocator: AllocatorName = "buddy",
        footprint: Footprint | None = None,
        max_running: int = 1024,
        block_tokens: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self.allocator = make_allocator(allocator, num_slots)
        self._max_length = max_length
        self._footprint = footprint or Footprint()
        self._max_running = max_running
        self._want = want
        self._is_buddy = allocator == "buddy"
        self._waiting: collections.deque[CountedRequest] = collections.deque()
        self._chunks: dict[CountedRequest, tuple[int, int]] = {}  # address and slots
        self._blocks = SharedBlocks(block_tokens)

    def chunk_slots(self, prompt_tokens: int, output_tokens: int) -> int:
        """How large a chunk such a request gets."""
        if self._want == "pow2":
            output_tokens = 1 << (output_tokens - 1).bit_length()
        tokens = min(self._max_length, prompt_tokens + output_tokens)
        return self._footprint.used(self._max_length if self._want == "max" else tokens)

    def add(self, request: CountedRequest) -> None:
        """Queues a request, unless its chunk is larger than the largest there can be."""
        slots = self.chunk_slots(request.prompt_tokens, request.output_tokens)
        largest = 1 << (self.num_slots.bit_length() - 1) if self._is_buddy else self.num_slots
        if slots > largest:
            raise ValueError(
                f"a request of {request.prompt_tokens:,} and {request.output_tokens:,} tokens "
                f"needs a chunk of {slots:,} slots, and the largest in a pool of "
                f"{self.num_slots:,} is {largest:,}: give the KV cache more memory"
            )
        self._waiting.append(request)

    def admit(self, step: int) -> None:
        """Lets requests begin until one does not fit."""
        while self._waiting and len(self._chunks) < self._max_running:
            request = self._waiting[0]
            slots = self.chunk_slots(request.prompt_tokens, request.output_tokens)
            address = self.allocator.allocate(slots)
            if address is None:
                break
            request.begin(step)
            self._chunks[self._waiting.popleft()] = address, slots
            self._blocks.add(request.block_ids)

    def is_blocked(self) -> bool:
        """Whether a request waits for a hole that is large enough."""
        return bool(self._waiting) and len(self._chunks) < self._max_running

    def running(self) -> Iterable[CountedRequest]:
        """The requests that run, oldest first."""
        return self._chunks.keys()

    def account(self, step: int, num_steps: int) -> Account:
        """From step to step, each request turns reserved slots into used ones."""
        steps = np.arange(step, step + num_steps, dtype=np.int64)
        chunks = sum(slots for _, slots in self._chunks.values())
        base = np.array([request.base for request in self._chunks], np.int64)
        used = self._footprint.used(base + steps[:, None]).sum(axis=1)
        ends = np.array([request.max_num_tokens for request in self._chunks], np.int64)
        totals = int(self._footprint.used(ends).sum())
        outside = self.num_slots - chunks
        external = outside if self.is_blocked() else self._rounding()
        return Account(
            used=used,
            reserved=totals - used,
            internal=np.full(num_steps, chunks - totals, np.int64),
            external=np.full(num_steps, external, np.int64),
            free=np.full(num_steps, outside - external, np.int64),
        )

    def finish(self, request: CountedRequest) -> None:
        """Releases its chunk."""
        self.allocator.release(self._chunks.pop(request)[0])
        self._blocks.remove(request.block_ids)

    def preempt(self, step: int) -> int:
        """Never called: what a request may need is reserved."""
        raise AssertionError(f"step {step}: a chunk holds all that its request may need")

    def duplicate_tokens(self) -> int:
        """Blocks that several running prompts begin with, but for one copy of each."""
        block_slots = self._blocks.block_tokens * self._footprint.full_shares
        return self._blocks.num_surplus * block_slots

    def _rounding(self) -> int:
        """What the buddy allocator adds to chunks, up to powers of two."""
        if not self._is_buddy:
            return 0
        return sum((1 << (slots - 1).bit_length()) - slots for _, slots in self._chunks.values())
