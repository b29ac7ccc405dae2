"""Runs many requests over one pool of pages: tokens in, tokens out. Text is `paxkv.llm`'s."""

import dataclasses
import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from paxkv.cache import PagedCache, init_cache
from paxkv.config import page_bytes, pages_of
from paxkv.decoder import Decoder
from paxkv.logits_processors import LogitsProcessor
from paxkv.models.generation import GenerationConfig
from paxkv.prefix_index import NO_KEY, PrefixKey
from paxkv.request import MAX_LOGPROBS, FinishReason, SamplingParams
from paxkv.samples import sample_params
from paxkv.scheduler import Request, Scheduler, forks
from paxkv.slots import DEFAULT_PROCESSOR, Slots, idle_requests, init_slots
from paxkv.steps import (
    Burst,
    PromptLogprobs,
    admit_step_jit,
    decode_loop_jit,
    fork_all_jit,
    prefill_step_jit,
    settle_step_jit,
)
from paxkv.transfer import (
    NUM_STOP_IDS,
    prefixes_of,
    rows_of,
    table_changes,
    take_prompt_logprobs,
    take_tokens,
)
from paxkv.turns import alone

_WARMING = SamplingParams(max_tokens=1, temperature=0.0).with_defaults(GenerationConfig())


@dataclasses.dataclass(slots=True)
class EngineStats:
    """What the engine has done since it was made."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    num_preemptions: int = 0
    peak_pages: int = 0
    peak_tokens: int = 0  # in the cache, at the moment of most pages
    prefix_tokens_hit: int = 0  # in the cache already when a request was admitted
    prefix_tokens_copied: int = 0  # of these, in pages that only begin alike


class Engine:
    """Continuous batching over a paged cache.

    Several threads may use one engine: its methods take turns.

        engine = Engine(decoder, num_slots=8, max_length=256, num_pages=129)
        request = engine.add([1, 2, 3], SamplingParams(max_tokens=16).with_defaults(defaults))
        while engine.has_work:
            engine.step()
        print(request.output)

    Args:
        decoder: See `paxkv.decoder`.
        num_slots: Requests that run at once.
        max_length: Prompt and output of one request, in tokens.
        num_pages: Pages of the pool, the null page counted.
        page_size: Tokens per page.
        dtype: Of keys and values.
        max_prefill_tokens: Prompt tokens in one call, a power of two.
        max_burst: Decode steps between two looks of the host.
        seed: What requests without a seed of their own draw from.
        prefix_caching: Keep the full pages of requests, while there is room, for later ones that
            begin with the same tokens.
        max_pinned_share: Of the pages, how many `warm(..., pin=True)` may keep for good. Room for
            one request of `max_length` is always left.
        processor: Changes logits before sampling; put your own behind the default ones with
            `chain`.

    Raises:
        ValueError: A size is out of range.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_slots: int,
        max_length: int,
        num_pages: int,
        page_size: int = 16,
        dtype: DTypeLike = jnp.float32,
        max_prefill_tokens: int = 1024,
        max_burst: int = 32,
        seed: int = 0,
        prefix_caching: bool = True,
        max_pinned_share: float = 0.5,
        processor: LogitsProcessor = DEFAULT_PROCESSOR,
    ) -> None:
        if max_prefill_tokens < 16 or max_prefill_tokens & (max_prefill_tokens - 1):
            raise ValueError(f"{max_prefill_tokens=} must be a power of two, 16 or more")
        num_slots, max_length, num_pages, page_size, max_burst, seed = (
            _whole(name, number)
            for name, number in {
                "num_slots": num_slots, "max_length": max_length, "num_pages": num_pages,
                "page_size": page_size, "max_burst": max_burst, "seed": seed,
            }.items()
        )  # fmt: skip
        if max_burst < 1:
            raise ValueError(f"{max_burst=} must be at least 1 decode step")
        if max_length < 2:
            raise ValueError(f"{max_length=} must be at least 2: a token of prompt, one of output")
        if page_size < 1 or num_pages < 2:
            raise ValueError(
                f"{page_size=} must be at least 1 token, and {num_pages=} at least 2: the null "
                "page serves nobody"
            )
        if not 0 <= max_pinned_share <= 1:
            raise ValueError(f"{max_pinned_share=} must be from 0 to 1")
        self.lock = threading.RLock()
        self.decoder = decoder
        self.max_prefill_tokens = max_prefill_tokens
        self.max_burst = max_burst
        self.stats = EngineStats()
        self.page_bytes = page_bytes(decoder.layer_groups, page_size=page_size, dtype=dtype)
        self.capacity = (num_pages - 1) * page_size  # tokens that the whole pool holds
        # The last token of a request is never stored, so it needs no place in the pool.
        self.max_length = min(max_length, self.capacity + 1)
        self._max_logprobs = min(MAX_LOGPROBS, decoder.vocab_size)
        self._seed = seed
        self._num_added = 0
        self._processor = processor
        self._verdicts: list[jax.Array] = []  # of operations that must go well
        longest = pages_of(self.max_length - 1, page_size)
        self._scheduler = Scheduler(
            num_slots=num_slots,
            num_pages=num_pages - 1,
            page_size=page_size,
            max_prefill_tokens=max_prefill_tokens,
            max_pinned_pages=min(int(max_pinned_share * (num_pages - 1)), num_pages - 1 - longest),
            shares_prefixes=prefix_caching,
        )
        self._cache = init_cache(
            decoder.layer_groups,
            num_slots=num_slots,
            max_length=self.max_length,
            num_pages=num_pages,
            page_size=page_size,
            dtype=dtype,
        )
        self._slots = init_slots(
            idle_requests(num_slots, self.max_length, NUM_STOP_IDS),
            max_burst=max_burst,
            max_logprobs=self._max_logprobs,
            processor=processor,
        )

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def num_slots(self) -> int:
        """Requests that run at once."""
        return self._scheduler.num_slots

    @property
    def num_pages(self) -> int:
        """Pages that can be handed out."""
        return self._scheduler.num_pages

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._scheduler.page_size

    @alone
    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        stop_token_ids: Sequence[int] = (),
        *,
        prefix_key: PrefixKey = NO_KEY,
    ) -> Request:
        """Queues a request.

        Args:
            prompt: Token ids.
            params: With nothing left open (see `SamplingParams.with_defaults`).
            stop_token_ids: Tokens that end it, on top of those in `params`.
            prefix_key: Only requests with an equal one share the pages of their first tokens.

        Returns:
            The request, whose `output` grows with every `step`.

        Raises:
            ValueError: It can never be served; the message says why and what would help.
        """
        request = self.make_request(prompt, params, stop_token_ids, prefix_key=prefix_key)
        self.queue(request)
        return request

    @alone
    def add_samples(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        stop_token_ids: Sequence[int] = (),
        *,
        prefix_key: PrefixKey = NO_KEY,
    ) -> list[Request]:
        """Queues the `n` samples of a prompt (`best_of`, if given), each a request of its own.

        The prompt is stored once for all that find a slot at the same time. Arguments and errors
        are those of `add`.
        """
        samples = [
            self.make_request(prompt, its, stop_token_ids, prefix_key=prefix_key)
            for its in sample_params(params)
        ]
        for sample in samples:
            sample.family = samples[0].id
            self.queue(sample)
        return samples

    def make_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        stop_token_ids: Sequence[int] = (),
        *,
        prefix_key: PrefixKey = NO_KEY,
    ) -> Request:
        """Like `add`, but leaves it to `queue`."""
        if params.num_samples > 1:
            raise ValueError(
                f"n={params.n} and best_of={params.best_of} are {params.num_samples} requests: "
                "use add_samples"
            )
        stops = tuple(dict.fromkeys((*params.stop_token_ids, *stop_token_ids)))
        self._check(prompt, params, stops)
        request = Request(
            id=self._num_added,
            prompt=list(prompt),
            params=params,
            stop_token_ids=stops,
            max_num_tokens=min(len(prompt) + (params.max_tokens or 0), self.max_length),
            prefix_key=prefix_key,
        )
        self._num_added += 1
        return request

    @alone
    def queue(self, request: Request) -> None:
        """Has a request of `make_request` wait for its turn."""
        self._scheduler.waiting.append(request)

    @alone
    def step(self, max_steps: int | None = None) -> list[Request]:
        """Admits what fits, stores their prompts, and decodes for a burst.

        Args:
            max_steps: Decode steps at most; `max_burst` when None. Short ones suit streaming.

        Returns:
            The requests that have new tokens or have ended.
        """
        num_steps = self.max_burst if max_steps is None else min(max_steps, self.max_burst)
        admitted = self._admit(num_steps)
        if self._scheduler.is_waiting_for_pages:
            num_steps = min(num_steps, 1)
        begin = time.perf_counter()
        prompt_logprobs = self._prefill()
        self._share_prompts(forks(admitted))
        middle = time.perf_counter()
        self._cache, self._slots, burst = decode_loop_jit(
            self.decoder, self._cache, self._slots, np.int32(num_steps),
            until_finish=np.bool_(len(self._scheduler.waiting) > 0),
            keeps_pages=self._scheduler.shares_prefixes, processor=self._processor,
        )  # fmt: skip
        burst, prompt_logprobs, tables = self._fetch(burst, prompt_logprobs)
        self.stats.prefill_seconds += middle - begin
        self.stats.decode_seconds += time.perf_counter() - middle
        for q_lens, logprobs in prompt_logprobs:
            take_prompt_logprobs(self._scheduler.running, q_lens, logprobs)
        return self._take_news(burst, tables)

    @alone
    def abort(self, request: Request, reason: FinishReason = "stop") -> None:
        """Ends a request now. One that has ended already is left as it is."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        if request in self._scheduler.waiting:
            self._scheduler.waiting.remove(request)
            return
        slot = next(slot for slot, r in self._scheduler.running.items() if r is request)
        self._scheduler.remove(slot)
        self._settle([slot])

    def warm(
        self, tokens: Sequence[int], *, prefix_key: PrefixKey = NO_KEY, pin: bool = False
    ) -> int:
        """Stores a prefix for later requests to begin with, such as a system prompt.

        Requests that run or wait are served meanwhile.

        Args:
            tokens: What does not fill a page at the end is left out.
            prefix_key: That of the requests to come.
            pin: Keep it until `unpin`, however short of pages the pool is.

        Returns:
            How many of the tokens are stored.

        Raises:
            ValueError: It cannot be stored, or pins would hold more pages than they may.
        """
        if not self._scheduler.shares_prefixes:
            raise ValueError("prefix_caching is off, so that no prefix is kept: turn it on")
        index = self._scheduler.index
        full = list(tokens[: len(tokens) - len(tokens) % self.page_size])
        if full:
            self._store([*full, full[-1]], prefix_key)
        if pin:
            return index.pin(tokens, prefix_key)
        return len(index.lookup([*full, 0], prefix_key).nodes) * self.page_size

    def unpin(self, tokens: Sequence[int], *, prefix_key: PrefixKey = NO_KEY) -> None:
        """Lets a prefix that was pinned go when its pages are needed.

        Raises:
            ValueError: It is not pinned.
        """
        self._scheduler.index.unpin(tokens, prefix_key)

    @alone
    def clear_prefixes(self) -> None:
        """Forgets what no running request uses, pinned prefixes too."""
        self._scheduler.index.clear()
        self._settle()

    @alone
    def free_pages(self, wanted: int) -> int:
        """Forgets prefixes until so many pages are free, for `on_cache`; returns how many are.

        Raises:
            RuntimeError: Requests are running.
        """
        self._refuse_while_begun("the cache that a search needs")
        num_free = self._scheduler.free_pages(wanted)
        self._settle()
        return num_free

    @alone
    def on_cache(
        self,
        program: Callable[[Decoder, PagedCache, Slots], tuple[PagedCache, *tuple[Any, ...]]],
    ) -> list[Any]:
        """Runs a program of another kind on the cache, such as a part of a beam search.

        Args:
            program: Takes the decoder, the cache, and slots to build its own from; returns the
                cache and results. In the end it must have given back the pages that it took.

        Returns:
            The results.

        Raises:
            RuntimeError: Requests are running.
        """
        self._refuse_while_begun("the cache that a search needs")
        self._cache, *results = program(self.decoder, self._cache, self._slots)
        return results

    @alone
    def set_decoder(self, decoder: Decoder) -> None:
        """Goes on with other weights. Nothing is compiled again if shapes and dtypes are equal.

        Prefixes that the old ones have stored are forgotten, pinned ones too.

        Raises:
            ValueError: The new decoder has other shapes or dtypes.
            RuntimeError: Requests have begun, whose keys and values are the old weights'.
        """
        self._refuse_while_begun("the old weights")
        _check_same_shapes(self.decoder, decoder)
        self.clear_prefixes()
        self.decoder = jax.device_put(decoder)  # once, not at every step

    def _refuse_while_begun(self, on_what: str) -> None:
        waiting = [request for request in self._scheduler.waiting if request.output]
        if begun := len(self._scheduler.running) + len(waiting):
            raise RuntimeError(
                f"{begun} requests are running on {on_what}: finish or abort them first"
            )

    def _check(self, prompt: Sequence[int], params: SamplingParams, stops: tuple[int, ...]) -> None:
        vocab_size = self.decoder.vocab_size
        if not params.is_settled:
            raise ValueError(f"settle what is left open, with_defaults of a model: {params}")
        if not prompt:
            raise ValueError("the prompt has no tokens; at least 1 is needed to predict the next")
        if not all(0 <= token < vocab_size for token in prompt):
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            raise ValueError(f"token id {wrong} is not in the vocabulary, 0 to {vocab_size - 1}")
        if len(prompt) >= self.max_length:
            why = "shorten the prompt or raise max_length"
            if self.max_length > self.capacity:
                why = (
                    f"the pool holds {self.capacity} tokens ({self.num_pages} pages of "
                    f"{self.page_size}), and one more need not be stored. Shorten the prompt or "
                    "give the KV cache more memory"
                )
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, but prompt and output together may have "
                f"{self.max_length}: {why}"
            )
        named = (*params.stop_token_ids, *dict(params.logit_bias))
        if wrong := [token for token in named if token >= vocab_size]:
            raise ValueError(
                f"stop_token_ids and logit_bias name token id {wrong[0]}, which is not in the "
                f"vocabulary, 0 to {vocab_size - 1}"
            )
        if len(stops) > NUM_STOP_IDS:
            raise ValueError(f"{len(stops)} stop tokens; a request may have {NUM_STOP_IDS}")

    def _admit(self, num_steps: int) -> dict[int, Request]:
        """Sends back whom the pool has no pages for, and lets in whom it has."""
        scheduler, sent_back = self._scheduler, []
        while scheduler.is_short:
            sent_back.append(scheduler.preempt())
        self.stats.num_preemptions += len(sent_back)
        admitted = scheduler.admit()
        scheduler.make_room(num_steps)
        self._settle(sent_back)
        if not admitted:
            return admitted
        is_new, requests = rows_of(
            admitted, scheduler.num_slots, self.max_length, engine_seed=self._seed
        )
        forked = forks(admitted)
        storing = {slot: request for slot, request in admitted.items() if slot not in forked}
        pages, lengths = prefixes_of(storing, self._cache)
        self._cache, self._slots, ok = admit_step_jit(
            self._cache, self._slots, is_new, requests, pages, lengths, processor=self._processor
        )
        self._verdicts.append(ok)
        self.stats.prefix_tokens_hit += int(lengths.sum())
        self.stats.prefix_tokens_copied += int((lengths % self.page_size).sum())
        scheduler.note_copied(admitted.values())
        return admitted

    def _prefill(self) -> list[tuple[dict[int, int], PromptLogprobs]]:
        """Stores the prompts of what was admitted; returns device arrays not yet fetched."""
        outputs = []
        num_slots = self._scheduler.num_slots
        while plan := self._scheduler.next_prefill():
            q_lens, num_rows = plan
            wanted = any(self._scheduler.running[slot].needs_prompt_logprobs for slot in q_lens)
            self._cache, fits, logprobs = prefill_step_jit(
                self.decoder, self._cache, self._slots,
                np.array([q_lens.get(slot, 0) for slot in range(num_slots)], np.int32),
                num_rows=num_rows, num_prompt_logprobs=self._max_logprobs if wanted else None,
            )  # fmt: skip
            self._verdicts.append(fits)
            if wanted:
                outputs.append((q_lens, logprobs))
            for slot, q_len in q_lens.items():
                self._scheduler.running[slot].num_stored += q_len
            self.stats.prefill_tokens += sum(q_lens.values())
        jax.block_until_ready(
            self._cache[0][1].lengths
        )  # so that prefill and decode are told apart
        return outputs

    def _fetch(
        self, burst: Burst, prompt_logprobs: list[tuple[dict[int, int], PromptLogprobs]]
    ) -> tuple[Burst, list[tuple[dict[int, int], PromptLogprobs]], list[np.ndarray]]:
        """Brings what a step did to the host, and the layer groups' tables if they are needed."""
        is_needed = self._scheduler.shares_prefixes
        tables = [table.block_tables for _, table in self._cache] if is_needed else []
        verdicts, self._verdicts = self._verdicts, []
        burst, prompt_logprobs, tables, verdicts = jax.device_get(
            (burst, prompt_logprobs, tables, verdicts)
        )
        if not all(verdicts):
            raise RuntimeError(
                f"{len(verdicts) - sum(verdicts)} operations on the cache were refused: the block "
                "tables are not what the scheduler takes them for, which is a fault of paxkv"
            )
        return burst, prompt_logprobs, tables

    def _share_prompts(self, parents: Mapping[int, int]) -> None:
        """Has slots begin with the stored prompt of their parent's."""
        if parents:
            slots = range(self._scheduler.num_slots)
            rows = np.array([parents.get(slot, slot) for slot in slots], np.int32)
            self._cache, ok = fork_all_jit(self._cache, rows)
            self._verdicts.append(ok)

    def _take_news(self, burst: Burst, tables: list[np.ndarray]) -> list[Request]:
        changed, scheduler = [], self._scheduler
        for slot, request in scheduler.running.items():
            is_new = take_tokens(request, burst.news, slot)
            self.stats.decode_tokens += int(burst.news.counts[slot])
            request.num_stored = request.num_tokens - 1
            if is_new or request.finish_reason:
                changed.append(request)
            if scheduler.shares_prefixes and request.finish_reason != "error":
                scheduler.note_written(request, [table[slot] for table in tables])
        self._note_peak()
        ended = [slot for slot, request in scheduler.running.items() if request.finish_reason]
        for slot in ended:
            scheduler.remove(slot)
        self._settle(ended if scheduler.shares_prefixes else [])
        return changed

    def _note_peak(self) -> None:
        num_pages = self._scheduler.num_pages_used
        if num_pages > self.stats.peak_pages:
            self.stats.peak_pages = num_pages
            self.stats.peak_tokens = self._scheduler.num_tokens_stored

    def _settle(self, done: Sequence[int] = ()) -> None:
        """Releases slots, and tells the block tables what the prefix index holds now."""
        changes = self._scheduler.index.take_changes()
        if not done and not changes:
            return
        holds, same_as = table_changes(changes, self._cache)
        is_done = np.isin(np.arange(self._scheduler.num_slots), done)
        self._cache, self._slots, ok = settle_step_jit(
            self._cache, self._slots, is_done, holds, same_as
        )
        self._verdicts.append(ok)

    def _store(self, tokens: Sequence[int], prefix_key: PrefixKey) -> None:
        """Serves a request for the sake of what it leaves in the cache."""
        request = self.add(tokens, _WARMING, prefix_key=prefix_key)
        try:
            while request.finish_reason is None:
                self.step()
        finally:
            self.abort(request)


def _whole(name: str, number: object) -> int:
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name}={number!r} must be a whole number") from None


def _check_same_shapes(old: Decoder, new: Decoder) -> None:
    """Raises a ValueError that names the first weight of another shape or dtype."""
    old_leaves, old_tree = jax.tree.flatten_with_path(jax.eval_shape(lambda: old))
    new_leaves, new_tree = jax.tree.flatten_with_path(jax.eval_shape(lambda: new))
    if old_tree != new_tree:
        raise ValueError("the new weights differ from the old ones in structure")
    for (path, was), (_, found) in zip(old_leaves, new_leaves, strict=True):
        if (was.shape, was.dtype) != (found.shape, found.dtype):
            raise ValueError(
                f"the new weights differ from the old ones: {jax.tree_util.keystr(path)} is "
                f"{found.dtype}{list(found.shape)} and was {was.dtype}{list(was.shape)}"
            )
