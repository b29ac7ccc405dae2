import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers_checkpoints import dense_logits, dense_step, write_folder
from helpers_dense import DenseCache
from helpers_reference import run_reference
from paxkv.decoder import Decoder, LayerGroup
from paxkv.models.config import DecoderConfig
from paxkv.models.llama import LlamaDecoder
from paxkv.models.load import load_model
from reference.make_llama_cases import CASES, DATA, ROWS, make_tokens, make_weights


def make_decoder(name: str, dtype=jnp.float32) -> LlamaDecoder:
    return LlamaDecoder(DecoderConfig.from_hf(CASES[name]), dtype=dtype, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_references(name, tmp_path):
    folder = write_folder(tmp_path, CASES[name], make_weights(CASES[name]))
    decoder = load_model(folder, dtype="float32").decoder
    logits = dense_logits(decoder, make_tokens(CASES[name]))
    expected = json.loads((DATA / "llama_logits.json").read_text())[name]
    np.testing.assert_allclose(logits[list(ROWS)], expected, atol=1e-4)


def test_stored_logits_are_what_the_reference_says_now(tmp_path):
    run_reference("make_llama_cases.py", "--data", tmp_path)
    for file in ("llama_logits.json", "window_logits.json"):
        stored = json.loads((DATA / file).read_text())
        for name, logits in json.loads((tmp_path / file).read_text()).items():
            np.testing.assert_allclose(stored[name], logits, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 5e-2), ("float16", 1e-2)]
)
def test_token_by_token_equals_all_at_once(dtype, tolerance):
    decoder = make_decoder("biases_everywhere", dtype)
    tokens = make_tokens(CASES["biases_everywhere"], 6)
    at_once = dense_logits(decoder, tokens)
    cache = DenseCache()
    for position, token in enumerate(tokens):
        logits, cache = dense_step(
            decoder, jnp.array([token]), jnp.array([position], jnp.int32), cache
        )
        assert logits.dtype == jnp.float32 and logits.shape == (1, 64)
        np.testing.assert_allclose(logits[0], at_once[position], atol=tolerance)


@pytest.mark.parametrize("name", ["multi_head", "grouped_explicit_head_dim_tied"])
def test_rotation_goes_on_past_the_length_a_model_was_made_for(name):
    """Only distances count: tokens across the end say what they say at the beginning."""
    decoder = make_decoder(name)
    tokens = jnp.array(make_tokens(CASES[name], 8))
    last = CASES[name]["max_position_embeddings"] - 1

    def logits_from(first: int) -> jax.Array:
        positions = first + jnp.arange(8, dtype=jnp.int32)
        return decoder.logits(decoder(tokens, positions, DenseCache())[0])

    np.testing.assert_allclose(logits_from(last - 3), logits_from(0), atol=1e-4)
    np.testing.assert_allclose(logits_from(10 * last), logits_from(0), atol=1e-3)


def test_decoder_is_one_the_core_can_drive():
    decoder = make_decoder("grouped_explicit_head_dim_tied")
    assert isinstance(decoder, Decoder)
    assert decoder.vocab_size == 64
    assert decoder.layer_groups == (LayerGroup(layers=(0, 1), num_kv_heads=2, head_dim=16),)
    assert decoder.head is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_and_hidden_states_keep_the_dtype(dtype):
    decoder = make_decoder("biases_everywhere", dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(decoder)} == {jnp.dtype(dtype)}
    hidden, _ = decoder(jnp.arange(3), jnp.arange(3), DenseCache())
    assert hidden.dtype == jnp.dtype(dtype)
    assert decoder.logits(hidden).dtype == jnp.float32


def test_other_weights_of_the_same_config_do_not_compile_again():
    traces = []

    @jax.jit
    def embed(decoder, tokens):
        traces.append(tokens)
        return decoder(tokens, tokens, DenseCache())[0]

    for name in ("multi_head", "multi_head"):
        embed(make_decoder(name), jnp.arange(2))
    assert len(traces) == 1
