"""Who runs: which requests hold a slot, and which of their tokens are worked on next.

Plain Python on counts. The pages a request holds follow from how many of its tokens are stored,
and which of them others may share from the prefix index, so nothing here needs to ask the device.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from paxkv.prefix_index import NO_KEY, Hit, Node, PrefixIndex, PrefixKey, common_length
from paxkv.request import FinishReason, SamplingParams, TokenLogprob

_SMALLEST_BUCKET = 16  # tokens
_WORTH_PADDING = 0.75  # a bucket filled less is left for the next smaller one
_WORTH_WAITING = 128  # tokens: to store as many takes longer than a decode step


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One prompt on its way: what was asked for, and what there is of the answer."""

    id: int
    prompt: list[int]
    params: SamplingParams  # settled: nothing left to the model's defaults
    stop_token_ids: tuple[int, ...]
    max_num_tokens: int  # prompt and output
    prefix_key: PrefixKey = NO_KEY
    output: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = dataclasses.field(default_factory=lambda: [None])
    num_stored: int = 0  # tokens in the cache
    path: list[Node] = dataclasses.field(default_factory=list)  # its first pages, in the index
    copied: Node | None = None  # whose first tokens it begins with after these, in a copy
    family: int | None = None  # samples of one prompt have the same
    prompt_pages: object = dataclasses.field(default_factory=object)  # held by who has the same
    finish_reason: FinishReason | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far."""
        return self.tokens_from(0)

    def tokens_from(self, start: int) -> list[int]:
        """Those at `start` and after it."""
        return self.prompt[start:] + self.output[max(0, start - len(self.prompt)) :]

    @property
    def num_tokens(self) -> int:
        """How many these are."""
        return len(self.prompt) + len(self.output)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether its prompt has to go through the decoder; not so when it begins again."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < len(self.prompt)


def bucket(num_tokens: int) -> int:
    """How many rows the next prefill call has for so many tokens.

    Rows are a power of two, so few shapes are compiled. Where the next one would be padding for
    more than a quarter, the one below it is taken and the rest waits for another call:
    300 tokens are calls of 256, 32 and 16 rows.
    """
    above = max(_SMALLEST_BUCKET, 1 << (num_tokens - 1).bit_length())
    is_worth_it = num_tokens > _WORTH_PADDING * above
    return above if is_worth_it or above == _SMALLEST_BUCKET else above // 2


def forks(admitted: Mapping[int, Request]) -> dict[int, int]:
    """Which slots are to be forked, and from which: samples of what has a slot before them."""
    first: dict[object, int] = {}
    parents = {slot: first.setdefault(its.prompt_pages, slot) for slot, its in admitted.items()}
    return {slot: parent for slot, parent in parents.items() if slot != parent}


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


class Scheduler:
    """First come, first served; a slot is refilled when its request ends.

    Args:
        num_slots: Requests that run at once.
        num_pages: Pages that can be handed out, the null page left out.
        page_size: Tokens per page.
        max_prefill_tokens: Prompt tokens in one call, a power of two.
        max_pinned_pages: Pages that pinned prefixes may hold.
        shares_prefixes: Whether requests may begin with what others have stored.
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
    ) -> None:
        self.num_slots = num_slots
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_prefill_tokens = max_prefill_tokens
        self.shares_prefixes = shares_prefixes
        self.index = PrefixIndex(page_size=page_size, max_pinned_pages=max_pinned_pages)
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: dict[int, Request] = {}  # by slot, oldest first
        self.is_waiting_for_pages = False  # for tokens that another request is about to store

    @property
    def num_pages_used(self) -> int:
        """Pages of requests that run and of pinned prefixes, shared ones counted once."""
        running = self.running.values()
        own = sum(self._pages(r.num_stored) - len(r.path) for r in running)
        return own - self._num_repeated(running) + self.index.num_used

    @property
    def num_tokens_stored(self) -> int:
        """Tokens in these pages."""
        running = self.running.values()
        own = sum(r.num_stored - len(r.path) * self.page_size for r in running)
        return own + (self.index.num_used - self._num_repeated(running)) * self.page_size

    @property
    def is_short(self) -> bool:
        """Whether the next step would take more pages than there are, reusable ones given up."""
        return self._own_pages(num_steps=1) + self.index.num_used > self.num_pages

    def admit(self) -> dict[int, Request]:
        """Moves waiting requests into free slots while the pool has pages for them.

        A request is admitted when its tokens and one page more for it and for each running request
        fit, so that the next steps do not drive it out again. Alone it always fits. It begins with
        the tokens that the index has. The page in `copied` is kept until `note_copied`. Samples of
        one prompt that are admitted together hold its pages together: the first of them stores it,
        the others are to be forked from that one then (see `forks`).
        """
        admitted: dict[int, Request] = {}
        forked = []
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
            if not first and self._is_stored_soon(request, hit, admitted.values()):
                self.is_waiting_for_pages = True
                break
            slot = min(set(range(self.num_slots)) - self.running.keys())
            admitted[slot] = self.running[slot] = self.waiting.popleft()
            request.path, request.copied = hit.nodes, hit.partial
            request.num_stored = len(hit.nodes) * self.page_size + hit.num_partial
            self.index.use(hit.all_nodes)
            if first:
                forked.append(request)
        for request in forked:
            request.num_stored = len(request.prompt) - 1
        return admitted

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

    def next_prefill(self) -> tuple[dict[int, int], int] | None:
        """The next prompt tokens to store: how many of each slot, and the rows of the call.

        None when every running request has only its newest token left, which decode takes.
        """
        left = {slot: r.num_tokens - 1 - r.num_stored for slot, r in self.running.items()}
        return plan_prefill(left, self.max_prefill_tokens)

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

    def remove(self, slot: int) -> None:
        """Takes a request out of its slot, whose pages must be released."""
        request = self.running.pop(slot)
        self.index.release(request.path)
        request.path = []

    def preempt(self) -> int:
        """Sends the newest request back to the front of the queue; its pages must be released.

        It keeps its output, and begins again by storing prompt and output.

        Returns:
            Its slot.
        """
        slot, request = next(reversed(self.running.items()))
        self.remove(slot)
        request.num_stored = 0
        self.waiting.appendleft(request)
        return slot

    def _lookup(self, request: Request) -> Hit:
        if request.needs_prompt_logprobs:
            return Hit([])  # they come of computing every token
        return self.index.lookup(request.tokens, request.prefix_key)

    def _fits(self, request: Request, hit: Hit) -> bool:
        running = self.running.values()
        promised = sum(self._pages(r.num_tokens) + 1 - len(r.path) for r in running)
        promised -= self._num_repeated(running)
        is_repeated = any(r.prompt_pages is request.prompt_pages for r in running)
        num_shared = self._prompt_pages(request) if is_repeated else len(hit.nodes)
        wanted = self._pages(request.num_tokens) + 1 - num_shared
        kept = self.index.num_used + sum(not node.num_users for node in hit.all_nodes)
        return promised + wanted + kept <= self.num_pages

    def _is_stored_soon(self, request: Request, hit: Hit, admitted: Iterable[Request]) -> bool:
        """Whether one of those just admitted stores many tokens that this one could begin with."""
        if request.needs_prompt_logprobs or not self.shares_prefixes:
            return False
        shared = [
            common_length(request.tokens[:-1], other.tokens[:-1])
            for other in admitted
            if other.prefix_key == request.prefix_key
        ]
        return max(shared, default=0) - len(hit.nodes) * self.page_size >= _WORTH_WAITING

    def _own_pages(self, num_steps: int) -> int:
        """Pages of the running requests besides those in the index, after some decode steps."""
        running = self.running.values()
        ends = ((r, r.num_tokens - 1 + num_steps) for r in running)
        own = sum(self._pages(min(end, r.max_num_tokens - 1)) - len(r.path) for r, end in ends)
        return own - self._num_repeated(running)

    def _num_repeated(self, requests: Iterable[Request]) -> int:
        """Pages outside of the index that are counted again: samples hold their prompt's together.

        Half-full ones are not, since every sample writes to it in the next step.
        """
        seen, repeated = set(), 0
        for request in requests:
            if request.prompt_pages in seen:
                repeated += max(0, self._prompt_pages(request) - len(request.path))
            seen.add(request.prompt_pages)
        return repeated

    def _prompt_pages(self, request: Request) -> int:
        """Full pages of the prompt that is stored before decoding."""
        return (len(request.prompt) - 1) // self.page_size

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)
