"""Sizes of models and memories: what keys and values take, of any config.json."""

import json

import pytest

from helpers_diagnose import make_trace
from paxkv.diagnose.accelerators import ACCELERATORS, find_memory
from paxkv.diagnose.budget import make_budget, parse_weights
from paxkv.diagnose.known_models import MODELS, find_sizes
from paxkv.diagnose.model_sizes import ModelSizes, read_sizes
from paxkv.diagnose.remedies import possible_remedies
from paxkv.models.config import DecoderConfig
from reference.make_llama_cases import WINDOW_CASES
from test_config import SMOLLM2

BASE = {
    "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 100,
    "intermediate_size": 128,
}  # fmt: skip


def budget_of(sizes: ModelSizes, **changes):
    settings = {
        "memory_bytes": 40 << 30, "weight_bytes": 26 << 30, "activation_bytes": 2 << 30,
        "kv_dtype": "bf16", "num_devices": 1,
    }  # fmt: skip
    return make_budget(sizes, **(settings | changes))


def test_sizes_are_those_that_the_decoder_has():
    sizes, config = read_sizes(SMOLLM2, "x"), DecoderConfig.from_hf(SMOLLM2)
    assert sizes.kv_bytes_per_token("bf16") == config.kv_bytes_per_token(2)
    assert sizes.num_parameters == pytest.approx(config.num_parameters, rel=0.001)
    assert sizes.max_length == config.max_position


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("opt-13b", 12.85e9, 819_200),
        ("llama-2-7b", 6.74e9, 524_288),
        ("llama-2-70b", 68.98e9, 327_680),
        ("llama-3.1-8b", 8.03e9, 131_072),
        ("llama-3.1-70b", 70.55e9, 327_680),
    ],
)
def test_built_in_models_have_the_sizes_that_are_known(name, parameters, kv_bytes):
    assert MODELS[name].num_parameters == pytest.approx(parameters, rel=0.01)
    assert MODELS[name].kv_bytes_per_token("fp16") == kv_bytes


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({}, 6 * 2 * 8 * 8),
        ({"num_key_value_heads": 2}, 6 * 2 * 2 * 8),
        ({"head_dim": 32}, 6 * 2 * 8 * 32),
        ({"multi_query": True}, 6 * 2 * 1 * 8),
        ({"kv_lora_rank": 48, "qk_rope_head_dim": 16}, 6 * 64),
        ({"num_kv_shared_layers": 2}, 4 * 2 * 8 * 8),
        ({"layer_types": ["linear_attention", "full_attention"] * 3}, 3 * 2 * 8 * 8),
    ],
    ids=["heads", "grouped", "head_dim", "multi_query", "latent", "shared_layers", "hybrid"],
)
def test_kv_bytes_follow_the_config(changes, numbers):
    assert read_sizes(BASE | changes, "x").kv_bytes_per_token("bf16") == 2 * numbers
    assert read_sizes(BASE | changes, "x").kv_bytes_per_token("int8") == numbers


def test_names_of_other_families_are_known():
    glm = {"num_layers": 28, "hidden_size": 4096, "num_attention_heads": 32, "kv_channels": 128,
           "multi_query_attention": True, "multi_query_group_num": 2, "ffn_hidden_size": 13696,
           "padded_vocab_size": 65024, "seq_length": 32768, "model_type": "chatglm"}  # fmt: skip
    sizes = read_sizes(glm, "x")
    assert sizes.kv_bytes_per_token("fp16") == 28 * 2 * 2 * 128 * 2
    assert sizes.num_parameters == pytest.approx(6.24e9, rel=0.01)
    dbrx = {"n_layers": 40, "d_model": 6144, "n_heads": 48, "attn_config": {"kv_n_heads": 8},
            "vocab_size": 100352, "max_seq_len": 32768}  # fmt: skip
    assert read_sizes(dbrx, "x").kv_bytes_per_token("fp16") == 40 * 2 * 8 * 128 * 2
    gpt2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 10, "n_positions": 128}
    sizes = read_sizes(gpt2 | {"model_type": "gpt2"}, "x")
    assert sizes.kv_bytes_per_token("fp16") == 2 * 2 * 64 * 2 and sizes.max_length == 128
    assert sizes.num_parameters == 2 * 12 * 64 * 64 + 10 * 64
    nested = read_sizes({"text_config": BASE, "model_type": "gemma3"}, "x")
    assert nested.kv_bytes_per_token("fp16") == read_sizes(BASE, "x").kv_bytes_per_token("fp16")


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({"sliding_window": None}, []),
        ({"sliding_window": 8}, [0, 1, 2, 3, 4, 5]),
        ({"sliding_window": 8, "use_sliding_window": False}, []),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4}, [4, 5]),
        ({"sliding_window": 8, "sliding_window_pattern": 3}, [0, 1, 3, 4]),
        (
            {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 3},
            [0, 2, 4],
        ),
        (
            {"attention_chunk_size": 8, "layer_types": ["chunked_attention"] * 6},
            [0, 1, 2, 3, 4, 5],
        ),
        ({"sliding_window": 8, "model_type": "gemma2"}, [0, 2, 4]),
    ],
)
def test_windowed_layers_keep_their_window(changes, windowed):
    sizes = read_sizes(BASE | changes, "x")
    assert [layer for layer, window in enumerate(sizes.windows) if window] == windowed
    kept = (len(windowed) * 7 + (6 - len(windowed)) * 32) / (6 * 32)  # besides the next token
    budget = budget_of(sizes)
    assert budget.request_bytes(32) == pytest.approx(kept * 32 * budget.bytes_per_token)


@pytest.mark.parametrize("name", WINDOW_CASES)
def test_windowed_layers_are_those_of_the_decoder(name):
    sizes, config = read_sizes(WINDOW_CASES[name], "x"), DecoderConfig.from_hf(WINDOW_CASES[name])
    windows = {layer: group.window for group in config.layer_groups for layer in group.layers}
    assert dict(enumerate(sizes.windows)) == windows


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_hidden_layers": None}, "names no num_hidden_layers"),
        ({"hidden_size": "64"}, "hidden_size='64' must be a whole number"),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, "names 1 of 6 layers"),
        ({"layer_types": ["mamba"] * 6}, "none of its layers keeps keys and values"),
        ({"sliding_window": "8"}, "sliding_window='8' must be a whole number above 1"),
    ],
)
def test_sizes_that_are_missing_are_told(changes, told):
    with pytest.raises(ValueError, match=told):
        read_sizes(BASE | changes, "x")


def test_models_are_found_by_name_file_or_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert find_sizes("OPT-13B").num_kv_heads == 40
    assert find_sizes(str(tmp_path)) == find_sizes(str(tmp_path)) and find_sizes(str(tmp_path))
    assert find_sizes(str(tmp_path / "config.json")).num_kv_heads == 8
    with pytest.raises(ValueError, match=r"is neither a config.json, nor .*opt-13b"):
        find_sizes("no/such/model")
    for text, told in (("{", "Expecting"), ("[]", "no JSON object"), ("{}", "num_hidden_layers")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=f"config.json: .*{told}"):
            find_sizes(str(tmp_path))


# The memory.


def test_the_papers_example_leaves_15728_tokens():
    budget = budget_of(MODELS["opt-13b"])
    assert budget.kv_bytes == 12 << 30
    assert budget.bytes_per_token == 819_200 and budget.num_slots == 15_728


def test_devices_share_weights_and_heads():
    one, four = MODELS["llama-2-70b"], {"weight_bytes": 138 << 30, "memory_bytes": 80 << 30}
    budget = budget_of(one, **four, num_devices=4)
    assert budget.weight_bytes == 138 * 2**28
    assert budget.bytes_per_token == 327_680 / 4
    # With more devices than KV heads, each head is kept twice.
    assert budget_of(one, **four, num_devices=16).bytes_per_token == 327_680 / 8


def test_a_memory_smaller_than_the_weights_says_what_would_help():
    with pytest.raises(ValueError) as error:
        budget_of(MODELS["opt-13b"], memory_bytes=24 << 30)
    told = str(error.value)
    assert "weights take 26.0 GiB and activations 2.0 GiB of 24.0 GiB" in told
    assert "look at the model" in told and "half as many bits a weight leave 9.0 GiB" in told
    assert "2 such devices leave 9.0 GiB on each" in told
    with pytest.raises(ValueError, match="too small for it in any form"):
        budget_of(MODELS["opt-13b"], memory_bytes=1 << 30)
    with pytest.raises(ValueError, match="KV dtype 'int3' is none of"):
        budget_of(MODELS["opt-13b"], kv_dtype="int3")


@pytest.mark.parametrize(
    ("weights", "expected"), [("26GiB", 26 << 30), ("1.5 GB", 1_500_000_000), ("int4", None)]
)
def test_weights_are_a_dtype_or_a_size(weights, expected):
    sizes = MODELS["opt-13b"]
    assert parse_weights(weights, sizes) == (expected or sizes.num_parameters // 2)
    with pytest.raises(ValueError, match="'heavy' is neither a dtype"):
        parse_weights("heavy", sizes)


def test_memories_are_found_by_name_or_size():
    assert find_memory("40GB") == (40_000_000_000, None)
    assert find_memory("A100_40GB")[0] == 40_000_000_000
    assert find_memory("tpu v5e")[1] is ACCELERATORS["tpu-v5e"]
    for name, told in (("a1000", "neither a memory size.*known.*a100-40gb"), ("12 XB", "12 XB")):
        with pytest.raises(ValueError, match=told):
            find_memory(name)
    assert all(chip.source and chip.bandwidth_gb_per_second > 0 for chip in ACCELERATORS.values())


def test_remedies_are_computed_from_bytes():
    budget = budget_of(MODELS["opt-13b"])
    found = {remedy.name: remedy for remedy in possible_remedies(
        budget, MODELS["opt-13b"], used_slots=float(budget.num_slots),
    )}  # fmt: skip
    half = found["weights in half the bits"]
    assert half.requests == pytest.approx(25 / 12, rel=1e-3)
    assert half.speed == pytest.approx(38 / 25, rel=1e-3)
    assert found["keys and values in half the bits"].requests == pytest.approx(2, rel=1e-3)
    heads = found["8 KV heads, not 40 (another model)"]
    assert heads.requests == pytest.approx(5, rel=1e-3)
    assert found["2 devices"].requests == pytest.approx(2 * 25 / 12, rel=1e-3)
    grouped = possible_remedies(budget_of(MODELS["llama-3.1-8b"]), MODELS["llama-3.1-8b"],
                                used_slots=float(make_trace((3, 4)).total_tokens[0]))  # fmt: skip
    assert not any("KV heads" in remedy.name for remedy in grouped)
