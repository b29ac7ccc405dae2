"""Which layers of a model see a window only, and which store nothing of their own."""

from collections.abc import Mapping
from typing import Any

# Of the layer types that keep keys and values. Others (linear attention, state spaces,
# convolutions) keep a state of one size, however long the sequence is.
_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "attention")
# Families whose every n-th layer sees all tokens, in configs that do not say it.
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}


def layer_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of every layer that keeps keys and values; None for one that keeps all tokens.

    Layers that use another layer's (`num_kv_shared_layers`, the last ones) keep none, and neither
    do those of `layer_types` that are no attention over tokens. Which layers are windowed says
    `layer_types` where it is given; else `use_sliding_window` and `max_window_layers` (Qwen: those
    from that one on), or `sliding_window_pattern` or the family (Gemma: all but every n-th); else
    all are.

    Raises:
        ValueError: `layer_types` does not name every layer, or no layer keeps anything.
    """
    num_layers -= config.get("num_kv_shared_layers") or 0
    types = config.get("layer_types")
    if types is not None:
        if len(types) < num_layers:
            raise ValueError(f"layer_types names {len(types)} of {num_layers} layers")
        kept = [kind for kind in types[:num_layers] if kind in _TYPES]
        windows = [_window_of_type(config, kind) for kind in kept]
    else:
        window = _window(config)
        windows = [window if _is_windowed(config, layer) else None for layer in range(num_layers)]
    if not windows:
        raise ValueError("none of its layers keeps keys and values: there is no cache to diagnose")
    return tuple(windows)


def _window(config: Mapping[str, Any]) -> int | None:
    window = config.get("sliding_window")
    if not window or not config.get("use_sliding_window", True):
        return None
    if type(window) is not int or window < 2:
        raise ValueError(f"sliding_window={window!r} must be a whole number above 1")
    return window


def _window_of_type(config: Mapping[str, Any], kind: str) -> int | None:
    if kind == "chunked_attention":
        return config.get("attention_chunk_size")
    return _window(config) if kind == "sliding_attention" else None


def _is_windowed(config: Mapping[str, Any], layer: int) -> bool:
    if "use_sliding_window" in config and config.get("max_window_layers") is not None:
        return layer >= config["max_window_layers"]
    pattern = config.get("sliding_window_pattern") or _PATTERNS.get(config.get("model_type", ""))
    return bool((layer + 1) % pattern) if pattern else True
