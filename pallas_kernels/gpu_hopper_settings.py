"""What the Hopper kernel is compiled for, and the shared memory in which its warpgroups meet."""

import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from paxkv.pallas_kernels.gpu_steps import Ref, piece_of

ROWS = 64  # of a warpgroup: what one wgmma takes


class Settings(NamedTuple):
    """What a kernel is compiled for."""

    group: int  # query heads per KV head
    unit_queries: int
    out_rows: int  # that a compute warpgroup writes, a multiple of 8
    is_swapped: bool  # queries are columns of products, else rows
    num_warpgroups: int  # that compute
    num_buffers: int  # of queries
    num_stages: int  # of the ring
    tile_tokens: int
    page_size: int
    num_pages: int
    scale: float
    window: int | None
    soft_cap: float | None
    num_programs: int  # at most
    num_parts: int  # 2: outputs as a sum of two numbers, for merging
    interpret: bool

    @property
    def piece(self) -> int:
        """Tokens of one copy."""
        return piece_of(self)

    @property
    def buffer_rows(self) -> int:
        """Rows of queries that a warpgroup has in shared memory."""
        return self.out_rows if self.is_swapped else ROWS


class Turn(NamedTuple):
    """A program's turn at an item of work for one KV head."""

    item: jax.Array
    kv_head: jax.Array
    num_tiles: jax.Array
    tiles_before: jax.Array  # that went through the ring in its turns before
    number: jax.Array  # of turns before
    buffer: jax.Array  # which has its queries


class Ring(NamedTuple):
    """Stages that the memory warpgroup fills and the others free."""

    tiles: Ref  # [stages, t, H]
    full: Ref  # a barrier per stage, like the next
    free: Ref


class Shared(NamedTuple):
    """The shared memory of a program. A program has all of a multiprocessor's."""

    queries: Ref  # [buffers, warpgroups, R, H], and outputs at the end of a turn
    queries_full: Ref  # a barrier per buffer, like the next
    queries_free: Ref
    keys: Ring
    values: Ring
    values_unclear: Ref  # a barrier: a tile is copied of which not all tokens exist
    log_sum_exp: Ref  # f32[warpgroups, R]
    weights: Ref | None  # [warpgroups, R, t] where swapped or interpreted, else in registers


def shared_memory(settings: Settings, head_dim: int, dtype: jnp.dtype) -> Shared:
    """The types of `Shared` for a kernel."""
    num_warpgroups, tile_tokens = settings.num_warpgroups, settings.tile_tokens
    rows = settings.buffer_rows
    buffers = settings.num_buffers, num_warpgroups, rows, head_dim
    is_taken = plgpu.Barrier(num_arrivals=num_warpgroups, num_barriers=settings.num_buffers)
    num_copies = tile_tokens // settings.piece
    ring = Ring(
        tiles=_tiled((settings.num_stages, tile_tokens, head_dim), dtype),
        full=plgpu.Barrier(num_arrivals=num_copies, num_barriers=settings.num_stages),
        free=plgpu.Barrier(num_arrivals=num_warpgroups, num_barriers=settings.num_stages),
    )
    weights = None
    if settings.is_swapped or settings.interpret:
        weights = _tiled((num_warpgroups, rows, tile_tokens), dtype)
    return Shared(
        queries=_tiled(buffers, dtype),
        queries_full=is_taken,
        queries_free=is_taken,
        keys=ring,
        values=ring,
        values_unclear=plgpu.Barrier(num_arrivals=num_copies),
        log_sum_exp=plgpu.SMEM((num_warpgroups, rows), jnp.float32),
        weights=weights,
    )


def _tiled(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Shared memory for rows of 16-bit numbers, tiled and swizzled as wgmma reads them."""
    columns = math.gcd(shape[-1], 64)
    tiles = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(2 * columns)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiles, swizzle))
