"""Requests of wildly different lengths, and what of a cache's memory they use while they run."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Asked(NamedTuple):
    """A prompt, and exactly how many tokens are to follow it."""

    prompt: list[int]
    new_tokens: int

    @property
    def most_stored(self) -> int:
        """Tokens in the cache in the end: the last one is never stored."""
        return len(self.prompt) + self.new_tokens - 1


def draw_requests(
    num: int,
    *,
    vocab_size: int,
    prompt_mean: float = 160.0,
    output_mean: float = 200.0,
    longest: int = 1024,
    seed: int = 0,
) -> list[Asked]:
    """Random tokens; prompt and output lengths are lognormal with these means, cut at `longest`."""
    rng = np.random.default_rng(seed)
    prompt_lens = _lognormal(rng, num, prompt_mean, longest)
    output_lens = _lognormal(rng, num, output_mean, longest)
    prompts = draw_prompts(prompt_lens, vocab_size=vocab_size, seed=seed)
    return [
        Asked(prompt, new_tokens) for prompt, new_tokens in zip(prompts, output_lens, strict=True)
    ]


def draw_prompts(lengths: Iterable[int], *, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random tokens."""
    rng = np.random.default_rng([seed, 1])
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def _lognormal(rng: np.random.Generator, num: int, mean: float, longest: int) -> list[int]:
    """Whole lengths; the logarithm has the standard deviation 1."""
    lengths = rng.lognormal(math.log(mean) - 0.5, 1.0, num)
    return np.clip(np.rint(lengths), 1, longest).astype(np.int64).tolist()


@dataclasses.dataclass(slots=True, kw_only=True)
class Held:
    """A request in memory during a burst."""

    num_stored: int  # tokens, before the burst
    most_stored: int  # tokens, in the end
    num_steps: int  # decode steps of the burst that it took part in


@dataclasses.dataclass(slots=True)
class MemoryUse:
    """Which slots of one token hold what, summed over decode steps.

    Used ones hold a token; reserved ones are a request's and will be filled; internal ones are a
    request's and never will be; the rest is nobody's.

    Args:
        capacity: Slots of one token that there are.
        room_of: How many of them a request with so many tokens takes.
    """

    capacity: int
    room_of: Callable[[int], int]
    num_steps: int = 0
    num_sequences: int = 0  # summed over steps, as are the next four
    used: int = 0
    reserved: int = 0
    internal: int = 0
    saturated_sequences: int = 0
    saturated_steps: int = 0  # in which requests waited
    peak_sequences: int = 0

    def note(self, burst: Sequence[Held], *, is_waiting: bool) -> None:
        """Accounts for a burst of decode steps."""
        num_steps = max((held.num_steps for held in burst), default=0)
        for i in range(num_steps):
            running = [held for held in burst if i < held.num_steps]
            for held in running:
                self._note_request(held.num_stored + i + 1, held.most_stored)
            self.num_sequences += len(running)
            self.saturated_sequences += len(running) * is_waiting
            self.peak_sequences = max(self.peak_sequences, len(running))
        self.num_steps += num_steps
        self.saturated_steps += num_steps * is_waiting

    def _note_request(self, num_stored: int, most_stored: int) -> None:
        room = self.room_of(num_stored)
        filled = max(num_stored, min(most_stored, room))
        self.used += num_stored
        self.reserved += filled - num_stored
        self.internal += room - filled

    def summary(self) -> dict[str, float]:
        """Means over decode steps: sequences, and shares of the capacity."""
        steps = max(1, self.num_steps)
        shares = {
            kind: getattr(self, kind) / (steps * self.capacity)
            for kind in ("used", "reserved", "internal")
        }
        return {
            "sequences_mean": self.num_sequences / steps,
            "sequences_while_waiting": self.saturated_sequences / max(1, self.saturated_steps),
            "sequences_peak": self.peak_sequences,
            "decode_steps": self.num_steps,
            **shares,
            "nobodys": 1 - sum(shares.values()),
        }
