"""Models by name: those that examples are made of, and any that has a `config.json`."""

import json
from pathlib import Path
from typing import Any

from paxkv.diagnose.model_sizes import ModelSizes, read_sizes

# As in each model's config.json; parameters are counted from these.
_FAMILIES = {
    "opt": {
        "model_type": "opt", "vocab_size": 50272, "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "llama-2": {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096},
    "llama-3.1": {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072},
    "smollm2": {
        "model_type": "llama", "vocab_size": 49152, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
_SIZES = {  # layers, hidden size, inner size of the MLP, query heads, KV heads
    "opt-6.7b": (32, 4096, 16384, 32, 32),
    "opt-13b": (40, 5120, 20480, 40, 40),
    "opt-66b": (64, 9216, 36864, 72, 72),
    "llama-2-7b": (32, 4096, 11008, 32, 32),
    "llama-2-13b": (40, 5120, 13824, 40, 40),
    "llama-2-70b": (80, 8192, 28672, 64, 8),
    "llama-3.1-8b": (32, 4096, 14336, 32, 8),
    "llama-3.1-70b": (80, 8192, 28672, 64, 8),
    "smollm2-135m": (30, 576, 1536, 9, 3),
}
_NAMES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip

MODELS = {
    name: read_sizes(
        _FAMILIES[name.rpartition("-")[0]] | dict(zip(_NAMES, sizes, strict=True)), name
    )
    for name, sizes in _SIZES.items()
}


def find_sizes(name_or_path: str) -> ModelSizes:
    """The sizes of a built-in model by name, or of a `config.json` or the folder it lies in.

    Raises:
        ValueError: It is neither, or the file does not have the sizes.
    """
    if name_or_path.lower() in MODELS:
        return MODELS[name_or_path.lower()]
    path = Path(name_or_path).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"{name_or_path} is neither a config.json, nor a folder with one, nor one of "
            f"{', '.join(MODELS)}"
        )
    try:
        config = _parsed(file)
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
        return read_sizes(config, path.resolve().name if path.is_dir() else str(name_or_path))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from error


def _parsed(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"it is not JSON, as the config.json of a model is: {error}") from error
