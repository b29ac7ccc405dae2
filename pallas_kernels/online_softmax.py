"""Softmax over keys that come in tiles.

A tile's partial softmax is its largest score, the sum of exponentials below it and the values
weighted by them. Partial softmaxes of one query merge exactly, whatever the order
(arXiv 1805.02867).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# The score of a key that a query does not see. It is finite, so that a tile of which a query sees
# nothing stays free of NaN: its weights there are all exp(0), and `merge` or `normalise` drop them.
MASKED = -1e30


class PartialSoftmax(NamedTuple):
    """An unfinished softmax over the keys seen so far; leading axes are the queries'."""

    top: jax.Array  # f32[...] the largest score
    total: jax.Array  # f32[...] sum of exp(score - top)
    values: jax.Array  # f32[..., H] values weighted by exp(score - top)


def empty_softmax(shape: tuple[int, ...], head_dim: int) -> PartialSoftmax:
    """Of queries that have seen no key yet."""
    return PartialSoftmax(
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )


def normalise(softmax: PartialSoftmax, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """`[T, N]` unfinished softmaxes to outputs `f32[T, N, H]` and log-sum-exp `f32[T, N]`."""
    top, total, values = softmax
    if sinks is not None:
        with_sink = jnp.maximum(top, sinks[None].astype(jnp.float32))
        shrink = jnp.exp(top - with_sink)
        values = values * shrink[..., None]
        total = total * shrink + jnp.exp(sinks[None].astype(jnp.float32) - with_sink)
        top = with_sink
    # NaN is not hidden: of a query that is NaN the top may be MASKED, since XLA for CPUs loses NaN
    # in maxima of some shapes, but the total is not a number.
    saw_keys = ~(top <= MASKED / 2) | jnp.isnan(total)
    out = jnp.where(saw_keys[..., None], values / jnp.where(saw_keys, total, 1.0)[..., None], 0.0)
    lse = jnp.where(saw_keys, top + jnp.log(jnp.where(saw_keys, total, 1.0)), -jnp.inf)
    return out, lse


def tile_softmax(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    visible: jax.Array,
    scale: float,
    soft_cap: float | None,
) -> PartialSoftmax:
    """The partial softmax of queries `[R, K, Q, H]` over keys and values `[R, K, t, H]`.

    Which queries see which keys is `visible`, `bool[R, Q, t]` or `bool[R, 1, t]`.
    """
    scores = _product("rkqh,rkth->rkqt", queries, keys)
    scores = scores * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible[:, None], scores, MASKED)
    top = jnp.max(scores, axis=-1)
    weights = jnp.exp(scores - top[..., None])
    weighted = _product("rkqt,rkth->rkqh", weights.astype(values.dtype), values)
    return PartialSoftmax(top, jnp.sum(weights, axis=-1), weighted)


def _product(axes: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """A product accumulated in float32, in which float32 is not rounded.

    By default, GPUs multiply float32 as TF32 and TPUs as bfloat16. CPUs do not round.
    """
    is_wide = jnp.float32 in (left.dtype, right.dtype)
    return jnp.einsum(
        axes, left, right, preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if is_wide else None,
    )  # fmt: skip


def merge(left: PartialSoftmax, right: PartialSoftmax) -> PartialSoftmax:
    """Of the same queries over the keys of both."""
    top = jnp.maximum(left.top, right.top)
    keep, share = jnp.exp(left.top - top), jnp.exp(right.top - top)
    return PartialSoftmax(
        top,
        left.total * keep + right.total * share,
        left.values * keep[..., None] + right.values * share[..., None],
    )


def merge_into_rows(
    softmax: PartialSoftmax, part: PartialSoftmax, rows: jax.Array
) -> PartialSoftmax:
    """Merges R tiles `[R, ...]` into the softmaxes `[T, ...]` of `rows` (`i32[R]`).

    Several tiles may be of one row; a GPU may sum them in another order each time. Those of row T,
    which there is not, are left out.
    """
    top = softmax.top.at[rows].max(part.top, mode="drop")
    keep = jnp.exp(softmax.top - top)
    share = jnp.exp(part.top - top.at[rows].get(mode="clip"))
    total = (softmax.total * keep).at[rows].add(part.total * share, mode="drop")
    kept = softmax.values * keep[..., None]
    values = kept.at[rows].add(part.values * share[..., None], mode="drop")
    return PartialSoftmax(top, total, values)
