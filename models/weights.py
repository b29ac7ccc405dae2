"""Fills a decoder with a checkpoint's tensors: all of them, each in its place."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paxkv.models.config import DecoderConfig
from paxkv.models.llama import LlamaDecoder, input_first
from paxkv.models.stored_tensor import StoredTensor

type OnProgress = Callable[[int, int], None]  # bytes loaded, bytes in all

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_HARMLESS = ".rotary_emb.inv_freq"  # old checkpoints store what the config already says
_MAX_LISTED = 5  # names in an error message


class Part(NamedTuple):
    """A stored tensor's share of one of the decoder's arrays."""

    name: str  # in Hugging Face checkpoints
    shape: tuple[int, ...]  # as stored
    place: Callable[[np.ndarray], np.ndarray]  # view of the array; its first axis splits the rows


class FusedArray(NamedTuple):
    """One of the decoder's arrays, and the stored tensors that make it up."""

    path: tuple[str | int, ...]
    parts: tuple[Part, ...]
    is_matrix: bool = False  # as `linear` takes it


def load_weights(
    config: DecoderConfig,
    tensors: Mapping[str, StoredTensor],
    *,
    dtype: jnp.dtype,
    on_progress: OnProgress | None = None,
) -> LlamaDecoder:
    """A decoder with a checkpoint's weights, read tensor by tensor into its fused arrays.

    Args:
        config: Sizes, which every stored tensor is checked against before memory is taken.
        tensors: By their names in Hugging Face checkpoints. Each must be used.
        dtype: Of the weights in memory, whatever they are stored in.
        on_progress: Called with the bytes loaded and the bytes in all after each array.

    Returns:
        The decoder. Its config says what was found about the head: where the config ties it to
        the embeddings and the file holds another one, the stored head is used, with a warning.

    Raises:
        ValueError: Tensors are missing, left over or of a wrong shape.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(_HARMLESS)}
    if config.tie_embeddings and _HEAD in tensors:
        config = dataclasses.replace(config, tie_embeddings=False)
        _check_tensors(config, tensors)
        if tensors[_HEAD].equals(tensors[_EMBEDDING]):
            config = dataclasses.replace(config, tie_embeddings=True)
        else:
            warnings.warn(
                f"the config ties the head to the embeddings, but {_HEAD} differs from "
                f"{_EMBEDDING}: the stored head is used",
                stacklevel=2,
            )
    else:
        _check_tensors(config, tensors)
    decoder = nnx.eval_shape(lambda: LlamaDecoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    done_bytes, total_bytes = 0, config.weight_bytes(dtype.itemsize)
    for path, parts, is_matrix in fused_arrays(config):
        param = _param(decoder, path)
        array = np.empty(param.shape, dtype)
        places = np.moveaxis(array, 0, -1) if is_matrix and input_first(dtype) else array
        for part in parts:
            tensors[part.name].read_into(part.place(places))
        # Waits for the copy: on a busy machine many arrays would else be held twice.
        array = jax.block_until_ready(jnp.asarray(array))
        param.set_value(array)
        done_bytes += array.nbytes
        if on_progress is not None:
            on_progress(done_bytes, total_bytes)
    return decoder


def fused_arrays(config: DecoderConfig) -> Iterator[FusedArray]:
    """The decoder's arrays. The largest come first, while most memory is free."""
    table = (config.vocab_size, config.hidden_size)
    yield FusedArray(("embedding",), (Part(_EMBEDDING, table, _whole),))
    if not config.tie_embeddings:
        yield FusedArray(("head",), (Part(_HEAD, table, _whole),))
    for index in range(config.num_layers):
        for path, parts, is_matrix in _layer_arrays(config):
            named = (part._replace(name=f"model.layers.{index}.{part.name}") for part in parts)
            yield FusedArray(("layers", index, *path), tuple(named), is_matrix)
    yield FusedArray(("norm",), (Part("model.norm.weight", (config.hidden_size,), _whole),))


def _layer_arrays(config: DecoderConfig) -> Iterator[FusedArray]:
    for array, name in (("attn_norm", "input"), ("mlp_norm", "post_attention")):
        part = Part(f"{name}_layernorm.weight", (config.hidden_size,), _whole)
        yield FusedArray((array,), (part,))
    yield _qkv_array(config, "", "weight")
    yield _out_array(config, "", "weight")
    yield from _mlp_arrays(config, "", "weight")
    if config.qkv_bias:
        yield _qkv_array(config, "_bias", "bias")
    if config.out_bias:
        yield _out_array(config, "_bias", "bias")
    if config.mlp_bias:
        yield from _mlp_arrays(config, "_bias", "bias")


def _qkv_array(config: DecoderConfig, suffix: str, kind: str) -> FusedArray:
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    keys, group = config.num_kv_heads * config.head_dim, config.num_heads // config.num_kv_heads
    qkv = (
        _projection("self_attn.q_proj", kind, (heads, hidden), lambda array: array[:, :group]),
        _projection("self_attn.k_proj", kind, (keys, hidden), lambda array: array[:, group]),
        _projection("self_attn.v_proj", kind, (keys, hidden), lambda array: array[:, group + 1]),
    )
    return FusedArray((f"qkv{suffix}",), qkv, is_matrix=kind == "weight")


def _out_array(config: DecoderConfig, suffix: str, kind: str) -> FusedArray:
    shape = (config.hidden_size, config.num_heads * config.head_dim)
    out = _projection("self_attn.o_proj", kind, shape, _whole)
    return FusedArray((f"out{suffix}",), (out,), is_matrix=kind == "weight")


def _mlp_arrays(config: DecoderConfig, suffix: str, kind: str) -> Iterator[FusedArray]:
    hidden, inner = config.hidden_size, config.intermediate_size
    gate_up = (
        _projection("mlp.gate_proj", kind, (inner, hidden), lambda array: array[0]),
        _projection("mlp.up_proj", kind, (inner, hidden), lambda array: array[1]),
    )
    is_matrix = kind == "weight"
    yield FusedArray((f"gate_up{suffix}",), gate_up, is_matrix)
    down = _projection("mlp.down_proj", kind, (hidden, inner), _whole)
    yield FusedArray((f"down{suffix}",), (down,), is_matrix)


def _projection(
    name: str, kind: str, shape: tuple[int, int], place: Callable[[np.ndarray], np.ndarray]
) -> Part:
    return Part(f"{name}.{kind}", shape if kind == "weight" else shape[:1], place)


def _whole(array: np.ndarray) -> np.ndarray:
    return array


def _check_tensors(config: DecoderConfig, tensors: Mapping[str, StoredTensor]) -> None:
    """Compares what is stored with what the config asks for, before any memory is taken."""
    if config.num_layers > len(tensors):
        raise ValueError(
            f"the config has {config.num_layers} layers and the file {len(tensors)} tensors"
        )
    parts = [part for array in fused_arrays(config) for part in array.parts]
    if missing := [part.name for part in parts if part.name not in tensors]:
        hint = " (and the config does not tie the head to the embeddings)" * (_HEAD in missing)
        raise ValueError(f"the file lacks {_listed(missing)}{hint}")
    if left := sorted(tensors.keys() - {part.name for part in parts}):
        raise ValueError(f"the file holds tensors that the decoder would not use: {_listed(left)}")
    for part in parts:
        if (found := tensors[part.name].shape) != part.shape:
            raise ValueError(
                f"{part.name} is stored as {list(found)}; the config asks for {list(part.shape)}"
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _param(decoder: LlamaDecoder, path: tuple[str | int, ...]) -> nnx.Param:
    node: Any = decoder
    for key in path:
        node = node[key] if isinstance(key, int) else getattr(node, key)
    return node
