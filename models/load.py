"""From a name or path to a decoder that is ready to generate."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from paxkv.models.config import DecoderConfig
from paxkv.models.generation import GenerationConfig
from paxkv.models.gguf_file import open_gguf
from paxkv.models.hub import find_model
from paxkv.models.llama import LlamaDecoder
from paxkv.models.safetensors_folder import read_json, stored_tensors
from paxkv.models.stored_tensor import StoredTensor
from paxkv.models.weights import OnProgress, load_weights

SUPPORTED_DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model on disk, read but for its weights."""

    path: Path  # a folder as Hugging Face has it, or a GGUF file
    config: DecoderConfig
    generation: GenerationConfig
    gguf_metadata: Mapping[str, Any] | None  # None for a folder
    tensors: Mapping[str, StoredTensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, and the files it came from."""

    decoder: LlamaDecoder
    files: ModelFiles


def open_model(name_or_path: str | Path) -> ModelFiles:
    """Reads everything about a model but its weights, which may take a while to load.

    Args:
        name_or_path: A model folder, a GGUF file or a hub id.

    Raises:
        ValueError: The model is not found, damaged, or not of a kind that is supported.
    """
    path = find_model(name_or_path)
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".gguf":
        return _open_gguf(path)
    raise ValueError(f"{path} is neither a model folder nor a .gguf file")


def checked_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype itself, or a ValueError if nothing here runs in it."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in SUPPORTED_DTYPES:
        name = found.name if found is not None else repr(dtype)
        raise ValueError(f"dtype {name} is not one of {', '.join(SUPPORTED_DTYPES)}")
    return found


def load_model(
    name_or_path: str | Path, *, dtype: DTypeLike, on_progress: OnProgress | None = None
) -> LoadedModel:
    """Loads a model; see `open_model` and `load_weights` for what it takes and refuses.

    Args:
        name_or_path: A model folder, a GGUF file or a hub id.
        dtype: Of weights and activations: bfloat16, float16 or float32.
        on_progress: Called with the bytes loaded and the bytes in all, as loading goes on.
    """
    dtype = checked_dtype(dtype)
    files = open_model(name_or_path)
    decoder = load_weights(files.config, files.tensors, dtype=dtype, on_progress=on_progress)
    return LoadedModel(decoder=decoder, files=files)


def _open_folder(folder: Path) -> ModelFiles:
    config = read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return ModelFiles(
        path=folder,
        config=DecoderConfig.from_hf(config),
        generation=GenerationConfig.from_hf(generation, config),
        gguf_metadata=None,
        tensors=stored_tensors(folder),
    )


def _open_gguf(path: Path) -> ModelFiles:
    file = open_gguf(path)
    config = DecoderConfig.from_gguf(
        file.metadata, tensor_names=file.tensors, rope_divisors=file.rope_divisors
    )
    return ModelFiles(
        path=path,
        config=config,
        generation=GenerationConfig.from_gguf(file.metadata),
        gguf_metadata=file.metadata,
        tensors=file.tensors,
    )
