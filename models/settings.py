"""Reading sizes from a model's settings, which are untrusted."""

from collections.abc import Mapping
from typing import Any

_MAX_LAYERS = 1000


def required(settings: Mapping[str, Any], name: str) -> Any:
    """The setting, which must be there."""
    if settings.get(name) is None:
        raise ValueError(f"the model's settings lack {name}")
    return settings[name]


def layer_count(settings: Mapping[str, Any], name: str) -> int:
    """A count of layers small enough to list them, which a damaged file's need not be."""
    count = required(settings, name)
    check_size(name, count)
    if count > _MAX_LAYERS:
        raise ValueError(f"the config has {count} layers, more than {_MAX_LAYERS}: is it damaged?")
    return count


def optional(settings: Mapping[str, Any], name: str, default: Any) -> Any:
    """The setting, or the default where it is missing or null."""
    value = settings.get(name)
    return default if value is None else value


def check_size(name: str, value: Any) -> None:
    """Refuses what is not a whole number above 0."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number above 0")


def whole_share(hidden_size: int, num_heads: int) -> int:
    """The head size of files that leave it out."""
    check_size("hidden_size", hidden_size)
    check_size("num_attention_heads", num_heads)
    if hidden_size % num_heads:
        raise ValueError(
            f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads} and "
            "the config names no head_dim"
        )
    return hidden_size // num_heads
