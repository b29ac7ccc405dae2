"""What an engine has done and how it stands: counters, and a picture of one moment."""

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np

from paxkv.finite import finite

_MOST_TIMES = 10_000  # latest ones that percentiles are taken of


@dataclasses.dataclass(slots=True)
class EngineStats:
    """What the engine has done since it was made."""

    prompt_tokens: int = 0  # of the requests that were added
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    peak_pages: int = 0
    peak_tokens: int = 0  # in the cache, at the moment of most pages
    prefix_tokens_hit: int = 0  # in the cache already when a request was admitted
    prefix_tokens_copied: int = 0  # of these, in pages that only begin alike: hit, but not shared
    copies_on_write: int = 0  # pages that a sequence had shared until it wrote to them
    num_preemptions: int = 0
    recomputed_tokens: int = 0  # stored a second time after a preemption
    swapped_tokens: int = 0  # copied to the host instead, and back
    num_expired: int = 0  # requests that were given up at their deadline
    num_compilations: int = 0  # programs made ready during steps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of times in seconds; NaN where there are none."""

    p50: float
    p90: float
    p99: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """An engine at one moment; `Engine.metrics` returns it.

    Beam searches, for which the engine lends its cache, are not counted.
    """

    num_waiting: int
    num_running: int
    free_pages: int
    held_pages: int  # by running requests and pins
    reusable_pages: int  # of prefixes that nobody uses now
    token_share: float  # of the slots in held pages, those that hold a token; 1 if none is held
    first_token_seconds: Percentiles  # since a request was added
    token_gap_seconds: Percentiles  # between two tokens of a request, evenly over a burst
    stats: EngineStats  # what has been done so far

    def asdict(self) -> dict[str, float | None]:
        """All of it as one flat dictionary, as for a log line; None for percentiles of nothing."""
        flat = dataclasses.asdict(self)
        for name in ("first_token_seconds", "token_gap_seconds"):
            flat |= {f"{name}_{p}": seconds for p, seconds in flat.pop(name).items()}
        return finite(flat.pop("stats") | flat)


class Latencies:
    """The latest times that requests waited for tokens."""

    def __init__(self) -> None:
        self._first: collections.deque[float] = collections.deque(maxlen=_MOST_TIMES)
        self._gaps: collections.deque[float] = collections.deque(maxlen=_MOST_TIMES)

    def note(self, num_tokens: int, seconds: float, *, are_first: bool) -> None:
        """Notes that so many tokens came so long after what was before them."""
        if are_first:
            self._first.append(seconds)
        else:
            self._gaps.extend([seconds / num_tokens] * num_tokens)

    @property
    def first_token(self) -> Percentiles:
        """Until the first token."""
        return _percentiles(self._first)

    @property
    def token_gap(self) -> Percentiles:
        """Between two tokens."""
        return _percentiles(self._gaps)


def _percentiles(seconds: Iterable[float]) -> Percentiles:
    values = list(seconds)
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist() if values else [np.nan] * 3
    return Percentiles(p50=p50, p90=p90, p99=p99)
