"""Which layers of a decoder see a window of the newest tokens only."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from paxkv.models.families import Family

FULL, SLIDING = "full_attention", "sliding_attention"  # as Hugging Face names types of layers


class LayerWindows(NamedTuple):
    """The window, and the layers that it holds for; the others see all tokens."""

    window: int | None = None  # tokens a query sees, itself counted
    layers: tuple[int, ...] = ()


def read_windows(config: Mapping[str, Any], family: Family) -> LayerWindows:
    """Reads which layers are windowed, as the architecture's reference code decides.

    Raises:
        ValueError: The settings contradict each other, or name windows that the architecture's
            reference code would not compute.
    """
    windows = _stated(family.settings(config))
    if _stated({**family.defaults, **config}) != windows:
        raise ValueError(
            f"the config has settings of sliding windows that {family.name} does not read (it "
            f"reads {[name for name in family.reads if 'bias' not in name]}): remove them, or "
            "name the architecture that they belong to"
        )
    return windows


def _stated(settings: Mapping[str, Any]) -> LayerWindows:
    window = _window(settings)
    if settings.get("layer_types") is not None:
        layers = _of_type_sliding(settings["layer_types"], settings["num_hidden_layers"])
        if layers and window is None:
            raise ValueError(
                f"layer_types has layers of type {SLIDING}, but sliding_window="
                f"{settings.get('sliding_window')} with use_sliding_window="
                f"{settings.get('use_sliding_window', True)} gives them no window"
            )
    elif window is not None:
        first = settings.get("max_window_layers", 0)
        if type(first) is not int or first < 0:
            raise ValueError(f"max_window_layers={first!r} must be a whole number, 0 or more")
        layers = tuple(range(first, settings["num_hidden_layers"]))
    else:
        layers = ()
    return LayerWindows(window, layers) if layers else LayerWindows()


def _window(settings: Mapping[str, Any]) -> int | None:
    window = settings.get("sliding_window")
    if window is None or not settings.get("use_sliding_window", True):
        return None
    if type(window) is not int or window < 1:
        raise ValueError(
            f"sliding_window={window!r} must be a whole number above 0, or null for no window"
        )
    return window


def _of_type_sliding(types: Any, num_layers: int) -> tuple[int, ...]:
    if not isinstance(types, list) or len(types) != num_layers:
        raise ValueError(f"layer_types={types!r} must name the type of each of {num_layers} layers")
    if unknown := sorted({str(kind) for kind in types} - {FULL, SLIDING}):
        raise ValueError(
            f"layer_types {unknown} are not supported; supported are {FULL}, {SLIDING}"
        )
    return tuple(layer for layer, kind in enumerate(types) if kind == SLIDING)
