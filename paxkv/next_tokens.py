"""The end of a decode step: the next token of each slot, sampled and noted.

All that is as wide as the vocabulary is done for the rows of the step, which may be fewer than the
slots: a batch that has nearly run out does not sample for those that have ended.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from paxkv.logits_processors import LogitsProcessor
from paxkv.sampling import log_probabilities, sample
from paxkv.slots import Finish, News, Slots, view_of


def sample_next(
    slots: Slots,
    logits: jax.Array,
    row_slots: jax.Array,
    is_sampled: jax.Array,
    processor: LogitsProcessor,
) -> tuple[Slots, jax.Array]:
    """Samples a token for the slots in `is_sampled` (`bool[B]`).

    Args:
        slots: The requests.
        logits: `f32[R, V]`.
        row_slots: `i32[R]`, whose rows they are: as `steps.store_newest` returns them.
        is_sampled: Slots that have a row.
        processor: Changes the logits before sampling.

    Returns:
        The new slots, and which of them end, `bool[B]`.
    """
    requests, seen = slots.requests, view_of(slots)
    rows = _Rows(row_slots, is_sampled.shape[0])
    state = rows.of(slots.processor_state)
    processed = processor.apply(state, logits, rows.of(seen))
    # Rows that are not sampled are greedy, which costs nothing.
    is_drawn = rows.of(is_sampled) & (row_slots < rows.num_slots)
    sampling = rows.of(requests.sampling)
    sampling = dataclasses.replace(
        sampling, temperature=jnp.where(is_drawn, sampling.temperature, 0.0)
    )
    row_tokens, row_ok = sample(
        processed, sampling, rows.of(requests.num_tokens - requests.prompt_lens)
    )
    tokens, ok = rows.to_slots(row_tokens), rows.to_slots(row_ok)

    takes = is_sampled & ok
    is_stop = jnp.any(tokens[:, None] == requests.settings.stop_ids, axis=1)
    num_tokens = requests.num_tokens + takes.astype(jnp.int32)
    is_full = num_tokens >= requests.max_num_tokens
    finish = jnp.select(
        [is_sampled & ~ok, takes & is_stop, takes & is_full],
        [jnp.int32(Finish.ERROR), jnp.int32(Finish.STOP), jnp.int32(Finish.LENGTH)],
        jnp.int32(Finish.NOT),
    )
    wants_logprobs = takes & requests.wants_logprobs
    news = _add_logprobs(slots.news, logits, row_tokens, rows, wants_logprobs)
    slots = dataclasses.replace(
        slots,
        requests=dataclasses.replace(
            requests,
            tokens=_put(requests.tokens, takes, requests.num_tokens, tokens),
            num_tokens=num_tokens,
        ),
        processor_state=processor.update(slots.processor_state, tokens, takes, seen),
        news=dataclasses.replace(
            news,
            tokens=_put(news.tokens, takes, news.counts, tokens),
            counts=news.counts + takes.astype(jnp.int32),
            finish=jnp.where(finish != Finish.NOT, finish, news.finish),
        ),
    )
    return slots, finish != Finish.NOT


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """From slots to the rows of a step, and back."""

    slots: jax.Array  # i32[R] whose rows they are; B for padding
    num_slots: int  # B

    @property
    def _are_slots(self) -> bool:
        return self.slots.shape[0] == self.num_slots

    def of[T](self, tree: T) -> T:
        """The rows of a pytree of `[B, ...]`; rows of padding are like any other."""
        if self._are_slots:
            return tree
        return jax.tree.map(lambda x: x.at[self.slots].get(mode="clip"), tree)

    def to_slots(self, array: jax.Array) -> jax.Array:
        """`[R, ...]` as `[B, ...]`, with zeros for slots that have no row."""
        if self._are_slots:
            return array
        zeros = jnp.zeros((self.num_slots, *array.shape[1:]), array.dtype)
        return zeros.at[self.slots].set(array, mode="drop")


def _add_logprobs(
    news: News, logits: jax.Array, row_tokens: jax.Array, rows: _Rows, is_wanted: jax.Array
) -> News:
    """Notes how likely the chosen tokens were, `i32[R]`, of the slots in `is_wanted`."""

    def with_logprobs() -> News:
        logprobs = log_probabilities(logits, row_tokens, news.top_ids.shape[2])
        chosen, top_ids, top = map(rows.to_slots, logprobs)
        return dataclasses.replace(
            news,
            logprobs=_put(news.logprobs, is_wanted, news.counts, chosen),
            top_ids=_put(news.top_ids, is_wanted, news.counts, top_ids),
            top_logprobs=_put(news.top_logprobs, is_wanted, news.counts, top),
        )

    return lax.cond(jnp.any(is_wanted), with_logprobs, lambda: news)


def _put(whole: jax.Array, is_put: jax.Array, columns: jax.Array, values: jax.Array) -> jax.Array:
    """Writes `[B, ...]` at `columns` (`i32[B]`) of `[B, C, ...]` in the rows of `is_put`."""
    rows = jnp.arange(is_put.shape[0], dtype=jnp.int32)
    columns = jnp.where(is_put, columns, whole.shape[1])  # past the end: dropped
    return whole.at[rows, columns].set(values, mode="drop", unique_indices=True)
