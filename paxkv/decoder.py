"""What a decoder must be so that paxkv can generate with it.

A decoder keeps no cache. It is given one, reads and writes it through `CacheView.attend`, and
hands it back:

    class TinyDecoder(nnx.Module):  # one layer, one KV head of 8 numbers, 32 tokens
        vocab_size = 32
        layer_groups = (LayerGroup(layers=(0,), num_kv_heads=1, head_dim=8),)

        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Embed(32, 8, rngs=rngs)

        def __call__(self, tokens, positions, cache):  # i32[T], i32[T] -> [T, 8]
            x = self.embed(tokens)
            heads = x[:, None, :]  # [T, 1, 8]: queries, keys and values at once
            out, cache = cache.attend(0, heads, heads, heads)
            return x + out[:, 0], cache

        def logits(self, hidden):  # [R, 8] -> f32[R, 32]
            return self.embed.attend(hidden).astype(jnp.float32)

Tokens of several sequences come packed, one after the other: a decoder treats them alike and
leaves to `attend` which of them see each other. Positions count from 0 in each sequence; rows of
padding hold token 0 at position 0, and what is computed for them is dropped.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, Self, runtime_checkable

import jax


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that keep the same tokens, and so share one block table.

    Most decoders have one group. One that mixes full and sliding-window layers has two.
    """

    layers: tuple[int, ...]  # as the decoder names them in `attend`
    num_kv_heads: int  # K
    head_dim: int  # H
    window: int | None = None  # tokens a query sees, itself counted; None is all before it


def group_of(groups: Sequence[LayerGroup], layer: int) -> tuple[int, int]:
    """The group that a layer belongs to, and its place there.

    Raises:
        ValueError: No group names it.
    """
    for index, group in enumerate(groups):
        if layer in group.layers:
            return index, group.layers.index(layer)
    named = sorted(layer for group in groups for layer in group.layers)
    raise ValueError(f"{layer=} is in none of the decoder's layer_groups, which name {named}")


class Cache(Protocol):
    """The KV cache as a decoder meets it during one call (`CacheView` is the paged one)."""

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
        """Stores the tokens' keys and values, then attends over all that the cache holds.

        Args:
            layer: Which layer asks; one of the decoder's `layer_groups` names it.
            queries: `[T, N, H]`.
            keys: `[T, K, H]`, rotated already where the decoder rotates.
            values: `[T, K, H]`.
            scale: What scores are multiplied by; `H ** -0.5` when None.
            soft_cap: Caps scores at `soft_cap * tanh(score / soft_cap)`.
            sinks: `f32[N]`, a learned logit per head that joins the softmax's denominator only.

        Returns:
            `[T, N, H]` in the queries' dtype, and the cache with the tokens in it.
        """
        ...


@runtime_checkable
class Decoder(Protocol):
    """A causal language model over packed tokens. See the module's example."""

    vocab_size: int  # V
    layer_groups: tuple[LayerGroup, ...]

    def __call__[C: Cache](
        self, tokens: jax.Array, positions: jax.Array, cache: C
    ) -> tuple[jax.Array, C]:
        """`i32[T]` tokens at `i32[T]` positions to hidden states `[T, D]`, and the cache."""
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden states `[R, D]` to next-token logits `f32[R, V]`."""
        ...
