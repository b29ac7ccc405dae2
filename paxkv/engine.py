"""Runs many requests over one pool of pages: tokens in, tokens out. Text is `paxkv.llm`'s."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxkv.batching import ContinuousBatching
from paxkv.cache import PagedCache
from paxkv.config import page_bytes, pages_of, pages_of_groups
from paxkv.decoder import Decoder
from paxkv.engine_checks import (
    Limits,
    check_max_steps,
    check_policies,
    check_same_shapes,
    check_sizes,
    whole_numbers,
)
from paxkv.errors import QueueFull
from paxkv.logits_processors import LogitsProcessor
from paxkv.memory_report import MemoryReport, report_memory
from paxkv.memory_trace import MemoryTrace, describe, open_trace
from paxkv.metrics import EngineStats, Metrics
from paxkv.preemption import Preemption, PreemptionCosts, Swapper
from paxkv.prefix_index import NO_KEY, PrefixKey
from paxkv.request import FinishReason, SamplingParams
from paxkv.request_state import Request
from paxkv.runner import Runner
from paxkv.samples import sample_params
from paxkv.scheduler import Scheduler
from paxkv.slots import DEFAULT_PROCESSOR, Slots
from paxkv.turns import Turns, alone, between

_WARMING = SamplingParams(max_tokens=1, temperature=0.0).with_defaults()


class Engine:
    """Continuous batching over a paged cache.

    Several threads may use one engine: its methods take turns. `paxkv.AsyncEngine` serves asyncio.

        engine = Engine(decoder, num_slots=8, max_length=256, num_pages=129)
        params = SamplingParams(max_tokens=16).with_defaults(defaults)
        request_id = engine.add(Request(prompt=[1, 2, 3], params=params))
        for tokens in engine.stream(request_id):
            print(tokens)

    Args:
        decoder: See `paxkv.decoder`.
        num_slots: Requests that run at once.
        max_length: Prompt and output of one request, in tokens.
        num_pages: Pages of the pool, the null page counted. Sliding windows beside full attention
            have a smaller pool of their own.
        page_size: Tokens per page.
        dtype: Of keys and values.
        max_prefill_tokens: Prompt tokens in one call, a power of two.
        prefill_chunk: Prompt tokens stored between two bursts while requests decode, a power of
            two: what bounds the gap between two of their tokens. `max_prefill_tokens` when None.
        max_burst: Decode steps between two looks of the host. Bursts are of one step while a
            prompt is being stored, and end when a request ends for which another waits.
        max_waiting: Requests that may wait; any number when None.
        preemption: What becomes of the tokens of a request that is sent back because the pool runs
            short: "recompute" stores them again, "swap" copies them to the host and back, "auto"
            takes what costs less by its own measurements. Those of a decoder with sliding windows
            are always stored again.
        max_swap_bytes: Host memory that such copies may take; as much as the pool when None.
        seed: What requests without a seed of their own draw from.
        prefix_caching: Keep the full pages of requests, while there is room, for later ones that
            begin with the same tokens. A decoder with sliding windows keeps none.
        max_pinned_share: Of the pages, how many `warm(..., pin=True)` may keep for good. Room for
            one request of `max_length` is always left.
        processor: Changes logits before sampling; put your own behind the default ones with
            `chain`.
        memory_trace: Where to log what the memory is used for, step by step, and every request's
            lengths: for `paxkv diagnose`.
        clock: Seconds from any moment on, for deadlines and latencies.

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
        prefill_chunk: int | None = None,
        max_burst: int = 32,
        max_waiting: int | None = None,
        preemption: Preemption = "auto",
        max_swap_bytes: int | None = None,
        seed: int = 0,
        prefix_caching: bool = True,
        max_pinned_share: float = 0.5,
        processor: LogitsProcessor = DEFAULT_PROCESSOR,
        memory_trace: MemoryTrace | str | Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        num_slots, max_length, num_pages, page_size, max_burst, seed = whole_numbers(
            num_slots=num_slots, max_length=max_length, num_pages=num_pages, page_size=page_size,
            max_burst=max_burst, seed=seed,
        )  # fmt: skip
        prefill_chunk = max_prefill_tokens if prefill_chunk is None else prefill_chunk
        check_sizes(
            max_length=max_length, num_pages=num_pages, page_size=page_size, max_burst=max_burst,
            max_prefill_tokens=max_prefill_tokens, prefill_chunk=prefill_chunk,
        )  # fmt: skip
        check_policies(
            preemption=preemption, max_waiting=max_waiting, max_swap_bytes=max_swap_bytes,
            max_pinned_share=max_pinned_share,
        )  # fmt: skip
        self.turns = Turns()
        self.max_prefill_tokens = max_prefill_tokens
        self.max_burst = max_burst
        self.page_bytes = page_bytes(decoder.layer_groups, page_size=page_size, dtype=dtype)
        self.capacity = (num_pages - 1) * page_size  # tokens that the whole pool holds
        windows = [group.window for group in decoder.layer_groups if group.window is not None]
        has_full = len(windows) < len(decoder.layer_groups)
        window = None if has_full else max(windows)
        at_once = self.capacity if window is None else window + max_prefill_tokens + page_size
        # The last token of a request is never stored, so it needs no place in the pool.
        self.max_length = min(max_length, self.capacity + 1)
        if at_once < self.capacity:  # what a request gives back serves it again
            self.max_length = max_length
        # Pins leave room for one request of any length.
        most_pinned = max(0, num_pages - 1 - pages_of(self.max_length - 1, page_size))
        self._limits = Limits(
            vocab_size=decoder.vocab_size, max_length=self.max_length, num_pages=num_pages - 1,
            page_size=page_size,
        )  # fmt: skip
        self._num_added = 0
        self._max_waiting = max_waiting
        self._scheduler = Scheduler(
            num_slots=num_slots,
            num_pages=num_pages - 1,
            page_size=page_size,
            max_prefill_tokens=max_prefill_tokens,
            max_pinned_pages=min(int(max_pinned_share * (num_pages - 1)), most_pinned),
            shares_prefixes=prefix_caching and not windows,
            window=window,
        )
        self._runner = Runner(
            decoder,
            num_slots=num_slots,
            max_length=self.max_length,
            num_pages=pages_of_groups(
                decoder.layer_groups,
                num_pages,
                num_slots=num_slots,
                at_once=max_prefill_tokens,
                page_size=page_size,
            ),
            page_size=page_size,
            dtype=dtype,
            max_burst=max_burst,
            seed=seed,
            keeps_pages=self._scheduler.shares_prefixes,
            notes_memory=memory_trace is not None,
            processor=processor,
        )
        trace = open_trace(memory_trace)
        if trace:
            trace.write_header(
                **describe(decoder.layer_groups, self._runner.cache),
                num_slots=num_slots, max_length=self.max_length,
            )  # fmt: skip
        costs = PreemptionCosts(preemption)
        self._swapper = Swapper(
            self._runner,
            costs,
            max_bytes=num_pages * self.page_bytes if max_swap_bytes is None else max_swap_bytes,
            page_bytes=self.page_bytes,
        )
        self._batching = ContinuousBatching(
            self._scheduler,
            self._runner,
            self._swapper,
            costs,
            prefill_chunk=prefill_chunk,
            max_burst=max_burst,
            clock=clock,
            memory_trace=trace,
        )

    @property
    def stats(self) -> EngineStats:
        """What has been done so far."""
        return self._batching.stats

    @property
    def decoder(self) -> Decoder:
        """The decoder, with the weights of now."""
        return self._runner.decoder

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
    def add(self, request: Request) -> int:
        """Queues a request, whose `output` (or that of its `samples`) grows with every `step`.

        The prompt of several samples is stored once for all that find a slot at the same time.

        Returns:
            Its id, for `stream` and `abort`.

        Raises:
            ValueError: It can never be served; the message says why and what would help.
            QueueFull: As many requests wait as may.
        """
        if self._max_waiting is not None and request.params.num_samples > self._max_waiting:
            raise ValueError(
                f"{request.params.num_samples} samples wait together, and "
                f"max_waiting={self._max_waiting} requests may: ask for fewer, or raise max_waiting"
            )
        self.prepare(request)
        parts, num_waiting = request.parts, len(self._scheduler.waiting)
        if self._max_waiting is not None and num_waiting + len(parts) > self._max_waiting:
            request.id = -1  # it may be added again
            request.samples.clear()
            raise QueueFull(
                f"{num_waiting} requests wait and {self._max_waiting} may, so there is no room for "
                f"{len(parts)} more: try again later, or raise max_waiting"
            )
        self._batching.queue(request)
        return request.id

    @alone
    def prepare(self, request: Request) -> None:
        """Checks a request and gives it an id and its samples, as `add` does, but leaves it so.

        Raises:
            ValueError: It can never be served, or was added before.
        """
        if request.id != -1:
            raise ValueError(
                f"the request was added before, as {request.id}: make a new one, without an id"
            )
        whole_numbers(priority=request.priority)
        self._limits.check_own_fields(request)
        stops = (*request.params.stop_token_ids, *request.stop_token_ids)
        request.stop_token_ids = tuple(dict.fromkeys(stops))
        self._limits.check(request)
        wanted = len(request.prompt) + (request.params.max_tokens or 0)
        request.max_num_tokens = min(wanted, self.max_length)
        request.id = self._next_id()
        if request.params.num_samples > 1:
            request.samples = [
                dataclasses.replace(request, params=its, id=self._next_id(), family=request.id,
                                    output=[], logprobs=[], prompt_logprobs=[None], path=[],
                                    samples=[], prompt_pages=object())
                for its in sample_params(request.params)
            ]  # fmt: skip

    @alone
    def step(self, max_steps: int | None = None) -> list[Request]:
        """Admits what fits, stores prompts or a chunk of them, and decodes for a burst.

        Args:
            max_steps: Decode steps at most; `max_burst` when None. Short ones suit streaming.

        Returns:
            The requests that have new tokens or have ended: samples, where there are several.

        Raises:
            ValueError: `max_steps` is below 1.
        """
        check_max_steps(max_steps)
        return self._batching.step(max_steps)

    @between
    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        """Ends a request now, with all its samples. One that is not known any more is no error.

        A signal handler that interrupts a step has it end the request after that step.
        """
        request = self._batching.live.get(request_id)
        if request is not None:
            for part in request.parts:
                self._batching.end(part, reason)

    def stream(self, request_id: int, max_steps: int = 2) -> Iterator[list[int]]:
        """Serves until a request ends; yields its new tokens as they come.

        Other requests are served meanwhile. Leaving the loop early aborts the request.

        Args:
            request_id: Of `add`.
            max_steps: Decode steps between two looks.

        Raises:
            ValueError: No such request is live, or it has several samples. Where threads share an
                engine, another one's steps may have ended it since it was added: its `output` says
                what it got.
            RequestError: It was not served to its end.
        """
        request = self._batching.live.get(request_id)
        if request is None:
            raise ValueError(f"no request {request_id} waits or runs: it has ended, or never was")
        if request.samples:
            raise ValueError(
                f"request {request_id} has {len(request.samples)} samples, and a stream gives one: "
                "stream each sample by its own id, or use step"
            )
        return self._stream(request, max_steps)

    def _stream(self, request: Request, max_steps: int) -> Iterator[list[int]]:
        num_read = 0
        try:
            while True:
                # Asked before the tokens are read: another thread may add the last ones now.
                has_ended = request.finish_reason is not None
                if new := request.output[num_read:]:
                    num_read += len(new)
                    yield new
                elif not has_ended:
                    self.step(max_steps)
                elif request.error:
                    raise request.error
                else:
                    return
        finally:
            self.abort(request.id)

    @alone
    def compile(self) -> None:
        """Compiles what serving needs, so that no request waits for it; nothing else changes.

        Log-probabilities of prompts, and beams, are compiled when they are first used.
        """
        self._runner.compile(self.max_prefill_tokens)
        self._swapper.compile()

    @alone
    def metrics(self) -> Metrics:
        """How the engine stands now, and what it has done."""
        scheduler = self._scheduler
        held, in_all = scheduler.num_pages_used, scheduler.num_pages
        reusable = scheduler.index.num_pages - scheduler.index.num_used
        return Metrics(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            free_pages=in_all - held - reusable,
            held_pages=held,
            reusable_pages=reusable,
            token_share=scheduler.num_tokens_stored / (held * self.page_size) if held else 1.0,
            first_token_seconds=self._batching.latencies.first_token,
            token_gap_seconds=self._batching.latencies.token_gap,
            stats=dataclasses.replace(self.stats),
        )

    @alone
    def memory_report(self) -> MemoryReport:
        """What the memory is used for now: by kind, layer group and request, in tokens and bytes.

        Also how many tokens stand in it twice, apart from what is kept to be reused over time.
        """
        return report_memory(
            self._runner.cache, self.decoder.layer_groups, self._scheduler.running,
            is_waiting=self._scheduler.is_blocked,
        )  # fmt: skip

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
            QueueFull: As many requests wait as may.
        """
        if not self._scheduler.shares_prefixes:
            raise ValueError(
                "no prefix is kept: prefix_caching is off, or the decoder has sliding windows"
            )
        index = self._scheduler.index
        full = list(tokens[: len(tokens) - len(tokens) % self.page_size])
        with self.turns.lock:  # until it is pinned: other threads' requests could take its pages
            if full:
                request = Request(prompt=[*full, full[-1]], params=_WARMING, prefix_key=prefix_key)
                for _ in self.stream(self.add(request)):
                    pass
            if pin:
                return index.pin(tokens, prefix_key)
            return len(index.lookup([*full, 0], prefix_key).nodes) * self.page_size

    @alone
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
        self._batching.settle()

    @alone
    def free_pages(self, wanted: int) -> int:
        """Forgets prefixes until so many pages are free, for `on_cache`; returns how many are.

        Raises:
            RuntimeError: Requests are running.
        """
        self._refuse_while_begun("the cache that a search needs")
        num_free = self._scheduler.free_pages(wanted)
        self._batching.settle()
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
        return self._runner.run(program)

    @alone
    def set_decoder(self, decoder: Decoder) -> None:
        """Goes on with other weights. Nothing is compiled again if shapes and dtypes are equal.

        Prefixes that the old ones have stored are forgotten, pinned ones too.

        Raises:
            ValueError: The new decoder has other shapes or dtypes.
            RuntimeError: Requests have begun, whose keys and values are the old weights'.
        """
        self._refuse_while_begun("the old weights")
        check_same_shapes(self.decoder, decoder)
        self.clear_prefixes()
        self._runner.decoder = jax.device_put(decoder)  # once, not at every step

    def _refuse_while_begun(self, on_what: str) -> None:
        if begun := self._batching.num_begun:
            raise RuntimeError(
                f"{begun} requests are running on {on_what}: finish or abort them first"
            )

    def _next_id(self) -> int:
        self._num_added += 1
        return self._num_added - 1
