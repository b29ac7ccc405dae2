"""Draws tokens from all of a vocabulary, some of it ruled out by cuts, without sorting it.

By rejection, as in FlashInfer: a token is drawn from all, its rank and the probability before it
are counted, and if a cut forbids it the next draw is from the tokens before it. What is before is
decided as everywhere in `paxkv.sampling`: the better token, and of equal ones that of the lower id.

A token is known by its distance, how far its logit lies below the best one of its row, over the
temperature: from 0 to infinity. Its weight is `exp(-distance)`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TINY = float(np.finfo(np.float32).tiny)  # below it, float32 is flushed to 0
_CHUNK_TOKENS = 256  # weights summed together before one is drawn: about the root of V
_INFINITY_BITS = 0x7F800000  # of float32


def draw_by_rejection(
    distances: jax.Array,
    keys: jax.Array,
    is_drawn: jax.Array,
    *,
    top_k: jax.Array,
    top_p: jax.Array,
    max_distance: jax.Array,
) -> jax.Array:
    """Draws one token in each row of `is_drawn`.

    Weights are computed from the distances wherever they are needed: that is faster than to
    write and read `[B, V]` of them.

    Args:
        distances: `f32[B, V]`.
        keys: `[B]`, typed keys that are used for this token alone.
        is_drawn: `bool[B]`.
        top_k: `i32[B]`, how many of the best tokens may come; 0 means off.
        top_p: `f32[B]`, the share of their weight that the best ones are to reach; 1 means off.
        max_distance: `f32[B]`, the farthest that may come.

    Returns:
        `i32[B]` tokens; what stands in the other rows has no meaning.
    """
    num_slots, vocab_size = distances.shape
    padding = ((0, 0), (0, -vocab_size % _CHUNK_TOKENS))
    chunks = jnp.pad(distances, padding, constant_values=jnp.inf)
    chunks = chunks.reshape(num_slots, -1, _CHUNK_TOKENS)
    ids = jnp.arange(chunks[0].size, dtype=jnp.int32).reshape(1, -1, _CHUNK_TOKENS)
    has_top_k = is_drawn & (top_k > 0) & (top_k < vocab_size)
    has_top_p = is_drawn & (top_p < 1.0)

    def top_p_mass() -> jax.Array:
        whole = jnp.sum(jnp.exp(-chunks), axis=(1, 2))
        within_k = lax.cond(
            jnp.any(has_top_k & has_top_p),
            lambda: _weight_of_best(distances, top_k, has_top_k & has_top_p),
            lambda: whole,
        )
        # The best token has nothing before it, which a share of 0 would not allow.
        return jnp.maximum(top_p, TINY) * jnp.where(has_top_k, within_k, whole)

    def is_past_top_k(distance: jax.Array, token: jax.Array) -> jax.Array:
        is_before = _is_before(chunks, ids, distance, token)
        return has_top_k & (jnp.sum(is_before, axis=(1, 2), dtype=jnp.int32) >= top_k)

    def is_past_top_p(distance: jax.Array, token: jax.Array) -> jax.Array:
        is_before = _is_before(chunks, ids, distance, token)
        mass = jnp.sum(jnp.where(is_before, jnp.exp(-chunks), 0.0), axis=(1, 2))
        return has_top_p & (mass >= allowed_mass)

    def attempt(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        number, distance, token, is_open = state

        def weigh(chunks: jax.Array, ids: jax.Array) -> jax.Array:
            is_kept = _is_before(chunks, ids, distance, token)
            is_kept &= chunks <= max_distance[:, None, None]
            return jnp.where(is_kept, jnp.exp(-chunks), 0.0)  # the best token's is 1

        # First a chunk, then a token within it, each by a uniform of its own: the 2^23 values
        # of one are fewer than a fine distribution needs.
        uniforms = uniform_pairs(keys, number)
        chunk = draw_column(jnp.sum(weigh(chunks, ids), axis=-1), uniforms[:, 0])[:, None, None]
        own = jnp.take_along_axis(chunks, chunk, axis=1)
        own_ids = chunk * _CHUNK_TOKENS + ids[:, :1]
        column = draw_column(weigh(own, own_ids)[:, 0], uniforms[:, 1])[:, None]
        drawn = (
            jnp.take_along_axis(own[:, 0], column, axis=1)[:, 0],
            jnp.take_along_axis(own_ids[:, 0], column, axis=1)[:, 0],
        )
        is_rejected = lax.cond(jnp.any(has_top_k), is_past_top_k, lambda *_: no, *drawn)
        is_rejected |= lax.cond(jnp.any(has_top_p), is_past_top_p, lambda *_: no, *drawn)
        return (
            number + 1,
            jnp.where(is_open, drawn[0], distance),
            jnp.where(is_open, drawn[1], token),
            is_open & is_rejected,
        )

    no = jnp.zeros_like(is_drawn)
    allowed_mass = lax.cond(jnp.any(has_top_p), top_p_mass, lambda: jnp.ones_like(top_p))
    # The place that the next draw must rank before: at first, every token does.
    distance = jnp.full(num_slots, jnp.inf, jnp.float32)
    token = jnp.full(num_slots, ids.size, jnp.int32)
    start = (jnp.zeros((), jnp.int32), distance, token, is_drawn)
    return lax.while_loop(lambda state: jnp.any(state[3]), attempt, start)[2]


def _is_before(
    chunks: jax.Array, ids: jax.Array, distance: jax.Array, token: jax.Array
) -> jax.Array:
    """What of distances `f32[B, n, C]` and ids ranks before a token `i32[B]` at `f32[B]`."""
    distance, token = distance[:, None, None], token[:, None, None]
    return (chunks < distance) | ((chunks == distance) & (ids < token))


def _weight_of_best(distances: jax.Array, k: jax.Array, is_asked: jax.Array) -> jax.Array:
    """The summed weight `f32[B]` of the `i32[B]` best tokens of each row, by bisection.

    Bit patterns of floats from 0 up are ordered like the floats, so 31 halvings find the k-th;
    about 20 do where no token is tied with it.
    """
    bits = lax.bitcast_convert_type(jnp.abs(distances), jnp.int32)  # abs: -0.0 becomes 0.0

    def is_open(low: jax.Array, high: jax.Array, num_within: jax.Array) -> jax.Array:
        return is_asked & (num_within != k) & (high - low > 1)

    def halve(bounds: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, num_within = bounds  # fewer than k tokens lie within low, k or more within high
        middle = low + (high - low) // 2
        num_middle = jnp.sum(bits <= middle[:, None], axis=-1, dtype=jnp.int32)
        up = is_open(*bounds) & (num_middle < k)
        down = is_open(*bounds) & (num_middle >= k)
        return (
            jnp.where(up, middle, low),
            jnp.where(down, middle, high),
            jnp.where(down, num_middle, num_within),
        )

    start = jnp.full_like(k, -1), jnp.full_like(k, _INFINITY_BITS), jnp.full_like(k, bits.shape[1])
    high = lax.while_loop(lambda bounds: jnp.any(is_open(*bounds)), halve, start)[1]
    kth = jnp.max(jnp.where(bits <= high[:, None], distances, 0.0), axis=-1)
    is_before = distances < kth[:, None]
    num_tied = k - jnp.sum(is_before, axis=-1, dtype=jnp.int32)
    before = jnp.sum(jnp.where(is_before, jnp.exp(-distances), 0.0), axis=-1)
    return before + num_tied.astype(jnp.float32) * jnp.exp(-kth)


def uniform_pairs(keys: jax.Array, number: jax.Array | int) -> jax.Array:
    """Two numbers in [0, 1) for attempt `number` of each token, `f32[B, 2]`."""
    return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, number), (2,)))(keys)


def draw_column(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Columns `i32[B]` of `f32[B, n]` where the running sum passes the uniform's share of it.

    Sums are rounded, so a column of weight 0 is ruled out by its weight, and the last column that
    has any weight is taken when rounding leaves none past the share.
    """
    running = jnp.cumsum(weights, axis=-1)
    columns = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    last = jnp.max(jnp.where(weights > 0.0, columns, 0), axis=-1)
    is_past = (running > (uniform * running[:, -1])[:, None]) & (weights > 0.0)
    return jnp.min(jnp.where(is_past, columns, last[:, None]), axis=-1)
