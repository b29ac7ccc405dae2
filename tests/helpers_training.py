"""A small model that has learned something, and what training takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from paxkv import CausalView, Decoder
from paxkv.models.config import DecoderConfig
from paxkv.models.llama import LlamaDecoder
from paxkv.models.rope import RopeConfig

END = 257  # </s> of `byte_level_tokenizer`
SENTENCES = (
    "A page holds the keys and values of a few tokens.",
    "The block table says which pages a request has.",
    "Page 0 is never handed out.",
    "No request needs memory in one piece.",
    "When a request ends, its pages go to the next one.",
    "Über Brücken geht man zu Fuß. 🙂",
)


def small_config(vocab_size: int) -> DecoderConfig:
    """Two layers, two KV heads of 16 numbers."""
    return DecoderConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0), max_position=256,
    )  # fmt: skip


@functools.cache
def trained_decoder() -> LlamaDecoder:
    """Knows SENTENCES by heart, byte by byte. Not to be changed."""
    decoder = LlamaDecoder(small_config(264), rngs=nnx.Rngs(0))
    tokens = _padded([[*text.encode(), END] for text in SENTENCES])
    optimizer = optax.adam(3e-3)
    decoder, loss = _train(decoder, optimizer.init(nnx.state(decoder)), tokens, optimizer, 250)
    assert loss < 0.1, f"the small model learned too little: a loss of {loss}"
    return decoder


def log_likelihoods(decoder: Decoder, tokens: jax.Array) -> jax.Array:
    """`f32[B, L - 1]` of each token but the first of `i32[B, L]`, as `jax.grad` can take it."""
    num_sequences, length = tokens.shape
    view = CausalView(num_sequences=num_sequences, groups=tuple(decoder.layer_groups))
    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), num_sequences)
    hidden, _ = decoder(tokens.ravel(), positions, view)
    logits = decoder.logits(hidden).reshape(num_sequences, length, -1)
    return -optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])


@functools.partial(jax.jit, static_argnames=("optimizer", "num_steps"))
def _train(decoder, state, tokens, optimizer, num_steps):
    graph, weights = nnx.split(decoder)

    def loss_of(weights):
        return -jnp.mean(log_likelihoods(nnx.merge(graph, weights), tokens))

    def step(carry, _):
        weights, state = carry
        loss, gradient = jax.value_and_grad(loss_of)(weights)
        updates, state = optimizer.update(gradient, state, weights)
        return (optax.apply_updates(weights, updates), state), loss

    (weights, _), losses = jax.lax.scan(step, (weights, state), length=num_steps)
    return nnx.merge(graph, weights), losses[-1]


def _padded(rows: list[list[int]]) -> jax.Array:
    tokens = np.full((len(rows), max(map(len, rows))), END, np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return jnp.asarray(tokens)
