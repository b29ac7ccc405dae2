"""Who runs: which requests hold a slot, and which of their tokens are worked on next.

Plain Python on counts. The pages a request holds follow from how many of its tokens are stored,
and which of them others may share from the prefix index, so nothing here needs to ask the device.
"""

import bisect
import collections
import itertools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence

from paxkv.prefix_index import Hit, PrefixIndex, common_length
from paxkv.request_state import Request

_SMALLEST_BUCKET = 16  # tokens
_WORTH_PADDING = 0.75  # a bucket filled less is left for the next smaller one
_WORTH_WAITING = 128  # tokens: to store as many takes longer than a decode step


def bucket(num_tokens: int) -> int:
    """How many rows the next prefill call has for so many tokens.

    Rows are a power of two, so few shapes are compiled. Where the next one would be padding for
    more than a quarter, the one below it is taken and the rest waits for another call:
    300 tokens are calls of 256, 32 and 16 rows.
    """
    above = max(_SMALLEST_BUCKET, 1 << (num_tokens - 1).bit_length())
    is_worth_it = num_tokens > _WORTH_PADDING * above
    return above if is_worth_it or above == _SMALLEST_BUCKET else above // 2


def prefill_buckets(max_tokens: int) -> list[int]:
    """All rows that a prefill call may have, where it may have `max_tokens`, a power of two."""
    return [_SMALLEST_BUCKET << n for n in range((max_tokens // _SMALLEST_BUCKET).bit_length())]


def _first_sample(request: Request, admitted: Iterable[Request]) -> Request | None:
    """The request just admitted that stores the same prompt for its samples."""
    if request.family is None or request.output:
        return None  # what it has written must be stored too
    return next((r for r in admitted if r.family == request.family and not r.output), None)


def plan_prefill(left: Mapping[int, int], max_tokens: int) -> tuple[dict[int, int], int] | None:
    """What the next prefill call stores, by slot, and its rows; None if no tokens are left."""
    left = {slot: tokens for slot, tokens in left.items() if tokens}
    if not left:
        return None
    num_rows = bucket(min(sum(left.values()), max_tokens))
    q_lens = {}
    for slot, tokens in left.items():
        q_lens[slot] = min(tokens, num_rows - sum(q_lens.values()))
    return {slot: q_len for slot, q_len in q_lens.items() if q_len}, num_rows


_in_turn = operator.attrgetter("priority", "id")  # sorts requests in the order they are served in


class Scheduler:
    """First come, first served, by priority; a slot is refilled when its request ends.

    Args:
        num_slots: Requests that run at once.
        num_pages: Pages that can be handed out, the null page left out.
        page_size: Tokens per page.
        max_prefill_tokens: Prompt tokens in one call, a power of two.
        max_pinned_pages: Pages that pinned prefixes may hold.
        shares_prefixes: Whether requests may begin with what others have stored.
        window: Tokens that any layer sees of a sequence, which gives back the pages of older ones.
            With prefixes shared it must be None, for all of them: these pages would be missing.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        max_prefill_tokens: int,
        max_pinned_pages: int = 0,
        shares_prefixes: bool = True,
        window: int | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_prefill_tokens = max_prefill_tokens
        self.shares_prefixes = shares_prefixes
        self.window = window
        self.index = PrefixIndex(page_size=page_size, max_pinned_pages=max_pinned_pages)
        self.waiting: list[Request] = []  # in the order in which they are to be admitted
        self.running: dict[int, Request] = {}  # by slot, those admitted first in front
        self.is_waiting_for_pages = False  # for tokens that another request is about to store

    @property
    def num_pages_used(self) -> int:
        """Pages of requests that run and of pinned prefixes, shared ones counted once."""
        own = sum(self._pages(r.num_stored) - len(r.path) for r in self._storing())
        return own - self._num_repeated(self._storing()) + self.index.num_used

    @property
    def num_tokens_stored(self) -> int:
        """Tokens in these pages."""
        own = sum(
            r.num_stored - (len(r.path) + self._pages_left(r.num_stored)) * self.page_size
            for r in self._storing()
        )
        shared = self.index.num_used - self._num_repeated(self._storing())
        return own + shared * self.page_size

    @property
    def is_short(self) -> bool:
        """Whether the next step would take more pages than there are, reusable ones given up."""
        return self._own_pages(num_steps=1) + self.index.num_used > self.num_pages

    @property
    def is_storing(self) -> bool:
        """Whether a running request has tokens left to store before it can decode."""
        return any(r.waits_for or r.num_left for r in self.running.values())

    @property
    def num_decoding(self) -> int:
        """Running requests that have none."""
        return sum(not r.waits_for and not r.num_left for r in self.running.values())

    @property
    def is_blocked(self) -> bool:
        """Whether a request waits for memory, and not for a slot or for what another stores.

        Where none runs, it does not: alone it always fits, so it is about to be admitted.
        """
        has_slot = 0 < len(self.running) < self.num_slots
        return bool(self.waiting) and has_slot and not self.is_waiting_for_pages

    def queue(self, request: Request) -> None:
        """Has a request wait for its turn."""
        bisect.insort(self.waiting, request, key=_in_turn)

    def admit(self) -> dict[int, Request]:
        """Moves waiting requests into free slots while the pool has pages for them.

        A request is admitted when its tokens and one page more for it and for each running request
        fit, so that the next steps do not drive it out again: of answers to come, of which nothing
        is known, a page each is expected. Alone it always fits. One that could begin with much of
        what another is about to store waits for that, and those behind it wait too. It begins with
        the tokens that the index has. The page in `copied` is kept until `note_copied`. Samples of
        one prompt that are admitted together hold its pages together: the first of them stores it,
        the others wait for that (see `take_forks`).
        """
        admitted: dict[int, Request] = {}
        self.is_waiting_for_pages = False
        while self.waiting and len(self.running) < self.num_slots:
            request = self.waiting[0]
            first = _first_sample(request, admitted.values())
            request.prompt_pages = first.prompt_pages if first else object()
            hit = Hit(list(first.path)) if first else self._lookup(request)
            if not self._fits(request, hit):
                hit = Hit(hit.nodes)  # perhaps without a page that is kept only to be copied
                if self.running and not self._fits(request, hit):
                    break
            if not first and self._is_stored_soon(request, hit):
                self.is_waiting_for_pages = True
                break
            slot = min(set(range(self.num_slots)) - self.running.keys())
            admitted[slot] = self.running[slot] = self.waiting.pop(0)
            request.path, request.copied = hit.nodes, hit.partial
            request.waits_for = first
            if not first:
                request.num_stored = len(hit.nodes) * self.page_size + hit.num_partial
            self.index.use(hit.all_nodes)
        return admitted

    def take_forks(self) -> dict[int, int]:
        """Slots that can be forked now, each with the one that has stored its prompt."""
        slot_of = {id(r): slot for slot, r in self.running.items()}
        ready = {
            slot: slot_of[id(r.waits_for)]
            for slot, r in self.running.items()
            if r.waits_for and not r.waits_for.num_left
        }
        for slot in ready:
            request = self.running[slot]
            request.num_stored, request.waits_for = len(request.prompt) - 1, None
        return ready

    def note_copied(self, admitted: Iterable[Request]) -> None:
        """Notes that requests have copied what they begin with and do not share."""
        for request in admitted:
            if request.copied:
                self.index.release([request.copied])
            request.copied = None

    def make_room(self, num_steps: int) -> None:
        """Gives up reusable pages, so that running requests can make so many decode steps."""
        wanted = self._own_pages(num_steps) + self.index.num_pages
        self.index.evict(max(0, wanted - self.num_pages))

    def free_pages(self, wanted: int) -> int:
        """Gives up reusable pages until so many are free, or none is left; returns how many are.

        No request may be running.
        """
        self.index.evict(max(0, wanted - (self.num_pages - self.index.num_pages)))
        return self.num_pages - self.index.num_pages

    def next_prefill(self, max_tokens: int | None = None) -> tuple[dict[int, int], int] | None:
        """The next prompt tokens to store: how many of each slot, and the rows of the call.

        Args:
            max_tokens: Rows at most, a power of two; `max_prefill_tokens` when None.

        Returns:
            None when every running request has only its newest token left, which decode takes.
        """
        left = {slot: r.num_left for slot, r in self.running.items() if not r.waits_for}
        return plan_prefill(left, max_tokens or self.max_prefill_tokens)

    def note_written(self, request: Request, rows: Sequence[Sequence[int]]) -> None:
        """Puts the full pages of a running request into the index.

        Args:
            request: Its tokens up to `num_stored` have been written.
            rows: For each layer group, the request's pages in token order.
        """
        written = range(len(request.path), request.num_stored // self.page_size)
        tokens = request.tokens_from(len(request.path) * self.page_size)
        for i, in_page in zip(written, itertools.batched(tokens, self.page_size), strict=False):
            pages = tuple(int(row[i]) for row in rows)
            if not all(pages):
                break  # the null page: it has left a window
            self.index.extend(request.path, in_page, pages, request.prefix_key)

    def remove(self, slot: int) -> list[int]:
        """Takes a request out of its slot.

        Returns:
            The slots whose pages must be released: its own, and those of samples that waited for
            what it was to store. These wait for their turn again.
        """
        request = self.running.pop(slot)
        self.index.release(request.path)
        request.path, request.waits_for = [], None
        orphans = [its for its, r in self.running.items() if r.waits_for is request]
        for orphan in orphans:
            self._send_back(orphan)
        return [slot, *orphans]

    def next_victim(self) -> int:
        """The slot that `preempt` would take: of the last in turn of those running."""
        return max(self.running, key=lambda slot: _in_turn(self.running[slot]))

    def preempt(self) -> list[int]:
        """Sends the last in turn of those running back to the queue.

        It keeps its output, and begins again by storing prompt and output.

        Returns:
            The slots whose pages must be released, its own first.
        """
        return self._send_back(self.next_victim())

    def slot_of(self, request: Request) -> int:
        """Where a running request is."""
        return next(slot for slot, r in self.running.items() if r is request)

    def _send_back(self, slot: int) -> list[int]:
        request = self.running[slot]
        slots = self.remove(slot)
        request.num_sent_back, request.num_stored = request.num_stored, 0
        self.queue(request)
        return slots

    def _storing(self) -> list[Request]:
        """The running requests that have pages, or are about to: not those that will be forked."""
        return [r for r in self.running.values() if not r.waits_for]

    def _lookup(self, request: Request) -> Hit:
        if request.needs_prompt_logprobs:
            return Hit([])  # they come of computing every token
        hit = self.index.lookup(request.tokens, request.prefix_key)
        return Hit(hit.nodes) if request.swapped else hit  # which has what else it had stored

    def _fits(self, request: Request, hit: Hit) -> bool:
        running = self.running.values()
        promised = sum(self._pages_at_most(r, r.num_tokens) + 1 - len(r.path) for r in running)
        promised -= self._num_promised_together(running)
        is_repeated = (
            self.window is None
            and request.family is not None
            and any(r.prompt_pages is request.prompt_pages for r in running)
        )
        num_shared = self._prompt_pages(request) if is_repeated else len(hit.nodes)
        wanted = self._pages_at_most(request, request.num_tokens) + 1 - num_shared
        kept = self.index.num_used + sum(not node.num_users for node in hit.all_nodes)
        return promised + wanted + kept <= self.num_pages

    def _is_stored_soon(self, request: Request, hit: Hit) -> bool:
        """Whether a running request is storing many tokens that this one could begin with."""
        if request.needs_prompt_logprobs or not self.shares_prefixes:
            return False
        shared = [
            common_length(request.tokens[:-1], other.tokens[:-1])
            for other in self.running.values()
            if other.num_left and other.prefix_key == request.prefix_key
        ]
        return max(shared, default=0) - len(hit.nodes) * self.page_size >= _WORTH_WAITING

    def _own_pages(self, num_steps: int) -> int:
        """Pages of the running requests besides those in the index, after some decode steps."""
        running = self.running.values()
        ends = ((r, r.num_tokens - 1 + num_steps) for r in running)
        own = sum(
            self._pages_at_most(r, min(end, r.max_num_tokens - 1)) - len(r.path) for r, end in ends
        )
        return own - self._num_promised_together(running)

    def _num_promised_together(self, running: Collection[Request]) -> int:
        """What `_pages_at_most` counts again of pages that samples hold together.

        With a window nothing: it counts a window of each, and not the prompt that they share.
        """
        return self._num_repeated(running) if self.window is None else 0

    def _num_repeated(self, requests: Iterable[Request]) -> int:
        """Pages outside of the index that are counted again: samples hold their prompt's together.

        Half-full ones are not, since every sample writes to it in the next step.
        """
        held: dict[object, list[int]] = collections.defaultdict(list)
        for r in requests:
            if r.family is None:
                continue
            others = max(len(r.path), self._pages_left(r.num_stored))  # not its own, or no more
            held[r.prompt_pages].append(max(0, self._prompt_pages(r) - others))
        return sum(sum(pages) - max(pages) for pages in held.values())

    def _prompt_pages(self, request: Request) -> int:
        """Full pages of the prompt that is stored before decoding."""
        return (len(request.prompt) - 1) // self.page_size

    def _pages(self, num_tokens: int) -> int:
        """Pages of a sequence that has stored so many tokens."""
        return -(-num_tokens // self.page_size) - self._pages_left(num_tokens)

    def _pages_at_most(self, request: Request, num_tokens: int) -> int:
        """Pages that a request needs on its way to so many tokens, what it then gives back too.

        With a window it never holds more than the window, what one call stores, and two half pages.
        """
        most = -(-num_tokens // self.page_size)
        if self.window is None:
            return most
        at_once = self.max_prefill_tokens if request.num_left else 1
        return min(most, -(-(self.window + at_once) // self.page_size) + 1)

    def _pages_left(self, num_tokens: int) -> int:
        """Pages of these that it has given up (see `paxkv.windows`)."""
        if self.window is None:
            return 0
        return max(0, num_tokens - (self.window - 1)) // self.page_size
