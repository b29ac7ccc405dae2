"""A model folder as Hugging Face has it: JSON files, and weights in safetensors.

The folder is untrusted: nothing in it is run, and no name in it may lead out of it.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from paxkv.models.stored_tensor import StoredTensor

_INDEX_NAME = "model.safetensors.index.json"
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16.dtype}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: The file is missing or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent} has no {path.name}: it is not a model folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__} where an object belongs")
    return value


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors in a folder's safetensors files by name; reads the headers only.

    Raises:
        ValueError: There are no safetensors, a file or the index is damaged, a name leads out
            of the folder, or a tensor's dtype cannot be read.
    """
    if (folder / _INDEX_NAME).exists():
        return _sharded(folder)
    usual = folder / "model.safetensors"
    files = [usual] if usual.exists() else sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return _tensors_of(files[0])
    if files:
        raise ValueError(f"{folder} has {len(files)} safetensors files and no {_INDEX_NAME}")
    pickles = sorted(
        path.name for suffix in ("bin", "pth", "pt") for path in folder.glob(f"*.{suffix}")
    )
    raise ValueError(
        f"{folder} has no safetensors file"
        + (
            f", and {pickles[0]} is a pickle, which can run code when it is loaded; "
            "convert it to safetensors first"
            if pickles
            else ""
        )
    )


def _sharded(folder: Path) -> dict[str, StoredTensor]:
    places = read_json(folder / _INDEX_NAME).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{folder / _INDEX_NAME} has no weight_map from names to files")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(places.values())):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ValueError(
                f"{_INDEX_NAME} names {shard!r}; shards must be safetensors files in the folder"
            )
        stored = _tensors_of(folder / shard)
        if twice := sorted(tensors.keys() & stored.keys()):
            raise ValueError(f"{shard} stores {twice[0]} a second time")
        tensors |= stored
    if lacking := sorted(places.keys() - tensors.keys()):
        raise ValueError(f"{_INDEX_NAME} names {lacking[0]}, which no shard stores")
    return tensors


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(path, framework="numpy"):
            pass  # the library checks the header, which then can be believed
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    return {name: _tensor(path, name, 8 + header_bytes, entry) for name, entry in header.items()}


def _tensor(path: Path, name: str, data_offset: int, entry: dict[str, Any]) -> StoredTensor:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(
            f"{path}: {name} is stored as {entry['dtype']}; supported are {', '.join(_DTYPES)}"
        )
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])

    def decode(raw: np.ndarray) -> np.ndarray:
        return raw.view(dtype).reshape(-1, *shape[1:])

    return StoredTensor(
        path=path, offset=data_offset + start, num_bytes=end - start, shape=shape, decode=decode
    )
