"""The device's half of an engine: its arrays, and the compiled programs that change them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from paxkv.cache import PagedCache, init_cache
from paxkv.decoder import Decoder
from paxkv.logits_processors import LogitsProcessor
from paxkv.prefix_index import PageChanges
from paxkv.request import MAX_LOGPROBS
from paxkv.request_state import Request, Swapped
from paxkv.scheduler import prefill_buckets
from paxkv.slots import Slots, idle_requests, init_slots
from paxkv.steps import (
    Burst,
    PromptLogprobs,
    admit_step_jit,
    decode_loop_jit,
    fork_all_jit,
    prefill_step_jit,
    settle_step_jit,
    swap_in_jit,
    swap_out_jit,
)
from paxkv.transfer import NUM_STOP_IDS, prefixes_of, rows_of, table_changes

_FEW_SLOTS = 8  # always decoded together, by one program
_WIDE_STEP = 32  # rows from which on three quarters of a power of two have a program too


def decode_rows(num_decoding: int, num_slots: int) -> int:
    """The rows of a decode step: few numbers, so that few programs are compiled.

    Of 64 slots, those that decode take the next of 1, 2, 4, 8, 16, 24, 32, 48 and 64 rows.
    """
    if num_slots <= _FEW_SLOTS:
        return num_slots
    power = 1 << (max(num_decoding, 1) - 1).bit_length()
    between = power * 3 // 4
    rows = between if power >= _WIDE_STEP and num_decoding <= between else power
    return min(num_slots, rows)


class Runner:
    """Decoder, cache and slots. The host waits for the device in `fetch` and `swap_out` only.

    Args:
        decoder: See `paxkv.decoder`.
        num_slots: Requests that run at once.
        max_length: Prompt and output of one request, in tokens.
        num_pages: Pages of each layer group's pool, the null page counted.
        page_size: Tokens per page.
        dtype: Of keys and values.
        max_burst: Decode steps between two looks of the host.
        seed: What requests without a seed of their own draw from.
        keeps_pages: Whether the pages of requests that end stay in their slots until `settle`.
        notes_memory: Whether bursts tell what the memory was used for.
        processor: Changes logits before sampling.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_slots: int,
        max_length: int,
        num_pages: Sequence[int],
        page_size: int,
        dtype: DTypeLike,
        max_burst: int,
        seed: int,
        keeps_pages: bool,
        notes_memory: bool,
        processor: LogitsProcessor,
    ) -> None:
        self.decoder = decoder
        self._num_slots = num_slots
        self._max_length = max_length
        self._max_logprobs = min(MAX_LOGPROBS, decoder.vocab_size)
        self._seed = seed
        self._keeps_pages = keeps_pages
        self._notes_memory = notes_memory
        self._processor = processor
        self._verdicts: list[jax.Array] = []  # of operations that must go well
        self.cache: PagedCache = init_cache(
            decoder.layer_groups,
            num_slots=num_slots,
            max_length=max_length,
            num_pages=num_pages,
            page_size=page_size,
            dtype=dtype,
        )
        self.slots: Slots = init_slots(
            idle_requests(num_slots, max_length, NUM_STOP_IDS),
            max_burst=max_burst,
            max_logprobs=self._max_logprobs,
            processor=processor,
        )

    def admit(self, admitted: Mapping[int, Request]) -> None:
        """Puts requests into slots, with the pages of the prefix index that they begin with."""
        is_new, requests = rows_of(
            admitted, self._num_slots, self._max_length, engine_seed=self._seed
        )
        storing = {slot: request for slot, request in admitted.items() if not request.waits_for}
        self.cache, self.slots, ok = admit_step_jit(
            self.cache, self.slots, is_new, requests, *prefixes_of(storing, self.cache),
            processor=self._processor,
        )  # fmt: skip
        self._verdicts.append(ok)

    def prefill(
        self, q_lens: Mapping[int, int], num_rows: int, *, wants_logprobs: bool
    ) -> PromptLogprobs | None:
        """Stores the next tokens of slots, so many of each."""
        self.cache, fits, logprobs = prefill_step_jit(
            self.decoder, self.cache, self.slots,
            np.array([q_lens.get(slot, 0) for slot in range(self._num_slots)], np.int32),
            num_rows=num_rows, num_prompt_logprobs=self._max_logprobs if wants_logprobs else None,
        )  # fmt: skip
        self._verdicts.append(fits)
        return logprobs

    def fork(self, parents: Mapping[int, int]) -> None:
        """Has slots go on from what their parents have stored."""
        if parents:
            slots = range(self._num_slots)
            rows = np.array([parents.get(slot, slot) for slot in slots], np.int32)
            self.cache, ok = fork_all_jit(self.cache, rows)
            self._verdicts.append(ok)

    def decode(
        self,
        num_steps: int,
        *,
        num_decoding: int,
        until_finish: bool = False,
        is_waiting: bool = False,
    ) -> Burst:
        """Decodes for a burst, in which so many slots decode; see `decode_loop`."""
        self.cache, self.slots, burst = decode_loop_jit(
            self.decoder, self.cache, self.slots, np.int32(num_steps),
            until_finish=np.bool_(until_finish), is_waiting=np.bool_(is_waiting),
            num_rows=decode_rows(num_decoding, self._num_slots),
            keeps_pages=self._keeps_pages, notes_memory=self._notes_memory,
            processor=self._processor,
        )  # fmt: skip
        return burst

    def settle(self, done: Collection[int], changes: PageChanges) -> None:
        """Releases slots, and tells the block tables what the prefix index holds now."""
        if not done and not changes:
            return
        is_done = np.isin(np.arange(self._num_slots), list(done))
        self.cache, self.slots, ok = settle_step_jit(
            self.cache, self.slots, is_done, *table_changes(changes, self.cache)
        )
        self._verdicts.append(ok)

    def swap_out(self, slot: int, num_pages: int, num_tokens: int) -> Swapped:
        """Copies what a slot has stored to the host; its pages are still to be released."""
        contents = jax.device_get(swap_out_jit(self.cache, np.int32(slot), num_pages=num_pages))
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(contents))
        return Swapped(num_tokens, num_bytes, contents)

    def swap_in(self, slot: int, swapped: Swapped, first_page: int) -> None:
        """Brings it back, but for the pages before `first_page`, which the slot has."""
        self.cache, ok = swap_in_jit(
            self.cache, np.int32(slot), swapped.contents, np.int32(first_page),
            np.int32(swapped.num_tokens),
        )  # fmt: skip
        self._verdicts.append(ok)

    def wait(self) -> None:
        """Returns when what was asked for so far is done."""
        jax.block_until_ready(self.cache[0][1].lengths)

    def fetch[T](self, results: T) -> tuple[T, list[np.ndarray]]:
        """Brings results to the host, and the layer groups' block tables if they are needed.

        Raises:
            RuntimeError: An operation was refused since the last time.
        """
        tables = [table.block_tables for _, table in self.cache] if self._keeps_pages else []
        verdicts, self._verdicts = self._verdicts, []
        results, tables, verdicts = jax.device_get((results, tables, verdicts))
        if not all(verdicts):
            raise RuntimeError(
                f"{len(verdicts) - sum(verdicts)} operations on the cache were refused: the block "
                "tables are not what the scheduler takes them for, which is a fault of paxkv"
            )
        return results, tables

    def compile(self, max_prefill_tokens: int) -> None:
        """Calls what serving calls, to no effect: then nothing of it is compiled any more.

        Log-probabilities of prompts are left out, and swaps: `compile_swaps`.
        """
        for num_rows in prefill_buckets(max_prefill_tokens):
            self.prefill({}, num_rows, wants_logprobs=False)
        for num_decoding in range(1, self._num_slots + 1):
            self.decode(0, num_decoding=num_decoding)
        self.admit({})
        self.fork({0: 0})
        self.settle([0], PageChanges())
        self.fetch(())

    def compile_swaps(self, num_pages: int) -> None:
        """Copies so many pages of the first slot to the host, and none of them back."""
        num_tokens = int(jax.device_get(self.cache[0][1].lengths[0]))
        self.swap_in(0, self.swap_out(0, num_pages, num_tokens), first_page=num_pages)
        self.fetch(())

    def run(
        self, program: Callable[[Decoder, PagedCache, Slots], tuple[PagedCache, *tuple[Any, ...]]]
    ) -> list[Any]:
        """Runs a program of another kind on the cache; returns its results."""
        self.cache, *results = program(self.decoder, self.cache, self.slots)
        return results
