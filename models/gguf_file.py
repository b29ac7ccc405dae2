"""A GGUF file of the llama architecture: metadata, and tensors under Hugging Face's names."""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from paxkv.models.stored_tensor import StoredTensor

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")
_ROPE_DIVISORS = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """An open GGUF file."""

    metadata: dict[str, Any]  # keys as in the file
    tensors: dict[str, StoredTensor]  # names as in Hugging Face checkpoints
    rope_divisors: tuple[float, ...]  # of each pair's frequency; empty where none are stored


def open_gguf(path: Path) -> GgufFile:
    """Reads a GGUF file's metadata and where its tensors lie, but no tensor's data.

    Raises:
        ValueError: The file is damaged, or a tensor's quantisation cannot be read.
    """
    try:
        reader = _Reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, LookupError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is not a GGUF file that can be read: {error}") from error
    head_counts = {
        "attn_q": metadata.get("llama.attention.head_count"),
        "attn_k": metadata.get("llama.attention.head_count_kv")
        or metadata.get("llama.attention.head_count"),
    }
    tensors: dict[str, StoredTensor] = {}
    rope_divisors: tuple[float, ...] = ()
    for entry in reader.tensors:
        if entry.name == _ROPE_DIVISORS:
            rope_divisors = tuple(_decoder(entry, None)(entry.data).ravel().tolist())
            continue
        parsed = _NAME.fullmatch(entry.name)
        part = parsed["part"] if parsed else entry.name
        tensors[_hf_name(entry.name)] = StoredTensor(
            path=path,
            offset=int(entry.data_offset),
            num_bytes=int(entry.n_bytes),
            shape=tuple(reversed(entry.shape.tolist())),
            decode=_decoder(entry, head_counts.get(part)),
        )
    return GgufFile(metadata=metadata, tensors=tensors, rope_divisors=rope_divisors)


class _Reader(gguf.GGUFReader):
    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        """As gguf's own, but fast, and refuses what lies past the end of the file.

        Beyond it gguf would find empty arrays, and a damaged count would loop for ever.
        """
        if type(self.data) is np.memmap:
            self.data = np.asarray(self.data)  # the same memory; slices cost a third
        end = offset + int(count) * np.dtype(dtype).itemsize
        if end > self.data.size:
            raise ValueError(f"it ends before byte {end}")
        return super()._get(offset, dtype, count, override_order)


def _hf_name(name: str) -> str:
    """The tensor's name in a Hugging Face checkpoint, or its own where it has none."""
    parsed = _NAME.fullmatch(name)
    if parsed is None or parsed["part"] not in _NAMES:
        return name
    prefix = "" if parsed["layer"] is None else f"model.layers.{parsed['layer']}."
    return f"{prefix}{_NAMES[parsed['part']]}.{parsed['kind']}"


def _decoder(entry: gguf.ReaderTensor, num_heads: int | None) -> Callable[[np.ndarray], np.ndarray]:
    """What turns rows of a tensor's bytes into rows of numbers.

    The llama layout stores the rows of a query or key head pairwise: row `i` of the first half
    beside row `i` of the second, which `num_heads` says to undo.
    """
    kind = entry.tensor_type
    if not _is_readable(kind):
        raise ValueError(f"tensor {entry.name} is stored as {kind.name}, which cannot be read")
    shape = tuple(reversed(entry.shape.tolist()))

    def decode(raw: np.ndarray) -> np.ndarray:
        rows = gguf.quants.dequantize(raw.view(np.uint8), kind).reshape(-1, *shape[1:])
        if num_heads is None:
            return rows
        pairs = rows.reshape(-1, shape[0] // num_heads // 2, 2, *shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    return decode


@functools.cache
def _is_readable(kind: gguf.GGMLQuantizationType) -> bool:
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:  # how gguf says that it cannot read a kind of quantisation
        return False
    return True
