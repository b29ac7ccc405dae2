"""Functions that change the logits inside the decode loop, before a token is chosen.

A processor is three pure functions, like an optax transformation. One of your own, with a state:

    def forbid_repeats() -> LogitsProcessor:  # never the same token twice in a row
        def init(num_slots):
            return jnp.full(num_slots, NO_TOKEN, jnp.int32)  # i32[B] the last token

        def apply(last, logits, slots):
            rows = jnp.arange(logits.shape[0])
            return logits.at[rows, last].set(-jnp.inf, mode="drop")

        def update(last, tokens, is_live, slots):
            return jnp.where(is_live, tokens, last)

        return LogitsProcessor(init, apply, update)

`chain(default_processors(), forbid_repeats())` then does both. A processor that keeps nothing is
`stateless(apply)`. What it does to one row must not depend on the others: `apply` is given those of
the slots that are sampled for, where they are few.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paxkv.request import MAX_LOGIT_BIASES

NO_TOKEN = int(np.iinfo(np.int32).max)  # past every vocabulary: writes to it are dropped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogitSettings:
    """What each request asks to have done to its logits. A whole row is set at admission."""

    repetition_penalty: jax.Array  # f32[B] 1 means off
    presence_penalty: jax.Array  # f32[B] 0 means off
    frequency_penalty: jax.Array  # f32[B] 0 means off
    min_tokens: jax.Array  # i32[B] 0 means off
    stop_ids: jax.Array  # i32[B, E] what min_tokens holds back, then ids >= V
    bias_ids: jax.Array  # i32[B, 300] no id twice in a row, then ids >= V
    bias_values: jax.Array  # f32[B, 300]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """What a processor may know of the slots."""

    tokens: jax.Array  # i32[B, C] prompt, then output, then anything; C is the longest allowed
    prompt_lens: jax.Array  # i32[B]
    num_tokens: jax.Array  # i32[B] prompt and output so far; 0 in an idle slot
    settings: LogitSettings


class LogitsProcessor(NamedTuple):
    """A change to the logits of all slots, and the state it keeps for each."""

    init: Callable[[int], Any]
    """`num_slots` to the state of fresh requests: a pytree whose arrays start with axis B."""

    apply: Callable[[Any, jax.Array, SlotView], jax.Array]
    """State, logits `[R, V]` and slots, of R rows too, to logits of the same shape and dtype."""

    update: Callable[[Any, jax.Array, jax.Array, SlotView], Any]
    """State, chosen `i32[B]`, `bool[B]` whether a row is live, and slots before it, to state."""


def stateless(apply: Callable[[jax.Array, SlotView], jax.Array]) -> LogitsProcessor:
    """A processor that only looks at the logits and the slots."""
    return LogitsProcessor(
        init=lambda num_slots: (),
        apply=lambda state, logits, slots: apply(logits, slots),
        update=lambda state, tokens, is_live, slots: state,
    )


def chain(*processors: LogitsProcessor) -> LogitsProcessor:
    """Some processors one after the other; with none, the logits stay as they are."""

    def apply(states: tuple, logits: jax.Array, slots: SlotView) -> jax.Array:
        for processor, state in zip(processors, states, strict=True):
            logits = processor.apply(state, logits, slots)
        return logits

    def update(states: tuple, tokens: jax.Array, is_live: jax.Array, slots: SlotView) -> tuple:
        return tuple(
            processor.update(state, tokens, is_live, slots)
            for processor, state in zip(processors, states, strict=True)
        )

    return LogitsProcessor(
        init=lambda num_slots: tuple(processor.init(num_slots) for processor in processors),
        apply=apply,
        update=update,
    )


def default_processors() -> LogitsProcessor:
    """What `SamplingParams` asks for: the bias, then the penalties, then the least length."""
    each = chain(logit_bias(), penalties(), min_tokens())

    def is_asked(logits: jax.Array, slots: SlotView) -> jax.Array:
        predicates = _wants_bias, _wants_penalties, _is_short
        return jnp.stack([jnp.any(wants(logits, slots)) for wants in predicates])

    # One branch around the three of them: a branch copies `[B, V]` even where it changes nothing.
    return _when_asked(is_asked, lambda logits, slots: each.apply(each.init(0), logits, slots))


def neutral_settings(num_slots: int, num_stop_ids: int) -> LogitSettings:
    """Settings under which the default processors change nothing."""
    return LogitSettings(
        repetition_penalty=jnp.ones(num_slots, jnp.float32),
        presence_penalty=jnp.zeros(num_slots, jnp.float32),
        frequency_penalty=jnp.zeros(num_slots, jnp.float32),
        min_tokens=jnp.zeros(num_slots, jnp.int32),
        stop_ids=jnp.full((num_slots, num_stop_ids), NO_TOKEN, jnp.int32),
        bias_ids=jnp.full((num_slots, MAX_LOGIT_BIASES), NO_TOKEN, jnp.int32),
        bias_values=jnp.zeros((num_slots, MAX_LOGIT_BIASES), jnp.float32),
    )


def penalties() -> LogitsProcessor:
    """Makes tokens that stand in the text already less likely.

    The repetition penalty (arXiv 1909.05858, as in `transformers`) divides the positive and
    multiplies the negative logits of all tokens of prompt and output. Then, as OpenAI defines
    them, the frequency penalty is taken off once for each time a token stands in the output, and
    the presence penalty once if it does.
    """
    return _when_asked(_wants_penalties, _penalise)


def logit_bias() -> LogitsProcessor:
    """Adds to the logits of named tokens."""
    return _when_asked(_wants_bias, _add_bias)


def min_tokens() -> LogitsProcessor:
    """Forbids the stop tokens until the output is `min_tokens` long."""
    return _when_asked(_is_short, _hold_back_stops)


def _when_asked(
    is_asked: Callable[[jax.Array, SlotView], jax.Array],
    change: Callable[[jax.Array, SlotView], jax.Array],
) -> LogitsProcessor:
    """A processor that costs little while `is_asked`, of logits and slots, is false for all."""

    def apply(logits: jax.Array, slots: SlotView) -> jax.Array:
        asked = jnp.any(is_asked(logits, slots))
        return lax.cond(asked, change, lambda logits, slots: logits, logits, slots)

    return stateless(apply)


def _wants_penalties(logits: jax.Array, slots: SlotView) -> jax.Array:
    settings = slots.settings
    return (
        (settings.repetition_penalty != 1.0)
        | (settings.presence_penalty != 0.0)
        | (settings.frequency_penalty != 0.0)
    ) & (slots.num_tokens > 0)


def _penalise(logits: jax.Array, slots: SlotView) -> jax.Array:
    settings = slots.settings
    places = lax.broadcasted_iota(jnp.int32, slots.tokens.shape, 1)
    is_output = places >= slots.prompt_lens[:, None]
    is_token = places < slots.num_tokens[:, None]
    is_token &= _wants_penalties(logits, slots)[:, None]
    in_prompt = _count(slots.tokens, is_token & ~is_output, logits.shape)
    in_output = _count(slots.tokens, is_token & is_output, logits.shape)
    repetition = settings.repetition_penalty[:, None]
    out = logits.astype(jnp.float32)
    repeated = jnp.where(out > 0.0, out / repetition, out * repetition)
    out = jnp.where(in_prompt + in_output > 0, repeated, out)
    out -= settings.frequency_penalty[:, None] * in_output.astype(jnp.float32)
    out -= settings.presence_penalty[:, None] * (in_output > 0).astype(jnp.float32)
    return out.astype(logits.dtype)


def _count(tokens: jax.Array, is_counted: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """How often each row of `i32[B, C]` holds each token, `i32[B, V]`."""
    rows = jnp.arange(shape[0])[:, None]
    counted = jnp.where(is_counted, tokens, NO_TOKEN)
    return jnp.zeros(shape, jnp.int32).at[rows, counted].add(1, mode="drop")


def _wants_bias(logits: jax.Array, slots: SlotView) -> jax.Array:
    return (slots.settings.bias_ids < logits.shape[1]) & (slots.num_tokens > 0)[:, None]


def _add_bias(logits: jax.Array, slots: SlotView) -> jax.Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    ids, values = slots.settings.bias_ids, slots.settings.bias_values
    biased = logits.astype(jnp.float32).at[rows, ids].add(values, mode="drop")
    return biased.astype(logits.dtype)


def _is_short(logits: jax.Array, slots: SlotView) -> jax.Array:
    num_outputs = slots.num_tokens - slots.prompt_lens
    return (num_outputs < slots.settings.min_tokens) & (slots.num_tokens > 0)


def _hold_back_stops(logits: jax.Array, slots: SlotView) -> jax.Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    is_short = _is_short(logits, slots)[:, None]
    stops = jnp.where(is_short, slots.settings.stop_ids, NO_TOKEN)
    return logits.at[rows, stops].set(-jnp.inf, mode="drop")
