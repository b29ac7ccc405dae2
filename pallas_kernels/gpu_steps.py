"""Steps that the bodies of the GPU kernels share: which pages a tile has, and scores to base 2."""

import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from paxkv.pallas_kernels.gpu_common import Work

LOG2_E = math.log2(math.e)

type Ref = Any  # Pallas has no public name for what a kernel reads and writes


class Tiling(Protocol):
    """What the settings of each kernel say of pages and tiles."""

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        ...

    @property
    def num_pages(self) -> int:
        """Of the pool."""
        ...

    @property
    def tile_tokens(self) -> int:
        """Keys that are taken at a time, whole pages or a part of one."""
        ...


def piece_of(tiling: Tiling) -> int:
    """Tokens of one copy: a page, or a tile of it."""
    return min(tiling.page_size, tiling.tile_tokens)


def load_work(work_ref: Ref, item: jax.Array) -> Work:
    """One item of `work_ref`, `i32[W, 8]`."""
    return Work(*(work_ref[item, field] for field in range(len(Work._fields))))


def page_of(
    work: Work, token: jax.Array, tables_ref: Ref, tiling: Tiling
) -> tuple[jax.Array, jax.Array]:
    """The page of a token and whether it is one: the null page stands in for those that are not."""
    column = jnp.where(token < work.end, lax.div(token, tiling.page_size), 0)
    page = tables_ref[work.slot, column]
    is_page = (page > 0) & (page < tiling.num_pages) & (token < work.end)
    return jnp.where(is_page, page, 0), is_page


def held_pieces(work: Work, first: jax.Array, tables_ref: Ref, tiling: Tiling) -> jax.Array:
    """Bit i: whether the i-th piece of the tile from token `first` on is of a page that exists."""

    def look_up():
        bits = jnp.int32(0)
        for number in range(tiling.tile_tokens // piece_of(tiling)):
            _, is_page = page_of(work, first + number * piece_of(tiling), tables_ref, tiling)
            bits |= jnp.where(is_page, 1 << number, 0)
        return bits

    return lax.cond(work.has_holes == 1, look_up, lambda: jnp.int32(-1))


def full(shape: tuple[int, ...], number: float, layout: Any) -> jax.Array:
    """`f32[shape]` of one number, in registers."""
    return plgpu.layout_cast(jnp.full(shape, number, jnp.float32), layout)


def in_powers_of_two(scores: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """Scaled and capped scores, to base 2.

    `tanh` is written with an exponential: the GPU's approximation of it is right to 5e-4 only,
    which a cap of 50 would make 0.025.
    """
    if soft_cap is None:
        return scores * (scale * LOG2_E)
    doubled = jnp.exp2(scores * (2 * scale / soft_cap * LOG2_E))
    return soft_cap * LOG2_E - (2 * soft_cap * LOG2_E) / (doubled + 1)
