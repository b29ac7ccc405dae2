"""Prefill and decode: pure functions of (decoder, cache, slots), and their compiled forms.

Prefill stores the keys and values of known tokens, all but the newest of each request. Decode
stores the newest one and samples the next, again and again:

    cache, fits, _ = prefill_step(decoder, cache, slots, prompt_lens - 1, num_rows=512)
    cache, slots, burst = decode_loop(decoder, cache, slots, num_steps)

So sampling stands in one place, and what a prompt's last token predicts is always computed anew,
however much of the prompt was in the cache.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from paxkv.cache import (
    PagedCache,
    adopt_all,
    append_all,
    fork_all,
    release_all,
    release_windows,
    reserve_all,
    settle_all,
)
from paxkv.cache_view import CacheView
from paxkv.decoder import Decoder
from paxkv.logits_processors import LogitsProcessor
from paxkv.memory_series import MemorySeries, init_series, note_step
from paxkv.next_tokens import sample_next
from paxkv.pallas_kernels.ragged import Ragged
from paxkv.sampling import log_probabilities
from paxkv.slots import DEFAULT_PROCESSOR, Finish, News, Requests, Slots, admit
from paxkv.swap import swap_in, swap_out

_LOGPROB_ROWS = 64  # rows of prompt logits `[rows, V]` that exist at once


class PromptLogprobs(NamedTuple):
    """How likely each packed row's next token was; of use where that token is the prompt's."""

    logprobs: jax.Array  # f32[T]
    top_ids: jax.Array  # i32[T, n] the most likely tokens, best first
    top_logprobs: jax.Array  # f32[T, n]


class Burst(NamedTuple):
    """What a burst of decode steps tells the host, in one transfer."""

    news: News
    lengths: jax.Array  # i32[B] tokens in the cache now
    num_steps: jax.Array  # i32[] decode steps made
    fits: jax.Array  # bool[] False: the pool could not serve the next step
    memory: MemorySeries | None = None  # of these steps, if it was noted


class _LoopState(NamedTuple):
    """What a decode loop carries."""

    cache: PagedCache
    slots: Slots
    memory: MemorySeries | None
    steps: jax.Array  # i32[] made
    fits: jax.Array  # bool[]


def prefill_step(
    decoder: Decoder,
    cache: PagedCache,
    slots: Slots,
    q_lens: jax.Array,
    *,
    num_rows: int,
    num_prompt_logprobs: int | None = None,
) -> tuple[PagedCache, jax.Array, PromptLogprobs | None]:
    """Stores the next `q_lens` tokens of each slot: prompts, or chunks of them, packed.

    Args:
        decoder: See `paxkv.decoder`.
        cache: Pages are reserved for the tokens; if the pool is short, nothing happens at all.
        slots: The requests. Their newest token is left to decode.
        q_lens: `i32[B]`, at most what a slot has besides its newest token that is not in the
            cache. 0 or less leaves a slot be.
        num_rows: T, at least the sum of `q_lens`; each T is compiled once.
        num_prompt_logprobs: n, of how many best tokens the prompt's log-probabilities are wanted.

    Returns:
        The new cache; `bool[]`, whether the pool had the pages; the log-probabilities, if wanted.
    """
    q_lens = jnp.maximum(q_lens, 0)  # `prompt_lens - 1` of an idle slot is -1
    cache, fits, hidden, view = store(
        decoder, cache, q_lens, partial(_tokens_at, slots.requests), num_rows=num_rows
    )
    if num_prompt_logprobs is None:
        return cache, fits, None
    rows = view.rows(num_rows)
    return cache, fits, _prompt_logprobs(decoder, hidden, slots.requests, rows, num_prompt_logprobs)


def decode_step(
    decoder: Decoder,
    cache: PagedCache,
    slots: Slots,
    *,
    num_rows: int | None = None,
    keeps_pages: bool = False,
    processor: LogitsProcessor = DEFAULT_PROCESSOR,
) -> tuple[PagedCache, Slots, jax.Array]:
    """Stores the newest token of each slot and samples the next; all of them or, if short, none.

    Slots that have more than their newest token to store wait for prefill, and those beyond the
    first `num_rows` that have not (`B` when None) for a later step: the decoder works on so many
    rows, whoever lives. The pages of requests
    that end are given back, or, if it `keeps_pages`, stay in their slots for `settle_step`.

    Returns:
        The new cache and slots, and `bool[]`, whether the pool had the pages.
    """
    cache, slots, has_ended, fits = _store_and_sample(decoder, cache, slots, num_rows, processor)
    return *_retire(cache, slots, has_ended, keeps_pages=keeps_pages), fits


def decode_loop(
    decoder: Decoder,
    cache: PagedCache,
    slots: Slots,
    num_steps: jax.Array | int,
    *,
    until_finish: jax.Array | bool = False,
    is_waiting: jax.Array | bool = False,
    num_rows: int | None = None,
    keeps_pages: bool = False,
    notes_memory: bool = False,
    processor: LogitsProcessor = DEFAULT_PROCESSOR,
) -> tuple[PagedCache, Slots, Burst]:
    """Decodes until no slot lives, `num_steps` are made, or the pool cannot serve the next step.

    Pages are taken and given back within the loop; the host is not asked.

    Args:
        decoder: See `paxkv.decoder`.
        cache: Donate it where you `jit`.
        slots: Likewise. The host is taken to have seen its news once this returns.
        num_steps: `i32[]`. A slot's news must also have room: `max_burst` tokens.
        until_finish: `bool[]`, also return when a request ends, so that its slot can be refilled.
        is_waiting: `bool[]`, whether a request waits for memory, for the notes on it.
        num_rows: At least the slots that decode, see `decode_step`; each number is compiled once.
        keeps_pages: Leave the pages of requests that end in their slots, for a prefix index.
        notes_memory: Note what the memory is used for at every step, see `MemorySeries`.
        processor: Changes the logits before sampling.
    """
    max_steps = slots.news.tokens.shape[1]
    has_ended_before = slots.news.finish != Finish.NOT

    def goes_on(state: _LoopState) -> jax.Array:
        cache, slots, _, steps, fits = state
        has_room = jnp.max(slots.news.counts) < max_steps
        has_ended = (slots.news.finish != Finish.NOT) & ~has_ended_before
        pauses = jnp.any(has_ended) & until_finish
        return fits & jnp.any(_is_decoding(cache, slots)) & (steps < num_steps) & has_room & ~pauses

    def step(state: _LoopState) -> _LoopState:
        cache, slots, memory, steps, _ = state
        is_live, num_running = slots.is_active, jnp.sum(_is_decoding(cache, slots), dtype=jnp.int32)
        cache, slots, has_ended, fits = _store_and_sample(
            decoder, cache, slots, num_rows, processor
        )
        if memory is not None:
            memory = note_step(
                memory, cache, jnp.where(fits, steps, max_steps),
                layer_groups=decoder.layer_groups, is_live=is_live, num_running=num_running,
                is_waiting=is_waiting,
            )  # fmt: skip
        cache, slots = _retire(cache, slots, has_ended, keeps_pages=keeps_pages)
        return _LoopState(cache, slots, memory, steps + fits.astype(jnp.int32), fits)

    memory = init_series(len(cache), max_steps) if notes_memory else None
    start = _LoopState(cache, slots, memory, jnp.int32(0), jnp.array(True))
    cache, slots, memory, steps, fits = lax.while_loop(goes_on, step, start)
    burst = Burst(slots.news, _lengths(cache), steps, fits, memory)
    seen = dataclasses.replace(
        slots.news,
        counts=jnp.zeros_like(slots.news.counts),
        finish=jnp.zeros_like(slots.news.finish),
    )
    return cache, dataclasses.replace(slots, news=seen), burst


def admit_step(
    cache: PagedCache,
    slots: Slots,
    is_new: jax.Array,
    requests: Requests,
    pages: jax.Array,
    lengths: jax.Array,
    *,
    processor: LogitsProcessor = DEFAULT_PROCESSOR,
) -> tuple[PagedCache, Slots, jax.Array]:
    """Puts requests into idle slots; they begin with what the cache has of their tokens.

    Args:
        cache: The state.
        slots: Likewise.
        is_new: `bool[B]`, the slots.
        requests: The requests, in the rows of these slots.
        pages: `i32[G, B, M]`, see `adopt_all`.
        lengths: `i32[B]`, how many tokens they hold; 0 in all other slots.
        processor: The logits processor that will be used.

    Returns:
        The new cache and slots, and `bool[]`, as `adopt_all`.
    """
    cache, ok = adopt_all(cache, pages, lengths)
    return cache, admit(slots, is_new, requests, processor=processor), ok


def settle_step(
    cache: PagedCache, slots: Slots, done: jax.Array, holds: jax.Array, same_as: jax.Array
) -> tuple[PagedCache, Slots, jax.Array]:
    """Takes the requests in `done` (`bool[B]`) out of the batch and gives back their pages.

    First a prefix index takes hold of pages, and lets go of others: see `settle_all`.

    Returns:
        The new cache and slots, and `bool[]`; False if a table is corrupt.
    """
    cache, ok = settle_all(cache, done, holds, same_as)
    return cache, dataclasses.replace(slots, is_active=slots.is_active & ~done), ok


def store(
    decoder: Decoder,
    cache: PagedCache,
    q_lens: jax.Array,
    tokens_at: Callable[[Ragged], jax.Array],
    *,
    num_rows: int,
    max_q_len: int | None = None,
) -> tuple[PagedCache, jax.Array, jax.Array, CacheView]:
    """Runs the decoder on the next `q_lens` tokens of each slot, which stores them.

    Pages that leave a sliding window with them are given back.

    Args:
        decoder: See `paxkv.decoder`.
        cache: Pages are reserved for the tokens; if the pool is short, nothing happens at all.
        q_lens: `i32[B]`.
        tokens_at: Says which tokens stand in packed rows, `i32[T]`; rows of padding do not count.
        num_rows: T, at least the sum of `q_lens`.
        max_q_len: No `q_lens` is above it, where that is known.

    Returns:
        The new cache, whether it fitted, hidden states `[T, D]`, and where their rows stand.
    """
    cache, fits = reserve_all(cache, q_lens)
    q_lens = jnp.where(fits, q_lens, 0)  # a step that does not fit runs on no rows
    view = _view(decoder, cache, q_lens, max_q_len)
    rows = view.rows(num_rows)
    tokens = jnp.where(rows.is_token, tokens_at(rows), 0)
    hidden, view = decoder(tokens, rows.positions, view)
    cache, _ = append_all(tuple(zip(view.pools, view.tables, strict=True)), q_lens)
    cache, _ = release_windows(cache, decoder.layer_groups)
    return cache, fits, hidden, view


def store_newest(
    decoder: Decoder,
    cache: PagedCache,
    is_stored: jax.Array,
    tokens_at: Callable[[Ragged], jax.Array],
    *,
    num_rows: int | None = None,
) -> tuple[PagedCache, jax.Array, jax.Array, jax.Array]:
    """Stores one token of each slot in `is_stored` (`bool[B]`); all of them or, if short, none.

    Args:
        decoder: See `paxkv.decoder`.
        cache: As for `store`.
        is_stored: The slots.
        tokens_at: As for `store`.
        num_rows: T, at least the number of these slots; `B` when None.

    Returns:
        The new cache, whether it fitted, the next token's logits, `f32[R, V]`, and whose they are,
        `i32[R]`: the slots in order where R is `B`, and only those in `is_stored` where `num_rows`
        are fewer, then `B` for rows of padding. Logits are of use in the rows of `is_stored`, and
        if it fitted.
    """
    num_slots = is_stored.shape[0]
    num_rows = num_slots if num_rows is None else num_rows
    cache, fits, hidden, view = store(
        decoder, cache, is_stored.astype(jnp.int32), tokens_at, num_rows=num_rows, max_q_len=1
    )
    if num_rows < num_slots:
        rows = view.rows(num_rows)
        row_slots = jnp.where(rows.is_token, rows.slots, num_slots)
        return cache, fits, decoder.logits(hidden), row_slots
    last_rows = jnp.maximum(view.cu_q_lens[1:] - 1, 0)
    row_slots = jnp.arange(num_slots, dtype=jnp.int32)
    return cache, fits, decoder.logits(hidden[last_rows]), row_slots


def _store_and_sample(
    decoder: Decoder,
    cache: PagedCache,
    slots: Slots,
    num_rows: int | None,
    processor: LogitsProcessor,
) -> tuple[PagedCache, Slots, jax.Array, jax.Array]:
    """A decode step but for its end: also which requests end (`bool[B]`), and whether it fitted."""
    is_decoding = _is_decoding(cache, slots)
    if num_rows is not None:
        is_decoding &= jnp.cumsum(is_decoding, dtype=jnp.int32) <= num_rows
    cache, fits, logits, row_slots = store_newest(
        decoder, cache, is_decoding, partial(_tokens_at, slots.requests), num_rows=num_rows
    )
    slots, has_ended = sample_next(slots, logits, row_slots, is_decoding & fits, processor)
    return cache, slots, has_ended, fits


def _retire(
    cache: PagedCache, slots: Slots, has_ended: jax.Array, *, keeps_pages: bool
) -> tuple[PagedCache, Slots]:
    """Takes requests out of the batch that have ended (`bool[B]`)."""
    if not keeps_pages:
        cache, _ = release_all(cache, has_ended)
    return cache, dataclasses.replace(slots, is_active=slots.is_active & ~has_ended)


def _lengths(cache: PagedCache) -> jax.Array:
    """Tokens of each slot in the cache, `i32[B]`: the same in every layer group."""
    return cache[0][1].lengths


def _is_decoding(cache: PagedCache, slots: Slots) -> jax.Array:
    """Which slots have just their newest token left to store, `bool[B]`."""
    return slots.is_active & (slots.requests.num_tokens - _lengths(cache) == 1)


def _tokens_at(requests: Requests, rows: Ragged) -> jax.Array:
    return requests.tokens[rows.slots, rows.positions]


def _view(
    decoder: Decoder, cache: PagedCache, q_lens: jax.Array, max_q_len: int | None
) -> CacheView:
    pools, tables = zip(*cache, strict=True)
    return CacheView(
        pools=pools,
        tables=tables,
        cu_q_lens=jnp.pad(jnp.cumsum(q_lens, dtype=jnp.int32), (1, 0)),
        kv_lens=_lengths(cache) + q_lens,
        groups=tuple(decoder.layer_groups),
        max_q_len=max_q_len,
    )


def _prompt_logprobs(
    decoder: Decoder, hidden: jax.Array, requests: Requests, rows: Ragged, num_top: int
) -> PromptLogprobs:
    """Log-probabilities of the token after each row, some rows at a time: `[T, V]` is large."""
    last = requests.tokens.shape[1] - 1
    following = requests.tokens[rows.slots, jnp.minimum(rows.positions + 1, last)]

    def of_row(row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        logprobs = log_probabilities(decoder.logits(row[0][None]), row[1][None], num_top)
        return jax.tree.map(lambda x: x[0], logprobs)

    return PromptLogprobs(*lax.map(of_row, (hidden, following), batch_size=_LOGPROB_ROWS))


# The compiled forms. What they change is donated, and updated where it is.
prefill_step_jit = jax.jit(
    prefill_step,
    static_argnames=("num_rows", "num_prompt_logprobs"),
    donate_argnames="cache",
)
decode_loop_jit = jax.jit(
    decode_loop,
    static_argnames=("num_rows", "keeps_pages", "notes_memory", "processor"),
    donate_argnames=("cache", "slots"),
)
admit_step_jit = jax.jit(
    admit_step, static_argnames="processor", donate_argnames=("cache", "slots")
)
settle_step_jit = jax.jit(settle_step, donate_argnames=("cache", "slots"))
fork_all_jit = jax.jit(fork_all, donate_argnames="cache")
swap_out_jit = jax.jit(swap_out, static_argnames="num_pages")
swap_in_jit = jax.jit(swap_in, donate_argnames="cache")
