"""The batch on the device: what was asked for, how far it has come, what the host has not seen."""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp

from paxkv.logits_processors import (
    LogitSettings,
    LogitsProcessor,
    SlotView,
    default_processors,
    neutral_settings,
)
from paxkv.sampling import Sampling, greedy_sampling

DEFAULT_PROCESSOR = default_processors()


class Finish(enum.IntEnum):
    """Why a request ended."""

    NOT = 0  # it has not, or there was none
    STOP = 1  # a stop token came
    LENGTH = 2  # it has as many tokens as were allowed
    ERROR = 3  # its logits were NaN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """One request per slot, and the tokens it has so far."""

    tokens: jax.Array  # i32[B, C] prompt, then output, then anything
    prompt_lens: jax.Array  # i32[B]
    num_tokens: jax.Array  # i32[B] prompt and output so far; 0 where there is no request
    max_num_tokens: jax.Array  # i32[B] where the request ends at the latest, at most C
    wants_logprobs: jax.Array  # bool[B]
    sampling: Sampling  # [B, ...]
    settings: LogitSettings  # [B, ...] its stop tokens among them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """Tokens sampled since the host last looked: at most `W` of each slot."""

    counts: jax.Array  # i32[B]
    tokens: jax.Array  # i32[B, W]
    logprobs: jax.Array  # f32[B, W] of the tokens, where asked for
    top_ids: jax.Array  # i32[B, W, n] the most likely tokens, best first, where asked for
    top_logprobs: jax.Array  # f32[B, W, n]
    finish: jax.Array  # i32[B] `Finish` of the requests that ended


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The state of the batch.

    The cache holds a request's tokens up to some length. The next call works on the rest: a new
    request's prompt (or a chunk of it), and in a decode step the one token sampled last.
    """

    requests: Requests
    is_active: jax.Array  # bool[B] holds a request that has not ended
    processor_state: Any  # pytree of [B, ...], the logits processor's
    news: News


def idle_requests(num_slots: int, max_length: int, num_stop_ids: int = 8) -> Requests:
    """No requests: `B` slots of `C` = `max_length` tokens and `E` = `num_stop_ids` stop tokens."""
    zeros = jnp.zeros(num_slots, jnp.int32)
    return Requests(
        tokens=jnp.zeros((num_slots, max_length), jnp.int32),
        prompt_lens=zeros,
        num_tokens=zeros,
        max_num_tokens=zeros,
        wants_logprobs=jnp.zeros(num_slots, bool),
        sampling=greedy_sampling(num_slots),
        settings=neutral_settings(num_slots, num_stop_ids),
    )


def requests_from_prompts(
    prompts: jax.Array,
    prompt_lens: jax.Array,
    *,
    max_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: tuple[int, ...] = (),
    wants_logprobs: bool = False,
) -> Requests:
    """A request for every row of a batch of prompts, to be used within a `jit` of your own.

    Args:
        prompts: `i32[B, longest]`, padded at the end with anything.
        prompt_lens: `i32[B]`, at least 1 each; 0 leaves the slot idle.
        max_tokens: New tokens at most, of each.
        sampling: Greedy when None.
        stop_ids: Tokens that end a request.
        wants_logprobs: Whether the log-probabilities of sampled tokens are kept.
    """
    num_slots, longest = prompts.shape
    idle = idle_requests(num_slots, longest + max_tokens, max(1, len(stop_ids)))
    stops = jnp.asarray([stop_ids], jnp.int32) if stop_ids else idle.settings.stop_ids
    return dataclasses.replace(
        idle,
        tokens=idle.tokens.at[:, :longest].set(prompts),
        prompt_lens=prompt_lens,
        num_tokens=prompt_lens,
        max_num_tokens=prompt_lens + max_tokens,
        wants_logprobs=jnp.full(num_slots, wants_logprobs),
        sampling=idle.sampling if sampling is None else sampling,
        settings=dataclasses.replace(
            idle.settings, stop_ids=jnp.broadcast_to(stops, (num_slots, stops.shape[1]))
        ),
    )


def init_slots(
    requests: Requests,
    *,
    max_burst: int = 32,
    max_logprobs: int = 20,
    processor: LogitsProcessor = DEFAULT_PROCESSOR,
) -> Slots:
    """Slots that hold these requests.

    Args:
        requests: Those with tokens are active.
        max_burst: `W`, tokens that a slot may sample between two looks of the host.
        max_logprobs: `n`, of how many best tokens log-probabilities are kept.
        processor: The logits processor that will be used.
    """
    num_slots = requests.num_tokens.shape[0]
    slots = Slots(
        requests=requests,
        is_active=requests.num_tokens > 0,
        processor_state=processor.init(num_slots),
        news=News(
            counts=jnp.zeros(num_slots, jnp.int32),
            tokens=jnp.zeros((num_slots, max_burst), jnp.int32),
            logprobs=jnp.zeros((num_slots, max_burst), jnp.float32),
            top_ids=jnp.zeros((num_slots, max_burst, max_logprobs), jnp.int32),
            top_logprobs=jnp.zeros((num_slots, max_burst, max_logprobs), jnp.float32),
            finish=jnp.zeros(num_slots, jnp.int32),
        ),
    )
    # Slots are donated, so no two fields may be one buffer (and none may be the caller's).
    return jax.tree.map(jnp.copy, slots)


def admit(
    slots: Slots,
    is_new: jax.Array,
    requests: Requests,
    *,
    processor: LogitsProcessor = DEFAULT_PROCESSOR,
) -> Slots:
    """Puts requests into the idle slots in `is_new` (`bool[B]`)."""
    return dataclasses.replace(
        slots,
        requests=choose_rows(is_new, requests, slots.requests),
        is_active=slots.is_active | is_new,
        processor_state=choose_rows(is_new, processor.init(is_new.shape[0]), slots.processor_state),
    )


def view_of(slots: Slots) -> SlotView:
    """What a logits processor may see."""
    requests = slots.requests
    return SlotView(
        tokens=requests.tokens,
        prompt_lens=requests.prompt_lens,
        num_tokens=jnp.where(slots.is_active, requests.num_tokens, 0),
        settings=requests.settings,
    )


def choose_rows[T](is_chosen: jax.Array, yes: T, no: T) -> T:
    """Takes the rows in `is_chosen` (`bool[B]`) from one pytree of `[B, ...]`, else the other."""

    def choose(yes: jax.Array, no: jax.Array) -> jax.Array:
        return jnp.where(jnp.expand_dims(is_chosen, tuple(range(1, yes.ndim))), yes, no)

    return jax.tree.map(choose, yes, no)
