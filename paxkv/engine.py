"""Runs many requests over one pool of pages: tokens in, tokens out. Text is `paxkv.llm`'s."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from paxkv.cache import PagedCache
from paxkv.compilations import counted_compilations
from paxkv.config import page_bytes, pages_of, pages_of_groups
from paxkv.decoder import Decoder
from paxkv.engine_checks import Limits, check_power_of_two, check_same_shapes, whole_numbers
from paxkv.errors import DeadlineExceeded, QueueFull
from paxkv.logits_processors import LogitsProcessor
from paxkv.memory_report import MemoryReport, report_memory
from paxkv.memory_trace import MemoryTrace, describe, open_trace
from paxkv.metrics import EngineStats, Latencies, Metrics
from paxkv.preemption import Preemption, PreemptionCosts, Swapper
from paxkv.prefix_index import NO_KEY, PrefixKey
from paxkv.request import FinishReason, SamplingParams
from paxkv.request_state import Request
from paxkv.runner import Runner
from paxkv.samples import sample_params
from paxkv.scheduler import Scheduler
from paxkv.slots import DEFAULT_PROCESSOR, News, Slots
from paxkv.steps import Burst, PromptLogprobs
from paxkv.transfer import take_prompt_logprobs, take_tokens
from paxkv.turns import alone

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
            takes what costs less by its own measurements.
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
        check_power_of_two("max_prefill_tokens", max_prefill_tokens)
        check_power_of_two("prefill_chunk", prefill_chunk)
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
        if preemption not in ("recompute", "swap", "auto"):
            raise ValueError(f'{preemption=} must be "recompute", "swap" or "auto"')
        self.lock = threading.RLock()
        self.max_prefill_tokens = max_prefill_tokens
        self.max_burst = max_burst
        self.stats = EngineStats()
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
        self._prefill_chunk = prefill_chunk
        self._max_waiting = max_waiting
        self._costs = PreemptionCosts(preemption)
        self._latencies = Latencies()
        self._clock = clock
        self._live: dict[int, Request] = {}  # those that have not ended, and their samples
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
        self._swapper = Swapper(
            self._runner,
            self._costs,
            max_bytes=num_pages * self.page_bytes if max_swap_bytes is None else max_swap_bytes,
            page_bytes=self.page_bytes,
        )

        self._memory_trace = open_trace(memory_trace)
        if self._memory_trace:
            self._memory_trace.write_header(
                **describe(decoder.layer_groups, self._runner.cache),
                num_slots=num_slots, max_length=self.max_length,
            )  # fmt: skip

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
        self.prepare(request)
        parts, num_waiting = request.parts, len(self._scheduler.waiting)
        if self._max_waiting is not None and num_waiting + len(parts) > self._max_waiting:
            raise QueueFull(
                f"{num_waiting} requests wait and {self._max_waiting} may, so there is no room for "
                f"{len(parts)} more: try again later, or raise max_waiting"
            )
        for part in (request, *request.samples):
            part.added_seconds = self._clock()
            self._live[part.id] = part
        for part in parts:
            self._scheduler.queue(part)
            if self._memory_trace:
                self._memory_trace.note_arrival(part)
        self.stats.prompt_tokens += len(request.prompt)
        return request.id

    @alone
    def prepare(self, request: Request) -> None:
        """Checks a request and gives it an id and its samples, as `add` does, but leaves it so.

        Raises:
            ValueError: It can never be served, or was added before.
        """
        if request.id >= 0:
            raise ValueError(f"the request was added before, as {request.id}: make a new one")
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
        """
        with counted_compilations() as compilations:
            changed = self._expire() + self._step(max_steps)
        self.stats.num_compilations += compilations.count
        return changed

    def _step(self, max_steps: int | None) -> list[Request]:
        scheduler = self._scheduler
        num_steps = self.max_burst if max_steps is None else min(max_steps, self.max_burst)
        self._admit(num_steps)
        begin, num_stored = time.perf_counter(), self.stats.prefill_tokens
        prompt_logprobs = self._prefill()
        self._fork()
        middle = time.perf_counter()
        self._costs.note_recompute(self.stats.prefill_tokens - num_stored, middle - begin)
        if scheduler.is_storing or scheduler.is_waiting_for_pages:
            num_steps = min(num_steps, 1)
        burst = self._runner.decode(
            num_steps,
            num_decoding=scheduler.num_decoding,
            until_finish=bool(scheduler.waiting),
            is_waiting=scheduler.is_blocked,
        )
        (burst, prompt_logprobs), tables = self._runner.fetch((burst, prompt_logprobs))
        self._trace_steps(burst)
        self.stats.prefill_seconds += middle - begin
        self.stats.decode_seconds += time.perf_counter() - middle
        for q_lens, logprobs in prompt_logprobs:
            take_prompt_logprobs(scheduler.running, q_lens, logprobs)
        return self._take_news(burst.news, tables)

    @alone
    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        """Ends a request now, with all its samples. One that is not known any more is no error."""
        request = self._live.get(request_id)
        if request is not None:
            for part in request.parts:
                self._end(part, reason)

    def stream(self, request_id: int, max_steps: int = 2) -> Iterator[list[int]]:
        """Serves until a request ends; yields its new tokens as they come.

        Other requests are served meanwhile. Leaving the loop early aborts the request.

        Args:
            request_id: Of `add`.
            max_steps: Decode steps between two looks.

        Raises:
            ValueError: No such request is live, or it has several samples.
            RequestError: It was not served to its end.
        """
        request = self._live.get(request_id)
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
                if new := request.output[num_read:]:
                    num_read += len(new)
                    yield new
                elif request.error:
                    raise request.error
                elif request.finish_reason:
                    return
                else:
                    self.step(max_steps)
        finally:
            self.abort(request.id)

    @alone
    def compile(self) -> None:
        """Compiles what serving needs, so that no request waits for it; nothing else changes.

        Log-probabilities of prompts, swaps and beams are compiled when they are first used.
        """
        self._runner.compile(self.max_prefill_tokens)

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
            first_token_seconds=self._latencies.first_token,
            token_gap_seconds=self._latencies.token_gap,
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
        """
        if not self._scheduler.shares_prefixes:
            raise ValueError(
                "no prefix is kept: prefix_caching is off, or the decoder has sliding windows"
            )
        index = self._scheduler.index
        full = list(tokens[: len(tokens) - len(tokens) % self.page_size])
        if full:
            request = Request(prompt=[*full, full[-1]], params=_WARMING, prefix_key=prefix_key)
            for _ in self.stream(self.add(request)):
                pass
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
        waiting = [request for request in self._scheduler.waiting if request.output]
        if begun := len(self._scheduler.running) + len(waiting):
            raise RuntimeError(
                f"{begun} requests are running on {on_what}: finish or abort them first"
            )

    def _next_id(self) -> int:
        self._num_added += 1
        return self._num_added - 1

    def _expire(self) -> list[Request]:
        """Gives up requests whose deadline has passed; returns them."""
        now, expired = self._clock(), []
        for request in list(self._live.values()):
            late = now - request.added_seconds
            if request.samples or request.timeout_seconds is None or late < request.timeout_seconds:
                continue
            request.error = DeadlineExceeded(
                f"not done {late:.3g} seconds after it was added, and timeout_seconds="
                f"{request.timeout_seconds:g}; it has {len(request.output)} new tokens"
            )
            self._end(request, "error")
            expired.append(request)
        self.stats.num_expired += len(expired)
        return expired

    def _admit(self, num_steps: int) -> None:
        """Sends back whom the pool has no pages for, and lets in whom it has."""
        scheduler, sent_back = self._scheduler, []
        while scheduler.is_short:
            slot = scheduler.next_victim()
            self._swapper.keep(slot, scheduler.running[slot], scheduler.waiting)
            sent_back += scheduler.preempt()
            self.stats.num_preemptions += 1
        admitted = scheduler.admit()
        scheduler.make_room(num_steps)
        self._settle(sent_back)
        if not admitted:
            return
        self._runner.admit(admitted)
        scheduler.note_copied(admitted.values())
        for slot, request in admitted.items():
            num_partial = request.num_stored % self.page_size
            self.stats.prefix_tokens_hit += request.num_stored
            self.stats.prefix_tokens_copied += num_partial
            self.stats.copies_on_write += num_partial > 0
            self.stats.swapped_tokens += self._swapper.bring_back(slot, request)
            self.stats.recomputed_tokens += max(0, request.num_sent_back - request.num_stored)
            request.num_sent_back = 0

    def _prefill(self) -> list[tuple[dict[int, int], PromptLogprobs]]:
        """Stores prompts, a chunk of them if requests decode; returns what is still to be fetched.

        A chunk is what is left of it after every call, rounded down to a power of two.
        """
        outputs, scheduler, num_stored = [], self._scheduler, 0
        left = self._prefill_chunk if scheduler.num_decoding else None
        while left is None or left >= 16:
            most = None if left is None else 1 << (left.bit_length() - 1)
            plan = scheduler.next_prefill(most)
            if plan is None:
                break
            q_lens, num_rows = plan
            wanted = any(scheduler.running[slot].needs_prompt_logprobs for slot in q_lens)
            logprobs = self._runner.prefill(q_lens, num_rows, wants_logprobs=wanted)
            if logprobs is not None:
                outputs.append((q_lens, logprobs))
            for slot, q_len in q_lens.items():
                scheduler.running[slot].num_stored += q_len
            num_stored += sum(q_lens.values())
            left = None if left is None else left - num_rows
        self._runner.wait()  # so that prefill and decode are told apart
        self.stats.prefill_tokens += num_stored
        return outputs

    def _fork(self) -> None:
        """Has samples go on from the prompt that one of them has stored."""
        ready = self._scheduler.take_forks()
        self._runner.fork(ready)
        forked = [self._scheduler.running[slot] for slot in ready]
        # The page that is half full is copied when they write to it; one of them all keeps it.
        self.stats.copies_on_write += sum(r.num_stored % self.page_size > 0 for r in forked)

    def _take_news(self, news: News, tables: list[np.ndarray]) -> list[Request]:
        changed, scheduler, now = [], self._scheduler, self._clock()
        for slot, request in scheduler.running.items():
            num_new = take_tokens(request, news, slot)
            self.stats.decode_tokens += num_new
            if num_new:
                self._note_latency(request, num_new, now)
                request.num_stored = request.num_tokens - 1
            if num_new or request.finish_reason:
                changed.append(request)
            if scheduler.shares_prefixes and request.finish_reason != "error":
                scheduler.note_written(request, [table[slot] for table in tables])
        self._note_peak()
        done = []
        for request in changed:
            if request.finish_reason:
                done += scheduler.remove(scheduler.slot_of(request))
                self._forget(request)
        self._settle(done if scheduler.shares_prefixes else [])
        return changed

    def _note_latency(self, request: Request, num_new: int, now: float) -> None:
        before = request.last_token_seconds
        if before is None:
            self._latencies.note(1, now - request.added_seconds, are_first=True)
        else:
            self._latencies.note(num_new, now - before, are_first=False)
        request.last_token_seconds = now

    def _trace_steps(self, burst: Burst) -> None:
        if self._memory_trace and burst.memory:
            self._memory_trace.write_steps(
                burst.memory, int(burst.num_steps), waiting=len(self._scheduler.waiting),
                preemptions=self.stats.num_preemptions,
                recomputed_tokens=self.stats.recomputed_tokens,
            )  # fmt: skip

    def _note_peak(self) -> None:
        num_pages = self._scheduler.num_pages_used
        if num_pages > self.stats.peak_pages:
            self.stats.peak_pages = num_pages
            self.stats.peak_tokens = self._scheduler.num_tokens_stored

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Takes a request that waits or runs out, if it has not ended already."""
        if request.finish_reason is not None:
            return
        request.finish_reason, request.swapped = reason, None
        self._forget(request)
        if request in self._scheduler.waiting:
            self._scheduler.waiting.remove(request)
        else:
            self._settle(self._scheduler.remove(self._scheduler.slot_of(request)))

    def _forget(self, ended: Request) -> None:
        """Drops a request that has ended, and, with the last of its samples, the whole."""
        self._live.pop(ended.id, None)
        if self._memory_trace:
            self._memory_trace.write_request(ended)
        whole = self._live.get(ended.family) if ended.family is not None else None
        if whole and all(sample.finish_reason for sample in whole.samples):
            whole.finish_reason, whole.error = ended.finish_reason, ended.error
            del self._live[whole.id]

    def _settle(self, done: Sequence[int] = ()) -> None:
        """Has slots released, and the block tables told what the prefix index holds now."""
        self._runner.settle(done, self._scheduler.index.take_changes())
