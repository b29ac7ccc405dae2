"""The Llama family as a Flax NNX decoder: Llama, SmolLM2, Mistral, Qwen2 and their like."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from paxkv.decoder import Cache
from paxkv.models.config import DecoderConfig
from paxkv.models.rope import rotate, rotation


class LlamaLayer(nnx.Module):
    """One layer: attention and a gated MLP, each on the normed residual and added to it.

    Projections that read the same input are one array, so that each is one large product.
    """

    def __init__(self, config: DecoderConfig, dtype: DTypeLike, *, rngs: nnx.Rngs):
        matrix = functools.partial(_matrix, dtype=dtype, rngs=rngs)
        ones = functools.partial(jnp.ones, dtype=dtype)
        zeros = functools.partial(jnp.zeros, dtype=dtype)
        hidden, inner = config.hidden_size, config.intermediate_size
        heads, head_dim, kv_heads = config.num_heads, config.head_dim, config.num_kv_heads
        # A KV head's query heads, then its key, then its value: so that the first axis shards.
        qkv = (kv_heads, heads // kv_heads + 2, head_dim)
        self.attn_norm = nnx.Param(ones((hidden,)))
        self.qkv = nnx.Param(matrix(qkv, hidden))  # [K, N / K + 2, H, D]
        self.qkv_bias = nnx.Param(zeros(qkv)) if config.qkv_bias else None
        self.out = nnx.Param(matrix((hidden,), heads * head_dim))  # [D, N * H]
        self.out_bias = nnx.Param(zeros((hidden,))) if config.out_bias else None
        self.mlp_norm = nnx.Param(ones((hidden,)))
        self.gate_up = nnx.Param(matrix((2, inner), hidden))  # [2, F, D]
        self.gate_up_bias = nnx.Param(zeros((2, inner))) if config.mlp_bias else None
        self.down = nnx.Param(matrix((hidden,), inner))  # [D, F]
        self.down_bias = nnx.Param(zeros((hidden,))) if config.mlp_bias else None
        self.norm_eps = config.rms_norm_eps

    def __call__[C: Cache](
        self, index: int, x: jax.Array, cos: jax.Array, sin: jax.Array, cache: C
    ) -> tuple[jax.Array, C]:
        """The residual stream `[T, D]` after layer `index`, and the cache."""
        qkv = linear(rms_norm(x, self.attn_norm, self.norm_eps), self.qkv, self.qkv_bias)
        num_tokens, kv_heads, group, head_dim = qkv.shape
        rotated = rotate(qkv[:, :, :-1].reshape(num_tokens, -1, head_dim), cos, sin)
        rotated = rotated.reshape(num_tokens, kv_heads, group - 1, head_dim)
        queries = rotated[:, :, :-1].reshape(num_tokens, -1, head_dim)
        heads, cache = cache.attend(index, queries, rotated[:, :, -1], qkv[:, :, -1])
        x = x + linear(heads.reshape(num_tokens, -1), self.out, self.out_bias)
        normed = rms_norm(x, self.mlp_norm, self.norm_eps)
        # Rounded once, after the product: a CPU computes it in half the time.
        gate_up = wide_linear(normed, self.gate_up, self.gate_up_bias)  # f32[T, 2, F]
        inner = (jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]).astype(x.dtype)
        return x + linear(inner, self.down, self.down_bias), cache


class LlamaDecoder(nnx.Module):
    """A `paxkv.decoder.Decoder` of the Llama family.

    Layers are unrolled and each has arrays of its own: slices of one stacked array would be
    copied at each step. Without memory for weights yet, build it under `nnx.eval_shape`.

    Args:
        config: Sizes and settings.
        dtype: Of weights and activations; norms, rotations and sums of products are float32.
        rngs: Where random weights come from.
    """

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.vocab_size = config.vocab_size
        self.layer_groups = config.layer_groups
        table = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(_normal(table, dtype=dtype, rngs=rngs))  # [V, D]
        self.layers = nnx.List(
            [LlamaLayer(config, dtype, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        tied = config.tie_embeddings
        self.head = None if tied else nnx.Param(_normal(table, dtype=dtype, rngs=rngs))  # [V, D]

    def __call__[C: Cache](
        self, tokens: jax.Array, positions: jax.Array, cache: C
    ) -> tuple[jax.Array, C]:
        """Normed hidden states `[T, D]` of tokens `i32[T]` at positions `i32[T]`; the cache."""
        x = jnp.take(self.embedding[...], tokens, axis=0, mode="clip")
        ropes = self.config.ropes
        turns = {
            rope: rotation(rope, self.config.head_dim, positions) for rope in dict.fromkeys(ropes)
        }
        for index, (layer, rope) in enumerate(zip(self.layers, ropes, strict=True)):
            x, cache = layer(index, x, *turns[rope], cache)
        return rms_norm(x, self.norm, self.config.rms_norm_eps), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Next-token logits `f32[R, V]` of hidden states `[R, D]`."""
        table = self.embedding if self.head is None else self.head
        return _product(hidden, table[...], input_axis=1)


def rms_norm(x: jax.Array, weight: nnx.Param, eps: float) -> jax.Array:
    """`x` `[T, D]` over its root mean square, times `weight`; in float32 (arXiv 1910.07467)."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * weight[...].astype(jnp.float32)[None]).astype(x.dtype)


def linear(x: jax.Array, weight: nnx.Param, bias: nnx.Param | None = None) -> jax.Array:
    """`wide_linear`, rounded to `x`'s dtype."""
    return wide_linear(x, weight, bias).astype(x.dtype)


def wide_linear(x: jax.Array, weight: nnx.Param, bias: nnx.Param | None = None) -> jax.Array:
    """`x` `[T, I]` by weights `[..., I]`, plus the bias: `f32[T, ...]`.

    Float32 weights are `[I, ...]`, see `input_first`.
    """
    shape = weight.shape
    # As a matrix: XLA's CPU backend transposes, and so copies, weights of more axes at each call.
    if input_first(weight.dtype):
        out = _product(x, weight[...].reshape(shape[0], -1), input_axis=0)
        out = out.reshape(-1, *shape[1:])
    else:
        out = _product(x, weight[...].reshape(-1, shape[-1]), input_axis=1)
        out = out.reshape(-1, *shape[:-1])
    if bias is not None:
        out = out + bias[...].astype(jnp.float32)[None]
    return out


def input_first(dtype: DTypeLike) -> bool:
    """Whether matrices of this dtype have their input axis first, instead of last.

    Measured: XLA's CPU backend multiplies a few rows by float32 matrices about 15 % faster so, and
    by 16-bit ones about 5 % slower.
    """
    return jnp.dtype(dtype).itemsize == 4


def _product(x: jax.Array, matrix: jax.Array, *, input_axis: int) -> jax.Array:
    """`x` `[T, I]` by a matrix whose `input_axis` is I, accumulated in float32: `f32[T, O]`."""
    num_rows = x.shape[0]
    if num_rows == 1 and x.dtype.itemsize == 2:
        # On a CPU, XLA multiplies (and compiles) one 16-bit row several times slower than two.
        x = jnp.pad(x, ((0, 1), (0, 0)))
    axes = (((1,), (input_axis,)), ((), ()))
    return lax.dot_general(x, matrix, axes, preferred_element_type=jnp.float32)[:num_rows]


def _matrix(
    outputs: tuple[int, ...], inputs: int, *, dtype: DTypeLike, rngs: nnx.Rngs
) -> jax.Array:
    """Random weights `[*outputs, inputs]`, or `[inputs, *outputs]`."""
    weight = _normal((*outputs, inputs), dtype=dtype, rngs=rngs)
    return jnp.moveaxis(weight, -1, 0) if input_first(dtype) else weight


def _normal(shape: tuple[int, ...], *, dtype: DTypeLike, rngs: nnx.Rngs) -> jax.Array:
    scale = jnp.asarray(shape[-1] ** -0.5, dtype)
    return jax.random.normal(rngs.params(), shape, dtype) * scale
