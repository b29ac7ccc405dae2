"""Chooses the next token of every slot at once.

The order of the cuts is that of `transformers`: the temperature divides the logits; `top_k` keeps
the k best tokens; `top_p` keeps the fewest best ones that reach a share p of what top-k left;
`min_p` drops tokens below a share of the best one's probability. Of tokens with equal logits the
one with the lower id ranks first, so a cut through a tie is the same every time.

Nothing is sorted: on a CPU, a sort of `[B, V]` costs more than a decode step. Rows with a small
top-k are served from their few best tokens. The others are sampled by rejection, as in FlashInfer:
a token is drawn from all, its rank and the probability before it are counted, and if a cut forbids
it the next draw is from the tokens before it. Whatever no row asks for is skipped.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

_FEW = 64  # a top-k up to this is taken from a short list; models recommend 20 to 64
_CHUNK_TOKENS = 256  # weights summed together before one is drawn: about the root of V
_TINY = float(np.finfo(np.float32).tiny)  # below it, float32 is flushed to 0
_INFINITY_BITS = 0x7F800000  # of float32


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
    is_drawn = ok & (sampling.temperature >= _TINY)
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
        return _draw_by_rejection(distances(logits), sampling, keys, is_drawn & ~is_few)

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
    return _draw_column(jnp.where(is_kept, weights, 0.0), _uniforms(keys, 0)[:, 0])


def _draw_by_rejection(
    distances: jax.Array, sampling: Sampling, keys: jax.Array, is_drawn: jax.Array
) -> jax.Array:
    """Tokens `i32[B]` drawn from all tokens' distances `f32[B, V]` in the rows `is_drawn`.

    Weights are computed from the distances wherever they are needed: that is faster than to
    write and read `[B, V]` of them.
    """
    num_slots, vocab_size = distances.shape
    padding = ((0, 0), (0, -vocab_size % _CHUNK_TOKENS))
    chunks = jnp.pad(distances, padding, constant_values=jnp.inf)
    chunks = chunks.reshape(num_slots, -1, _CHUNK_TOKENS)
    ids = jnp.arange(chunks[0].size, dtype=jnp.int32).reshape(1, -1, _CHUNK_TOKENS)
    has_top_k = is_drawn & (sampling.top_k > 0) & (sampling.top_k < vocab_size)
    has_top_p = is_drawn & (sampling.top_p < 1.0)

    def top_p_mass() -> jax.Array:
        whole = jnp.sum(jnp.exp(-chunks), axis=(1, 2))
        within_k = lax.cond(
            jnp.any(has_top_k & has_top_p),
            lambda: _weight_of_best(distances, sampling.top_k, has_top_k & has_top_p),
            lambda: whole,
        )
        # The best token has nothing before it, which a share of 0 would not allow.
        return jnp.maximum(sampling.top_p, _TINY) * jnp.where(has_top_k, within_k, whole)

    def is_past_top_k(distance: jax.Array, token: jax.Array) -> jax.Array:
        is_before = _is_before(chunks, ids, distance, token)
        return has_top_k & (jnp.sum(is_before, axis=(1, 2), dtype=jnp.int32) >= sampling.top_k)

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
        uniforms = _uniforms(keys, number)
        chunk = _draw_column(jnp.sum(weigh(chunks, ids), axis=-1), uniforms[:, 0])[:, None, None]
        own = jnp.take_along_axis(chunks, chunk, axis=1)
        own_ids = chunk * _CHUNK_TOKENS + ids[:, :1]
        column = _draw_column(weigh(own, own_ids)[:, 0], uniforms[:, 1])[:, None]
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
    max_distance = _max_distance(sampling)
    allowed_mass = lax.cond(jnp.any(has_top_p), top_p_mass, lambda: jnp.ones_like(sampling.top_p))
    # The place that the next draw must rank before: at first, every token does.
    distance = jnp.full(num_slots, jnp.inf, jnp.float32)
    token = jnp.full(num_slots, ids.size, jnp.int32)
    start = (jnp.zeros((), jnp.int32), distance, token, is_drawn)
    return lax.while_loop(lambda state: jnp.any(state[3]), attempt, start)[2]


def _max_distance(sampling: Sampling) -> jax.Array:
    """How far below the best a token may lie, `f32[B]`, for min-p and at all.

    Weights under exp(-80) would never be drawn, and float32 may flush them to 0 in one
    computation and not in another.
    """
    return jnp.minimum(-jnp.log(sampling.min_p), 80.0)


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


def _token_keys(keys: jax.Array, index: jax.Array) -> jax.Array:
    """The keys of token `index` of each request, from raw key data `u32[B, 2]`."""
    return jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys, impl="threefry2x32"), index)


def _uniforms(keys: jax.Array, number: jax.Array | int) -> jax.Array:
    """Two numbers in [0, 1) for attempt `number` of each token, `f32[B, 2]`."""
    return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, number), (2,)))(keys)


def _draw_column(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Columns `i32[B]` of `f32[B, n]` where the running sum passes the uniform's share of it.

    Sums are rounded, so a column of weight 0 is ruled out by its weight, and the last column that
    has any weight is taken when rounding leaves none past the share.
    """
    running = jnp.cumsum(weights, axis=-1)
    columns = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    last = jnp.max(jnp.where(weights > 0.0, columns, 0), axis=-1)
    is_past = (running > (uniform * running[:, -1])[:, None]) & (weights > 0.0)
    return jnp.min(jnp.where(is_past, columns, last[:, None]), axis=-1)
