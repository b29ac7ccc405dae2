"""Paged attention on TPU where each sequence has at most one query.

One program walks its sequences, tile of pages by tile of pages. While a tile is computed the next
one is on its way from HBM, whether it is of the same sequence or of the next; each sequence's row
of the block table, its query and its new token come while the sequence before it is computed.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from paxkv.pallas_kernels.attention_call import AttentionArrays, AttentionSettings, PagedAttention
from paxkv.pallas_kernels.tpu_decode_kernel import decode_kernel
from paxkv.pallas_kernels.tpu_pages import are_whole
from paxkv.pallas_kernels.tpu_stacks import Stacks
from paxkv.pallas_kernels.tpu_steps import interpreter, pad
from paxkv.pallas_kernels.tpu_tiles import LANES, chip_traced_for, decode_tile_pages

_PART_TOKENS = 256  # of a tile that is masked at an edge of what a query sees


def paged_decode_tpu(
    arrays: AttentionArrays, settings: AttentionSettings, *, interpret: bool
) -> PagedAttention:
    """`paged_attention` where no sequence has more than one query.

    Rows that belong to no sequence are left unset.
    """
    queries, _, _, key_pages, value_pages, block_tables, kv_lens, cu_q_lens, sinks = arrays
    chip = chip_traced_for()
    num_rows, num_heads, head_dim = queries.shape
    num_pages, num_kv_heads, page_size, _ = key_pages.shape
    max_pages = block_tables.shape[1]
    stacks = Stacks(num_kv_heads, num_heads // num_kv_heads)
    tile_pages = decode_tile_pages(chip, key_pages, max_pages)
    padded_pages = -(-max(max_pages, tile_pages) // LANES) * LANES
    lse_lanes = -(-stacks.count * stacks.rows // LANES) * LANES

    window = settings.window
    seen_from = jnp.zeros_like(kv_lens) if window is None else jnp.maximum(kv_lens - window, 0)
    seen_to = jnp.minimum(kv_lens, max_pages * page_size)
    is_active = (cu_q_lens[1:] > cu_q_lens[:-1]) & (seen_from < seen_to)
    is_whole = are_whole(block_tables, seen_from, seen_to, num_pages, page_size)

    hbm = pl.BlockSpec(memory_space=pl.ANY)
    shape, rows = jax.ShapeDtypeStruct, (stacks.count, stacks.rows)
    out, lse, key_pages, value_pages = pl.pallas_call(
        functools.partial(
            decode_kernel, stacks=stacks, max_pages=max_pages, settings=settings,
            has_sinks=sinks is not None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(chip.num_cores,),
            in_specs=[hbm, hbm, hbm, pl.BlockSpec(memory_space=pltpu.VMEM), hbm, hbm],
            out_specs=[hbm, hbm, hbm, hbm],
            scratch_shapes=_scratch_shapes(arrays, stacks, tile_pages, padded_pages, lse_lanes),
        ),
        out_shape=[
            shape((num_rows, *rows, head_dim), queries.dtype),
            shape((num_rows, 1, lse_lanes), jnp.float32),
            shape(key_pages.shape, key_pages.dtype),
            shape(value_pages.shape, value_pages.dtype),
        ],
        input_output_aliases={7: 2, 8: 3},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            disable_bounds_checks=True,
            vmem_limit_bytes=chip.usable_vmem_bytes,
        ),
        interpret=interpreter(interpret),
        name="paged_decode",
    )(
        cu_q_lens[:-1],
        jnp.where(is_active, kv_lens, 0),
        is_whole.astype(jnp.int32),
        pad(block_tables, -1, padded_pages)[:, None],
        stacks.stack(queries),
        jnp.stack([arrays.new_keys, arrays.new_values], axis=1).astype(key_pages.dtype),
        _sink_rows(sinks, stacks),
        key_pages,
        value_pages,
    )  # fmt: skip
    lse = lse[:, 0, : stacks.count * stacks.rows].reshape(num_rows, *rows, 1)
    return PagedAttention(
        stacks.unstack(out), key_pages, value_pages, stacks.unstack(lse)[..., 0]
    )  # fmt: skip


def _scratch_shapes(
    arrays: AttentionArrays, stacks: Stacks, tile_pages: int, padded_pages: int, lse_lanes: int
) -> list:
    """The kernel's memory, in the order of its references."""
    _, num_kv_heads, page_size, head_dim = arrays.key_pages.shape
    dtype, rows = arrays.key_pages.dtype, (stacks.count, stacks.rows)
    part_pages = max(1, min(tile_pages, _PART_TOKENS // page_size))
    written_rows = min(page_size, 32 // dtype.itemsize)  # the least that a copy can begin at
    vmem, smem, dma = pltpu.VMEM, pltpu.SMEM, pltpu.SemaphoreType.DMA
    tiles = vmem((2, num_kv_heads, tile_pages, page_size, head_dim), dtype)
    return [
        smem((2, 1, padded_pages), jnp.int32),
        vmem((2, *rows, head_dim), arrays.queries.dtype),
        vmem((2, 2, num_kv_heads, head_dim), dtype),
        tiles,
        tiles,
        vmem((2, *rows, head_dim), arrays.queries.dtype),
        vmem((2, 1, lse_lanes), jnp.float32),
        vmem((2, 2, num_kv_heads, written_rows, head_dim), dtype),
        vmem((8, part_pages * page_size), jnp.float32),
        vmem((*rows, LANES), jnp.float32),
        vmem((*rows, LANES), jnp.float32),
        vmem((*rows, stacks.heads * head_dim), jnp.float32),
        smem((2,), jnp.int32),
        smem((2, 2), jnp.int32),
        *[dma((2,))] * 5,
    ]


def _sink_rows(sinks: jax.Array | None, stacks: Stacks) -> jax.Array:
    """`f32[J, R, 128]`, the same in all lanes."""
    if sinks is None:
        return jnp.zeros((stacks.count, stacks.rows, LANES), jnp.float32)
    lanes = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (*sinks.shape, LANES))
    return stacks.stack(lanes)
