"""The architectures that load, and what each computes that its `config.json` leaves open."""

import dataclasses
from collections.abc import Mapping
from typing import Any

# Settings that some architectures read and others do not, whatever their files say.
_READ_BY_SOME = (
    "attention_bias",
    "mlp_bias",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture as the reference code of `transformers` has it."""

    name: str
    model_type: str
    reads: tuple[str, ...]  # of the settings that only some architectures read
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # where a file has none
    has_qkv_bias: bool = False  # always, whatever the file says

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A config with the architecture's defaults and without what it does not read."""
        read = {
            name: value
            for name, value in config.items()
            if name in self.reads or name not in _READ_BY_SOME
        }
        return {**self.defaults, **read}


_FAMILIES = (
    Family(name="LlamaForCausalLM", model_type="llama", reads=("attention_bias", "mlp_bias")),
    Family(
        name="MistralForCausalLM",
        model_type="mistral",
        reads=("sliding_window",),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    Family(
        name="Qwen2ForCausalLM",
        model_type="qwen2",
        reads=("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        has_qkv_bias=True,
    ),
)


def family_of(config: Mapping[str, Any]) -> Family:
    """The architecture that a `config.json` names.

    Raises:
        ValueError: No decoder here computes it.
    """
    model_type = config.get("model_type")
    named = (config.get("architectures") or [None])[0]
    for family in _FAMILIES:
        is_named = named in (family.name, None) and model_type in (family.model_type, None)
        if is_named and (named or model_type):
            return family
    raise ValueError(
        f"architecture {named} (model_type {model_type!r}) is not supported; supported are "
        + ", ".join(family.name for family in _FAMILIES)
    )
