import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from paxkv.models.config import DecoderConfig
from paxkv.models.llama import LlamaDecoder
from reference.make_llama_cases import CASES

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


def test_sizes_follow_from_the_config():
    config = DecoderConfig.from_hf(SMOLLM2)
    assert config.head_dim == 64 and config.rope.theta == 100000
    assert config.num_parameters == 134_515_008
    assert config.weight_bytes(2) == 269_030_016
    assert config.kv_bytes_per_token(2) == 2 * 30 * 3 * 64 * 2
    assert hash(config) == hash(DecoderConfig.from_hf(SMOLLM2))


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_the_decoder(name):
    config = DecoderConfig.from_hf(CASES[name])
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
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM.*supported are Llama"),
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
        ({"num_hidden_layers": "3"}, "num_layers='3'"),
        ({"hidden_size": None}, "lack hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' would change the numbers"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map"),
        ({"sliding_window": 8}, "sliding_window=8"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_hf(SMOLLM2 | changes)


def test_a_window_that_is_switched_off_is_none():
    config = DecoderConfig.from_hf(SMOLLM2 | {"sliding_window": 8, "use_sliding_window": False})
    assert config == DecoderConfig.from_hf(SMOLLM2)
