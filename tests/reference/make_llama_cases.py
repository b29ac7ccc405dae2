"""Tiny random checkpoints of Llama and its kin, and the logits that transformers computes.

Tests make the same checkpoints from the same seeds; only logits are stored. To make them again:

    $PAXKV_REFERENCE_PYTHON tests/reference/make_llama_cases.py [--smollm2 FOLDER]

FOLDER is what `export_smollm2.py` wrote; without it that model's logits are left as they are.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parents[1] / "data"
ROWS = (0, 11, 23)  # positions whose logits are stored
WINDOW_LENGTH, WINDOW_ROWS = 20, (6, 7, 8, 13, 19)  # with a window of 8
SMOLLM2_PROMPT = (504, 3575, 282, 4649, 314)  # "The capital of France is"
SMOLLM2_TOP = 64  # logits that are stored, largest first

_BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, dict[str, Any]] = {
    "multi_head": _BASE,
    "grouped_explicit_head_dim_tied": {
        **_BASE,
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "one_kv_head_wide_theta": {**_BASE, "num_key_value_heads": 1, "rope_theta": 500000.0},
    "biases_everywhere": {
        **_BASE,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "linear_rope_of_old": {
        **_BASE,
        "rope_theta": 50000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "llama3_rope_in_parameters": {
        **_BASE,
        "num_key_value_heads": 2,
        "rope_parameters": {**_LLAMA3, "rope_theta": 500000.0},
    },
    "llama3_rope_in_scaling": {**_BASE, "rope_theta": 20000.0, "rope_scaling": _LLAMA3},
}
# Which layers see a window only.
_QWEN2 = {
    **_BASE,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "sliding_window": 8,
}
_MISTRAL = {**_QWEN2, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
WINDOW_CASES: dict[str, dict[str, Any]] = {
    "qwen2_switched_off": {**_QWEN2, "use_sliding_window": False, "max_window_layers": 2},
    "qwen2_from_a_layer_on": {**_QWEN2, "use_sliding_window": True, "max_window_layers": 2},
    "qwen2_by_layer_types": {
        **_QWEN2,
        "use_sliding_window": True,
        "max_window_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "mistral_without": {**_MISTRAL, "sliding_window": None},
    "mistral_in_all_layers": _MISTRAL,
}


def make_tokens(config: dict[str, Any], length: int = 24) -> np.ndarray:
    """Token ids `i32[length]` to run a case on."""
    return np.random.default_rng(1).integers(0, config["vocab_size"], length, dtype=np.int32)


def make_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """A checkpoint's tensors in float32, large enough that every one of them matters."""
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries = config["num_attention_heads"] * head_dim
    keys = config.get("num_key_value_heads", config["num_attention_heads"]) * head_dim
    attention_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    qkv_bias = attention_bias or config["model_type"] == "qwen2"
    projections = {
        "self_attn.q_proj": (queries, hidden, qkv_bias),
        "self_attn.k_proj": (keys, hidden, qkv_bias),
        "self_attn.v_proj": (keys, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, queries, attention_bias),
        "mlp.gate_proj": (inner, hidden, mlp_bias),
        "mlp.up_proj": (inner, hidden, mlp_bias),
        "mlp.down_proj": (hidden, inner, mlp_bias),
    }

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, scale=1.0)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, has_bias) in projections.items():
            weights[f"{prefix}{name}.weight"] = normal(rows, columns, scale=columns**-0.5)
            if has_bias:
                weights[f"{prefix}{name}.bias"] = normal(rows, scale=0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = 1 + normal(hidden, scale=0.2)
    weights["model.norm.weight"] = 1 + normal(hidden, scale=0.2)
    if not config.get("tie_word_embeddings"):
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden, scale=hidden**-0.5)
    return weights


def main() -> None:
    """Reads the command line and writes the files."""
    parser = argparse.ArgumentParser(description="Expected logits of Llama models")
    parser.add_argument("--smollm2", type=Path, metavar="FOLDER")
    parser.add_argument("--data", type=Path, metavar="FOLDER", default=DATA)
    args = parser.parse_args()
    cases = {name: _reference_logits(config, 24, ROWS) for name, config in CASES.items()}
    (args.data / "llama_logits.json").write_text(json.dumps(cases) + "\n")
    cases = {
        name: _reference_logits(config, WINDOW_LENGTH, WINDOW_ROWS)
        for name, config in WINDOW_CASES.items()
    }
    (args.data / "window_logits.json").write_text(json.dumps(cases) + "\n")
    if args.smollm2:
        (args.data / "smollm2_logits.json").write_text(json.dumps(_smollm2(args.smollm2)) + "\n")


def _reference_logits(
    config: dict[str, Any], length: int, rows: tuple[int, ...]
) -> list[list[float]]:
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        save_file(make_weights(config), Path(folder, "model.safetensors"), {"format": "pt"})
        logits = _logits(folder, make_tokens(config, length).tolist())
    return np.round(logits[list(rows)].astype(float), 6).tolist()


def _smollm2(folder: Path) -> dict[str, Any]:
    last = _logits(str(folder), list(SMOLLM2_PROMPT))[-1].astype(float)
    tokens = np.argsort(-last)[:SMOLLM2_TOP]
    return {"token_ids": tokens.tolist(), "logits": np.round(last[tokens], 5).tolist()}


def _logits(folder: str, tokens: list[int]) -> np.ndarray:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


if __name__ == "__main__":
    main()
