"""Continuous batching: who is admitted, what is stored and decoded next, who leaves."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from paxkv.compilations import counted_compilations
from paxkv.errors import DeadlineExceeded
from paxkv.memory_trace import MemoryTrace
from paxkv.metrics import EngineStats, Latencies
from paxkv.preemption import PreemptionCosts, Swapper
from paxkv.request import FinishReason
from paxkv.request_state import Request
from paxkv.runner import Runner
from paxkv.scheduler import Scheduler
from paxkv.slots import News
from paxkv.steps import Burst, PromptLogprobs
from paxkv.transfer import take_prompt_logprobs, take_tokens


class ContinuousBatching:
    """The steps of an engine, which says what its settings mean.

    Args:
        scheduler: Decides on counts.
        runner: Has the arrays.
        swapper: Keeps what preempted requests had stored.
        costs: Of preemption, which are measured here.
        prefill_chunk: Prompt tokens between two bursts while requests decode.
        max_burst: Decode steps of a burst.
        clock: Seconds from any moment on.
        memory_trace: A log of what the memory is used for.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        swapper: Swapper,
        costs: PreemptionCosts,
        *,
        prefill_chunk: int,
        max_burst: int,
        clock: Callable[[], float],
        memory_trace: MemoryTrace | None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.live: dict[int, Request] = {}  # those that have not ended, and their samples
        self.stats = EngineStats()
        self.latencies = Latencies()
        self._swapper = swapper
        self._costs = costs
        self._prefill_chunk = prefill_chunk
        self._max_burst = max_burst
        self._clock = clock
        self._memory_trace = memory_trace

    @property
    def num_begun(self) -> int:
        """Requests that run, or wait for the rest of an answer that has begun."""
        # One without output may have a part of its prompt in a copy on the host; and samples are
        # judged beside those of the same prompt that have ended.
        begun_families = {
            whole.id
            for whole in self.live.values()
            if any(sample.finish_reason for sample in whole.samples)
        }
        waiting = [
            request
            for request in self.scheduler.waiting
            if request.output or request.num_sent_back or request.family in begun_families
        ]
        return len(self.scheduler.running) + len(waiting)

    def queue(self, request: Request) -> None:
        """Has a request, or all its samples, wait for their turn."""
        for part in (request, *request.samples):
            part.added_seconds = self._clock()
            self.live[part.id] = part
        for part in request.parts:
            self.scheduler.queue(part)
            if self._memory_trace:
                self._memory_trace.note_arrival(part)
        self.stats.prompt_tokens += len(request.prompt)

    def step(self, max_steps: int | None) -> list[Request]:
        """See `Engine.step`."""
        with counted_compilations() as compilations:
            changed = self._expire() + self._step(max_steps)
        self.stats.num_compilations += compilations.count
        return changed

    def end(self, request: Request, reason: FinishReason) -> None:
        """Takes a request that waits or runs out, if it has not ended already."""
        if request.finish_reason is not None:
            return
        request.finish_reason, request.swapped = reason, None
        self._forget(request)
        if request in self.scheduler.waiting:
            self.scheduler.waiting.remove(request)
        else:
            self.settle(self.scheduler.remove(self.scheduler.slot_of(request)))

    def settle(self, done: Sequence[int] = ()) -> None:
        """Has slots released, and the block tables told what the prefix index holds now."""
        self.runner.settle(done, self.scheduler.index.take_changes())

    def _step(self, max_steps: int | None) -> list[Request]:
        scheduler = self.scheduler
        num_steps = self._max_burst if max_steps is None else min(max_steps, self._max_burst)
        self._admit(num_steps)
        begin, num_stored = time.perf_counter(), self.stats.prefill_tokens
        prompt_logprobs = self._prefill()
        self._fork()
        middle = time.perf_counter()
        self._costs.note_recompute(self.stats.prefill_tokens - num_stored, middle - begin)
        if scheduler.is_storing or scheduler.is_waiting_for_pages:
            num_steps = min(num_steps, 1)
        burst = self.runner.decode(
            num_steps,
            num_decoding=scheduler.num_decoding,
            until_finish=bool(scheduler.waiting),
            is_waiting=scheduler.is_blocked,
        )
        (burst, prompt_logprobs), tables = self.runner.fetch((burst, prompt_logprobs))
        self._trace_steps(burst)
        self.stats.prefill_seconds += middle - begin
        self.stats.decode_seconds += time.perf_counter() - middle
        for q_lens, logprobs in prompt_logprobs:
            take_prompt_logprobs(scheduler.running, q_lens, logprobs)
        return self._take_news(burst.news, tables)

    def _expire(self) -> list[Request]:
        """Gives up requests whose deadline has passed; returns them."""
        now, expired = self._clock(), []
        for request in list(self.live.values()):
            late = now - request.added_seconds
            if request.samples or request.timeout_seconds is None or late < request.timeout_seconds:
                continue
            request.error = DeadlineExceeded(
                f"not done {late:.3g} seconds after it was added, and timeout_seconds="
                f"{request.timeout_seconds:g}; it has {len(request.output)} new tokens: allow more "
                "time, or ask for fewer"
            )
            self.end(request, "error")
            expired.append(request)
        self.stats.num_expired += len(expired)
        return expired

    def _admit(self, num_steps: int) -> None:
        """Sends back whom the pool has no pages for, and lets in whom it has."""
        scheduler, sent_back = self.scheduler, []
        while scheduler.is_short:
            slot = scheduler.next_victim()
            self._swapper.keep(slot, scheduler.running[slot], scheduler.waiting)
            sent_back += scheduler.preempt()
            self.stats.num_preemptions += 1
        admitted = scheduler.admit()
        scheduler.make_room(num_steps)
        self.settle(sent_back)
        if not admitted:
            return
        self.runner.admit(admitted)
        scheduler.note_copied(admitted.values())
        for slot, request in admitted.items():
            num_partial = request.num_stored % self.scheduler.page_size
            self.stats.prefix_tokens_hit += request.num_stored
            self.stats.prefix_tokens_copied += num_partial
            self.stats.copies_on_write += num_partial > 0
            self.stats.swapped_tokens += self._swapper.bring_back(slot, request)
            self.stats.recomputed_tokens += max(0, request.num_sent_back - request.num_stored)
            request.num_sent_back = 0
            if request.needs_prompt_logprobs:  # of what is stored again they are told again
                del request.prompt_logprobs[request.num_stored + 1 :]

    def _prefill(self) -> list[tuple[dict[int, int], PromptLogprobs]]:
        """Stores prompts, a chunk of them if requests decode; returns what is still to be fetched.

        A chunk is what is left of it after every call, rounded down to a power of two.
        """
        outputs, scheduler, num_stored = [], self.scheduler, 0
        left = self._prefill_chunk if scheduler.num_decoding else None
        while left is None or left >= 16:
            most = None if left is None else 1 << (left.bit_length() - 1)
            plan = scheduler.next_prefill(most)
            if plan is None:
                break
            q_lens, num_rows = plan
            wanted = any(scheduler.running[slot].needs_prompt_logprobs for slot in q_lens)
            logprobs = self.runner.prefill(q_lens, num_rows, wants_logprobs=wanted)
            if logprobs is not None:
                outputs.append((q_lens, logprobs))
            for slot, q_len in q_lens.items():
                scheduler.running[slot].num_stored += q_len
            num_stored += sum(q_lens.values())
            left = None if left is None else left - num_rows
        self.runner.wait()  # so that prefill and decode are told apart
        self.stats.prefill_tokens += num_stored
        return outputs

    def _fork(self) -> None:
        """Has samples go on from the prompt that one of them has stored."""
        ready = self.scheduler.take_forks()
        self.runner.fork(ready)
        forked = [self.scheduler.running[slot] for slot in ready]
        # The page that is half full is copied when they write to it; one of them all keeps it.
        self.stats.copies_on_write += sum(
            r.num_stored % self.scheduler.page_size > 0 for r in forked
        )

    def _take_news(self, news: News, tables: list[np.ndarray]) -> list[Request]:
        changed, scheduler, now = [], self.scheduler, self._clock()
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
        self.settle(done if scheduler.shares_prefixes else [])
        return changed

    def _note_latency(self, request: Request, num_new: int, now: float) -> None:
        before = request.last_token_seconds
        if before is None:
            self.latencies.note(1, now - request.added_seconds, are_first=True)
        else:
            self.latencies.note(num_new, now - before, are_first=False)
        request.last_token_seconds = now

    def _trace_steps(self, burst: Burst) -> None:
        if self._memory_trace and burst.memory:
            self._memory_trace.write_steps(
                burst.memory, int(burst.num_steps), waiting=len(self.scheduler.waiting),
                preemptions=self.stats.num_preemptions,
                recomputed_tokens=self.stats.recomputed_tokens,
            )  # fmt: skip

    def _note_peak(self) -> None:
        num_pages = self.scheduler.num_pages_used
        if num_pages > self.stats.peak_pages:
            self.stats.peak_pages = num_pages
            self.stats.peak_tokens = self.scheduler.num_tokens_stored

    def _forget(self, ended: Request) -> None:
        """Drops a request that has ended, and, with the last of its samples, the whole."""
        self.live.pop(ended.id, None)
        if self._memory_trace:
            self._memory_trace.write_request(ended)
        whole = self.live.get(ended.family) if ended.family is not None else None
        if whole and all(sample.finish_reason for sample in whole.samples):
            whole.error, whole.finish_reason = ended.error, ended.finish_reason
            del self.live[whole.id]
