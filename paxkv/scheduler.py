"""Who runs: which requests hold a slot, and which of their tokens are worked on next.

Plain Python on counts. The pages a request holds follow from how many of its tokens are stored,
so nothing here needs to ask the device.
"""

import collections
import dataclasses

from paxkv.request import FinishReason, SamplingParams, TokenLogprob

_SMALLEST_BUCKET = 16  # tokens
_WORTH_PADDING = 0.75  # a bucket filled less is left for the next smaller one


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One prompt on its way: what was asked for, and what there is of the answer."""

    id: int
    prompt: list[int]
    params: SamplingParams  # settled: nothing left to the model's defaults
    stop_token_ids: tuple[int, ...]
    max_num_tokens: int  # prompt and output
    output: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = dataclasses.field(default_factory=lambda: [None])
    num_stored: int = 0  # tokens in the cache
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt) + len(self.output)

    @property
    def knows_prompt_logprobs(self) -> bool:
        """Whether they are complete, as they are when a request begins again."""
        return len(self.prompt_logprobs) == len(self.prompt)


def bucket(num_tokens: int) -> int:
    """How many rows the next prefill call has for so many tokens.

    Rows are a power of two, so few shapes are compiled. Where the next one would be padding for
    more than a quarter, the one below it is taken and the rest waits for another call:
    300 tokens are calls of 256, 32 and 16 rows.
    """
    above = max(_SMALLEST_BUCKET, 1 << (num_tokens - 1).bit_length())
    is_worth_it = num_tokens > _WORTH_PADDING * above
    return above if is_worth_it or above == _SMALLEST_BUCKET else above // 2


class Scheduler:
    """First come, first served; a slot is refilled when its request ends.

    Args:
        num_slots: Requests that run at once.
        num_pages: Pages that can be handed out, the null page left out.
        page_size: Tokens per page.
        max_prefill_tokens: Prompt tokens in one call, a power of two.
    """

    def __init__(
        self, *, num_slots: int, num_pages: int, page_size: int, max_prefill_tokens: int
    ) -> None:
        self.num_slots = num_slots
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: dict[int, Request] = {}  # by slot, oldest first

    @property
    def num_pages_held(self) -> int:
        """Pages of the requests that run."""
        return sum(self._pages(request.num_stored) for request in self.running.values())

    def admit(self) -> dict[int, Request]:
        """Moves waiting requests into free slots while the pool has pages for them.

        A request is admitted when its tokens and one page more for it and for each running request
        fit, so that the next steps do not drive it out again. Alone it always fits.
        """
        admitted = {}
        while self.waiting and len(self.running) < self.num_slots:
            promised = sum(self._pages(request.num_tokens) + 1 for request in self.running.values())
            wanted = self._pages(self.waiting[0].num_tokens) + 1
            if self.running and promised + wanted > self.num_pages:
                break
            slot = min(set(range(self.num_slots)) - self.running.keys())
            admitted[slot] = self.running[slot] = self.waiting.popleft()
        return admitted

    def next_prefill(self) -> tuple[dict[int, int], int] | None:
        """The next prompt tokens to store: how many of each slot, and the rows of the call.

        None when every running request has only its newest token left, which decode takes.
        """
        left = {slot: r.num_tokens - 1 - r.num_stored for slot, r in self.running.items()}
        left = {slot: tokens for slot, tokens in left.items() if tokens}
        if not left:
            return None
        num_rows = bucket(min(sum(left.values()), self.max_prefill_tokens))
        q_lens = {}
        for slot, tokens in left.items():
            q_lens[slot] = min(tokens, num_rows - sum(q_lens.values()))
        return {slot: q_len for slot, q_len in q_lens.items() if q_len}, num_rows

    def preempt(self) -> int:
        """Sends the newest request back to the front of the queue; its pages must be released.

        It keeps its output, and begins again by storing prompt and output.

        Returns:
            Its slot.
        """
        slot, request = self.running.popitem()
        request.num_stored = 0
        self.waiting.appendleft(request)
        return slot

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)
