"""Where the pages of a simulated cache lie: a snapshot of the pool, page by page."""

import collections
import dataclasses
import heapq
from typing import Literal

from paxkv.config import pages_of
from paxkv.diagnose.counted_request import CountedRequest
from paxkv.diagnose.diagnosis import Case
from paxkv.diagnose.paged import PagedPolicy
from paxkv.diagnose.simulate import simulate

type PageKind = Literal["own", "shared", "reusable", "free", "null"]

MAP_PAGES = 1024  # a picture of more is a carpet


@dataclasses.dataclass(frozen=True, slots=True)
class MappedPage:
    """One page of the snapshot."""

    kind: PageKind
    request: int | None = None  # whose; None for shared and unused ones
    fill: float = 1.0  # part of its slots that hold a token


def map_memory(
    case: Case, *, num_pages: int = MAP_PAGES, max_steps: int = 1500
) -> list[MappedPage]:
    """The pool after some steps, or the part of it that a picture has room for.

    Pages are handed out lowest first, as the block table does. Pages of a known prefix are shared,
    and kept when nobody holds them until others need the room. Of a model with windows, these are
    the pages of layers that keep every token, or none if all have windows.

    Raises:
        ValueError: No request fits in so small a pool.
    """
    if not case.budget.footprint.full_shares:
        return []
    num_pages = min(num_pages, case.budget.num_tokens // case.page_size)
    shares = case.block_tokens > 0 and case.block_tokens % case.page_size == 0
    policy = PagedPolicy(
        num_pages * case.page_size, page_size=case.page_size, max_running=case.max_running,
        shares_prefixes=shares, block_tokens=case.block_tokens,
    )  # fmt: skip
    pages = _Pages(num_pages, case.page_size, case.block_tokens if shares else 0)
    simulate(
        policy, case.trace, max_steps=max_steps, step_seconds=case.step_seconds,
        on_stretch=lambda step: pages.follow(list(policy.running()), step),
    )  # fmt: skip
    return pages.snapshot()


class _Pages:
    """Deals page ids to the requests that run."""

    def __init__(self, num_pages: int, page_size: int, block_tokens: int) -> None:
        self._page_size = page_size
        self._block_tokens = block_tokens
        self._free = list(range(1, num_pages + 1))  # a heap; 0 is the null page
        self._num_pages = num_pages
        self._own: dict[CountedRequest, list[int]] = {}
        self._blocks: dict[int, list[int]] = {}  # pages of each block that is kept
        self._last_step: dict[int, int] = {}  # of each block that is kept, in order of use
        self._step = 0

    def follow(self, running: list[CountedRequest], step: int) -> None:
        """Takes pages for what was stored in the last step, and takes back those of the ended."""
        self._step = step
        alive = set(running)
        for request in [request for request in self._own if request not in alive]:
            for page in self._own.pop(request):
                heapq.heappush(self._free, page)
        # What anybody needs is marked before something is taken, for taking may evict.
        blocks = dict.fromkeys(block for request in running for block in self._ids(request))
        self._last_step.update({block: step for block in blocks if block in self._blocks})
        for block in blocks:
            if block not in self._blocks:
                num_pages = self._block_tokens // self._page_size
                self._blocks[block] = [self._take() for _ in range(num_pages)]
                self._last_step[block] = step
        for request in running:
            own = self._own.setdefault(request, [])
            wanted = pages_of(request.base + step - 1, self._page_size) - self._num_shared(request)
            own.extend(self._take() for _ in range(wanted - len(own)))

    def snapshot(self) -> list[MappedPage]:
        """Every page, in order."""
        mapped = [MappedPage("null")] + [MappedPage("free", fill=0.0)] * self._num_pages
        holders: dict[int, list[CountedRequest]] = collections.defaultdict(list)
        for request in self._own:
            for block in self._ids(request):
                holders[block].append(request)
        for block, pages in self._blocks.items():
            for page in pages:
                mapped[page] = _block_page(holders[block])
        for request, pages in self._own.items():
            stored = request.base + self._step - 1 - self._num_shared(request) * self._page_size
            for place, page in enumerate(pages):
                fill = min(max(stored - place * self._page_size, 0), self._page_size)
                mapped[page] = MappedPage("own", request.id, fill / self._page_size)
        return mapped

    def _ids(self, request: CountedRequest) -> list[int]:
        return request.block_ids.tolist() if self._block_tokens else []

    def _num_shared(self, request: CountedRequest) -> int:
        return len(request.block_ids) * self._block_tokens // self._page_size

    def _take(self) -> int:
        if not self._free:
            oldest = min(
                (block for block, step in self._last_step.items() if step < self._step),
                key=self._last_step.__getitem__,
            )
            del self._last_step[oldest]
            for page in self._blocks.pop(oldest):
                heapq.heappush(self._free, page)
        return heapq.heappop(self._free)


def _block_page(holders: list[CountedRequest]) -> MappedPage:
    """A full page of a prompt, by who holds it."""
    if len(holders) == 1:
        return MappedPage("own", holders[0].id)
    return MappedPage("shared" if holders else "reusable")
