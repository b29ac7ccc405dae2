"""Decoders whose layers see a window of the newest tokens: which layers, and what they compute."""

import dataclasses
import json
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers import TINY_CONFIG, assert_greedy, make_engine, random_prompts, serve, settled
from helpers_checkpoints import write_folder
from helpers_steps import NUM_SLOTS, make_cache
from paxkv.cache import PagedCache
from paxkv.decoder import Cache, Decoder, LayerGroup
from paxkv.models.config import DecoderConfig
from paxkv.models.llama import LlamaDecoder
from paxkv.models.load import load_model
from paxkv.steps import store
from reference.make_llama_cases import (
    DATA,
    WINDOW_CASES,
    WINDOW_LENGTH,
    WINDOW_ROWS,
    make_tokens,
    make_weights,
)

WINDOWED = {
    "qwen2_switched_off": (),
    "qwen2_from_a_layer_on": (2, 3),
    "qwen2_by_layer_types": (0, 2),
    "mistral_without": (),
    "mistral_in_all_layers": (0, 1, 2, 3),
}
WAYS = {"in one call": WINDOW_LENGTH, "in chunks": 3, "by decode": 1}  # tokens in a call


@partial(jax.jit, static_argnames=("num_rows", "max_q_len"))
def store_some(
    decoder: Decoder,
    cache: PagedCache,
    tokens: jax.Array,
    q_len: jax.Array,
    *,
    num_rows: int,
    max_q_len: int | None,
) -> tuple[PagedCache, jax.Array, jax.Array]:
    """Stores the next `q_len` of a sequence's tokens in the second slot; their logits."""
    q_lens = jnp.where(jnp.arange(NUM_SLOTS) == 1, q_len, 0)
    cache, fits, hidden, _ = store(
        decoder, cache, q_lens, lambda rows: tokens[rows.positions],
        num_rows=num_rows, max_q_len=max_q_len,
    )  # fmt: skip
    return cache, fits, decoder.logits(hidden)


def paged_logits(decoder: Decoder, tokens: Sequence[int] | np.ndarray, chunk: int) -> np.ndarray:
    """Logits `f32[L, V]` of one sequence on the paged cache, `chunk` tokens in a call."""
    num_rows, max_q_len = (NUM_SLOTS, 1) if chunk == 1 else (24, None)
    cache, logits = make_cache(decoder), []
    for start in range(0, len(tokens), chunk):
        q_len = min(chunk, len(tokens) - start)
        cache, fits, new = store_some(
            decoder, cache, jnp.asarray(tokens, jnp.int32), jnp.int32(q_len),
            num_rows=num_rows, max_q_len=max_q_len,
        )  # fmt: skip
        assert fits
        logits.append(np.asarray(new)[:q_len])
    return np.concatenate(logits)


@pytest.mark.parametrize("name", WINDOW_CASES)
def test_layers_are_windowed_as_the_reference_decides(name):
    config = DecoderConfig.from_hf(WINDOW_CASES[name])
    assert config.windowed_layers == WINDOWED[name]
    windows = {layer: group.window for group in config.layer_groups for layer in group.layers}
    assert windows == {n: 8 if n in WINDOWED[name] else None for n in range(4)}
    assert len(config.layer_groups) == len(set(windows.values()))


@pytest.mark.parametrize("name", WINDOW_CASES)
def test_logits_are_the_references_whichever_way(name, tmp_path):
    config = WINDOW_CASES[name]
    folder = write_folder(tmp_path, config, make_weights(config))
    decoder = load_model(folder, dtype="float32").decoder
    expected = json.loads((DATA / "window_logits.json").read_text())[name]
    for way, chunk in WAYS.items():
        logits = paged_logits(decoder, make_tokens(config, WINDOW_LENGTH), chunk)
        np.testing.assert_allclose(logits[list(WINDOW_ROWS)], expected, atol=1e-4, err_msg=way)


class WeighsAlike(nnx.Module):
    """Logits are the weight of each position: all that a query sees weigh the same."""

    vocab_size = 16

    def __init__(self, window: int | None) -> None:
        self.layer_groups = (LayerGroup(layers=(0,), num_kv_heads=1, head_dim=16, window=window),)

    def __call__[C: Cache](
        self, tokens: jax.Array, positions: jax.Array, cache: C
    ) -> tuple[jax.Array, C]:
        zeros = jnp.zeros((tokens.shape[0], 1, 16))
        weights, cache = cache.attend(0, zeros, zeros, jax.nn.one_hot(positions, 16)[:, None])
        return weights[:, 0], cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden


@pytest.mark.parametrize("chunk", [10, 3, 1])
@pytest.mark.parametrize("window", [4, 10, 100, None])
def test_a_window_counts_the_query_itself(window, chunk):
    weights = paged_logits(WeighsAlike(window), [0] * 10, chunk)
    expected = np.tri(10, 16) * (1 - np.tri(10, 16, -(window or 16)))
    np.testing.assert_allclose(weights, expected / expected.sum(1, keepdims=True), atol=1e-6)
    if window == 4:
        np.testing.assert_allclose(weights[9, 6:10], 0.25, atol=1e-6)
        np.testing.assert_allclose(weights[3, :4], 0.25, atol=1e-6)
        np.testing.assert_allclose(weights[4, 1:5], 0.25, atol=1e-6)


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        paged_logits(WeighsAlike(0), [0] * 10, 10)


@pytest.mark.parametrize("windowed_layers", [(0,), (0, 1)], ids=["one_layer", "all_layers"])
def test_engine_generates_what_dense_attention_does(windowed_layers):
    config = dataclasses.replace(TINY_CONFIG, window=6, windowed_layers=windowed_layers)
    decoder = LlamaDecoder(config, rngs=nnx.Rngs(0))
    prompts = random_prompts([3, 6, 7, 30])
    requests = serve(make_engine(decoder), [*prompts, prompts[3]], settled(max_tokens=16))
    for request in requests:
        assert_greedy(decoder, request.prompt, request.output)
    assert requests[3].output == requests[4].output


class KeyRecorder:
    """Keeps the rotated keys of each layer. Attention gives nothing, so no layer sees another's."""

    def __init__(self) -> None:
        self.keys: list[np.ndarray] = []  # a layer each, [T, K, H]

    def attend(self, layer, queries, keys, values, **options):
        self.keys.append(np.asarray(keys))
        return jnp.zeros_like(queries), self


FULL_BASE, WINDOW_BASE, FACTOR = 1000000.0, 10000.0, 8.0
ROPES = {
    "by type": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": FACTOR, "rope_theta": FULL_BASE},
            "sliding_attention": {"rope_type": "default", "rope_theta": WINDOW_BASE},
        }
    },
    "as of old": {
        "rope_theta": FULL_BASE,
        "rope_local_base_freq": WINDOW_BASE,
        "rope_scaling": {"rope_type": "linear", "factor": FACTOR},
    },
}


@pytest.mark.parametrize("settings", ROPES.values(), ids=ROPES)
def test_windowed_layers_turn_by_a_base_of_their_own_without_scaling(settings):
    types = ["sliding_attention"] * 5 + ["full_attention"]
    case = WINDOW_CASES["qwen2_by_layer_types"] | {"num_hidden_layers": 6, "layer_types": types}
    decoder = LlamaDecoder(DecoderConfig.from_hf(case | settings), rngs=nnx.Rngs(0))
    recorder = KeyRecorder()
    decoder(jnp.array([5, 5]), jnp.array([0, 800], jnp.int32), recorder)
    for kind, keys in zip(types, recorder.keys, strict=True):
        is_full = kind == "full_attention"
        first, base = (100, FULL_BASE) if is_full else (800, WINDOW_BASE)
        angles = first * base ** -(np.arange(4) / 4)
        pairs = keys[..., :4] + 1j * keys[..., 4:]
        np.testing.assert_allclose(pairs[1], pairs[0] * np.exp(1j * angles), atol=2e-4)
