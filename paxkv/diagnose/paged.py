"""The paged KV cache: the engine's own scheduler, run on counts."""

from collections.abc import Iterable
from typing import cast

import numpy as np

from paxkv.diagnose.counted_request import CountedRequest
from paxkv.diagnose.footprint import Footprint
from paxkv.diagnose.policy import Account
from paxkv.diagnose.shared_blocks import SharedBlocks
from paxkv.scheduler import Scheduler


class PagedPolicy:
    """Pages as they are needed; the newest request is preempted when there are none.

    The scheduler decides on pages that are a request's own. Pages that requests share are counted
    once and taken out of the pool that it sees. In layers with a window they are not shared: what
    has left a window is given back.

    Args:
        num_slots: Slots of the pool, see `Footprint`.
        page_size: Slots per page.
        footprint: What a sequence takes.
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
        footprint: Footprint | None = None,
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
        self._footprint = footprint = footprint or Footprint()
        self._num_shares, self._full_shares = footprint.shares, footprint.full_shares
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
            shares_prefixes=False,  # of tokens, which are not known here
        )

    def add(self, request: CountedRequest) -> None:
        """Queues a request, unless it needs more pages than there are."""
        blocks = len(request.block_ids) * self._blocks.block_tokens if self._shares_prefixes else 0
        full = self._full_shares
        repeated = full * (self._num_samples - 1) * (request.prompt_tokens // self.page_size)
        request.shared_pages = repeated + full * blocks // self.page_size
        most = self._footprint.most_pages(request.max_num_tokens - 1, self.page_size)
        pages = self._num_samples * most - repeated
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
        for request, pages in zip(self._slots, self._pages(stored).tolist(), strict=True):
            self._set_room(request, pages)
        while waiting and len(self._slots) < self._max_running:
            request = cast(CountedRequest, waiting[0])
            request.begin(step)
            pages = self._pages(request.base + step)
            new_blocks = self._num_new_blocks(request) * self._block_slots
            self._set_room(request, pages + new_blocks // self.page_size)
            self._scheduler.num_slots = len(self._slots) + 1
            admitted = self._scheduler.admit()
            if not admitted:
                break
            [slot] = admitted
            self._slots[request] = slot
            self._blocks.add(request.block_ids)
            self._set_room(request, pages)
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
        pages = self._pages(stored).sum(axis=1) - shared
        fits = pages <= self._num_pages
        num_fitting = num_steps if fits.all() else int(np.argmin(fits))
        stored, held = stored[:num_fitting], pages[:num_fitting] * self.page_size
        used = self._num_samples * self._footprint.used(stored).sum(axis=1)
        used -= shared * self.page_size
        totals = np.array([request.max_num_tokens for request in self._slots], np.int64)
        wasted = self._footprint.never_filled(stored, totals, self.page_size)
        internal = self._num_samples * wasted.sum(axis=1)
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
        return 0 if self._shares_prefixes else self._blocks.num_surplus * self._block_slots

    @property
    def _num_pages(self) -> int:
        return self.num_slots // self.page_size

    @property
    def _block_pages(self) -> int:
        """Pages of the blocks that running requests share, each counted once."""
        if not self._shares_prefixes:
            return 0
        return self._blocks.num_blocks * self._block_slots // self.page_size

    @property
    def _block_slots(self) -> int:
        """What a block that is shared would take again."""
        return self._blocks.block_tokens * self._full_shares

    def _give_back_blocks(self, request: CountedRequest) -> None:
        self._blocks.remove(request.block_ids)
        self._scheduler.num_pages = self._num_pages - self._block_pages

    def _pages[T: (int, np.ndarray)](self, stored: T) -> T:
        """Pages of requests that store so many tokens, shared ones counted for all who share."""
        return self._num_samples * self._footprint.pages(stored, self.page_size)

    def _set_room(self, request: CountedRequest, pages: int) -> None:
        """Tells the scheduler how many pages the request takes that nobody else has.

        It keeps one more for everybody's next token, which is one for each share.
        """
        own = pages - request.shared_pages + self._num_shares - 1
        request.room_tokens = own * self.page_size

    def _num_new_blocks(self, request: CountedRequest) -> int:
        return self._blocks.num_new(request.block_ids) if self._shares_prefixes else 0
