"""The steps of a kernel that differ between chips, and between a chip and its interpreter.

`mma` and copies without a barrier are not interpreted, copies with a barrier exist from Hopper on.
Each step is one small function here, so that all else in a kernel is the same everywhere.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from paxkv.pallas_kernels.gpu_device import Gpu
from paxkv.pallas_kernels.gpu_steps import Ref


class Warps(NamedTuple):
    """How a product's rows and columns are spread over the four warps of a program."""

    dtype: DTypeLike
    below: int  # warps below each other, 16 rows each; the others stand beside them

    @property
    def rows(self) -> int:
        """Rows of a product."""
        return 16 * self.below

    @property
    def columns(self) -> int:
        """What a product's columns are a multiple of: 8 a warp."""
        return 8 * (4 // self.below)

    @property
    def left(self) -> Any:
        """How the left operand lies in registers."""
        return plgpu.Layout.MMA_LHS(self.dtype, m_warps=self.below)

    @property
    def right(self) -> Any:
        """How the right operand lies in registers."""
        return plgpu.Layout.MMA_RHS(self.dtype, m_warps=self.below)

    @property
    def sums(self) -> Any:
        """How the product lies in registers."""
        return plgpu.Layout.MMA_ACC(self.dtype, m_warps=self.below)


def add_product(
    sums: jax.Array, left: Ref, right: Ref, *, depth: int, warps: Warps, interpret: bool
) -> jax.Array:
    """`sums + left @ right`, of `[m, k]` and `[k, n]` in shared memory, `sums` being `f32[m, n]`.

    Operands are loaded `depth` of k at a time: all at once they would not fit in the registers.
    """
    if interpret:
        return sums + jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)
    for first in range(0, left.shape[1], depth):
        part = pl.ds(first, depth)
        sums = plgpu.mma(
            sums,
            plgpu.load(left.at[:, part], layout=warps.left),
            plgpu.load(right.at[part], layout=warps.right),
        )
    return sums


def copy_columns(rows: int, head_dim: int, gpu: Gpu) -> int:
    """Numbers of a row that lie together in shared memory: as many as copies allow, 16 at least."""
    for columns in (64, 32, 16):
        if head_dim % columns == 0 and (gpu.has_tma or _can_share(rows, head_dim, columns)):
            return columns
    return 16


def _can_share(rows: int, head_dim: int, columns: int) -> bool:
    """Whether four warps can share an asynchronous copy: by tiles of 8 rows, in fours."""
    row_tiles, column_tiles = rows // 8, head_dim // columns
    return row_tiles % 4 == 0 or column_tiles % 4 == 0 or row_tiles % 2 == column_tiles % 2 == 0


def start_copy(source: Ref, target: Ref, barrier: Ref | None, gpu: Gpu) -> None:
    """Begins a copy `[rows, H]` from global to shared memory, in the background.

    Few rows of an odd `head_dim` cannot be shared by the warps: they are copied at once, by each.
    """
    rows, head_dim = target.shape
    if gpu.has_tma or _can_share(rows, head_dim, copy_columns(rows, head_dim, gpu)):
        plgpu.copy_gmem_to_smem(
            source, target, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
        )
        return
    layout = plgpu.Layout.TILED(plgpu.Tiling(((8, 16), (4,))), (plgpu.Replicated(4),), (-3, -2), -1)
    store(target, plgpu.load(source, layout=layout, optimized=False), optimized=False)


def wait_for_copies(barrier: Ref | None, are_later_begun: jax.Array, num_later: int) -> None:
    """Waits for the oldest copies that nobody waited for.

    Args:
        barrier: What they signal; None where threads count copies instead.
        are_later_begun: Whether `num_later` copies were begun after them. Counting cannot tell them
            apart otherwise, and all are waited for.
        num_later: Copies that may go on.
    """
    if barrier is not None:
        plgpu.barrier_wait(barrier)
        return

    @pl.when(are_later_begun)
    def _wait_for_some():
        plgpu.wait_gmem_to_smem(num_later)

    @pl.when(jnp.logical_not(are_later_begun))
    def _wait_for_all():
        plgpu.wait_gmem_to_smem(0)


def store(target: Ref, numbers: jax.Array, *, optimized: bool = True) -> None:
    """Writes registers to memory; to global memory not `optimized`."""
    if hasattr(plgpu, "store"):  # from jax 0.12 on
        plgpu.store(target, numbers, optimized=optimized)
    else:
        target[...] = numbers
