"""A cache without pages, for checking decoders alone."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseCache:
    """Keys and values of one sequence, layer by layer, each `[length, K, H]` (`Cache`)."""

    keys: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    values: dict[int, jax.Array] = dataclasses.field(default_factory=dict)

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
        """Causal softmax attention in float32 over what is stored and what is new."""
        assert soft_cap is None and sinks is None
        if layer in self.keys:
            keys = jnp.concatenate([self.keys[layer], keys])
            values = jnp.concatenate([self.values[layer], values])
        num_tokens, num_heads, head_dim = queries.shape
        group = num_heads // keys.shape[1]
        wide_keys = jnp.repeat(keys.astype(jnp.float32), group, axis=1)
        wide_values = jnp.repeat(values.astype(jnp.float32), group, axis=1)
        scores = jnp.einsum("tnh,snh->nts", queries.astype(jnp.float32), wide_keys)
        scores = scores * (head_dim**-0.5 if scale is None else scale)
        seen = jnp.tri(num_tokens, len(keys), len(keys) - num_tokens, dtype=bool)
        weights = jax.nn.softmax(jnp.where(seen[None], scores, -jnp.inf), axis=-1)
        out = jnp.einsum("nts,snh->tnh", weights, wide_values).astype(queries.dtype)
        return out, dataclasses.replace(
            self, keys={**self.keys, layer: keys}, values={**self.values, layer: values}
        )
