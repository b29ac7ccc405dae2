"""Which layers of a model see a window only, and which store nothing of their own."""

from collections.abc import Mapping
from typing import Any


def layer_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of every layer that keeps keys and values; None for one that keeps all tokens.

    Layers that use another layer's (`num_kv_shared_layers`, the last ones) keep none. Which layers
    are windowed says `layer_types` where it is given; else `use_sliding_window` and
    `max_window_layers` (Qwen: those from that one on), or `sliding_window_pattern` (Gemma 3: all
    but every n-th); else all are.

    Raises:
        ValueError: `layer_types` does not name every layer.
    """
    window = config.get("sliding_window")
    if not window or not config.get("use_sliding_window", True):
        windows = [None] * num_layers
    else:
        windows = [window if sees else None for sees in _is_windowed(config, num_layers)]
    return tuple(windows[: num_layers - (config.get("num_kv_shared_layers") or 0)])


def _is_windowed(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    types = config.get("layer_types")
    if types is not None:
        if len(types) != num_layers:
            raise ValueError(f"layer_types names {len(types)} of {num_layers} layers")
        return [kind == "sliding_attention" for kind in types]
    if "use_sliding_window" in config and config.get("max_window_layers") is not None:
        return [layer >= config["max_window_layers"] for layer in range(num_layers)]
    pattern = config.get("sliding_window_pattern")
    if pattern:
        return [bool((layer + 1) % pattern) for layer in range(num_layers)]
    return [True] * num_layers
