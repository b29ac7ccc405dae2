"""What a model needs of the memory: weights, and keys and values per token, of any config.json.

This reads sizes only, so it knows far more models than paxkv can run.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from paxkv.diagnose.layer_types import layer_windows

BITS = {
    "fp32": 32, "float32": 32, "bf16": 16, "bfloat16": 16, "fp16": 16, "float16": 16,
    "fp8": 8, "int8": 8, "fp4": 4, "int4": 4,
}  # fmt: skip
# Families with two matrices in the MLP, and tied embeddings where the config does not say.
_UNGATED = ("opt", "gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "falcon", "bloom", "phi")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a decoder that decide about memory."""

    name: str
    num_parameters: int
    num_heads: int  # N
    num_kv_heads: int  # K
    numbers_per_head: int  # of keys and values of one KV head, one token and one layer: 2 x H
    windows: tuple[int | None, ...]  # per layer that stores; None is every token
    max_length: int  # tokens of context

    def weight_bytes(self, dtype: str) -> int:
        """Memory of the weights in a dtype of `BITS`."""
        return self.num_parameters * BITS[dtype] // 8

    def kv_bytes_per_token(self, dtype: str, *, num_devices: int = 1) -> int:
        """Memory of one token's keys and values on one device, with no window at work.

        KV heads are split over devices. Where there are fewer of them than devices, each is kept
        more than once.
        """
        heads = math.ceil(self.num_kv_heads / num_devices)
        return len(self.windows) * heads * self.numbers_per_head * BITS[dtype] // 8


def read_sizes(config: Mapping[str, Any], name: str) -> ModelSizes:
    """The sizes in a parsed `config.json`.

    Parameters are counted for the usual decoder (attention, a plain or gated MLP or experts,
    embeddings), which is right within a few percent; `--parameters` says it better.

    Raises:
        ValueError: A size is missing or is no number.
    """
    # Models of pictures and text keep the decoder's sizes in a config of their own, DBRX some.
    for part in ("text_config", "attn_config", "ffn_config"):
        config = {**config, **(config.get(part) or {})}
    num_layers = _size(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    hidden = _size(config, "hidden_size", "n_embd", "d_model", "dim")
    num_heads = _size(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    head_dim = config.get("head_dim") or config.get("kv_channels") or hidden // num_heads
    num_kv_heads = _num_kv_heads(config, num_heads)
    numbers_per_head = 2 * head_dim
    if config.get("kv_lora_rank"):  # one compressed row for all heads (MLA)
        num_kv_heads = 1
        numbers_per_head = config["kv_lora_rank"] + (config.get("qk_rope_head_dim") or 0)
    return ModelSizes(
        name=name,
        num_parameters=_num_parameters(config, num_layers, hidden, num_heads, head_dim),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        numbers_per_head=numbers_per_head,
        windows=layer_windows(config, num_layers),
        max_length=_size(
            config, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length",
            "max_sequence_length", otherwise=2048,
        ),
    )  # fmt: skip


def _size(config: Mapping[str, Any], *names: str, otherwise: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is not None:
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number above 0")
            return value
    if otherwise is None:
        raise ValueError(f"it names no {names[0]}: is it the config.json of a decoder?")
    return otherwise


def _num_kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    """Grouped heads by their usual names; Falcon and StarCoder say "one for all" by a flag."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return _size(
        config, "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "kv_n_heads",
        "multi_query_group_num", otherwise=num_heads,
    )  # fmt: skip


def _num_parameters(
    config: Mapping[str, Any], num_layers: int, hidden: int, num_heads: int, head_dim: int
) -> int:
    kv_heads = _num_kv_heads(config, num_heads)
    attention = 2 * hidden * head_dim * (num_heads + kv_heads)
    inner = _size(
        config, "intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size",
        otherwise=4 * hidden,
    )  # fmt: skip
    is_gated = config.get("model_type") not in _UNGATED
    matrices = 3 if is_gated else 2
    num_experts = config.get("num_local_experts") or config.get("n_routed_experts") or (
        config.get("num_experts") or 1
    )  # fmt: skip
    if num_experts > 1:
        inner = config.get("moe_intermediate_size") or inner
    mlp = num_experts * matrices * hidden * inner
    embeddings = _size(config, "vocab_size", "padded_vocab_size") * hidden
    tied = config.get("tie_word_embeddings", config.get("model_type") in _UNGATED)
    return num_layers * (attention + mlp) + embeddings * (1 if tied else 2)
