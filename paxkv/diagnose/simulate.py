"""Replays a trace against a pool: iteration-level batching, first come first served.

Every running request makes one token per step, and a request's prompt is stored when it begins, so
a step is a decode step and prefill takes no time. What happens between two events (a request ends
or comes, the memory is full) is computed at once.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from paxkv.diagnose.counted_request import CountedRequest, counted_request
from paxkv.diagnose.policy import Account, Policy
from paxkv.diagnose.trace import Trace

STEP_SECONDS = 0.03  # of a decode step, where nothing is known about it
WARMUP = 0.15  # of the steps, while the first requests are all of one age
THRASHING = 0.5  # tokens computed again per output token, from which on we call it that
_MAX_ROWS = 2**20  # numbers in one array of steps by requests


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a policy made of a trace, step by step. Steps of the warm-up are left out of means."""

    num_slots: int
    account: Account  # per step
    duplicate: np.ndarray  # i64[steps] of used
    running: np.ndarray  # i64[steps] requests
    waiting: np.ndarray  # i64[steps] requests
    blocked: np.ndarray  # bool[steps] whether one waits for memory, not only for its turn
    warmup_steps: int
    num_completed: int
    num_preemptions: int
    num_refused: int  # requests that do not fit in the pool, even alone
    recomputed_tokens: int

    @property
    def num_steps(self) -> int:
        """All of them, the warm-up included."""
        return len(self.running)

    @property
    def shares(self) -> dict[str, float]:
        """Mean percent of the pool by kind; `duplicate` is part of `used`."""
        kinds = self.account._asdict() | {"duplicate": self.duplicate}
        return {kind: 100 * self._mean(tokens) / self.num_slots for kind, tokens in kinds.items()}

    @property
    def mean_running(self) -> float:
        """Requests at once, and so output tokens per step."""
        return self._mean(self.running)

    @property
    def recomputed_share(self) -> float:
        """Tokens computed a second time, per output token."""
        return self.recomputed_tokens / max(int(self.running.sum()), 1)

    @property
    def is_thrashing(self) -> bool:
        """Whether much of the work is lost to preemption, however full the pool is."""
        return self.recomputed_share > THRASHING

    @property
    def blocked_share(self) -> float:
        """Part of the steps in which a request waited for memory."""
        return self._mean(self.blocked)

    @property
    def peak_used_percent(self) -> float:
        """Most of the pool that ever held tokens."""
        return 100 * float(self.account.used.max(initial=0)) / self.num_slots

    def _mean(self, per_step: np.ndarray) -> float:
        counted = per_step[self.warmup_steps :]
        return float(counted.mean()) if len(counted) else 0.0


def simulate(
    policy: Policy,
    trace: Trace,
    *,
    max_steps: int | None = None,
    warmup_steps: int | None = None,
    step_seconds: float = STEP_SECONDS,
    on_stretch: Callable[[int], None] = lambda step: None,
) -> Simulation:
    """Runs a trace, or the first steps of it.

    A trace without arrival times is one long queue, and ends for us when the queue does: what
    memory can hold shows only while requests wait.

    Args:
        policy: Who hands out memory; it has no requests yet.
        trace: Requests of one token of prompt and output at least. Without arrival times all of
            them wait at the first step.
        max_steps: Where to stop.
        warmup_steps: Steps at the begin that means leave out. None leaves out `WARMUP` of the
            steps where all requests wait at the first one, and otherwise none.
        step_seconds: Time of a step, which arrival times are divided by.
        on_stretch: Called with the next step whenever some steps are done.

    Raises:
        ValueError: No request can ever run in the pool.
    """
    requests = _requests(trace)
    arrivals = _arrival_steps(trace, step_seconds)
    is_queue = trace.arrival_seconds is None
    log = _Log(policy)
    step = num_arrived = 0
    while max_steps is None or step < max_steps:
        while num_arrived < len(requests) and arrivals[num_arrived] <= step:
            log.add(requests[num_arrived])
            num_arrived += 1
        policy.admit(step)
        events = [request.end for request in policy.running()]
        num_running = len(events)
        num_waiting = num_arrived - log.num_completed - log.num_refused - num_running
        if is_queue and num_waiting == 0 and log.has_waited:
            break
        if num_arrived < len(requests):
            events.append(int(arrivals[num_arrived]))
        if not events:
            break
        if max_steps is not None:
            events.append(max_steps)
        wanted = min(min(events) - step, _MAX_ROWS // max(num_running, 1) + 1)
        done = log.account(step, wanted, num_running, num_waiting)
        step += done
        on_stretch(step)
        if done < wanted:
            log.recomputed_tokens += policy.preempt(step)
            log.num_preemptions += 1
            continue
        for request in [request for request in policy.running() if request.end == step]:
            policy.finish(request)
            log.num_completed += 1
    if warmup_steps is None:
        warmup_steps = int(WARMUP * step) if is_queue else 0
    return log.result(warmup_steps)


def _requests(trace: Trace) -> list[CountedRequest]:
    prefixes = trace.prefixes
    requests = []
    lengths = zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    for index, (prompt, output) in enumerate(lengths):
        request = counted_request(index, prompt, output)
        if prefixes is not None:
            request.block_ids = prefixes.of(index)[: prompt // prefixes.block_tokens]
        requests.append(request)
    return requests


def _arrival_steps(trace: Trace, step_seconds: float) -> np.ndarray:
    if trace.arrival_seconds is None:
        return np.zeros(len(trace), np.int64)
    return np.floor(trace.arrival_seconds / step_seconds).astype(np.int64)


class _Log:
    """Collects what the policy says of each stretch of steps."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._accounts: list[Account] = []
        self._others: list[tuple[int, ...]] = []  # steps, running, waiting, blocked, duplicate
        self.has_waited = False  # whether ever a request did
        self.num_completed = self.num_preemptions = self.num_refused = 0
        self.recomputed_tokens = 0
        self._why_refused: ValueError | None = None

    def add(self, request: CountedRequest) -> None:
        """Queues a request, or counts it as refused."""
        try:
            self._policy.add(request)
        except ValueError as error:
            self._why_refused = error
            self.num_refused += 1

    def account(self, step: int, num_steps: int, num_running: int, num_waiting: int) -> int:
        """Returns how many of the steps there is memory for."""
        account = self._policy.account(step, num_steps)
        done = len(account.used)
        others = (num_running, num_waiting, self._policy.is_blocked())
        self.has_waited |= num_waiting > 0
        self._accounts.append(account)
        self._others.append((done, *others, self._policy.duplicate_tokens()))
        return done

    def result(self, warmup_steps: int) -> Simulation:
        """Everything, step by step."""
        steps, *others = np.array(self._others or [(0,) * 5]).T
        running, waiting, blocked, duplicate = (np.repeat(values, steps) for values in others)
        if self._why_refused and not running.any():
            raise self._why_refused
        accounts = zip(*self._accounts, strict=True)
        return Simulation(
            num_slots=self._policy.num_slots,
            account=Account(*(np.concatenate(series) for series in accounts)),
            duplicate=duplicate,
            running=running,
            waiting=waiting,
            blocked=blocked.astype(bool),
            warmup_steps=warmup_steps,
            num_completed=self.num_completed,
            num_preemptions=self.num_preemptions,
            num_refused=self.num_refused,
            recomputed_tokens=self.recomputed_tokens,
        )
