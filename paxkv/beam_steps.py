"""Beam search inside the compiled loop: beams share pages, and copy them when they are written.

    @jax.jit
    def search(decoder, cache, prompts, prompt_lens):  # i32[G, longest], i32[G]
        return beam_search(
            decoder, cache, prompts, prompt_lens, width=4, max_tokens=32, eos_ids=(2,)
        )

A step stores the newest token of every beam, takes the best continuations of all beams of a prompt
together (see `paxkv.beams`), and has each slot go on from the parent of its new beam by `fork_all`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from paxkv.beams import (
    Beams,
    EarlyStopping,
    Ends,
    Hypotheses,
    hypotheses,
    may_improve,
    take_best,
)
from paxkv.cache import PagedCache, fork_all, release_all
from paxkv.decoder import Decoder
from paxkv.steps import store, store_newest


def beam_search(
    decoder: Decoder,
    cache: PagedCache,
    prompts: jax.Array,
    prompt_lens: jax.Array,
    *,
    width: int,
    max_tokens: int,
    length_penalty: jax.Array | float = 1.0,
    early_stopping: EarlyStopping = False,
    eos_ids: tuple[int, ...] = (),
) -> tuple[PagedCache, Hypotheses, jax.Array]:
    """Finds likely continuations of prompts, to be used within a `jit` of your own.

    Where the pool is too small for all beams, the search ends there. In any case the slots are
    empty again when this returns.

    Args:
        decoder: See `paxkv.decoder`.
        cache: Its first `G * W` slots must be empty; others stay as they are.
        prompts: `i32[G, longest]`, padded at the end with anything.
        prompt_lens: `i32[G]`; 0 is no prompt.
        width: `W`, beams of each prompt.
        max_tokens: `T`, new tokens at most.
        length_penalty: `f32[]`. Sums of log-probabilities are divided by `length` to this power:
            above 0 favours long answers, below 0 short ones.
        early_stopping: True ends a prompt's search when it has W hypotheses, False when no beam
            scores better than they do at its present length, "never" when none can.
        eos_ids: Tokens that end a text.

    Returns:
        The cache, the hypotheses, and `bool[]`, whether the pool was large enough for all.

    Raises:
        ValueError: The cache has too few slots.
    """
    num_prompts, longest = prompts.shape
    num_slots = _num_slots(cache)
    _check_width(num_prompts, width, num_slots)
    stored = jnp.maximum(prompt_lens - 1, 0)
    first = jnp.arange(num_prompts, dtype=jnp.int32) * width
    cache, fits, *_ = store(
        decoder, cache, jnp.zeros(num_slots, jnp.int32).at[first].set(stored),
        lambda rows: prompts[rows.slots // width, rows.positions], num_rows=num_prompts * longest,
    )  # fmt: skip
    cache, beams = start_beams(
        cache, jnp.take_along_axis(prompts, stored[:, None], axis=1)[:, 0],
        jnp.where(fits & (prompt_lens > 0), max_tokens, 0), width=width, max_length=max_tokens,
        length_penalty=length_penalty, early_stopping=early_stopping, eos_ids=eos_ids,
    )  # fmt: skip
    cache, beams, steps_fit = beam_loop(decoder, cache, beams, max_tokens)
    cache, _ = release_all(cache, jnp.arange(num_slots) < num_prompts * width)
    return cache, hypotheses(beams), fits & steps_fit


def start_beams(
    cache: PagedCache,
    last_tokens: jax.Array,
    max_tokens: jax.Array,
    *,
    width: int,
    max_length: int,
    length_penalty: jax.Array | float = 1.0,
    early_stopping: EarlyStopping = False,
    eos_ids: tuple[int, ...] = (),
) -> tuple[PagedCache, Beams]:
    """Has W beams go on from each prompt. See `beam_search` for what is not said here.

    Args:
        cache: Slot `g * W` holds prompt g, all of it but the last token.
        last_tokens: `i32[G]`, those last tokens.
        max_tokens: `i32[G]`, new tokens of each at most; 0 is no prompt.
        width: `W`.
        max_length: `T`, no `max_tokens` is above it.
        length_penalty: `f32[]`.
        early_stopping: True, False or "never".
        eos_ids: Tokens that end a text.
    """
    num_prompts, num_slots = last_tokens.shape[0], _num_slots(cache)
    _check_width(num_prompts, width, num_slots)
    slot = jnp.arange(num_slots, dtype=jnp.int32)
    cache, _ = fork_all(cache, jnp.where(slot < num_prompts * width, slot // width * width, slot))
    is_first = jnp.broadcast_to(jnp.arange(width) == 0, (num_prompts, width))
    nothing = jnp.zeros((num_prompts, width), jnp.int32)
    levels = jnp.zeros((max_length + 1, num_prompts, width), jnp.int32)
    return cache, Beams(
        num_steps=jnp.int32(0),
        tokens=levels.at[0].set(jnp.broadcast_to(last_tokens[:, None], nothing.shape)),
        parents=levels,
        # All beams are alike yet: the first one speaks for them.
        scores=jnp.where(is_first, 0.0, -jnp.inf),
        ends=Ends(jnp.full_like(nothing, -jnp.inf, jnp.float32), nothing, nothing, nothing),
        is_running=max_tokens > 0,
        has_failed=jnp.zeros(num_prompts, bool),
        max_tokens=jnp.asarray(max_tokens, jnp.int32),
        length_penalty=jnp.asarray(length_penalty, jnp.float32),
        early_stopping=early_stopping,
        eos_ids=eos_ids,
    )


def beam_loop(
    decoder: Decoder, cache: PagedCache, beams: Beams, num_steps: jax.Array | int
) -> tuple[PagedCache, Beams, jax.Array]:
    """Takes steps until no prompt runs, `num_steps` are made, or the pool cannot serve the next.

    Returns:
        The new cache and beams, and `bool[]`, False if the pool is too small to go on.
    """
    last = beams.num_steps + num_steps

    def goes_on(state: tuple[PagedCache, Beams, jax.Array]) -> jax.Array:
        _, beams, fits = state
        return fits & jnp.any(beams.is_running) & (beams.num_steps < last)

    def step(state: tuple[PagedCache, Beams, jax.Array]) -> tuple[PagedCache, Beams, jax.Array]:
        return beam_step(decoder, *state[:2])

    return lax.while_loop(goes_on, step, (cache, beams, jnp.array(True)))


def beam_step(
    decoder: Decoder, cache: PagedCache, beams: Beams
) -> tuple[PagedCache, Beams, jax.Array]:
    """Gives every beam one more token; all of them or, if the pool is short, none.

    The pages of prompts whose search ends are given back.

    Returns:
        The new cache and beams, and `bool[]`, whether the pool had the pages.
    """
    num_prompts, width = beams.scores.shape
    newest = beams.tokens[beams.num_steps].ravel()
    cache, fits, logits, _ = store_newest(
        decoder, cache, _slots_of(beams.is_running, width, cache), lambda rows: newest[rows.slots]
    )
    logits = logits[: num_prompts * width].astype(jnp.float32)
    logprobs = jax.nn.log_softmax(logits).reshape(num_prompts, width, -1)
    # A NaN or an infinite logit makes all of its row NaN.
    has_failed = beams.is_running & fits & jnp.any(jnp.isnan(logprobs[:, :, 0]), axis=1)

    taken = take_best(beams, logprobs)
    is_searched = (beams.is_running & fits & ~has_failed)[:, None]
    ends = _choose(is_searched, taken.ends, beams.ends)
    goes_on = is_searched[:, 0] & may_improve(beams, taken.scores[:, 0], ends.scores[:, -1])
    cache, _ = fork_all(cache, _parent_slots(goes_on, taken.parents, cache))
    cache, _ = release_all(cache, _slots_of(beams.is_running & fits & ~goes_on, width, cache))
    level = beams.num_steps + 1
    return (
        cache,
        dataclasses.replace(
            beams,
            num_steps=beams.num_steps + fits.astype(jnp.int32),
            tokens=beams.tokens.at[level].set(taken.tokens),
            parents=beams.parents.at[level].set(taken.parents),
            scores=_choose(is_searched, taken.scores, beams.scores),
            ends=ends,
            is_running=jnp.where(fits, goes_on, beams.is_running),
            has_failed=beams.has_failed | has_failed,
        ),
        fits,
    )


def _parent_slots(goes_on: jax.Array, parents: jax.Array, cache: PagedCache) -> jax.Array:
    """The slot that each slot goes on from, `i32[B]`: its own but for the prompts of `goes_on`."""
    num_prompts, width = parents.shape
    first = jnp.arange(num_prompts, dtype=jnp.int32)[:, None] * width
    own = jnp.arange(width, dtype=jnp.int32)[None]
    beams = first + jnp.where(goes_on[:, None], parents, own)
    others = jnp.arange(num_prompts * width, _num_slots(cache), dtype=jnp.int32)
    return jnp.concatenate([beams.ravel(), others])


def _slots_of(prompts: jax.Array, width: int, cache: PagedCache) -> jax.Array:
    """The slots of the prompts in `bool[G]`, as `bool[B]`."""
    slots = jnp.repeat(prompts, width)
    return jnp.pad(slots, (0, _num_slots(cache) - slots.shape[0]))


def _num_slots(cache: PagedCache) -> int:
    return cache[0][1].lengths.shape[0]


def _check_width(num_prompts: int, width: int, num_slots: int) -> None:
    if not 1 <= num_prompts * width <= num_slots:
        raise ValueError(
            f"{num_prompts} prompts of {width=} beams need {num_prompts * width} slots, and the "
            f"cache has {num_slots}: make it with more, or search with fewer beams (at least 1)"
        )


def _choose[T](condition: jax.Array, yes: T, no: T) -> T:
    return jax.tree.map(lambda yes, no: jnp.where(condition, yes, no), yes, no)


# The compiled forms. What they change is donated, and updated where it is.
start_beams_jit = jax.jit(
    start_beams,
    static_argnames=("width", "max_length", "early_stopping", "eos_ids"),
    donate_argnames="cache",
)
beam_loop_jit = jax.jit(beam_loop, donate_argnames=("cache", "beams"))
release_all_jit = jax.jit(release_all, donate_argnames="cache")
hypotheses_jit = jax.jit(hypotheses)
