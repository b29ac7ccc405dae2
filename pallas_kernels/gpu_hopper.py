"""Paged attention for Hopper (sm_90a): TMA copies of pages into a ring, wgmma on its stages.

One body serves decode and prefill. A piece of work is an item of `gpu_common` for one KV head: up
to 64 rows a compute warpgroup, a row being a query and a head of the group. A memory warpgroup
copies the piece's keys and values tile by tile, each page of one head with one TMA copy, and runs
ahead by as many tiles as the ring has stages; in decode it runs on into the program's next piece.
It also zeroes the values of slots that hold no token, in the tiles that have any. A compute
warpgroup multiplies with wgmma and keeps an online softmax in registers.

wgmma takes 64 rows at least. In decode they are 64 tokens, and the query heads of a group its 8 or
16 columns: operands are swapped. What else could be done, to pad the group to 64 rows, was compiled
too. For 64 tokens of a KV head of 128, with 4 query heads:

                                       swapped    padded
    registers                               64       139
    instructions of a warp                 151       341   (72 and 117 more at an edge)
    exponentials and the like, cycles       48       272   (6 and 34 instructions at 16 a cycle)
    tensor cores, cycles                   256       512   (16 products, each reading 2 KB at 128
                                                            bytes a cycle; 8 of 32 and 4 of 64)
    barriers of the warpgroup                5         0   (the largest scores meet across warps,
                                                            1 KB of weights in shared memory)

The tokens take about 1600 cycles to arrive (32 KB, at 4.8 TB/s shared by 132 multiprocessors of
1.76 GHz). The steps of a tile wait for each other, so the padded ones would come close to that.
Heads of 80 and 96 are padded all the same: the second product has a head's numbers as rows.
"""

from paxkv.pallas_kernels.attention_call import AttentionArrays, AttentionSettings, PagedAttention
from paxkv.pallas_kernels.gpu_common import plan_work, rows_by_kv_head, unite
from paxkv.pallas_kernels.gpu_device import gpu_traced_for
from paxkv.pallas_kernels.gpu_hopper_kernel import attend
from paxkv.pallas_kernels.gpu_hopper_settings import ROWS, Settings
from paxkv.pallas_kernels.ragged import ragged_rows, write_new_tokens

_RING_BYTES = 225 * 1024  # of the 227 KB of a multiprocessor, with queries
_MOST_STAGES = 6  # enough to keep memory busy while a program ends a piece of work


def paged_attention_hopper(
    arrays: AttentionArrays,
    settings: AttentionSettings,
    *,
    interpret: bool = False,
    num_multiprocessors: int | None = None,
) -> PagedAttention:
    """`paged_attention` on Hopper.

    Args:
        arrays: Of 16-bit numbers, head_dim 64, 80, 96, 128 or 256, pages of a power of two from 8
            to 256.
        settings: Of the call.
        interpret: Runs it on the CPU, which raises where two threads race.
        num_multiprocessors: Work is split until all have some. None: of the GPU traced for.
    """
    if num_multiprocessors is None:
        num_multiprocessors = gpu_traced_for(interpret=interpret).num_multiprocessors
    queries = arrays.queries
    num_pages, num_kv_heads, page_size, head_dim = arrays.key_pages.shape
    group = queries.shape[1] // num_kv_heads
    rows = ragged_rows(queries.shape[0], arrays.cu_q_lens, arrays.kv_lens)
    arrays = write_new_tokens(arrays, rows)
    is_decode = settings.is_decode
    num_warpgroups, num_buffers = (1, 2) if is_decode else (2, 1)
    unit_queries = 1 if is_decode else num_warpgroups * ROWS // group
    tile_tokens = 128 if not is_decode and head_dim <= 128 else 64
    plan = plan_work(
        arrays, settings, rows, unit_queries=unit_queries, tile_tokens=tile_tokens,
        num_programs=num_multiprocessors, num_rounds=4 if is_decode else 1,
    )  # fmt: skip
    out_rows = -(-group // 8) * 8 if is_decode else ROWS
    is_swapped = is_decode and head_dim % ROWS == 0
    buffer_rows = out_rows if is_swapped else ROWS
    kernel_settings = Settings(
        group=group,
        unit_queries=unit_queries,
        out_rows=out_rows,
        is_swapped=is_swapped,
        num_warpgroups=num_warpgroups,
        num_buffers=num_buffers,
        num_stages=_num_stages(head_dim, tile_tokens, num_buffers * num_warpgroups * buffer_rows),
        tile_tokens=tile_tokens,
        page_size=page_size,
        num_pages=num_pages,
        scale=settings.scale,
        window=settings.window,
        soft_cap=settings.soft_cap,
        # Decode keeps one program on each multiprocessor, whose copies run on from one piece of
        # work to the next; prefill computes more than it copies and is better balanced by the GPU.
        num_programs=num_multiprocessors if is_decode else 2**31 - 1,
        num_parts=1 if plan.unit_of_item is None else 2,
        interpret=interpret,
    )
    by_head = rows_by_kv_head(queries, num_kv_heads, padding=num_warpgroups * out_rows)
    values, lse = attend(
        plan.work, arrays.block_tables, by_head, arrays.key_pages, arrays.value_pages,
        kernel_settings,
    )  # fmt: skip
    out, lse = unite(values, lse, plan, rows, arrays.sinks, unit_queries=unit_queries, group=group)
    return PagedAttention(out.astype(queries.dtype), arrays.key_pages, arrays.value_pages, lse)


def _num_stages(head_dim: int, tile_tokens: int, num_rows: int) -> int:
    """Stages of the ring: as many as fit beside so many rows of queries."""
    stage_bytes = 2 * tile_tokens * head_dim * 2
    return min(_MOST_STAGES, (_RING_BYTES - num_rows * head_dim * 2) // stage_bytes)
