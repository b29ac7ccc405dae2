"""The paged KV cache: the engine's own scheduler, run on counts."""

from collections.abc import Iterable
from typing import cast

import numpy as np

from paxkv.config import pages_of
from paxkv.diagnose.counted_request import CountedRequest
from paxkv.diagnose.policy import Account
from paxkv.diagnose.shared_blocks import SharedBlocks
from paxkv.scheduler import Scheduler


class PagedPolicy:
    """Pages as they are needed; the newest request is preempted when there are none.

    The scheduler decides on pages that are a request's own. Pages that requests share are counted
    once and taken out of the pool that it sees.

    Args:
        num_slots: Tokens of the pool.
        page_size: Tokens per page.
        max_running: Requests that run at once.
        num_samples: Outputs per request, all of its length, which share the prompt's full pages.
        shares_prefixes: Whether running requests share the blocks that their prompts begin with.
        block_tokens: Tokens of such a block, of whole pages where they are shared.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        page_size: int,
        max_running: int = 1024,
        num_samples: int = 1,
        shares_prefixes: bool = False,
        block_tokens: int = 0,
    ) -> None:
        if shares_prefixes and block_tokens % page_size:
            raise ValueError(
                f"{page_size=} must divide the {block_tokens} tokens of a block that is shared"
            )
        self.num_slots = num_slots
        self.page_size = page_size
        self._max_running = max_running
        self._num_samples = num_samples
        self._shares_prefixes = shares_prefixes
        self._blocks = SharedBlocks(block_tokens)
        self._slots: dict[CountedRequest, int] = {}  # the scheduler's, oldest first
        self._scheduler = Scheduler(
            num_slots=max_running,
            num_pages=num_slots // page_size,
            page_size=page_size,
            max_prefill_tokens=16,  # not asked for: prompts are there when their request begins
        )

    def add(self, request: CountedRequest) -> None:
        """Queues a request, unless it needs more pages than there are."""
        blocks = len(request.block_ids) * self._blocks.block_tokens if self._shares_prefixes else 0
        repeated = (self._num_samples - 1) * (request.prompt_tokens // self.page_size)
        request.shared_pages = repeated + blocks // self.page_size
        pages = self._num_samples * pages_of(request.max_num_tokens - 1, self.page_size) - repeated
        if pages > self._num_pages:
            raise ValueError(
                f"a request of {request.prompt_tokens:,} and {request.output_tokens:,} tokens "
                f"needs {pages:,} pages of {self.page_size}, and a pool of {self.num_slots:,} "
                f"tokens has {self._num_pages:,}: give the KV cache more memory"
            )
        self._scheduler.waiting.append(request)

    def admit(self, step: int) -> None:
        """Lets the scheduler admit, one by one, so that each sees what the one before shares."""
        waiting = self._scheduler.waiting
        if not waiting or len(self._slots) == self._max_running:
            return
        stored = step + np.array([request.base for request in self._slots], np.int64)
        rooms = self._num_samples * -(-stored // self.page_size) * self.page_size
        for request, room in zip(self._slots, rooms.tolist(), strict=True):
            request.room_tokens = room - request.shared_pages * self.page_size
        while waiting and len(self._slots) < self._max_running:
            request = cast(CountedRequest, waiting[0])
            request.begin(step)
            self._set_room(request, step, new_blocks=self._num_new_blocks(request))
            self._scheduler.num_slots = len(self._slots) + 1
            admitted = self._scheduler.admit()
            if not admitted:
                break
            [slot] = admitted
            self._slots[request] = slot
            self._blocks.add(request.block_ids)
            self._set_room(request, step)
            self._scheduler.num_pages = self._num_pages - self._block_pages

    def is_blocked(self) -> bool:
        """Whether a request waits for pages."""
        return bool(self._scheduler.waiting) and len(self._slots) < self._max_running

    def running(self) -> Iterable[CountedRequest]:
        """The requests that run, oldest first."""
        return self._slots.keys()

    def account(self, step: int, num_steps: int) -> Account:
        """Requests take a page whenever theirs are full."""
        base = np.array([request.base for request in self._slots], np.int64)
        shared = sum(request.shared_pages for request in self._slots) - self._block_pages
        stored = base + np.arange(step, step + num_steps, dtype=np.int64)[:, None]  # [steps, R]
        filled = -(-stored // self.page_size)
        pages = self._num_samples * filled.sum(axis=1) - shared
        fitting = slice(0, np.searchsorted(pages, self._num_pages, side="right"))
        held = pages[fitting] * self.page_size
        used = self._num_samples * stored[fitting].sum(axis=1) - shared * self.page_size
        totals = np.array([request.max_num_tokens for request in self._slots], np.int64)
        beyond = np.maximum(filled[fitting] * self.page_size - totals, 0)
        internal = self._num_samples * beyond.sum(axis=1)
        outside = self.num_slots - held
        rounding = self.num_slots % self.page_size
        external = outside if self.is_blocked() else np.full_like(outside, rounding)
        return Account(
            used=used,
            reserved=held - used - internal,
            internal=internal,
            external=external,
            free=outside - external,
        )

    def finish(self, request: CountedRequest) -> None:
        """Gives back its pages."""
        del self._scheduler.running[self._slots.pop(request)]
        self._give_back_blocks(request)

    def preempt(self, step: int) -> int:
        """Sends the newest request back to the front of the queue, as the scheduler does."""
        self._scheduler.preempt()
        request = cast(CountedRequest, self._scheduler.waiting[0])
        del self._slots[request]
        self._give_back_blocks(request)
        stored = request.send_back(step)
        return stored + (self._num_samples - 1) * (stored - request.prompt_tokens)

    def duplicate_tokens(self) -> int:
        """Blocks that several running prompts begin with, but for one copy of each."""
        return 0 if self._shares_prefixes else self._blocks.num_surplus * self._blocks.block_tokens

    @property
    def _num_pages(self) -> int:
        return self.num_slots // self.page_size

    @property
    def _block_pages(self) -> int:
        """Pages of the blocks that running requests share, each counted once."""
        if not self._shares_prefixes:
            return 0
        return self._blocks.num_blocks * self._blocks.block_tokens // self.page_size

    def _give_back_blocks(self, request: CountedRequest) -> None:
        self._blocks.remove(request.block_ids)
        self._scheduler.num_pages = self._num_pages - self._block_pages

    def _set_room(self, request: CountedRequest, step: int, *, new_blocks: int = 0) -> None:
        """Tells the scheduler how many pages the request takes that nobody else has."""
        pages = self._num_samples * pages_of(request.base + step, self.page_size)
        pages += new_blocks * self._blocks.block_tokens // self.page_size - request.shared_pages
        request.room_tokens = pages * self.page_size

    def _num_new_blocks(self, request: CountedRequest) -> int:
        return self._blocks.num_new(request.block_ids) if self._shares_prefixes else 0
