"""The beams of a search, and what is kept of their continuations: arrays only, no cache.

The rule is that of `transformers`: of the best 2W continuations of a prompt (more, if several
tokens end a text), those that end and are among the best W may become hypotheses, of which the W
with the best scores are kept; the best W that do not end are the next step's beams.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

type EarlyStopping = bool | Literal["never"]


class Ends(NamedTuple):
    """The best hypotheses so far, best first: where each leaves the tree of tokens."""

    scores: jax.Array  # f32[G, W] -inf where there is none yet
    parents: jax.Array  # i32[G, W] the beam that its last token follows
    tokens: jax.Array  # i32[G, W] its last token
    lengths: jax.Array  # i32[G, W] new tokens, the last one counted; 0 where there is none yet


class Hypotheses(NamedTuple):
    """What was found for each prompt, best first."""

    tokens: jax.Array  # i32[G, W, T] new tokens, the one that ends the text among them, then 0
    lengths: jax.Array  # i32[G, W] new tokens; 0 where there are fewer than W hypotheses
    scores: jax.Array  # f32[G, W] sum of log-probabilities / length ** length_penalty
    is_complete: jax.Array  # bool[G] False where the pool was too small or logits were NaN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Beams:
    """The beams of G prompts, W each: slot `g * W + w` of the cache holds beam w of prompt g.

    Their tokens are a tree, so that none is copied when beams fork. Level 0 is the prompt's last
    token, level t the t-th new token of the beams that ran then. The newest level is not in the
    cache yet.
    """

    num_steps: jax.Array  # i32[] the newest level
    tokens: jax.Array  # i32[T + 1, G, W]
    parents: jax.Array  # i32[T + 1, G, W] which beam of the level before a beam goes on from
    scores: jax.Array  # f32[G, W] sums of log-probabilities, best first; -inf is no beam
    ends: Ends
    is_running: jax.Array  # bool[G]
    has_failed: jax.Array  # bool[G] its logits were NaN
    max_tokens: jax.Array  # i32[G] new tokens at most, no more than T
    length_penalty: jax.Array  # f32[]
    early_stopping: EarlyStopping = dataclasses.field(metadata={"static": True})
    eos_ids: tuple[int, ...] = dataclasses.field(metadata={"static": True})


def hypotheses(beams: Beams) -> Hypotheses:
    """Reads the hypotheses out of the tree, from their last tokens back."""
    ends = beams.ends

    def step_back(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tokens, beam = state  # and the beam of this level that each hypothesis goes through
        level = beams.num_steps - i

        def passed(levels: jax.Array, last: jax.Array) -> jax.Array:
            inside = jnp.take_along_axis(levels[level], beam, axis=1)
            return jnp.where(ends.lengths == level, last, inside)

        its = jnp.where(ends.lengths >= level, passed(beams.tokens, ends.tokens), 0)
        return tokens.at[level - 1].set(its), passed(beams.parents, ends.parents)

    start = jnp.zeros_like(beams.tokens[1:]), jnp.zeros_like(ends.tokens)
    tokens, _ = lax.fori_loop(0, beams.num_steps, step_back, start)
    return Hypotheses(
        tokens=tokens.transpose(1, 2, 0),
        lengths=ends.lengths,
        scores=ends.scores,
        is_complete=(beams.max_tokens > 0) & ~beams.is_running & ~beams.has_failed,
    )


class Taken(NamedTuple):
    """A step's new beams and the hypotheses after it, if the step is taken."""

    scores: jax.Array  # f32[G, W]
    parents: jax.Array  # i32[G, W]
    tokens: jax.Array  # i32[G, W]
    ends: Ends


def take_best(beams: Beams, logprobs: jax.Array) -> Taken:
    """The best continuations by `f32[G, W, V]`: those that end, and those that go on."""
    num_prompts, width, vocab_size = logprobs.shape
    length = beams.num_steps + 1
    sums = (beams.scores[:, :, None] + logprobs).reshape(num_prompts, width * vocab_size)
    # Each beam ends in as many ways as there are such tokens: W that go on are always among these.
    sums, places = lax.top_k(sums, max(2, 1 + len(beams.eos_ids)) * width)
    parents, tokens = places // vocab_size, places % vocab_size
    is_end = jnp.isin(tokens, jnp.array(beams.eos_ids, jnp.int32))
    is_end |= (length >= beams.max_tokens)[:, None]

    scores, going = lax.top_k(jnp.where(is_end, -jnp.inf, sums), width)
    is_new = is_end & (jnp.arange(is_end.shape[1])[None] < width)
    penalised = sums / _power(length, beams.length_penalty)
    lengths = jnp.broadcast_to(length, tokens.shape)
    new = Ends(jnp.where(is_new, penalised, -jnp.inf), parents, tokens, lengths)
    both = jax.tree.map(lambda *pair: jnp.concatenate(pair, axis=1), beams.ends, new)
    ends = _columns(both, lax.top_k(both.scores, width)[1])  # of equals the older ones
    return Taken(scores, *_columns((parents, tokens), going), ends)


def may_improve(beams: Beams, best: jax.Array, worst: jax.Array) -> jax.Array:
    """Whether a beam may still beat the worst hypothesis, `bool[G]`.

    Args:
        beams: The beams before the step.
        best: `f32[G]`, the best of the new beams' sums.
        worst: `f32[G]`, the W-th best hypothesis' score, -inf where there are fewer.
    """
    length = jnp.broadcast_to(beams.num_steps + 1, best.shape)
    if beams.early_stopping == "never":
        length = jnp.where(beams.length_penalty > 0, beams.max_tokens, length)
    may_improve = best / _power(length, beams.length_penalty) > worst
    return may_improve & (worst == -jnp.inf) if beams.early_stopping is True else may_improve


def _power(length: jax.Array, exponent: jax.Array) -> jax.Array:
    return length.astype(jnp.float32) ** exponent


def _columns[T](arrays: T, columns: jax.Array) -> T:
    """Takes the columns `i32[G, n]` of each `[G, m]`."""
    return jax.tree.map(lambda x: jnp.take_along_axis(x, columns, axis=1), arrays)
