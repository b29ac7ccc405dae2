"""Chooses the next token of every slot at once.

The order of the cuts is that of `transformers`: the temperature divides the logits, then `top_k`,
then `top_p` of what top-k left (renormalised), then `min_p` relative to the best token. Each cut
keeps the tokens whose logit reaches some threshold, so tokens of equal logit stay or go together:
a tie at the edge of top-k keeps them all.

Nothing is sorted (a sort of `[B, V]` costs more than a decode step on a CPU). A threshold is found
by bisection over the bit patterns of the logits' distances from the best one, which are ordered
like the distances themselves, and every stage is skipped when no row asks for it.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_CHUNK_TOKENS = 256  # tokens summed together before one is drawn: about the root of V
_MIN_TEMPERATURE = float(np.finfo(np.float32).tiny)  # below it, division flushes to 0 / 0
_INFINITY_BITS = 0x7F800000  # of float32; the largest pattern of a distance
_ENTROPY_BITS = 64  # of a raw key


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How each slot's next token is drawn. Idle slots are best left greedy: it costs nothing."""

    temperature: jax.Array  # f32[B] 0 means greedy
    top_k: jax.Array  # i32[B] 0 means off
    top_p: jax.Array  # f32[B] 1 means off
    min_p: jax.Array  # f32[B] 0 means off
    key: jax.Array  # u32[B, 2] raw key data of each request, see `request_key`


def greedy_sampling(num_slots: int) -> Sampling:
    """The settings of `num_slots` slots that take the most likely token."""
    return Sampling(
        temperature=jnp.zeros(num_slots, jnp.float32),
        top_k=jnp.zeros(num_slots, jnp.int32),
        top_p=jnp.ones(num_slots, jnp.float32),
        min_p=jnp.zeros(num_slots, jnp.float32),
        key=jnp.zeros((num_slots, 2), jnp.uint32),
    )


def request_key(seed: int | None, request_index: int, engine_seed: int = 0) -> np.ndarray:
    """The raw key of one request, `u32[2]`, made on the host.

    A seeded request has the key of `jax.random.key(seed)` (of the seed's low 64 bits), whichever
    request it is. One without a seed has a key of its own, drawn from the engine's seed.
    """
    if seed is None:
        entropy = (engine_seed % 2**_ENTROPY_BITS, request_index)
        return np.random.SeedSequence(entropy).generate_state(2, np.uint32)
    high, low = divmod(seed % 2**_ENTROPY_BITS, 2**32)
    return np.array([high, low], np.uint32)


def sample(logits: jax.Array, sampling: Sampling, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws token number `index` of each request.

    A row's token depends on its own logits, settings, key and index and on nothing else: neither
    the slot nor the neighbours nor the batch size change it.

    Args:
        logits: `[B, V]`. Tokens at -inf are never drawn.
        sampling: The settings of each row.
        index: `i32[B]`, how many tokens the request has already.

    Returns:
        `i32[B]` tokens, and `bool[B]`, whether the row could be sampled. A row that holds a NaN or
        whose best logit is infinite could not; its token is 0.
    """
    logits = logits.astype(jnp.float32)
    best = jnp.max(logits, axis=-1)  # NaN where the row holds one
    ok = jnp.isfinite(best)
    is_drawn = ok & (sampling.temperature >= _MIN_TEMPERATURE)
    tokens = jnp.where(ok, _first_at(logits, best), 0)

    def draw() -> jax.Array:
        temperature = jnp.where(is_drawn, sampling.temperature, 1.0)
        distances = (best[:, None] - logits) / temperature[:, None]  # [0, inf], first cannot be nan
        distances = jnp.where(is_drawn[:, None], distances, 0.0)
        weights = _cut(distances, sampling, is_drawn)
        return jnp.where(is_drawn, _draw(weights, _uniforms(sampling.key, index)), tokens)

    return lax.cond(jnp.any(is_drawn), draw, lambda: tokens), ok


def log_probabilities(
    logits: jax.Array, tokens: jax.Array, num_top: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Natural log-probabilities under the model itself: no temperature, cut or processor.

    Args:
        logits: `[R, V]`, as the model gave them.
        tokens: `i32[R]`, the chosen tokens.
        num_top: How many of the best tokens to list (static; 20 or so at most).

    Returns:
        `f32[R]` of the chosen tokens, and the ids and log-probabilities of the best ones, best
        first, `i32[R, num_top]` and `f32[R, num_top]`. A token at -inf has -inf.
    """
    logits = logits.astype(jnp.float32)
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1) - normaliser
    top_logits, top_ids = lax.top_k(logits, num_top)
    return chosen[:, 0], top_ids, top_logits - normaliser


def _first_at(values: jax.Array, wanted: jax.Array) -> jax.Array:
    """Where each row of `[B, n]` first equals `f32[B]`, else n. Ten times faster than argmax."""
    columns = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    return jnp.min(jnp.where(values == wanted[:, None], columns, values.shape[1]), axis=-1)


def _cut(distances: jax.Array, sampling: Sampling, is_drawn: jax.Array) -> jax.Array:
    """Unnormalised probabilities `f32[B, V]` of distances `f32[B, V]`: 0 where cut, best 1."""
    bits = lax.bitcast_convert_type(jnp.abs(distances), jnp.int32)  # abs: -0.0 is 0.0
    weights = jnp.exp(-distances)
    keep_all = jnp.full(is_drawn.shape, _INFINITY_BITS, jnp.int32)

    def count(threshold: jax.Array) -> jax.Array:
        return jnp.sum(bits <= threshold[:, None], axis=-1, dtype=jnp.int32)

    def mass(threshold: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(bits <= threshold[:, None], weights, 0.0), axis=-1)

    def top_k() -> jax.Array:
        return _smallest(count, sampling.top_k, count, has_top_k)

    def top_p() -> jax.Array:
        return _smallest(mass, sampling.top_p * mass(within_top_k), count, has_top_p)

    has_top_k = is_drawn & (sampling.top_k > 0) & (sampling.top_k < distances.shape[1])
    has_top_p = is_drawn & (sampling.top_p < 1.0)
    within_top_k = lax.cond(jnp.any(has_top_k), top_k, lambda: keep_all)
    within_top_p = lax.cond(jnp.any(has_top_p), top_p, lambda: keep_all)
    threshold = jnp.minimum(within_top_k, within_top_p)
    is_kept = (bits <= threshold[:, None]) & (weights >= sampling.min_p[:, None])
    return jnp.where(is_kept, weights, 0.0)


def _smallest(
    measure: Callable[[jax.Array], jax.Array],
    wanted: jax.Array,
    count: Callable[[jax.Array], jax.Array],
    is_asked: jax.Array,
) -> jax.Array:
    """The smallest threshold whose measure reaches `wanted`, as bits.

    Args:
        measure: Of the tokens within a threshold `i32[B]`; grows with it.
        wanted: `[B]`.
        count: How many tokens are within a threshold. The search of a row ends when one token
            is left between its bounds, which takes half the steps that its bits would.
        is_asked: `bool[B]`. Other rows keep everything.
    """

    def is_open(low: jax.Array, high: jax.Array, between: jax.Array) -> jax.Array:
        return is_asked & (high - low > 1) & (between > 1)

    def step(bounds: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, count_low, count_high = bounds
        middle = low + (high - low) // 2
        count_middle = count(middle)
        reaches = measure(middle) >= wanted
        is_searched = is_open(low, high, count_high - count_low)
        up, down = is_searched & ~reaches, is_searched & reaches
        return (
            jnp.where(up, middle, low),
            jnp.where(down, middle, high),
            jnp.where(up, count_middle, count_low),
            jnp.where(down, count_middle, count_high),
        )

    low = jnp.full(is_asked.shape, -1, jnp.int32)  # no token is within it
    high = jnp.full(is_asked.shape, _INFINITY_BITS, jnp.int32)  # every token is
    bounds = (low, high, jnp.zeros_like(low), count(high))
    bounds = lax.while_loop(lambda b: jnp.any(is_open(b[0], b[1], b[3] - b[2])), step, bounds)
    return bounds[1]


def _uniforms(keys: jax.Array, index: jax.Array) -> jax.Array:
    """Two numbers in [0, 1) for token `index` of each request, `f32[B, 2]`."""

    def of_request(key: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, index), (2,))

    return jax.vmap(of_request)(keys, index)


def _draw(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Token ids `i32[B]` by weights `f32[B, V]`: first a chunk of tokens, then one within it."""
    num_slots, vocab_size = weights.shape
    padding = -vocab_size % _CHUNK_TOKENS
    chunks = jnp.pad(weights, ((0, 0), (0, padding))).reshape(num_slots, -1, _CHUNK_TOKENS)
    chunk = _draw_one(jnp.sum(chunks, axis=-1), uniforms[:, 0])
    within = jnp.take_along_axis(chunks, chunk[:, None, None], axis=1)[:, 0]
    return chunk * _CHUNK_TOKENS + _draw_one(within, uniforms[:, 1])


def _draw_one(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Columns `i32[B]` of `f32[B, n]` where the running sum passes the uniform's share of it.

    Sums are rounded, so a column of weight 0 is ruled out by its weight, and the last column that
    has any weight is taken when rounding leaves none past the share.
    """
    running = jnp.cumsum(weights, axis=-1)
    columns = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    last = jnp.max(jnp.where(weights > 0.0, columns, 0), axis=-1)
    is_past = (running > (uniform * running[:, -1])[:, None]) & (weights > 0.0)
    return jnp.min(jnp.where(is_past, columns, last[:, None]), axis=-1)
