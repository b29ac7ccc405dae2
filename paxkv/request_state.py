"""A request on its way through the engine. Plain Python, no jax."""

import dataclasses
from typing import Any, NamedTuple, Self

from paxkv.errors import RequestError
from paxkv.prefix_index import NO_KEY, Node, PrefixKey
from paxkv.request import FinishReason, SamplingParams, TokenLogprob


class Swapped(NamedTuple):
    """What a request had in the cache when it was sent back, kept in the memory of the host."""

    num_tokens: int
    num_bytes: int
    contents: Any  # see `paxkv.swap`


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """What is asked for, and what there is of the answer.

        request = Request(prompt=[1, 2, 3], params=params.with_defaults(generation_config))
        request_id = engine.add(request)
        while request.finish_reason is None:
            engine.step()
        print(request.output)

    Of several samples (`params.n`, `params.best_of`) each is a request of its own, in `samples`.
    """

    prompt: list[int]
    params: SamplingParams  # settled: nothing left to the model's defaults
    stop_token_ids: tuple[int, ...] = ()  # that end it, on top of those in `params`
    prefix_key: PrefixKey = NO_KEY  # only requests with an equal one share first pages
    priority: int = 0  # lower ones are served first, equal ones in the order in which they came
    timeout_seconds: float | None = None  # since it was added; what takes longer is given up

    output: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = dataclasses.field(default_factory=lambda: [None])
    finish_reason: FinishReason | None = None
    error: RequestError | None = None  # why `finish_reason` is "error"
    samples: list[Self] = dataclasses.field(default_factory=list)  # none if it is the only one

    # The engine's; not shown where they would show pages or other requests.
    id: int = -1  # in the order in which requests came
    max_num_tokens: int = 0  # prompt and output
    added_seconds: float = 0.0  # by the engine's clock
    last_token_seconds: float | None = None  # when there last were new tokens
    num_stored: int = 0  # tokens in the cache
    num_sent_back: int = 0  # tokens that it had there when it was sent back to the queue
    # Its first pages, in the index; and whose first tokens it begins with after these, in a copy.
    path: list[Node] = dataclasses.field(default_factory=list, repr=False)
    copied: Node | None = dataclasses.field(default=None, repr=False)
    family: int | None = None  # samples of one prompt have the same
    # Held by who has the same.
    prompt_pages: object = dataclasses.field(default_factory=object, repr=False)
    # A sample that stores the prompt, to be forked from then.
    waits_for: Self | None = dataclasses.field(default=None, repr=False)
    swapped: Swapped | None = dataclasses.field(default=None, repr=False)

    @property
    def parts(self) -> "list[Request]":
        """The requests that run: its samples, or itself."""
        return [*self.samples] or [self]

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
    def num_left(self) -> int:
        """Tokens to store before it can decode, which takes the newest one itself."""
        return self.num_tokens - 1 - self.num_stored

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether its prompt has to go through the decoder; not so when it begins again."""
        wanted = self.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < len(self.prompt)
