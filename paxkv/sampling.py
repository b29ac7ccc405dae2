"""Chooses the next token of every slot at once.

The order of the cuts is that of `transformers`: the temperature divides the logits; `top_k` keeps
the k best tokens; `top_p` keeps the fewest best ones that reach a share p of what top-k left;
`min_p` drops tokens below a share of the best one's probability. Of tokens with equal logits the
one with the lower id ranks first, so a cut through a tie is the same every time.

Nothing is sorted: on a CPU, a sort of `[B, V]` costs more than a decode step. Rows with a small
top-k are served from their few best tokens, the others by `paxkv.rejection_sampling`. Whatever no
row asks for is skipped.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from paxkv.rejection_sampling import TINY, draw_by_rejection, draw_column, uniform_pairs

_FEW = 64  # a top-k up to this is taken from a short list; models recommend 20 to 64


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


def same_sampling(
    num_slots: int,
    key: jax.Array,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Sampling:
    """The settings of `num_slots` slots that sample alike, each with a key split off `key`."""
    return Sampling(
        temperature=jnp.full(num_slots, temperature, jnp.float32),
        top_k=jnp.full(num_slots, top_k, jnp.int32),
        top_p=jnp.full(num_slots, top_p, jnp.float32),
        min_p=jnp.full(num_slots, min_p, jnp.float32),
        key=jax.random.key_data(jax.random.split(key, num_slots)),
    )


def request_key(seed: int | None, request_index: int, engine_seed: int = 0) -> np.ndarray:
    """The raw key of one request, `u32[2]`, made on the host.

    A seeded request has the key of `jax.random.key(seed)` (of the seed's low 64 bits), whichever
    request it is. One without a seed has a key of its own, drawn from the engine's seed.
    """
    if seed is None:
        entropy = (engine_seed % 2**64, request_index)
        return np.random.SeedSequence(entropy).generate_state(2, np.uint32)
    high, low = divmod(seed % 2**64, 2**32)
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
    # XLA's maximum on CPUs may pass over a NaN, so that is made infinite first.
    best = jnp.max(jnp.where(jnp.isnan(logits), jnp.inf, logits), axis=-1)
    ok = jnp.isfinite(best)
    tokens = jnp.where(ok, _first_at(logits, best), 0)
    is_drawn = ok & (sampling.temperature >= TINY)
    is_few = is_drawn & (sampling.top_k > 0) & (sampling.top_k <= _FEW)

    def distances(logits: jax.Array) -> jax.Array:
        """How far logits lie below the row's best, over the temperature: 0 to infinity."""
        temperature = jnp.where(is_drawn, sampling.temperature, 1.0)
        return (best[:, None] - logits) / temperature[:, None]

    def draw_from_few() -> jax.Array:
        few_logits, few_ids = lax.top_k(logits, min(_FEW, logits.shape[1]))
        column = _draw_from_sorted(distances(few_logits), sampling, keys)
        return jnp.take_along_axis(few_ids, column[:, None], axis=-1)[:, 0]

    def draw_from_all() -> jax.Array:
        return draw_by_rejection(
            distances(logits),
            keys,
            is_drawn & ~is_few,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            max_distance=_max_distance(sampling),
        )

    def draw() -> jax.Array:
        few = lax.cond(jnp.any(is_few), draw_from_few, lambda: tokens)
        rest = lax.cond(jnp.any(is_drawn & ~is_few), draw_from_all, lambda: tokens)
        return jnp.where(is_few, few, jnp.where(is_drawn, rest, tokens))

    keys = _token_keys(sampling.key, index)
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
    chosen = -optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
    top_logits, top_ids = lax.top_k(logits, num_top)
    return chosen, top_ids, top_logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def _first_at(values: jax.Array, wanted: jax.Array) -> jax.Array:
    """Where each row of `[B, n]` first equals `f32[B]`, else n. Ten times faster than argmax."""
    columns = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    return jnp.min(jnp.where(values == wanted[:, None], columns, values.shape[1]), axis=-1)


def _draw_from_sorted(distances: jax.Array, sampling: Sampling, keys: jax.Array) -> jax.Array:
    """Columns `i32[B]` drawn from the best tokens' distances `f32[B, n]`, best first; n >= k."""
    columns = lax.broadcasted_iota(jnp.int32, distances.shape, 1)
    weights = jnp.where(columns < sampling.top_k[:, None], jnp.exp(-distances), 0.0)
    upto = jnp.cumsum(weights, axis=-1)
    is_kept = upto - weights < sampling.top_p[:, None] * upto[:, -1:]
    is_kept &= distances <= _max_distance(sampling)[:, None]
    is_kept |= columns == 0
    return draw_column(jnp.where(is_kept, weights, 0.0), uniform_pairs(keys, 0)[:, 0])


def _max_distance(sampling: Sampling) -> jax.Array:
    """How far below the best a token may lie, `f32[B]`, for min-p and at all.

    Weights under exp(-80) would never be drawn, and float32 may flush them to 0 in one
    computation and not in another.
    """
    return jnp.minimum(-jnp.log(sampling.min_p), 80.0)


def _token_keys(keys: jax.Array, index: jax.Array) -> jax.Array:
    """The keys of token `index` of each request, from raw key data `u32[B, 2]`."""
    return jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys, impl="threefry2x32"), index)
