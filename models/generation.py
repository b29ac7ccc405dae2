"""How a model's makers would have it sampled, and which tokens end its text."""

import dataclasses
from collections.abc import Mapping
from typing import Any

_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of text, turn, message

_WHOLE_NUMBERS = ("bos_token_id", "max_new_tokens", "top_k")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """The model's defaults; None where it names none."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        if not all(type(token) is int and token >= 0 for token in self.eos_token_ids):
            raise ValueError(f"eos_token_id={self.eos_token_ids} must hold token ids")
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            is_whole = field.name in _WHOLE_NUMBERS
            right = isinstance(value, int if is_whole else int | float)
            if value is not None and (not right or isinstance(value, bool)):
                kind = "an integer" if is_whole else "a number"
                raise ValueError(f"{field.name}={value!r} must be {kind}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be 1 or more")

    @classmethod
    def from_hf(
        cls, generation: Mapping[str, Any], config: Mapping[str, Any]
    ) -> "GenerationConfig":
        """Reads `generation_config.json`, and `config.json` for what it leaves open."""
        settings = _named(config, "eos_token_id", "bos_token_id")
        names = (field.name for field in dataclasses.fields(cls)[1:])
        settings |= _named(generation, "eos_token_id", *names)
        eos = settings.pop("eos_token_id", [])
        eos = tuple(eos) if isinstance(eos, list) else (eos,)
        return cls(eos_token_ids=eos, **settings)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "GenerationConfig":
        """Reads a GGUF file's metadata, which names tokens only."""
        ids = (metadata.get(f"tokenizer.ggml.{key}") for key in _STOP_KEYS)
        return cls(
            eos_token_ids=tuple(dict.fromkeys(token for token in ids if token is not None)),
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        )


def _named(settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: settings[name] for name in names if settings.get(name) is not None}
