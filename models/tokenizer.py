"""Text to token ids and back, from a model folder or a GGUF file's metadata."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import processors

from paxkv.models.detokenizer import Detokenizer
from paxkv.models.gguf_tokenizer import build_backend, gguf_special_tokens
from paxkv.models.token_spelling import TokenSpelling, token_spelling

MAX_FILE_BYTES = 256 << 20  # the largest tokenizer files known have 35 MB
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A `tokenizers` tokenizer with what a model says about it.

    Special tokens that stand in a text, such as `<|im_end|>`, become the token and not its letters,
    as with transformers: who puts untrusted text into a prompt has to clean it first.
    """

    backend: tokenizers.Tokenizer
    spelling: TokenSpelling
    special_tokens: Mapping[str, str]  # by role: bos_token, eos_token, unk_token, pad_token
    special_ids: frozenset[int]  # left out of decoded text
    chat_template: str | None = None

    @classmethod
    def create(
        cls,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
    ) -> Self:
        """Wraps a tokenizer of the `tokenizers` library, which is changed to pad and cut nothing.

        Raises:
            ValueError: Its decoder is not understood.
        """
        backend.no_padding()
        backend.no_truncation()
        known = [t for t in special_tokens.values() if backend.token_to_id(t) is not None]
        backend.add_special_tokens(known)
        added = backend.get_added_tokens_decoder()
        return cls(
            backend=backend,
            spelling=token_spelling(backend),
            special_tokens=special_tokens,
            special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
            chat_template=chat_template,
        )

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Reads a Hugging Face model folder: tokenizer.json, and its settings where there are any.

        Raises:
            FileNotFoundError: There is no tokenizer.json.
            ValueError: A file is too large or is not what it should be.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(_missing_tokenizer(folder))
        try:
            backend = tokenizers.Tokenizer.from_str(_read(file))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{file} is not a tokenizer: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        named = _read_json(folder / "special_tokens_map.json") | config
        special_tokens = {
            name: token["content"] if isinstance(token, dict) else token
            for name in _NAMED_TOKENS
            if (token := named.get(name))
        }
        if not {"add_bos_token", "add_eos_token"}.isdisjoint(config):
            bos = special_tokens.get("bos_token") if config.get("add_bos_token") else None
            eos = special_tokens.get("eos_token") if config.get("add_eos_token") else None
            _wrap_texts(backend, bos, eos)
        return cls.create(backend, special_tokens, _folder_chat_template(folder, config))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """Builds the tokenizer that a GGUF file's metadata describe.

        Args:
            metadata: `{name: field.contents()}` of a `gguf.GGUFReader`'s fields.

        Raises:
            ValueError: A kind of tokenizer that is not understood, or metadata that are missing.
        """
        backend, adds_bos, adds_eos = build_backend(metadata)
        special_tokens = gguf_special_tokens(metadata)
        bos = special_tokens.get("bos_token") if adds_bos else None
        eos = special_tokens.get("eos_token") if adds_eos else None
        _wrap_texts(backend, bos, eos)
        return cls.create(backend, special_tokens, metadata.get("tokenizer.chat_template"))

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included (a model may have ids beyond them)."""
        return self.backend.get_vocab_size()

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, where the model names one."""
        return self._id_of("bos_token")

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text, where the model names one (generation_config has more)."""
        return self._id_of("eos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with the model's begin and end tokens unless told otherwise."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids, exactly what a `Detokenizer` gives piece by piece."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def _wrap_texts(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes `encode` put these tokens around each text."""
    tokens = [token for token in (bos, "$A", eos) if token]
    special = [(token, backend.token_to_id(token)) for token in (bos, eos) if token]
    backend.post_processor = processors.TemplateProcessing(single=tokens, special_tokens=special)


def _folder_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The folder's template: a file of its own goes before the settings', as in transformers."""
    if (file := folder / "chat_template.jinja").is_file():
        return _read(file)
    template = _read_json(folder / "chat_template.json").get("chat_template")
    template = template or config.get("chat_template")
    if isinstance(template, list):  # several named ones
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _missing_tokenizer(folder: Path) -> str:
    if (folder / "tokenizer.model").is_file():
        return (
            f"{folder} has only a SentencePiece tokenizer.model, and paxkv reads tokenizer.json:"
            " make one with transformers,"
            " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    return f"{folder} has no tokenizer.json: name a folder that has one, or a GGUF file"


def _read(file: Path) -> str:
    size_bytes = file.stat().st_size
    if size_bytes > MAX_FILE_BYTES:
        raise ValueError(f"{file} has {size_bytes} bytes, more than the {MAX_FILE_BYTES} allowed")
    return file.read_text(encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a file, empty where there is no file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read(file))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}, not an object")
    return value
