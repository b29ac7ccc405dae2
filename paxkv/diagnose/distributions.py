"""Request lengths by name, for when there is no trace at hand: fitted to published statistics."""

import dataclasses
import math

import numpy as np

from paxkv.diagnose.trace import Trace


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Lengths whose logarithm is normal: most are short and a few are very long."""

    median: float  # tokens
    sigma: float  # of the logarithm

    def sample(self, rng: np.random.Generator, num: int) -> np.ndarray:
        """Whole lengths of 1 token or more, `i64[num]`."""
        lengths = np.exp(math.log(self.median) + self.sigma * rng.standard_normal(num))
        return np.maximum(np.rint(lengths), 1).astype(np.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LengthDistribution:
    """Independent prompt and output lengths, of requests that fit the context they were seen in."""

    source: str
    prompt: LogNormal
    output: LogNormal
    max_length: int  # prompt and output


# Fitted so that what `sample_trace` gives has the published figures, within 3 percent.
DISTRIBUTIONS = {
    "sharegpt": LengthDistribution(
        source="PagedAttention paper (SOSP 2023): means 161.31 and 337.99, figure 2 for the spread",
        prompt=LogNormal(median=71.4, sigma=1.5),
        output=LogNormal(median=248.5, sigma=0.87),
        max_length=2048,
    ),
    "azure-conv": LengthDistribution(
        source="Splitwise (ISCA 2024): medians 1020 and 129; means of the trace 1154.7 and 211.1",
        prompt=LogNormal(median=1020.0, sigma=0.498),
        output=LogNormal(median=129.0, sigma=0.993),
        max_length=16384,
    ),
    "azure-code": LengthDistribution(
        source="Splitwise (ISCA 2024): medians 1500 and 13; means of the trace 2047.9 and 27.9",
        prompt=LogNormal(median=1500.0, sigma=0.789),
        output=LogNormal(median=13.0, sigma=1.236),
        max_length=16384,
    ),
}


def sample_trace(
    name: str,
    *,
    num_requests: int = 20_000,
    seed: int = 0,
    requests_per_second: float | None = None,
) -> Trace:
    """Draws a trace from a distribution by name.

    Args:
        name: One of `DISTRIBUTIONS`.
        num_requests: How many.
        seed: The same seed gives the same trace.
        requests_per_second: Requests come at random at this mean rate; None: all wait at once.

    Raises:
        ValueError: No distribution has that name, or the rate is not above 0.
    """
    if name not in DISTRIBUTIONS:
        raise ValueError(f"{name!r} is none of {', '.join(DISTRIBUTIONS)}")
    chosen = DISTRIBUTIONS[name]
    rng = np.random.default_rng(seed)
    prompts, outputs = np.zeros(0, np.int64), np.zeros(0, np.int64)
    while len(prompts) < num_requests:
        prompt, output = (part.sample(rng, num_requests) for part in (chosen.prompt, chosen.output))
        fits = prompt + output <= chosen.max_length
        prompts = np.concatenate([prompts, prompt[fits]])
        outputs = np.concatenate([outputs, output[fits]])
    trace = Trace(
        name=name,
        prompt_tokens=prompts[:num_requests],
        output_tokens=outputs[:num_requests],
        notes=(f"lengths drawn from a fit, not measured: {chosen.source}",),
    )
    return trace if requests_per_second is None else with_arrivals(trace, requests_per_second, rng)


def with_arrivals(
    trace: Trace, requests_per_second: float, rng: np.random.Generator | None = None
) -> Trace:
    """The trace with requests that come independently of each other, at a mean rate."""
    if not 0 < requests_per_second < math.inf:
        raise ValueError(f"{requests_per_second} requests per second: the rate must be above 0")
    rng = rng or np.random.default_rng(0)
    gaps = rng.exponential(1 / requests_per_second, len(trace))
    return dataclasses.replace(
        trace,
        arrival_seconds=np.cumsum(gaps) - gaps[0],
        notes=(*trace.notes, f"arrivals drawn at {requests_per_second:g} requests per second"),
    )
