import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from paxkv.models.config import DecoderConfig
from paxkv.models.llama import LlamaDecoder
from reference.make_llama_cases import CASES, WINDOW_CASES

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def test_sizes_follow_from_the_config():
    config = DecoderConfig.from_hf(SMOLLM2)
    assert config.head_dim == 64 and config.rope.theta == 100000
    assert config.num_parameters == 134_515_008
    assert config.weight_bytes(2) == 269_030_016
    assert config.kv_bytes_per_token(2) == 2 * 30 * 3 * 64 * 2
    assert hash(config) == hash(DecoderConfig.from_hf(SMOLLM2))


@pytest.mark.parametrize("name", [*CASES, "qwen2_by_layer_types", "mistral_in_all_layers"])
def test_parameters_are_those_of_the_decoder(name):
    config = DecoderConfig.from_hf({**CASES, **WINDOW_CASES}[name])
    decoder = nnx.eval_shape(lambda: LlamaDecoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    sizes = [leaf.size for leaf in jax.tree.leaves(decoder)]
    assert sum(sizes) == config.num_parameters


def test_defaults_are_the_familys():
    config = DecoderConfig.from_hf(
        {key: value for key, value in SMOLLM2.items() if key not in ("num_key_value_heads",)}
        | {"tie_word_embeddings": None, "rope_theta": None}
    )
    assert config.num_kv_heads == 9 and not config.tie_embeddings
    assert config.rope.theta == 10000.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM.*supported are Llama"),
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM .model_type 'llama'"),
        ({"architectures": None, "model_type": "gemma"}, "'gemma'.*supported are LlamaForCausalLM"),
        ({"model_type": "qwen2"}, "'qwen2'"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x'"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"rope_theta": "x"}, "positive"),
        ({"rope_scaling": "x"}, "must be an object"),
        ({"num_key_value_heads": 2}, "num_heads=9 must be a multiple of num_kv_heads=2"),
        ({"num_attention_heads": 10}, "hidden_size=576 is not a multiple of"),
        ({"head_dim": 63}, "head_dim=63 must be even"),
        ({"vocab_size": -1}, "vocab_size=-1 must be a whole number"),
        ({"vocab_size": 2.5}, "vocab_size=2.5"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers='3'"),
        ({"hidden_size": None}, "lack hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' would change the numbers"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map"),
        ({"sliding_window": 8}, "LlamaForCausalLM does not read"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_hf(SMOLLM2 | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 0}, "sliding_window=0 must be a whole number above 0, or null"),
        ({"sliding_window": -1}, "sliding_window=-1"),
        ({"sliding_window": 8.0}, "sliding_window=8.0"),
        ({"sliding_window": True}, "sliding_window=True"),
        ({"max_window_layers": None}, "max_window_layers=None"),
        ({"max_window_layers": -1}, "max_window_layers=-1"),
        ({"layer_types": ["sliding_attention"] * 3}, "type of each of 4 layers"),
        ({"layer_types": "sliding_attention"}, "type of each of 4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention.* are not supported"),
        ({"use_sliding_window": False}, "gives them no window"),
        ({"sliding_window": None}, "sliding_window=None .* gives them no window"),
        (MISTRAL, r"MistralForCausalLM does not read .it reads .'sliding_window'"),
    ],
)
def test_windows_that_are_not_understood_are_refused(changes, message):
    case = WINDOW_CASES["qwen2_by_layer_types"]
    if "max_window_layers" in changes:
        case = WINDOW_CASES["qwen2_from_a_layer_on"]
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_hf(case | changes)


def test_a_window_that_is_switched_off_is_none():
    config = DecoderConfig.from_hf(SMOLLM2 | {"sliding_window": 8, "use_sliding_window": False})
    assert config == DecoderConfig.from_hf(SMOLLM2)


@pytest.mark.parametrize(
    ("name", "left_out", "window", "layers"),
    [
        ("mistral_in_all_layers", "sliding_window", 4096, (0, 1, 2, 3)),
        ("qwen2_from_a_layer_on", "sliding_window", 4096, (2, 3)),
        ("qwen2_from_a_layer_on", "max_window_layers", None, ()),
        ("qwen2_from_a_layer_on", "use_sliding_window", None, ()),
    ],
)
def test_settings_of_windows_that_are_left_out_are_the_familys(name, left_out, window, layers):
    case = {key: value for key, value in WINDOW_CASES[name].items() if key != left_out}
    config = DecoderConfig.from_hf(case)
    assert (config.window, config.windowed_layers) == (window, layers)


def test_biases_are_those_that_the_architecture_has():
    flags = {"attention_bias": True, "mlp_bias": True}
    found = {
        name: DecoderConfig.from_hf(case | flags)
        for name, case in (("llama", SMOLLM2), *WINDOW_CASES.items())
    }
    assert {
        name: (config.qkv_bias, config.out_bias, config.mlp_bias) for name, config in found.items()
    } == {
        "llama": (True, True, True),
        **{name: (name.startswith("qwen2"), False, False) for name in WINDOW_CASES},
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 8}, "give both or neither"),
        ({"windowed_layers": (0,)}, "give both or neither"),
        ({"window": 0, "windowed_layers": (0,)}, "window=0 must be a whole number above 0"),
        ({"window": 8, "windowed_layers": (30,)}, "must be of layers 0 to 29"),
    ],
)
def test_windowed_layers_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DecoderConfig.from_hf(SMOLLM2), **changes)
