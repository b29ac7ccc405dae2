"""Serves requests from a cache of one row of maximum length per slot, in batches or one by one."""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from benchmarks.contiguous_cache import decode_burst_jit, init_layers, piece_lengths, prefill_jit
from paxkv.decoder import Decoder
from paxkv.sampling import greedy_sampling


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class ContiguousRequest:
    """One prompt, and the tokens that followed so far."""

    prompt: list[int]
    max_tokens: int
    output: list[int] = dataclasses.field(default_factory=list)

    @property
    def num_left(self) -> int:
        """Tokens that it still wants."""
        return self.max_tokens - len(self.output)

    @property
    def num_stored(self) -> int:
        """Tokens in the cache: all but the newest."""
        return len(self.prompt) + len(self.output) - 1


class ContiguousEngine:
    """Greedy decoding as `paxkv.engine.Engine` does it, over a cache without pages.

    Requests end by length alone, so that the host knows when a slot can be refilled.

    Args:
        decoder: See `paxkv.decoder`; of one layer group.
        num_slots: Requests that run at once, each with a row of `max_length` tokens.
        max_length: Prompt and output of one request, in tokens.
        dtype: Of keys and values.
        max_burst: Decode steps between two looks of the host.
        is_static: Refill slots only when all are empty, which is how batches are served without
            continuous batching.
        smallest_piece: See `piece_lengths`.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_slots: int,
        max_length: int,
        dtype: DTypeLike = jnp.float32,
        max_burst: int = 16,
        is_static: bool = False,
        smallest_piece: int = 256,
    ) -> None:
        self.max_length = max_length
        self.max_burst = max_burst
        self._decoder = decoder
        self._is_static = is_static
        lengths = piece_lengths(max_length, smallest_piece)
        self._piece_ends = list(itertools.accumulate(lengths))
        self._layers = init_layers(decoder, num_slots, lengths, dtype)
        self._sampling = greedy_sampling(num_slots)
        self._slots: list[ContiguousRequest | None] = [None] * num_slots
        self._waiting: collections.deque[ContiguousRequest] = collections.deque()

    @property
    def has_work(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._waiting) or any(self._slots)

    def add(self, prompt: Sequence[int], max_tokens: int) -> ContiguousRequest:
        """Queues a request."""
        assert len(prompt) + max_tokens <= self.max_length
        request = ContiguousRequest(prompt=list(prompt), max_tokens=max_tokens)
        self._waiting.append(request)
        return request

    def step(self, max_steps: int | None = None) -> list[ContiguousRequest]:
        """Refills slots, stores their prompts, and decodes for a burst; who has new tokens.

        Args:
            max_steps: Decode steps at most; `max_burst` when None.
        """
        self._refill()
        running = [request for request in self._slots if request]
        lefts = [request.num_left for request in running]
        until = min(lefts) if self._waiting and not self._is_static else max(lefts)
        news = self._decode(min(until, self.max_burst, max_steps or self.max_burst))
        for slot, request in enumerate(self._slots):
            if request:
                request.output.extend(news[slot, : min(request.num_left, len(news[slot]))].tolist())
        self._slots = [request if request and request.num_left else None for request in self._slots]
        return running

    def warm_up(self, prompt_lens: Iterable[int]) -> None:
        """Compiles what prompts of these lengths, and whatever follows them, take."""
        for num_rows in {prompt_bucket(num - 1, self.max_length) for num in prompt_lens if num > 1}:
            self._prefill([0] * num_rows, 0)
        for num_pieces in range(1, len(self._piece_ends) + 1):
            self._burst([[0, 0, 0]] * len(self._slots), 0, num_pieces)

    def _refill(self) -> None:
        if self._is_static and any(self._slots):
            return
        for slot, request in enumerate(self._slots):
            if request is None and self._waiting:
                self._slots[slot] = new = self._waiting.popleft()
                self._prefill(new.prompt[:-1], slot)

    def _prefill(self, tokens: Sequence[int], slot: int) -> None:
        if not tokens:
            return
        padded = np.zeros(prompt_bucket(len(tokens), self.max_length), np.int32)
        padded[: len(tokens)] = tokens
        self._layers = prefill_jit(self._decoder, self._layers, padded, np.int32(slot))

    def _decode(self, num_steps: int) -> np.ndarray:
        """The tokens of a burst, `i32[B, num_steps]`."""
        rows = [
            [*(r.prompt + r.output)[-1:], r.num_stored, r.num_left] if r else [0, 0, 0]
            for r in self._slots
        ]
        longest = max(stored + min(left, num_steps) for _, stored, left in rows)
        num_pieces = 1 + int(np.searchsorted(self._piece_ends, longest))
        return self._burst(rows, num_steps, num_pieces)[:, :num_steps]

    def _burst(self, rows: list[list[int]], num_steps: int, num_pieces: int) -> np.ndarray:
        newest, num_stored, num_left = np.array(rows, np.int32).T
        self._layers, news = decode_burst_jit(
            self._decoder, self._layers, newest, num_stored, num_left, self._sampling,
            np.int32(num_steps), num_pieces=num_pieces, max_burst=self.max_burst,
        )  # fmt: skip
        return jax.device_get(news)


def prompt_bucket(num_tokens: int, max_length: int) -> int:
    """Rows that so many tokens are padded to: a quarter more at most, 11 % on average.

    Four lengths for each power of two from 128 on, multiples of 32 below.
    """
    step = max(32, (1 << num_tokens.bit_length()) >> 3)
    return min(-(-num_tokens // step) * step, max_length)
