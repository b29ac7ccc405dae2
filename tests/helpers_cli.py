"""The command run in this process, and models that are quick to load."""

from pathlib import Path

from typer.testing import CliRunner, Result

from helpers_checkpoints import write_folder
from helpers_text import byte_level_tokenizer
from paxkv.cli import app
from reference.make_llama_cases import CASES, make_weights

TINY = CASES["multi_head"] | {"vocab_size": 264, "eos_token_id": 257, "max_position_embeddings": 96}
TEMPLATE = "{% for m in messages %}Q:{{ m.content }}\nA:{% endfor %}"


def write_tiny_model(folder: Path, *, has_chat_format: bool) -> Path:
    """A model of random weights that reads and writes bytes."""
    write_folder(folder, TINY, make_weights(TINY))
    byte_level_tokenizer().backend.save(str(folder / "tokenizer.json"))
    if has_chat_format:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])
