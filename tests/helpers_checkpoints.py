"""Small checkpoints on disk, and the logits of what is loaded from them."""

import json
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from helpers_dense import DenseCache
from paxkv.models.llama import LlamaDecoder


def write_folder(
    folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray], *, num_shards: int = 1
) -> Path:
    """A model folder as Hugging Face has it; more than one shard gets an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    places = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: weights[name] for name in sorted(weights)[shard::num_shards]}
        save_file(part, folder / file_name)
        places |= dict.fromkeys(part, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    settings: dict[str, int] | None = None,
    scores: list[float] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter makes it, q and k rows permuted.

    Args:
        path: Where to write.
        config: As in Hugging Face's `config.json`.
        weights: By their names in Hugging Face checkpoints.
        kind: How matrices are stored; vectors stay float32.
        architecture: What the file claims to be.
        settings: More metadata, whole numbers.
        scores: Of tokens, an array in the metadata.
        extra: More tensors, by their names in GGUF files.
    """
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads", num_heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(
        config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 10000.0)
    )
    if config.get("rope_scaling", {}).get("type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    writer.add_eos_token_id(config["eos_token_id"])
    for name, value in (settings or {}).items():
        writer.add_uint32(name, value)
    if scores:
        writer.add_token_scores(scores)
    for name, tensor in weights.items():
        heads = {"q_proj": num_heads, "k_proj": num_kv_heads}.get(name.split(".")[-2])
        if heads:
            halves = tensor.reshape(heads, 2, head_dim // 2, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        _add(writer, _gguf_name(name), np.ascontiguousarray(tensor), kind)
    for name, tensor in (extra or {}).items():
        _add(writer, name, tensor, gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    for hf_name, gguf_name in _GGUF_NAMES.items():
        name = name.replace(f"{hf_name}.", f"{gguf_name}.")
    return name.replace("model.layers.", "blk.")


def _add(
    writer: gguf.GGUFWriter, name: str, tensor: np.ndarray, kind: gguf.GGMLQuantizationType
) -> None:
    if tensor.ndim == 1:
        kind = gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)


@jax.jit
def dense_step(
    decoder: LlamaDecoder, tokens: jax.Array, positions: jax.Array, cache: DenseCache
) -> tuple[jax.Array, DenseCache]:
    """Logits `f32[T, V]` of one sequence's next tokens, and the cache."""
    hidden, cache = decoder(tokens, positions, cache)
    return decoder.logits(hidden), cache


def dense_logits(decoder: LlamaDecoder, tokens: np.ndarray) -> np.ndarray:
    """Logits `f32[T, V]` of one sequence from its start."""
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    with jax.numpy_dtype_promotion("strict"):
        return np.asarray(dense_step(decoder, jnp.asarray(tokens), positions, DenseCache())[0])
