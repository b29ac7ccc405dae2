"""A request trace: how long prompts and outputs are, when they come, what they begin with."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """`n` requests, in the order in which they come."""

    name: str
    prompt_tokens: np.ndarray  # i64[n]
    output_tokens: np.ndarray  # i64[n]
    arrival_seconds: np.ndarray | None = None  # f64[n] from the first on; None: all wait at once
    prefixes: "Prefixes | None" = None
    notes: tuple[str, ...] = ()  # what the reader of a report should know about the numbers

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def total_tokens(self) -> np.ndarray:
        """Prompt and output of each request, `i64[n]`."""
        return self.prompt_tokens + self.output_tokens

    def take(self, indices: np.ndarray, *, note: str | None = None) -> "Trace":
        """Some of the requests (`i64[m]` or `bool[n]`), in that order.

        Arrival times are kept for requests that stay in order, which is for the caller to see to.
        """
        seconds = self.arrival_seconds
        return dataclasses.replace(
            self,
            prompt_tokens=self.prompt_tokens[indices],
            output_tokens=self.output_tokens[indices],
            arrival_seconds=None if seconds is None else seconds[indices],
            prefixes=self.prefixes.take(indices) if self.prefixes else None,
            notes=self.notes + ((note,) if note else ()),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Which prompts begin alike: one id per full or partial block of a prompt.

    Equal ids mean that the prompts are equal up to the end of that block.
    """

    block_tokens: int
    ids: np.ndarray  # i64[blocks of all requests, one request after the other]
    starts: np.ndarray  # i64[n + 1] where each request's ids begin, and the end

    def of(self, request: int) -> np.ndarray:
        """The ids of one request's blocks, in order."""
        return self.ids[self.starts[request] : self.starts[request + 1]]

    def take(self, indices: np.ndarray) -> "Prefixes":
        """Those of some of the requests, in that order."""
        rows = np.arange(len(self.starts) - 1)[indices]
        chosen = [self.of(row) for row in rows.tolist()]
        lengths = [len(ids) for ids in chosen]
        return dataclasses.replace(
            self,
            ids=np.concatenate([np.zeros(0, np.int64), *chosen]),
            starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        )


def fit_to_context(trace: Trace, max_length: int, *, skips_longer: bool) -> Trace:
    """The requests that a model can serve: neither empty nor longer than its context.

    Raises:
        ValueError: A request is longer and `skips_longer` is False, or none is left.
    """
    is_longer = trace.total_tokens > max_length
    if is_longer.any() and not skips_longer:
        first = int(np.argmax(is_longer))
        raise ValueError(
            f"{is_longer.sum():,} of {len(trace):,} requests are longer than the model's context "
            f"of {max_length:,} tokens (request {first + 1}: {trace.prompt_tokens[first]:,} of "
            f"prompt and {trace.output_tokens[first]:,} of output). Leave them out with "
            "--skip-longer, or name another length with --context"
        )
    is_empty = (trace.prompt_tokens < 1) | (trace.output_tokens < 1)
    kept = ~is_longer & ~is_empty
    if not kept.any():
        raise ValueError(
            f"none of the {len(trace):,} requests has a prompt, an output and at most "
            f"{max_length:,} tokens: is this the right trace for the model?"
        )
    dropped = []
    if is_longer.any():
        dropped.append(f"{is_longer.sum():,} longer than {max_length:,} tokens")
    if (is_empty & ~is_longer).any():
        dropped.append(f"{(is_empty & ~is_longer).sum():,} without prompt or output")
    note = f"left out: {', '.join(dropped)}" if dropped else None
    return trace.take(kept, note=note) if note else trace
