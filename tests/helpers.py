"""A tiny decoder, decoders whose logits a test sets, and engines that are checked as they run."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from paxkv.causal_view import CausalView
from paxkv.decoder import Cache, Decoder, LayerGroup
from paxkv.engine import Engine
from paxkv.integrity import check_integrity
from paxkv.models.config import DecoderConfig
from paxkv.models.generation import GenerationConfig
from paxkv.models.llama import LlamaDecoder
from paxkv.request import SamplingParams
from paxkv.request_state import Request

VOCAB = 64
NEAR_TIE = 1e-3  # where two logits differ by less, float32 may choose either
TINY_CONFIG = DecoderConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
    }
)


@functools.cache
def tiny_decoder(dtype: DTypeLike = "float32", seed: int = 0) -> LlamaDecoder:
    """Two layers, two KV heads of 8 numbers, 64 tokens, random weights. Not to be changed."""
    return LlamaDecoder(TINY_CONFIG, dtype=dtype, rngs=nnx.Rngs(seed))


class StubDecoder(nnx.Module):
    """Logits are the last token's row of a table `[V, V]`, or the one row of `[V]`."""

    layer_groups = (LayerGroup(layers=(0,), num_kv_heads=1, head_dim=1),)

    def __init__(self, table: ArrayLike) -> None:
        table = jnp.asarray(table)
        self.vocab_size = table.shape[-1]
        self.table = nnx.Param(jnp.broadcast_to(table, (self.vocab_size, self.vocab_size)))

    def __call__[C: Cache](
        self, tokens: jax.Array, positions: jax.Array, cache: C
    ) -> tuple[jax.Array, C]:
        heads = tokens.astype(jnp.float32)[:, None, None]
        _, cache = cache.attend(0, heads, heads, heads)
        return tokens[:, None], cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self.table[...][hidden[:, 0]]


class HistoryDecoder(StubDecoder):
    """Logits are a row of the table chosen by all tokens that the cache holds, and their order.

    Exact as long as sums of some hundred tokens are: a single wrong key or value shows.
    """

    def __call__[C: Cache](
        self, tokens: jax.Array, positions: jax.Array, cache: C
    ) -> tuple[jax.Array, C]:
        zeros = jnp.zeros((tokens.shape[0], 1, 1), jnp.float32)  # every key weighs the same
        mean, cache = cache.attend(0, zeros, zeros, _checks(tokens, positions)[:, None, None])
        total = jnp.round(mean[:, 0, 0] * (positions + 1).astype(jnp.float32))
        return (total.astype(jnp.int32) % self.vocab_size)[:, None], cache


def _checks(tokens: jax.Array, positions: jax.Array) -> jax.Array:
    return ((tokens + 1) * (1 + positions % 7)).astype(jnp.float32)


def settled(**choices) -> SamplingParams:
    """Greedy for 8 tokens where nothing else is said."""
    defaults: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}
    return SamplingParams(**(defaults | choices)).with_defaults(GenerationConfig())


def make_engine(decoder: Decoder, **sizes) -> Engine:
    """An engine of sizes that many tests share, so that few programs are compiled."""
    defaults: dict[str, Any] = {
        "num_slots": 4,
        "max_length": 64,
        "num_pages": 65,
        "page_size": 4,
        "max_prefill_tokens": 16,
    }
    return Engine(decoder, **(defaults | sizes))


def add(engine: Engine, prompt: Sequence[int], params: SamplingParams, **choices: Any) -> Request:
    """Adds a request, and returns it."""
    request = Request(prompt=list(prompt), params=params, **choices)
    engine.add(request)
    return request


def run(engine: Engine, max_steps: int | None = None) -> None:
    """Serves all that was added. The tables are checked after every step, the pool at the end."""
    while engine.has_work:
        engine.step(max_steps)
        check_engine(engine)
    assert pages_held(engine) == 0


def check_engine(engine: Engine) -> None:
    """Checks the tables, and that the host's count of pages is the device's."""
    index = engine._scheduler.index
    for group, (_, table) in enumerate(engine._runner.cache):
        check_integrity(table, held_by_index(engine, group))
    num_taken = max(
        int(np.sum(np.asarray(table.ref_counts) > 0)) - 1 for _, table in engine._runner.cache
    )
    num_reusable = index.num_pages - index.num_used
    assert num_taken == engine._scheduler.num_pages_used + num_reusable


def held_by_index(engine: Engine, group: int = 0) -> np.ndarray:
    """`i32[P]`, the pages of a layer group that the prefix index holds."""
    held = np.zeros(engine._runner.cache[group][1].ref_counts.shape, np.int32)
    for node in engine._scheduler.index.nodes():
        held[node.pages[group]] += 1
    return held


def pages_held(engine: Engine) -> int:
    """Pages that requests hold in the layer group that has most, the null page left out."""
    return max(
        int(np.sum(np.asarray(table.ref_counts) > held_by_index(engine, group))) - 1
        for group, (_, table) in enumerate(engine._runner.cache)
    )


def serve(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, **stops
) -> list[Request]:
    """Adds prompts, serves them, and returns their requests."""
    requests = [add(engine, prompt, params, **stops) for prompt in prompts]
    run(engine)
    return requests


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


@jax.jit
def dense_logits(decoder: Decoder, tokens: jax.Array) -> jax.Array:
    """Logits `f32[L, V]` of one sequence `i32[L]`, without a cache of any kind."""
    view = CausalView(num_sequences=1, groups=tuple(decoder.layer_groups))
    hidden, _ = decoder(tokens, jnp.arange(tokens.shape[0], dtype=jnp.int32), view)
    return decoder.logits(hidden)


def logits_of(decoder: Decoder, tokens: Sequence[int], length: int = 64) -> np.ndarray:
    """Dense logits of a sequence padded to `length`, so that lengths share a program."""
    padded = np.zeros(max(length, len(tokens)), np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(dense_logits(decoder, padded))[: len(tokens)]


def assert_greedy(
    decoder: Decoder, prompt: Sequence[int], output: Sequence[int], length: int = 64
) -> None:
    """Every token is the best one by dense attention over all before it, near ties aside."""
    logits = logits_of(decoder, [*prompt, *output], length)[len(prompt) - 1 : -1]
    gaps = np.max(logits, axis=1) - logits[np.arange(len(output)), output]
    assert np.all(gaps <= NEAR_TIE), (prompt, output, gaps)
    for place in np.flatnonzero(gaps):
        print(f"near tie at {place} of {output}: {gaps[place]}")
