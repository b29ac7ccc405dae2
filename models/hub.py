"""From a model's name to a place on disk."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

_WANTED = ("*.json", "*.jinja", "*.safetensors")  # no pickles, no code


def find_model(name_or_path: str | Path) -> Path:
    """The folder or GGUF file that a name stands for, downloaded if it is a hub id.

    Raises:
        ValueError: There is no such folder or file, and the hub cannot serve the name either.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    problem = f"{name_or_path} is neither a folder, nor a GGUF file, nor a model on the hub"
    if path.is_absolute() or path.suffix == ".gguf":
        raise ValueError(problem)
    try:
        return Path(snapshot_download(str(name_or_path), allow_patterns=list(_WANTED)))
    except (OSError, HFValidationError) as error:
        raise ValueError(f"{problem}: {error}") from error
