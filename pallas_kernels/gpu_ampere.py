"""Paged attention with `mma.sync`: for Ampere and Ada, and for later chips without their own.

One kernel serves decode and prefill. A program does one item of work (`gpu_common`) for one KV
head: 16 rows where a sequence has one query, up to 64 otherwise, a row being a query and a head of
the group. Four warps copy pages into a ring in shared memory, some tiles ahead of the products.
"""

import jax
import jax.numpy as jnp

from paxkv.pallas_kernels.gpu_ampere_kernel import Settings, attend
from paxkv.pallas_kernels.gpu_ampere_steps import Warps, chip_of_default_device
from paxkv.pallas_kernels.gpu_common import plan_work, rows_by_kv_head, unite
from paxkv.pallas_kernels.ragged import ragged_rows, write_new_tokens

# Of a program. With 3 KB that the compiler and the driver add, two share a multiprocessor of an
# A100 (164 KB), and one has an Ada multiprocessor (100 KB) to itself.
_SHARED_BYTES = 77 * 1024
_MOST_STAGES = 4
_PROGRAMS_PER_MULTIPROCESSOR = 2


def paged_attention_ampere(
    queries: jax.Array,
    new_keys: jax.Array,
    new_values: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    max_q_len: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`paged_attention` with `mma.sync`; see there for the arguments.

    Takes bfloat16 and float16, head_dim 64, 80, 96, 128 and 256, pages of a power of two from 8 to
    256, and up to 64 query heads per KV head.

    Returns:
        Outputs `[T, N, H]`, log-sum-exp `f32[T, N]`, and the two pool arrays.
    """
    num_rows, num_heads, head_dim = queries.shape
    num_pages, num_kv_heads, page_size, _ = key_pages.shape
    group = num_heads // num_kv_heads
    chip = chip_of_default_device(interpret=interpret)
    longest = num_rows if max_q_len is None else min(max_q_len, num_rows)
    warps = _choose_warps(queries.dtype, longest * group, head_dim)
    tile_tokens, num_stages = _choose_ring(warps, head_dim)
    unit_queries = min(warps.rows // group, longest)

    rows = ragged_rows(num_rows, cu_q_lens, kv_lens)
    key_pages, value_pages = write_new_tokens(
        key_pages, value_pages, new_keys, new_values, block_tables, rows
    )
    plan = plan_work(
        rows, block_tables, kv_lens, cu_q_lens, key_pages,
        window=window, max_q_len=max_q_len, unit_queries=unit_queries, tile_tokens=tile_tokens,
        num_programs=_PROGRAMS_PER_MULTIPROCESSOR * chip.num_multiprocessors,
    )  # fmt: skip
    settings = Settings(
        group=group,
        warps=warps,
        num_stages=num_stages,
        tile_tokens=tile_tokens,
        page_size=page_size,
        num_pages=num_pages,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        has_splits=plan.unit_of_item is not None,
        chip=chip,
    )
    by_head = rows_by_kv_head(queries, num_kv_heads, padding=warps.rows)
    values, lse = attend(plan.work, block_tables, by_head, key_pages, value_pages, settings)
    out, lse = unite(values, lse, plan, rows, sinks, unit_queries=unit_queries, group=group)
    return out.astype(queries.dtype), lse, key_pages, value_pages


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
