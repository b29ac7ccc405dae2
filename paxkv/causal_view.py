"""The cache of a decoder that is trained or evaluated on whole sequences: there is none."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from paxkv.decoder import LayerGroup, group_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CausalView:
    """Causal attention within sequences of one length, which `jax.grad` goes through.

    The paged cache cannot be differentiated, so a training loop samples with it and learns with
    this, on one set of weights:

        def log_likelihood(decoder, tokens):  # i32[B, L]
            num_sequences, length = tokens.shape
            view = CausalView(num_sequences=num_sequences, groups=decoder.layer_groups)
            positions = jnp.tile(jnp.arange(length), num_sequences)
            hidden, _ = decoder(tokens.ravel(), positions, view)
            return -optax.softmax_cross_entropy_with_integer_labels(
                decoder.logits(hidden).reshape(num_sequences, length, -1)[:, :-1], tokens[:, 1:]
            )

    Sequences padded at the end need no mask: no token sees what comes after it.
    """

    num_sequences: int = dataclasses.field(metadata={"static": True})  # B
    groups: tuple[LayerGroup, ...] = dataclasses.field(metadata={"static": True})

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
        """See `paxkv.decoder.Cache.attend`; `T` is `B * L`."""
        num_rows, num_heads, head_dim = queries.shape
        num_kv_heads = keys.shape[1]
        shape = (self.num_sequences, num_rows // self.num_sequences, num_kv_heads, -1, head_dim)
        queries = queries.reshape(shape)
        keys, values = (x.reshape(*shape[:3], head_dim) for x in (keys, values))
        scores = jnp.einsum("bqkgh,btkh->bkgqt", queries, keys, preferred_element_type=jnp.float32)
        scores = scores * (head_dim**-0.5 if scale is None else scale)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        weights = _softmax(jnp.where(self._is_seen(layer, shape[1]), scores, -jnp.inf), sinks)
        out = jnp.einsum(
            "bkgqt,btkh->bqkgh",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return out.reshape(num_rows, num_heads, head_dim).astype(queries.dtype), self

    def _is_seen(self, layer: int, length: int) -> jax.Array:
        """`bool[1, 1, 1, q, t]`, whether the query sees the key."""
        window = self.groups[group_of(self.groups, layer)[0]].window
        place = jnp.arange(length)
        seen = place[None, :] <= place[:, None]
        if window is not None:
            seen &= place[None, :] > place[:, None] - window
        return seen[None, None, None]


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Over the last axis of `[B, K, G, q, t]`; sinks `f32[N]` join the denominator only."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    _, num_kv_heads, group, *_ = scores.shape
    sinks = sinks.astype(jnp.float32).reshape(1, num_kv_heads, group, 1, 1)
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks)
    weights = jnp.exp(scores - top)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - top))
