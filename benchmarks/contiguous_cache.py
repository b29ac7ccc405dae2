"""A KV cache without pages: each slot has a row of maximum length, as long as the model's context.

It fulfils `paxkv.decoder.Cache`, so that the same decoder runs on it, and is what paging is
compared with: made as fast as it could be. Of a layer's keys there are several pieces, each as long
as all before it together, so that a batch of short sequences attends over the first ones only: on
CPUs XLA copies a slice of one long array at every step, which was measured to take twice the time.

    pieces of 2,048 tokens: [B, K, 256, H] [B, K, 256, H] [B, K, 512, H] [B, K, 1024, H]
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from paxkv.decoder import Decoder
from paxkv.sampling import Sampling, sample

_MASKED = -1e30
_TILE_QUERIES = 256  # of a prompt; a tile attends to no keys behind it

type Pieces = tuple[jax.Array, ...]  # [B, K, length of the piece, H] each
type Layers = tuple[tuple[Pieces, Pieces], ...]  # each layer's keys and values


def piece_lengths(max_length: int, smallest: int) -> list[int]:
    """How many tokens each piece holds: `smallest`, then as many as all before it together."""
    ends = [min(smallest, max_length)]
    while ends[-1] < max_length:
        ends.append(min(2 * ends[-1], max_length))
    return [ends[0], *(end - start for start, end in itertools.pairwise(ends))]


def init_layers(
    decoder: Decoder, num_slots: int, lengths: Sequence[int], dtype: DTypeLike
) -> Layers:
    """An empty cache in pieces of these lengths, for a decoder of one layer group."""
    [group] = decoder.layer_groups

    def pieces() -> Pieces:
        return tuple(
            jnp.zeros((num_slots, group.num_kv_heads, length, group.head_dim), dtype)
            for length in lengths
        )

    return tuple((pieces(), pieces()) for _ in group.layers)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeView:
    """The cache during a decode step: one token of each slot."""

    layers: Layers  # of the pieces that hold tokens
    positions: jax.Array  # i32[B] where each slot's new token goes; past the end: nowhere

    def attend(
        self,
        layer: int,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Self]:
        """See `paxkv.decoder.Cache.attend`; `T` is `B`."""
        assert soft_cap is None and sinks is None
        all_keys = _with_token(self.layers[layer][0], keys, self.positions)
        all_values = _with_token(self.layers[layer][1], values, self.positions)
        num_slots, num_heads, head_dim = queries.shape
        grouped = queries.reshape(num_slots, keys.shape[1], -1, head_dim)
        scores = [_einsum("bkgh,bkth->bkgt", grouped, piece) for piece in all_keys]
        scores = jnp.concatenate(scores, axis=-1) * (head_dim**-0.5 if scale is None else scale)
        is_seen = jnp.arange(scores.shape[-1])[None] <= self.positions[:, None]
        scores = jnp.where(is_seen[:, None, None], scores, _MASKED)
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        out = _weighted(weights.astype(values.dtype), all_values)
        out = out / jnp.sum(weights, axis=-1)[..., None]
        out = out.reshape(num_slots, num_heads, head_dim).astype(queries.dtype)
        return out, _replaced(self, layer, (all_keys, all_values))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefillView:
    """The cache while one slot's prompt is stored, padded at its end."""

    layers: Layers
    slot: jax.Array  # i32[]

    def attend(
        self,
        layer: int,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Self]:
        """See `paxkv.decoder.Cache.attend`; `T` is the padded prompt's length."""
        assert soft_cap is None and sinks is None
        factor = queries.shape[-1] ** -0.5 if scale is None else scale
        tiles = [
            _attend_tile(queries[start:end], keys[:end], values[:end], factor)
            for start in range(0, queries.shape[0], _TILE_QUERIES)
            for end in [min(start + _TILE_QUERIES, queries.shape[0])]
        ]
        all_keys = _with_prompt(self.layers[layer][0], keys, self.slot)
        all_values = _with_prompt(self.layers[layer][1], values, self.slot)
        return jnp.concatenate(tiles), _replaced(self, layer, (all_keys, all_values))


def prefill(decoder: Decoder, layers: Layers, tokens: jax.Array, slot: jax.Array) -> Layers:
    """Stores a prompt `i32[T]` in a slot. What padding stores is overwritten before it is seen."""
    view = PrefillView(layers=layers, slot=slot)
    return decoder(tokens, jnp.arange(tokens.shape[0], dtype=jnp.int32), view)[1].layers


def decode_burst(
    decoder: Decoder,
    layers: Layers,
    newest: jax.Array,
    num_stored: jax.Array,
    num_left: jax.Array,
    sampling: Sampling,
    num_steps: jax.Array,
    *,
    num_pieces: int,
    max_burst: int,
) -> tuple[Layers, jax.Array]:
    """Decodes `num_steps` tokens, or `num_left`, of each slot.

    Args:
        decoder: See `paxkv.decoder`.
        layers: Donate it where you `jit`.
        newest: `i32[B]`, each slot's last token, which is not stored yet.
        num_stored: `i32[B]`, tokens in the cache.
        num_left: `i32[B]`, tokens that each slot still wants; 0 where it is idle.
        sampling: How tokens are drawn.
        num_steps: `i32[]`, no more than `max_burst`.
        num_pieces: The first ones, which are enough for all tokens (static).
        max_burst: `W` (static).

    Returns:
        The cache and the tokens, `i32[B, W]`.
    """

    def step(
        i: jax.Array, state: tuple[Layers, jax.Array, jax.Array]
    ) -> tuple[Layers, jax.Array, jax.Array]:
        layers, newest, news = state
        is_going = i < num_left
        positions = num_stored + i
        view = DecodeView(layers=layers, positions=jnp.where(is_going, positions, nowhere))
        hidden, view = decoder(newest, jnp.where(is_going, positions, 0), view)
        tokens, _ = sample(decoder.logits(hidden), sampling, positions)
        return view.layers, tokens, news.at[:, i].set(tokens)

    nowhere = sum(piece.shape[2] for piece in layers[0][0])
    in_use = tuple((keys[:num_pieces], values[:num_pieces]) for keys, values in layers)
    news = jnp.zeros((newest.shape[0], max_burst), jnp.int32)
    in_use, _, news = lax.fori_loop(0, num_steps, step, (in_use, newest, news))
    return tuple(
        (used_keys + keys[num_pieces:], used_values + values[num_pieces:])
        for (used_keys, used_values), (keys, values) in zip(in_use, layers, strict=True)
    ), news


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _with_token(pieces: Pieces, new: jax.Array, positions: jax.Array) -> Pieces:
    """Writes `[B, K, H]` at `positions` (`i32[B]`), each in the piece that has the place."""
    rows, start, written = jnp.arange(positions.shape[0]), 0, []
    for piece in pieces:
        length = piece.shape[2]
        is_here = (positions >= start) & (positions < start + length)
        place = jnp.where(is_here, positions - start, length)  # past the end: dropped
        written.append(piece.at[rows, :, place].set(new, mode="drop", unique_indices=True))
        start += length
    return tuple(written)


def _with_prompt(pieces: Pieces, new: jax.Array, slot: jax.Array) -> Pieces:
    """Writes `[T, K, H]` to the beginning of a slot's row."""
    left, written = new.swapaxes(0, 1)[None], []
    for piece in pieces:
        here, left = left[:, :, : piece.shape[2]], left[:, :, piece.shape[2] :]
        written.append(lax.dynamic_update_slice(piece, here, (slot, 0, 0, 0)))
    return tuple(written)


def _weighted(weights: jax.Array, pieces: Pieces) -> jax.Array:
    """The sum of values by `[B, K, G, t]`: `f32[B, K, G, H]`."""
    ends = itertools.accumulate(piece.shape[2] for piece in pieces)
    parts = [
        _einsum("bkgt,bkth->bkgh", weights[..., end - piece.shape[2] : end], piece)
        for piece, end in zip(pieces, ends, strict=True)
    ]
    return functools.reduce(jnp.add, parts)


def _attend_tile(queries: jax.Array, keys: jax.Array, values: jax.Array, scale: float) -> jax.Array:
    """Causal attention of the last `q` of `t` tokens: `[q, N, H]` over `[t, K, H]`."""
    grouped = queries.reshape(queries.shape[0], keys.shape[1], -1, queries.shape[2])
    scores = _einsum("qkgh,tkh->kgqt", grouped, keys) * scale
    place = jnp.arange(keys.shape[0])
    is_seen = place[None] <= place[-queries.shape[0] :, None]
    weights = jax.nn.softmax(jnp.where(is_seen[None, None], scores, _MASKED), axis=-1)
    out = _einsum("kgqt,tkh->qkgh", weights.astype(values.dtype), values)
    return out.reshape(queries.shape).astype(queries.dtype)


def _replaced[V: DecodeView | PrefillView](view: V, layer: int, stored: tuple[Pieces, Pieces]) -> V:
    layers = (*view.layers[:layer], stored, *view.layers[layer + 1 :])
    return dataclasses.replace(view, layers=layers)


# The compiled forms. The cache is donated, and updated where it is.
prefill_jit = jax.jit(prefill, donate_argnames="layers")
decode_burst_jit = jax.jit(
    decode_burst, static_argnames=("num_pieces", "max_burst"), donate_argnames="layers"
)
