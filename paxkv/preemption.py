"""How a request that is sent back keeps what it has stored: computed again, or copied away."""

import time
from collections.abc import Iterable
from typing import Literal

from paxkv.compilations import counted_compilations
from paxkv.config import pages_of
from paxkv.request_state import Request
from paxkv.runner import Runner

type Preemption = Literal["recompute", "swap", "auto"]


class PreemptionCosts:
    """Which way costs less for a token, as measured so far.

    The fastest of each counts, since a first call may compile. Copies count twice, out and in.

    Args:
        preemption: "auto" takes what costs less, and copies until both are known.
    """

    def __init__(self, preemption: Preemption) -> None:
        self.preemption = preemption
        self._recompute_seconds: float | None = None  # per token
        self._copy_seconds: float | None = None  # per token, one way

    @property
    def prefers_swap(self) -> bool:
        """Whether pages are better copied to the host than computed again."""
        if self.preemption != "auto":
            return self.preemption == "swap"
        if self._recompute_seconds is None or self._copy_seconds is None:
            return True
        return 2 * self._copy_seconds < self._recompute_seconds

    def note_recompute(self, num_tokens: int, seconds: float) -> None:
        """Notes how long it took to store tokens."""
        self._recompute_seconds = _least(self._recompute_seconds, num_tokens, seconds)

    def note_copy(self, num_tokens: int, seconds: float) -> None:
        """Notes how long it took to copy their pages one way."""
        self._copy_seconds = _least(self._copy_seconds, num_tokens, seconds)


def _least(known: float | None, num_tokens: int, seconds: float) -> float | None:
    if not num_tokens:
        return known
    found = seconds / num_tokens
    return found if known is None else min(known, found)


class Swapper:
    """Copies of what requests had stored, in the memory of the host.

    Args:
        runner: Holds the pages.
        costs: Say when a copy is worth it.
        max_bytes: Host memory that copies may take.
        page_bytes: Of one page in all layers.
    """

    def __init__(
        self, runner: Runner, costs: PreemptionCosts, *, max_bytes: int, page_bytes: int
    ) -> None:
        self._runner = runner
        self._costs = costs
        self._max_bytes = max_bytes
        self._page_bytes = page_bytes

    def keep(self, slot: int, request: Request, others: Iterable[Request]) -> None:
        """Copies what a request has stored, before it is sent back, if that is worth it.

        Args:
            slot: Where it is.
            request: Its tokens up to `num_stored` are copied.
            others: Those that wait, and may have copies.
        """
        num_pages = pages_of(request.num_stored, self._runner.cache[0][1].page_size)
        if not num_pages or not self._costs.prefers_swap:
            return
        taken = sum(r.swapped.num_bytes for r in others if r.swapped)
        room = (self._max_bytes - taken) // self._page_bytes
        counts = [n for n in self._page_counts() if num_pages <= n <= room]
        if not counts:
            return
        begin = time.perf_counter()
        with counted_compilations() as compilations:
            request.swapped = self._runner.swap_out(slot, counts[0], request.num_stored)
        if not compilations.count:
            self._costs.note_copy(request.num_stored, time.perf_counter() - begin)

    def bring_back(self, slot: int, request: Request) -> int:
        """Puts a copy back, but for the first pages, which the request may have again already.

        Returns:
            How many tokens it had that were not there.
        """
        swapped, request.swapped = request.swapped, None
        if swapped is None or swapped.num_tokens <= request.num_stored:
            return 0
        first_page = request.num_stored // self._runner.cache[0][1].page_size
        self._runner.swap_in(slot, swapped, first_page)
        num_tokens = swapped.num_tokens - request.num_stored
        request.num_stored = swapped.num_tokens
        return num_tokens

    def compile(self) -> None:
        """Compiles the copies that may be made."""
        if self._costs.preemption != "recompute":
            for num_pages in self._page_counts():
                if num_pages * self._page_bytes <= self._max_bytes:
                    self._runner.compile_swaps(num_pages)

    def _page_counts(self) -> list[int]:
        """The numbers of pages that are copied at once: few, so that few programs are compiled.

        None where layers have windows: what has left a window cannot be brought back.
        """
        if any(group.window is not None for group in self._runner.decoder.layer_groups):
            return []
        max_pages = self._runner.cache[0][1].block_tables.shape[1]
        return [*(1 << n for n in range((max_pages - 1).bit_length())), max_pages]
