"""One set of weights in the forms that paxkv and its peers read."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from safetensors.numpy import save_file

from paxkv.models.bundled import name_or_bundled
from paxkv.models.config import DecoderConfig
from paxkv.models.load import open_model
from paxkv.models.rope import RopeConfig

type Weights = Literal["random", "real"]

SMOLLM2_135M = DecoderConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=100000.0),
    max_position=8192,
    tie_embeddings=True,
)
TINY = dataclasses.replace(  # for trying a benchmark out
    SMOLLM2_135M,
    vocab_size=256,
    hidden_size=48,
    intermediate_size=64,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=16,
)
_KINDS = {
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "float32": gguf.GGMLQuantizationType.F32,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The same weights for everyone."""

    config: DecoderConfig
    folder: Path  # float32, as Hugging Face has it
    ggufs: dict[str, Path]  # by dtype


def write_checkpoint(
    weights: Weights, folder: Path, dtypes: Sequence[str], config: DecoderConfig = SMOLLM2_135M
) -> Checkpoint:
    """Writes a model into `folder`: random weights in a shape, or SmolLM2-135M's own."""
    config, tensors = (config, _random(config)) if weights == "random" else _bundled()
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(_hf_config(config)))
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    ggufs = {dtype: folder / f"{dtype}.gguf" for dtype in dtypes}
    for dtype, path in ggufs.items():
        _write_gguf(path, config, tensors, _KINDS[dtype])
    return Checkpoint(config=config, folder=model, ggufs=ggufs)


def _random(config: DecoderConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else rng.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)
        for name, shape in _shapes(config)
    }


def _bundled() -> tuple[DecoderConfig, dict[str, np.ndarray]]:
    files = open_model(name_or_bundled(None))
    tensors = {}
    for name, stored in files.tensors.items():
        [(_, rows)] = stored.pieces(1)
        tensors[name] = np.ascontiguousarray(rows, np.float32)
    return files.config, tensors


def _shapes(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(config.num_layers):
        for part, shape in (
            ("input_layernorm", (hidden,)),
            ("self_attn.q_proj", (queries, hidden)),
            ("self_attn.k_proj", (keys, hidden)),
            ("self_attn.v_proj", (keys, hidden)),
            ("self_attn.o_proj", (hidden, queries)),
            ("post_attention_layernorm", (hidden,)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
        ):
            yield f"model.layers.{layer}.{part}.weight", shape


def _hf_config(config: DecoderConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _write_gguf(
    path: Path,
    config: DecoderConfig,
    tensors: dict[str, np.ndarray],
    kind: gguf.GGMLQuantizationType,
) -> None:
    """Weights without a tokenizer, in the layout that llama.cpp reads."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    heads = {"q_proj.weight": config.num_heads, "k_proj.weight": config.num_kv_heads}
    for name, tensor in tensors.items():
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None, name
        if num_heads := heads.get(name.partition("self_attn.")[2]):
            # llama.cpp turns neighbouring rows together, Hugging Face a head's two halves.
            halves = tensor.reshape(num_heads, 2, -1, tensor.shape[1])
            tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
        if tensor.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name, tensor)
        else:
            writer.add_tensor(gguf_name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
