"""Paged attention for Hopper (sm_90a): TMA copies of pages into a ring, wgmma on its stages.

One body serves decode and prefill. A piece of work is an item of `gpu_common` for one KV head: up
to 64 rows a compute warpgroup, a row being a query and a head of the group. A memory warpgroup
copies the piece's keys and values tile by tile, each page of one head with one TMA copy, and runs
ahead by as many tiles as the ring has stages; in decode it runs on into the program's next piece.
It also zeroes the values of slots that hold no token, in the tiles that have any. A compute
warpgroup multiplies with wgmma and keeps an online softmax in registers.

wgmma takes 64 rows at least, so decode pads its group of query heads to 64. That costs nothing that
counts: 64 tokens of a KV head of 128 take about 1600 cycles to arrive at a multiprocessor (32 KB,
at 4.8 TB/s shared by 132 of 1.76 GHz), and 512 cycles of tensor cores.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paxkv.pallas_kernels.attention_call import AttentionArrays, AttentionSettings, PagedAttention
from paxkv.pallas_kernels.gpu_common import Work, plan_work, rows_by_kv_head, unite
from paxkv.pallas_kernels.gpu_steps import (
    LOG2_E,
    full,
    held_pieces,
    in_powers_of_two,
    load_work,
    page_of,
    piece_of,
)
from paxkv.pallas_kernels.online_softmax import MASKED
from paxkv.pallas_kernels.ragged import ragged_rows, write_new_tokens

_RING_BYTES = 225 * 1024  # of the 227 KB of a multiprocessor, with queries
_ROWS = 64  # of a warpgroup: what one wgmma takes
_PAGES_AT_ONCE = 8  # whose ids are read together: more would not fit in registers


class _Settings(NamedTuple):
    """What a kernel is compiled for."""

    group: int  # query heads per KV head
    unit_queries: int
    out_rows: int  # that a compute warpgroup writes, a multiple of 8
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


def _attention_kernel(
    work_ref,  # i32[W, 8], the fields of Work
    tables_ref,  # i32[B, M]
    q_ref,  # [K, T * G + padding, H]
    k_ref,  # [P, K, S, H]
    v_ref,  # [P, K, S, H]
    out_ref,  # [W, parts, K, R, H]
    lse_ref,  # f32[W, K, R]
    q_smem,  # [buffers, warpgroups, 64, H], for outputs at the end
    k_smem,  # [stages, t, H]
    v_smem,  # [stages, t, H]
    lse_smem,  # f32[warpgroups, 64]
    p_smem,  # [warpgroups, 64, t] if interpreted
    q_full,
    q_free,
    k_full,
    v_full,
    k_free,
    v_free,
    v_unclear,
    *,
    settings: _Settings,
):
    program = lax.axis_index("program")
    num_programs = lax.axis_size("program")
    warpgroup = lax.axis_index("warpgroup")
    num_kv_heads = q_ref.shape[0]
    num_pieces = work_ref.shape[0] * num_kv_heads
    num_rounds = lax.div(num_pieces - 1 - program, num_programs) + 1

    def for_each_piece(do):
        """Does this program's pieces of work, which share one ring and the buffers of queries."""

        def do_piece(number, before):
            pieces_before, tiles_before = before
            # The longest units of a causal prefill are the last; they go first.
            piece = num_pieces - 1 - (program + number * num_programs)
            item, kv_head = lax.div(piece, num_kv_heads), lax.rem(piece, num_kv_heads)
            work = load_work(work_ref, item)
            num_keys = jnp.maximum(work.end - work.begin, 0)
            num_tiles = lax.div(num_keys + settings.tile_tokens - 1, settings.tile_tokens)
            buffer = lax.rem(pieces_before, settings.num_buffers)

            @pl.when(num_tiles > 0)
            def _do():
                do(item, kv_head, num_tiles, tiles_before, buffer, pieces_before)

            pieces_before += jnp.where(num_tiles > 0, 1, 0)
            return pieces_before, tiles_before + num_tiles

        none = jnp.int32(0), jnp.int32(0)
        if num_pieces <= settings.num_programs:  # one each
            do_piece(0, none)
        else:
            lax.fori_loop(0, num_rounds, do_piece, none)

    # Three warpgroups have 168 registers a thread each; two that compute need more, a memory
    # warpgroup that clears long tiles no less than 80.
    memory_registers = 80 if settings.tile_tokens > _ROWS else 56

    @pl.when(warpgroup == settings.num_warpgroups)
    def _copy():
        if settings.num_warpgroups > 1:
            plgpu.set_max_registers(memory_registers, action="decrease")
        keys, values = (k_ref, k_smem, k_full, k_free), (v_ref, v_smem, v_full, v_free)

        def copy(item, kv_head, num_tiles, tiles_before, buffer, pieces_before):
            work = load_work(work_ref, item)

            @pl.when(pieces_before >= settings.num_buffers)
            def _wait():
                plgpu.barrier_wait(q_free.at[buffer])

            for number in range(settings.num_warpgroups):
                plgpu.copy_gmem_to_smem(
                    q_ref.at[
                        kv_head,
                        pl.ds(work.first_row * settings.group + number * _ROWS, settings.out_rows),
                    ],
                    q_smem.at[buffer, number, pl.ds(0, settings.out_rows)],
                    q_full.at[buffer],
                )
            _copy_tiles(
                work, kv_head, num_tiles, tiles_before, tables_ref, keys, values, v_unclear,
                settings,
            )  # fmt: skip

        for_each_piece(copy)

    @pl.when(warpgroup < settings.num_warpgroups)
    def _compute():
        if settings.num_warpgroups > 1:
            plgpu.set_max_registers((504 - memory_registers) // 16 * 8, action="increase")

        def compute(item, kv_head, num_tiles, tiles_before, buffer, pieces_before):
            del pieces_before
            rows_smem = q_smem.at[buffer, warpgroup]
            plgpu.barrier_wait(q_full.at[buffer])
            top, total, values = _attend(
                work_ref, item, num_tiles, tiles_before, warpgroup, tables_ref, rows_smem,
                k_smem, v_smem, None if p_smem is None else p_smem.at[warpgroup],
                (k_full, v_full, k_free, v_free), settings,
            )  # fmt: skip
            rows = pl.ds(warpgroup * _ROWS, settings.out_rows)
            _store(
                top, total, values, rows_smem, lse_smem.at[warpgroup],
                out_ref.at[item, :, kv_head, rows], lse_ref.at[item, kv_head, rows], settings,
            )  # fmt: skip
            plgpu.barrier_arrive(q_free.at[buffer])

        for_each_piece(compute)


def _store(top, total, values, o_smem, lse_smem, out_ref, lse_ref, settings: _Settings):
    """Writes a warpgroup's outputs and log-sum-exp by way of shared memory."""
    out_rows = pl.ds(0, settings.out_rows)
    saw_keys = top > MASKED / 2
    total = jnp.where(saw_keys, total, jnp.ones_like(total))
    lse_smem[...] = jnp.where(
        saw_keys, (top + jnp.log2(total)) / LOG2_E, jnp.full_like(top, -jnp.inf)
    )
    share = jnp.where(saw_keys, 1 / total, jnp.zeros_like(total))
    values *= lax.broadcast_in_dim(share, values.shape, [0])
    for part in range(settings.num_parts):
        rounded = values.astype(o_smem.dtype)
        o_smem[...] = rounded
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem.at[out_rows], out_ref.at[part])
        if part == 0:
            plgpu.copy_smem_to_gmem(lse_smem.at[out_rows], lse_ref)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        values -= rounded.astype(jnp.float32)


def _copy_tiles(
    work: Work, kv_head, num_tiles, tiles_before, tables_ref, keys, values, v_unclear,
    settings: _Settings,
):  # fmt: skip
    """Fills the ring: waits until a stage is free and copies the next tile there."""
    k_ref, k_smem, k_full, k_free = keys
    v_ref, v_smem, v_full, v_free = values
    tile_tokens, piece = settings.tile_tokens, settings.piece

    @pl.loop(0, num_tiles)
    def _copy_tile(tile):
        stage = lax.rem(tiles_before + tile, settings.num_stages)
        first = work.begin + tile * tile_tokens

        def copy(pool_ref, smem, barrier):
            for group in range(0, tile_tokens, piece * _PAGES_AT_ONCE):
                offsets = range(group, min(group + piece * _PAGES_AT_ONCE, tile_tokens), piece)
                pages = [page_of(work, first + x, tables_ref, settings)[0] for x in offsets]
                for offset, page in zip(offsets, pages, strict=True):
                    in_page = pl.ds(lax.rem(first + offset, settings.page_size), piece)
                    if piece == settings.page_size:
                        in_page = pl.ds(0, piece)
                    plgpu.copy_gmem_to_smem(
                        pool_ref.at[page, kv_head, in_page],
                        smem.at[stage, pl.ds(offset, piece)],
                        barrier,
                    )

        def wait(free):
            @pl.when(tiles_before + tile >= settings.num_stages)
            def _wait():
                plgpu.barrier_wait(free.at[stage])

        wait(k_free)
        copy(k_ref, k_smem, k_full.at[stage])
        wait(v_free)
        is_whole = (first + tile_tokens <= work.end) & (work.has_holes == 0)

        @pl.when(is_whole)
        def _copy():
            copy(v_ref, v_smem, v_full.at[stage])

        @pl.when(jnp.logical_not(is_whole))
        def _copy_and_clear():
            copy(v_ref, v_smem, v_unclear)
            plgpu.barrier_wait(v_unclear)
            _clear(work, first, tables_ref, v_smem.at[stage], settings)
            for _ in range(tile_tokens // piece):
                plgpu.barrier_arrive(v_full.at[stage])


def _attend(
    work_ref, item, num_tiles, tiles_before, warpgroup, tables_ref, q_smem, k_smem, v_smem,
    p_smem, barriers, settings: _Settings,
):  # fmt: skip
    """Softmax of a warpgroup's rows over all tiles: top and total f32[64], values f32[64, H].

    Scores and `top` are in powers of two.
    """
    k_full, v_full, k_free, v_free = barriers
    tile_tokens, head_dim = settings.tile_tokens, q_smem.shape[-1]
    work = load_work(work_ref, item)

    def attend_tile(tile, carry):
        top, total, values = carry
        stage = lax.rem(tiles_before + tile, settings.num_stages)
        first = work.begin + tile * tile_tokens
        plgpu.barrier_wait(k_full.at[stage])
        scores = _multiply(q_smem, k_smem.at[stage].transpose((1, 0)))
        plgpu.barrier_arrive(k_free.at[stage])
        scores = in_powers_of_two(scores, settings.scale, settings.soft_cap)
        is_full = (first >= work.full_begin) & (first + tile_tokens <= work.full_end)
        scores = lax.cond(
            is_full,
            lambda scores: scores,
            # What only an edge needs is loaded there: it would hold registers through the loop.
            lambda scores: _mask(
                scores, load_work(work_ref, item), first, warpgroup, tables_ref, settings
            ),
            scores,
        )
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        keep = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        total = total * keep + jnp.sum(weights, axis=1)
        weights = weights.astype(v_smem.dtype)
        plgpu.barrier_wait(v_full.at[stage])
        values *= lax.broadcast_in_dim(keep, values.shape, [0])
        values = _add_weighted(values, weights, v_smem.at[stage], p_smem)
        plgpu.barrier_arrive(v_free.at[stage])
        return new_top, total, values

    return lax.fori_loop(
        0,
        num_tiles,
        attend_tile,
        (
            full((_ROWS,), MASKED, plgpu.Layout.WGMMA.reduce(1)),
            full((_ROWS,), 0.0, plgpu.Layout.WGMMA.reduce(1)),
            full((_ROWS, head_dim), 0.0, plgpu.Layout.WGMMA),
        ),
    )


def _iota(shape: tuple[int, int], axis: int):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def _mask(scores, work: Work, first, warpgroup, tables_ref, settings: _Settings):
    """Hides what a query does not see in a tile at an edge."""
    column = _iota(scores.shape, 1)
    position = work.first_row + work.shift
    if settings.unit_queries > 1:
        row = warpgroup * _ROWS + _iota(scores.shape, 0)
        position = position + lax.div(row, settings.group)
    # Of a column 8 a + b, a is known when the kernel is compiled. Compared so, no register is
    # needed for the columns.
    in_eight = column & 7
    eights = column - in_eight
    visible = eights < jnp.minimum(position + 1, work.end) - first - in_eight
    if settings.window is not None:
        visible &= eights > position - settings.window - first - in_eight
    pieces = held_pieces(work, first, tables_ref, settings)
    visible &= (pieces >> lax.div(eights, settings.piece)) & 1 == 1
    return jnp.where(visible, scores, MASKED)


def _clear(work: Work, first, tables_ref, v_smem, settings: _Settings):
    """Zeroes a tile's rows that hold no token: a NaN there is NaN with a weight of 0 too."""
    tile_tokens, head_dim = v_smem.shape
    columns = math.gcd(head_dim, 64)  # at a time, to need few registers
    pieces = held_pieces(work, first, tables_ref, settings)

    @pl.loop(0, tile_tokens // _ROWS * (head_dim // columns))
    def _clear_part(part):  # a loop: unrolled, the compiler would compute all addresses ahead
        begin = lax.rem(part, tile_tokens // _ROWS) * _ROWS
        column = lax.div(part, tile_tokens // _ROWS) * columns
        row = begin + _iota((_ROWS, columns), 0)
        is_held = (pieces >> lax.div(row, settings.piece)) & 1 == 1
        is_stored = (row < work.end - first) & is_held
        part_ref = v_smem.at[pl.ds(begin, _ROWS), pl.ds(column, columns)]
        values = plgpu.load(part_ref, layout=plgpu.Layout.WGMMA)
        part_ref[...] = jnp.where(is_stored, values, jnp.zeros_like(values))

    plgpu.commit_smem()


def _multiply(left, right):
    """The product of two matrices in shared memory."""

    def multiply(product_ref):
        plgpu.wgmma(product_ref, left, right)
        return product_ref[...]

    shape = left.shape[0], right.shape[1]
    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _add_weighted(values, weights, v_smem, p_smem):
    """`values + weights @ v`, with weights in registers or, interpreted, in shared memory."""
    if p_smem is None:

        def multiply(values_ref):
            plgpu.wgmma(values_ref, weights, v_smem)

        return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(values))
    p_smem[...] = weights
    plgpu.commit_smem()
    return values + _multiply(p_smem, v_smem)


def _transforms(head_dim: int) -> tuple[Any, ...]:
    """How rows of `head_dim` 16-bit numbers lie in shared memory: tiled and swizzled for wgmma."""
    columns = math.gcd(head_dim, 64)
    return (
        plgpu.TilingTransform((8, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(2 * columns),  # pyright: ignore[reportAbstractUsage]
    )


def paged_attention_hopper(
    arrays: AttentionArrays,
    settings: AttentionSettings,
    *,
    interpret: bool = False,
    num_multiprocessors: int = 132,
) -> PagedAttention:
    """`paged_attention` on Hopper.

    `interpret` runs it on the CPU, which raises where two threads race. Work is split until all
    `num_multiprocessors` of the GPU have some.
    """
    queries = arrays.queries
    num_pages, num_kv_heads, page_size, head_dim = arrays.key_pages.shape
    group = queries.shape[1] // num_kv_heads
    rows = ragged_rows(queries.shape[0], arrays.cu_q_lens, arrays.kv_lens)
    arrays = write_new_tokens(arrays, rows)
    is_decode = settings.is_decode
    num_warpgroups, num_buffers = (1, 2) if is_decode else (2, 1)
    unit_queries = 1 if is_decode else num_warpgroups * _ROWS // group
    tile_tokens = 128 if not is_decode and head_dim <= 128 else 64
    plan = plan_work(
        arrays, settings, rows, unit_queries=unit_queries, tile_tokens=tile_tokens,
        num_programs=num_multiprocessors, num_rounds=4 if is_decode else 1,
    )  # fmt: skip
    kernel_settings = _Settings(
        group=group,
        unit_queries=unit_queries,
        out_rows=-(-group // 8) * 8 if is_decode else _ROWS,
        num_warpgroups=num_warpgroups,
        num_buffers=num_buffers,
        num_stages=_num_stages(head_dim, tile_tokens, num_buffers * num_warpgroups * _ROWS),
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
    rows_of_heads = rows_by_kv_head(
        queries, num_kv_heads, padding=num_warpgroups * kernel_settings.out_rows
    )
    values, lse = _attend_items(
        plan.work, arrays.block_tables, rows_of_heads, arrays.key_pages, arrays.value_pages,
        kernel_settings,
    )  # fmt: skip
    out, lse = unite(values, lse, plan, rows, arrays.sinks, unit_queries=unit_queries, group=group)
    return PagedAttention(out.astype(queries.dtype), arrays.key_pages, arrays.value_pages, lse)


def _num_stages(head_dim: int, tile_tokens: int, num_rows: int) -> int:
    """As many as fit, but no more than keep memory busy while a program ends a piece of work."""
    stage_bytes = 2 * tile_tokens * head_dim * 2
    return min(6, (_RING_BYTES - num_rows * head_dim * 2) // stage_bytes)


def _attend_items(
    work: Work, block_tables, rows_of_heads, key_pages, value_pages, settings: _Settings
) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel: each item's outputs `[W, K, R, H]` and log-sum-exp `f32[W, K, R]`."""
    num_items = work.slot.shape[0]
    _, num_kv_heads, _, head_dim = key_pages.shape
    dtype = key_pages.dtype
    num_warpgroups, num_stages = settings.num_warpgroups, settings.num_stages
    tile_tokens = settings.tile_tokens
    out_rows = settings.out_rows * num_warpgroups
    transforms = _transforms(head_dim)
    num_copies = tile_tokens // settings.piece
    ring = plgpu.SMEM((num_stages, tile_tokens, head_dim), dtype, transforms=transforms)
    weights = None
    if settings.interpret:
        shape = num_warpgroups, _ROWS, tile_tokens
        weights = plgpu.SMEM(shape, dtype, transforms=_transforms(tile_tokens))
    full = plgpu.Barrier(num_arrivals=num_copies, num_barriers=num_stages)
    free = plgpu.Barrier(num_arrivals=num_warpgroups, num_barriers=num_stages)
    scratch = (
        plgpu.SMEM(
            (settings.num_buffers, num_warpgroups, _ROWS, head_dim), dtype, transforms=transforms
        ),
        ring,
        ring,
        plgpu.SMEM((num_warpgroups, _ROWS), jnp.float32),
        weights,
        plgpu.Barrier(num_arrivals=num_warpgroups, num_barriers=settings.num_buffers),
        plgpu.Barrier(num_arrivals=num_warpgroups, num_barriers=settings.num_buffers),
        full,
        full,
        free,
        free,
        plgpu.Barrier(num_arrivals=num_copies),
    )
    values, lse = plgpu.kernel(
        functools.partial(_attention_kernel, settings=settings),
        out_type=(
            jax.ShapeDtypeStruct(
                (num_items, settings.num_parts, num_kv_heads, out_rows, head_dim), dtype
            ),
            jax.ShapeDtypeStruct((num_items, num_kv_heads, out_rows), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(min(settings.num_programs, num_items * num_kv_heads),),
        grid_names=("program",),
        num_threads=num_warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if settings.interpret else None,
    )(jnp.stack(work, axis=-1), block_tables, rows_of_heads, key_pages, value_pages)
    if settings.num_parts > 1:
        return jnp.sum(values, axis=1, dtype=jnp.float32), lse
    return values[:, 0], lse
