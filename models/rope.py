"""Rotary position embedding (Su et al., 2021, arXiv 2104.09864) and its scalings.

Cosines and sines are computed from the positions by formula. There is no table, so no position
is past its end.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_LLAMA3_SETTINGS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
_SETTINGS: dict[str, tuple[str, ...]] = {  # what each supported type of scaling needs
    "default": (),
    "linear": ("factor",),
    "llama3": _LLAMA3_SETTINGS,
}
_BLOCKS = ("rope_parameters", "rope_scaling")  # where a file may hold settings of scaling


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How fast each pair of a head's numbers turns with the position."""

    theta: float
    scaling: str = "default"  # or "linear", or "llama3"
    factor: float = 1.0  # linear, llama3: how much slower the (slow) pairs turn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 8192  # llama3: positions the model was first trained on
    divisors: tuple[float, ...] = ()  # one per pair, as GGUF files store llama3's result

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        *,
        layer_type: str | None = None,
        default_theta: float = 10000.0,
    ) -> "RopeConfig":
        """Reads the settings from wherever a Hugging Face `config.json` holds them.

        Newer files have one block `rope_parameters` with the base in it, or one such block for
        each type of layer; older ones `rope_theta` beside `rope_scaling`. Where a file has both
        they must agree. An older file with `rope_local_base_freq` gives that base to its windowed
        layers, and the scaling to the others only.

        Args:
            config: The parsed `config.json`.
            layer_type: Whose settings to read where types of layers differ, such as
                `sliding_attention`.
            default_theta: The model family's base, for files that name none.

        Raises:
            ValueError: Two places disagree, or a setting is not understood.
        """
        if layer_type == "sliding_attention" and config.get("rope_local_base_freq"):
            config = _of_windowed_layers(config)
        blocks = [_block(config[name], layer_type) for name in _BLOCKS if config.get(name)]
        block = _agreed("rope_parameters and rope_scaling", blocks) or {}
        bases = [place["rope_theta"] for place in (block, config) if place.get("rope_theta")]
        base = _agreed("rope_theta inside and outside rope_parameters", bases)
        scaling = block.pop("rope_type", "default")
        if scaling not in _SETTINGS:
            raise ValueError(
                f"rope_type {scaling!r} is not supported; supported are {', '.join(_SETTINGS)}"
            )
        block.pop("rope_theta", None)
        shares = [block.pop("partial_rotary_factor", 1), config.get("partial_rotary_factor", 1)]
        if any(share not in (1, None) for share in shares):
            raise ValueError("partial_rotary_factor other than 1 is not supported")
        used = _SETTINGS[scaling]
        if missing := [name for name in used if name not in block]:
            raise ValueError(f"rope_type {scaling!r} needs the settings {missing}")
        if unknown := sorted(block.keys() - set(_LLAMA3_SETTINGS)):
            raise ValueError(f"RoPE settings not understood: {unknown}")
        settings = {name.removesuffix("_embeddings"): block[name] for name in used}
        return cls(theta=base or default_theta, scaling=scaling, **settings)

    @classmethod
    def from_gguf(cls, settings: Mapping[str, Any], divisors: tuple[float, ...]) -> "RopeConfig":
        """Reads a GGUF file's metadata, without the architecture's prefix, and its `rope_freqs`.

        Raises:
            ValueError: A type of scaling that is not supported.
        """
        scaling = settings.get("rope.scaling.type", "none")
        factor = settings.get("rope.scaling.factor") or settings.get("rope.scale_linear") or 1.0
        if "rope.scale_linear" in settings and scaling == "none":
            scaling = "linear"  # how files of 2023 say it
        if scaling not in ("none", "linear"):
            raise ValueError(
                f"RoPE scaling {scaling!r} is not supported; supported are 'none' and 'linear'"
            )
        return cls(
            theta=settings.get("rope.freq_base", 10000.0),
            scaling="linear" if scaling == "linear" else "default",
            factor=factor if scaling == "linear" else 1.0,
            divisors=divisors,
        )

    def __post_init__(self) -> None:
        numbers = (
            self.theta,
            self.factor,
            self.low_freq_factor,
            self.high_freq_factor,
            self.original_max_position,
            *self.divisors,
        )
        if not all(isinstance(n, int | float) and 0 < n < math.inf for n in numbers):
            raise ValueError(f"RoPE settings must be positive and finite, found {self}")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} must be greater than "
                f"low_freq_factor={self.low_freq_factor}"
            )


def _of_windowed_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with a base for windowed layers, as if all layers were such."""
    shared = [name for name in _BLOCKS if not _is_by_type(config.get(name) or {})]
    own = {name: value for name, value in config.items() if name not in shared}
    return own | {"rope_theta": config["rope_local_base_freq"]}


def _is_by_type(block: Any) -> bool:
    """Whether the block holds one block for each type of layer."""
    return isinstance(block, Mapping) and all(isinstance(v, Mapping) for v in block.values())


def _block(block: Any, layer_type: str | None) -> dict[str, Any]:
    """One RoPE block without empty settings, and its type under one name."""
    if not isinstance(block, Mapping):
        raise ValueError(f"RoPE settings {block!r} must be an object")
    if _is_by_type(block):
        if layer_type is None or layer_type not in block:
            raise ValueError(
                f"RoPE settings by type of layer {sorted(block)} do not belong to a model whose "
                f"layers are of type {layer_type}"
            )
        block = block[layer_type]
    settings = {name: value for name, value in block.items() if value is not None}
    types = [settings.pop(name) for name in ("rope_type", "type") if name in settings]
    return settings | {"rope_type": _agreed("rope_type and type", types) or "default"}


def _agreed(what: str, values: list[Any]) -> Any:
    """The value that all places hold, or None where there is no place."""
    if any(value != values[0] for value in values):
        raise ValueError(f"{what} disagree: {values[0]} against {values[1]}; remove one of them")
    return values[0] if values else None


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians that each pair of a head turns per position, `f32[H / 2]`."""
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "llama3":
        # Pairs that turn often within the original length stay, rare ones are slowed down by
        # `factor`, and those between are blended (Llama 3.1's reference code).
        turns = rope.original_max_position * frequencies / (2 * np.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = np.clip(blend, 0, 1)
        frequencies = (1 - blend) * frequencies / rope.factor + blend * frequencies
    if rope.divisors:
        frequencies = frequencies / np.array(rope.divisors)
    return frequencies.astype(np.float32)


def rotation(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of positions `i32[T]`, each `f32[T, 1, H / 2]`, for every layer."""
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies[None, None]
    # Without the barrier XLA computes them anew in every layer, for every head.
    return lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns heads `[T, N, H]` by the angles of `rotation`.

    A pair is numbers `i` and `i + H / 2` of a head, as Hugging Face checkpoints have it.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
