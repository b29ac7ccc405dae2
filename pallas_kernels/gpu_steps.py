"""Steps that the bodies of the GPU kernels share: which pages a tile has, and scores to base 2."""

import functools
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
    """Scaled and capped scores, to base 2."""
    if soft_cap is None:
        return scores * (scale * LOG2_E)
    return tanh(scores * (scale / soft_cap)) * (soft_cap * LOG2_E)


# Of a rational function in x * x that is tanh(x) / x, to some units in the last place of float32
# for |x| up to where tanh is 1 (as in Eigen and XLA). Highest powers first.
_TANH_NUMERATOR = (
    -2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
    1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03,
)  # fmt: skip
_TANH_DENOMINATOR = (
    1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03
)  # fmt: skip
_TANH_IS_1 = 7.90531110763549805


def tanh(x: jax.Array) -> jax.Array:
    """The hyperbolic tangent, its relative error below 1e-6 however small or large `x` is.

    The GPU's own is right to 5e-4, and a formula with exponentials to 1e-7 of 1, not of a small
    result: a cap of 1e6 would make 0.1 of either.
    """
    x = jnp.minimum(jnp.maximum(x, -_TANH_IS_1), _TANH_IS_1)
    square = x * x
    numerator, denominator = (
        functools.reduce(lambda so_far, next_: so_far * square + next_, coefficients)
        for coefficients in (_TANH_NUMERATOR, _TANH_DENOMINATOR)
    )
    # A division would take some ten instructions to be rounded as IEEE 754 has it.
    root = lax.rsqrt(denominator)
    return x * numerator * (root * root)
