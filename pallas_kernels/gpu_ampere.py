"""Paged attention with `mma.sync`: for Ampere and Ada, and for later chips without their own.

One kernel serves decode and prefill. A program does one item of work (`gpu_common`) for one KV
head: 16 rows where a sequence has one query, up to 64 otherwise, a row being a query and a head of
the group. Four warps copy pages into a ring in shared memory, some tiles ahead of the products.
"""

import jax.numpy as jnp

from paxkv.pallas_kernels.attention_call import AttentionArrays, AttentionSettings, PagedAttention
from paxkv.pallas_kernels.gpu_ampere_kernel import Settings, attend
from paxkv.pallas_kernels.gpu_ampere_steps import Warps
from paxkv.pallas_kernels.gpu_common import plan_work, rows_by_kv_head, unite
from paxkv.pallas_kernels.gpu_device import gpu_traced_for
from paxkv.pallas_kernels.ragged import ragged_rows, write_new_tokens

# Of a program. With 3 KB that the compiler and the driver add, two share a multiprocessor of an
# A100 (164 KB), and one has an Ada multiprocessor (100 KB) to itself.
_SHARED_BYTES = 77 * 1024
_MOST_STAGES = 4
_PROGRAMS_PER_MULTIPROCESSOR = 2


def paged_attention_ampere(
    arrays: AttentionArrays, settings: AttentionSettings, *, interpret: bool = False
) -> PagedAttention:
    """`paged_attention` with `mma.sync`.

    Takes bfloat16 and float16, head_dim 64, 80, 96, 128 and 256, pages of a power of two from 8 to
    256, and up to 64 query heads per KV head.
    """
    queries, max_q_len = arrays.queries, settings.max_q_len
    num_rows, num_heads, head_dim = queries.shape
    num_pages, num_kv_heads, page_size, _ = arrays.key_pages.shape
    group = num_heads // num_kv_heads
    gpu = gpu_traced_for(interpret=interpret)
    longest = num_rows if max_q_len is None else min(max_q_len, num_rows)
    warps = _choose_warps(queries.dtype, longest * group, head_dim)
    tile_tokens, num_stages = _choose_ring(warps, head_dim)
    unit_queries = min(warps.rows // group, longest)

    rows = ragged_rows(num_rows, arrays.cu_q_lens, arrays.kv_lens)
    arrays = write_new_tokens(arrays, rows)
    plan = plan_work(
        arrays, settings, rows, unit_queries=unit_queries, tile_tokens=tile_tokens,
        num_programs=_PROGRAMS_PER_MULTIPROCESSOR * gpu.num_multiprocessors,
    )  # fmt: skip
    kernel_settings = Settings(
        group=group,
        warps=warps,
        num_stages=num_stages,
        tile_tokens=tile_tokens,
        page_size=page_size,
        num_pages=num_pages,
        scale=settings.scale,
        window=settings.window,
        soft_cap=settings.soft_cap,
        has_splits=plan.unit_of_item is not None,
        gpu=gpu,
    )
    by_head = rows_by_kv_head(queries, num_kv_heads, padding=warps.rows)
    values, lse = attend(
        plan.work, arrays.block_tables, by_head, arrays.key_pages, arrays.value_pages,
        kernel_settings,
    )  # fmt: skip
    out, lse = unite(values, lse, plan, rows, arrays.sinks, unit_queries=unit_queries, group=group)
    return PagedAttention(out.astype(queries.dtype), arrays.key_pages, arrays.value_pages, lse)


def _choose_warps(dtype: jnp.dtype, most_rows: int, head_dim: int) -> Warps:
    """As few rows as hold what a sequence has, up to 64, with columns that divide `head_dim`."""
    for below in (1, 2):
        warps = Warps(dtype, below)
        if most_rows <= warps.rows and head_dim % warps.columns == 0:
            return warps
    return Warps(dtype, 4)


def _choose_ring(warps: Warps, head_dim: int) -> tuple[int, int]:
    """Tokens of a tile and stages of the ring: the largest tiles of which three fit.

    Where not even the smallest do, two stages of it.
    """
    itemsize = jnp.dtype(warps.dtype).itemsize
    smallest = max(16, warps.columns)
    for tile_tokens in (64, 32, 16):
        others = itemsize * warps.rows * (head_dim + tile_tokens)
        stage = itemsize * 2 * tile_tokens * head_dim
        num_stages = min((_SHARED_BYTES - others) // stage, _MOST_STAGES)
        if num_stages >= 3 or tile_tokens == smallest:
            return tile_tokens, max(num_stages, 2)
    raise AssertionError(f"{warps} want more tokens than a tile has")
