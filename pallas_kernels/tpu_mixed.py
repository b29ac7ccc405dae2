"""Paged attention on TPU for any number of queries per sequence: prefill, chunks of it, decode.

The packed rows are cut into tiles, one for each step of the grid, whosever the rows are. A step
walks the sequences that have rows in its tile, and of each the tiles of keys that those rows see.
While one tile of keys is computed the next is on its way, across sequences and steps. New tokens
are written first of all.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from paxkv.pallas_kernels.attention_call import AttentionArrays, AttentionSettings, PagedAttention
from paxkv.pallas_kernels.tpu_float16 import dtype_of_words
from paxkv.pallas_kernels.tpu_mixed_kernel import mixed_kernel
from paxkv.pallas_kernels.tpu_pages import are_whole
from paxkv.pallas_kernels.tpu_row_groups import RING, find_groups, group_rows
from paxkv.pallas_kernels.tpu_steps import interpreter, pad
from paxkv.pallas_kernels.tpu_tiles import (
    LANES,
    chip_traced_for,
    power_of_two_over,
    prefill_tile_pages,
    prefill_tile_queries,
)

_CHUNK_ROWS = 128  # of a tile of queries that meet a tile of keys at once


def paged_mixed_tpu(
    arrays: AttentionArrays, settings: AttentionSettings, *, interpret: bool
) -> PagedAttention:
    """`paged_attention` for any number of queries per sequence."""
    queries, _, _, key_pages, value_pages, block_tables, kv_lens, cu_q_lens, sinks = arrays
    chip = chip_traced_for()
    num_tokens, num_heads, head_dim = queries.shape
    num_pages, num_kv_heads, page_size, _ = key_pages.shape
    num_slots, max_pages = block_tables.shape
    real_group = num_heads // num_kv_heads
    group = power_of_two_over(real_group)
    tile_pages = prefill_tile_pages(chip, key_pages, max_pages)
    tile_queries = prefill_tile_queries(num_tokens, num_kv_heads, group, head_dim)
    num_rows = tile_queries * group
    num_steps = -(-num_tokens // tile_queries)
    padded_tokens = num_steps * tile_queries
    padded_pages = -(-max(max_pages, tile_pages) // LANES) * LANES

    def by_head(x):  # [T, N, H] -> [K, T' * G, H]
        x = x.reshape(-1, num_kv_heads, real_group, x.shape[-1])
        x = pad(pad(x, 2, group), 0, padded_tokens)
        return x.swapaxes(0, 1).reshape(num_kv_heads, padded_tokens * group, -1)

    def by_token(x):
        x = x.reshape(num_kv_heads, padded_tokens, group, -1).swapaxes(0, 1)
        return x[:num_tokens, :, :real_group].reshape(num_tokens, num_heads, -1)

    q_lens, window = cu_q_lens[1:] - cu_q_lens[:-1], settings.window
    first = kv_lens - q_lens
    seen_from = jnp.zeros_like(kv_lens) if window is None else jnp.maximum(first - window + 1, 0)
    is_whole = are_whole(block_tables, seen_from, kv_lens, num_pages, page_size)
    write_rows = group_rows(page_size, key_pages.dtype)
    groups = find_groups(
        block_tables, jnp.maximum(first, 0), jnp.where(q_lens > 0, kv_lens, 0),
        num_pages, page_size, write_rows, num_tokens // write_rows + 2 * num_slots,
    )  # fmt: skip

    hbm = pl.BlockSpec(memory_space=pl.ANY)
    rows_spec = pl.BlockSpec((num_kv_heads, num_rows, head_dim), lambda i, *_: (0, i, 0))
    shape, lse_shape = jax.ShapeDtypeStruct, (num_kv_heads, num_rows // LANES, LANES)
    out, lse, key_pages, value_pages = pl.pallas_call(
        functools.partial(
            mixed_kernel, group=group, chunk_rows=min(num_rows, _CHUNK_ROWS),
            max_pages=max_pages, settings=settings, has_sinks=sinks is not None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7,
            grid=(num_steps,),
            in_specs=[hbm, rows_spec, hbm, pl.BlockSpec(memory_space=pltpu.VMEM), hbm, hbm],
            out_specs=[
                rows_spec,
                pl.BlockSpec((1, *lse_shape), lambda i, *_: (i, 0, 0, 0)),
                hbm,
                hbm,
            ],
            scratch_shapes=_scratch_shapes(arrays, tile_pages, num_rows, padded_pages),
        ),
        out_shape=[
            shape((num_kv_heads, padded_tokens * group, head_dim), queries.dtype),
            shape((num_steps, *lse_shape), jnp.float32),
            shape(key_pages.shape, key_pages.dtype),
            shape(value_pages.shape, value_pages.dtype),
        ],
        input_output_aliases={11: 2, 12: 3},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=True,
            vmem_limit_bytes=chip.usable_vmem_bytes,
        ),
        interpret=interpreter(interpret),
        name="paged_mixed",
    )(
        cu_q_lens,
        kv_lens,
        is_whole.astype(jnp.int32),
        *groups,
        pad(block_tables, -1, padded_pages)[:, None],
        by_head(queries),
        _new_words(arrays, write_rows),
        _sink_rows(sinks, num_kv_heads, real_group, num_rows),
        key_pages,
        value_pages,
    )  # fmt: skip
    lse = lse.reshape(num_steps, num_kv_heads, num_rows).swapaxes(0, 1)
    return PagedAttention(by_token(out), key_pages, value_pages, by_token(lse)[..., 0])


def _scratch_shapes(
    arrays: AttentionArrays, tile_pages: int, num_rows: int, padded_pages: int
) -> list:
    """The kernel's memory, in the order of its references."""
    _, num_kv_heads, page_size, head_dim = arrays.key_pages.shape
    dtype = arrays.key_pages.dtype
    write_rows, parts = group_rows(page_size, dtype), max(1, head_dim // LANES)
    vmem, smem, dma = pltpu.VMEM, pltpu.SMEM, pltpu.SemaphoreType.DMA
    tiles = vmem((2, num_kv_heads, tile_pages, page_size, head_dim), dtype)
    return [
        smem((4,), jnp.int32),
        smem((2, 1, padded_pages), jnp.int32),
        smem((2,), jnp.int32),
        tiles,
        tiles,
        vmem((8, tile_pages * page_size), jnp.float32),
        vmem((num_kv_heads, num_rows, LANES), jnp.float32),
        vmem((num_kv_heads, num_rows, LANES), jnp.float32),
        vmem((num_kv_heads, num_rows, head_dim), jnp.float32),
        vmem(
            (RING, 2, num_kv_heads, parts, 2 * write_rows, head_dim // parts),
            dtype_of_words(dtype),
        ),
        vmem((RING, 2, num_kv_heads, write_rows, head_dim), dtype),
        dma((2,)),
        dma((2,)),
        dma((RING,)),
        dma((RING,)),
    ]


def _new_words(arrays: AttentionArrays, write_rows: int) -> jax.Array:
    """New keys and values `[2, K, T', H]`, with room for a group to begin before and end after."""
    dtype = arrays.key_pages.dtype
    new = jnp.stack([arrays.new_keys, arrays.new_values]).astype(dtype)
    new = new.astype(dtype_of_words(dtype)).swapaxes(1, 2)
    tail = -new.shape[2] % write_rows + 2 * write_rows
    return jnp.pad(new, ((0, 0), (0, 0), (write_rows, tail), (0, 0)))


def _sink_rows(
    sinks: jax.Array | None, num_kv_heads: int, real_group: int, num_rows: int
) -> jax.Array:
    """`f32[K, q * G, 128]`, for each row its head's, the same in all lanes."""
    if sinks is None:
        return jnp.zeros((num_kv_heads, num_rows, LANES), jnp.float32)
    group = power_of_two_over(real_group)
    of_group = pad(sinks.astype(jnp.float32).reshape(num_kv_heads, real_group), 1, group)
    rows = jnp.tile(of_group, (1, num_rows // group))
    return jnp.broadcast_to(rows[..., None], (*rows.shape, LANES))
