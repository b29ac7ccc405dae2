"""Paged attention on TPU where each sequence has at most one query.

One program walks its sequences, tile of pages by tile of pages. While a tile is computed the next
one is on its way from HBM, whether it is of the same sequence or of the next; each sequence's row
of the block table, its query and its new token come while the sequence before it is computed.

Query heads of several KV heads are stacked so that their scores fill whole registers: a stack
holds `heads_per_stack` KV heads with `group` query heads each, `R` rows in all, and its scores are
the sum over its heads of (the query rows of that head, others zero) times (the keys of that head).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from paxkv.pallas_kernels.attention_call import AttentionArrays, AttentionSettings, PagedAttention
from paxkv.pallas_kernels.online_softmax import MASKED
from paxkv.pallas_kernels.ragged import is_page
from paxkv.pallas_kernels.tpu_float16 import dtype_of_numbers, dtype_of_words
from paxkv.pallas_kernels.tpu_pages import PageTiles
from paxkv.pallas_kernels.tpu_steps import dot, interpreter, pad
from paxkv.pallas_kernels.tpu_tiles import (
    LANES,
    chip_traced_for,
    decode_tile_pages,
    power_of_two_over,
)


def _decode_kernel(
    rows_ref,  # i32[B] the packed row of each slot
    kv_lens_ref,  # i32[B], 0 for slots with nothing to do
    is_whole_ref,  # i32[B] whether all pages that the query sees exist
    tables_ref,  # i32[B, 1, M]
    queries_ref,  # [T, J, R, H]
    new_ref,  # [T, 2, K, H] the new key and value
    sinks_ref,  # f32[J, R, 128]
    _keys_ref,
    _values_ref,
    out_ref,  # [T, J, R, H]
    lse_ref,  # f32[T, 1, N'] of row r of stack j in lane j * R + r
    keys_ref,  # [P, K, S, H]
    values_ref,
    ids,  # SMEM i32[2, 1, M]
    query_buf,  # [2, J, R, H]
    new_buf,  # [2, 2, K, H]
    key_buf,  # [2, K, C, S, H]
    value_buf,
    out_buf,  # [2, J, R, H]
    lse_buf,  # f32[2, 1, N']
    written_buf,  # [2, 2, K, G, H] the rows around the new token, for their way back to HBM
    bias,  # f32[8, part of C * S] 0 or MASKED
    top,  # f32[J, R, 128]
    total,  # f32[J, R, 128]
    weighted,  # f32[J, R, heads_per_stack * H]
    copied,  # SMEM i32[2] pages on their way into each half of key_buf
    is_leaving,  # SMEM i32[2, 2] whether out_buf and written_buf are on their way to HBM
    ids_sems,
    row_sems,
    page_sems,
    out_sems,
    written_sems,
    *,
    group: int,
    max_pages: int,
    settings: AttentionSettings,
    has_sinks: bool,
):
    scale, window, soft_cap, _ = settings
    num_slots = kv_lens_ref.shape[0]
    num_pages, num_kv_heads, page_size, head_dim = keys_ref.shape
    tiles = PageTiles(
        pools=(keys_ref, values_ref), bufs=(key_buf, value_buf), tables=tables_ref, ids=ids,
        copied=copied, ids_sems=ids_sems, page_sems=page_sems, max_pages=max_pages,
    )  # fmt: skip
    tile_pages, tile_tokens = tiles.tile_pages, tiles.tile_tokens
    num_stacks, stack_rows, _ = top.shape
    heads_per_stack = num_kv_heads // num_stacks
    group_rows = written_buf.shape[3]
    part_pages = bias.shape[1] // page_size

    per_program = pl.cdiv(num_slots, pl.num_programs(0))
    first_slot = pl.program_id(0) * per_program
    end_slot = jnp.minimum(first_slot + per_program, num_slots)

    def next_slot(slot):
        """The first slot at or after one that has something to do."""

        def is_idle(slot):
            return (slot < end_slot) & (kv_lens_ref[jnp.minimum(slot, num_slots - 1)] == 0)

        return lax.while_loop(is_idle, lambda slot: slot + 1, slot)

    def first_seen(slot):
        return 0 if window is None else jnp.maximum(kv_lens_ref[slot] - window, 0)

    def end_seen(slot):
        return jnp.minimum(kv_lens_ref[slot], max_pages * page_size)

    def row_copies(slot, half):
        row = rows_ref[slot]
        return (
            pltpu.make_async_copy(queries_ref.at[row], query_buf.at[half], row_sems.at[half]),
            pltpu.make_async_copy(new_ref.at[row], new_buf.at[half], row_sems.at[half]),
        )

    def start_sequence(slot, half):
        tiles.ids_copy(slot, half).start()
        for copy in row_copies(slot, half):
            copy.start()

    def start_tile(slot, tile, half, buf):
        tiles.start(tile, first_seen(slot), end_seen(slot), half, buf)

    def out_copies(slot, half):
        row = rows_ref[slot]
        return (
            pltpu.make_async_copy(out_buf.at[half], out_ref.at[row], out_sems.at[half]),
            pltpu.make_async_copy(lse_buf.at[half], lse_ref.at[row], out_sems.at[half]),
        )

    def written_copies(page_id, offset, half):
        rows = pl.ds(offset, group_rows)
        return [
            pltpu.make_async_copy(
                written_buf.at[half, i], pages.at[page_id, :, rows], written_sems.at[half]
            )
            for i, pages in enumerate((keys_ref, values_ref))
        ]

    def wait_leaving(half):
        """Until the buffers that results leave from can be filled again."""

        @pl.when(is_leaving[half, 0] == 1)
        def _():
            for copy in out_copies(0, half):
                copy.wait()
            is_leaving[half, 0] = 0

        @pl.when(is_leaving[half, 1] == 1)
        def _():
            for copy in written_copies(0, 0, half):
                copy.wait()
            is_leaving[half, 1] = 0

    def write_new_token(slot, tile, half, buf):
        """Puts the new token into the tile, and its rows of the page back into HBM."""
        position = kv_lens_ref[slot] - 1
        column = position // page_size
        page_id = ids[half, 0, jnp.minimum(column, max_pages - 1)]

        @pl.when((column < max_pages) & is_page(page_id, num_pages))
        def _():
            place = column - tile * tile_pages
            offset = position % page_size
            first = pl.multiple_of(offset // group_rows * group_rows, group_rows)
            shape = (num_kv_heads, group_rows, head_dim)
            is_new = lax.broadcasted_iota(jnp.int32, shape, 1) == offset - first
            for i, pages_buf in enumerate((key_buf, value_buf)):
                rows = pages_buf.at[buf, :, place, pl.ds(first, group_rows)]
                # Rows are repeated in words of 32 bits.
                new = new_buf[half, i].astype(dtype_of_words(new_buf.dtype))[:, None]
                new = jnp.broadcast_to(new, shape).astype(pages_buf.dtype)
                merged = jnp.where(is_new, new, rows[...])
                rows[...] = merged
                written_buf[half, i] = merged
            for copy in written_copies(page_id, first, half):
                copy.start()
            is_leaving[half, 1] = 1

    row_head = lax.broadcasted_iota(jnp.int32, (stack_rows, LANES), 0) // group

    def attend(
        slot, first_page, half, buf, *, length: int, is_masked: bool, between=lambda stack: None
    ):
        """Merges `length` pages of a tile into the softmax; calls `between` once for each stack.

        The scores of a stack are asked for before the values of the one before it, so that the
        matrix units work while a softmax is computed.
        """
        num_tokens = length * page_size
        pages = pl.ds(first_page % tile_pages if is_masked else 0, length)
        if is_masked:
            is_whole = is_whole_ref[slot] == 1
            tiles.hide_unseen(
                bias, first_page, first_seen(slot), end_seen(slot), is_whole, half, buf
            )

        def score(stack):
            query = query_buf[half, stack]
            scores = jnp.zeros((stack_rows, num_tokens), jnp.float32)
            for i in range(heads_per_stack):
                keys = key_buf[buf, stack * heads_per_stack + i, pages]
                keys = keys.reshape(num_tokens, head_dim)
                mine = query
                if heads_per_stack > 1:
                    mine = jnp.where(row_head[:, :1] == i, query, jnp.zeros_like(query))
                scores += dot(mine, keys, (1, 1))
            return scores

        def weigh(stack, scores):
            scores *= scale
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            if is_masked:
                hidden = jnp.broadcast_to(bias[0:1], scores.shape)
                scores = jnp.where(hidden == 0, scores, MASKED)
            old_top = top[stack]
            new_top = jnp.maximum(old_top, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp(scores - new_top[:, :1])
            keep = jnp.exp(old_top - new_top)
            top[stack] = new_top
            total[stack] = keep * total[stack] + jnp.sum(weights, axis=1, keepdims=True)
            return weights.astype(dtype_of_numbers(value_buf.dtype)), keep[:, :1]

        def gather(stack, weights, keep):
            for i in range(heads_per_stack):
                head = stack * heads_per_stack + i
                values = value_buf[buf, head, pages].reshape(num_tokens, head_dim)
                part = pl.ds(i * head_dim, head_dim)
                weighted[stack, :, part] = keep * weighted[stack, :, part] + dot(
                    weights, values, (1, 0)
                )

        scores = score(0)
        for stack in range(num_stacks):
            following = score(stack + 1) if stack + 1 < num_stacks else None
            between(stack)
            gather(stack, *weigh(stack, scores))
            scores = following

    def finish(slot, half):
        """Normalises a sequence's softmax and sends it off."""
        lane = lax.broadcasted_iota(jnp.int32, (stack_rows, lse_buf.shape[2]), 1)
        row = lax.broadcasted_iota(jnp.int32, (stack_rows, lse_buf.shape[2]), 0)
        lse_row = jnp.zeros(lane.shape, jnp.float32)
        for stack in range(num_stacks):
            values = weighted[stack, :, :head_dim]
            for i in range(1, heads_per_stack):
                part = weighted[stack, :, i * head_dim : (i + 1) * head_dim]
                values = jnp.where(row_head[:, :1] == i, part, values)
            stack_top, stack_total = top[stack], total[stack]
            if has_sinks:
                sinks = sinks_ref[stack]
                with_sink = jnp.maximum(stack_top, sinks)
                shrink = jnp.exp(stack_top - with_sink)
                values *= shrink[:, :1]
                stack_total = stack_total * shrink + jnp.exp(sinks - with_sink)
                stack_top = with_sink
            saw_keys = ~(stack_top <= MASKED / 2)  # NaN is not hidden
            stack_total = jnp.where(saw_keys, stack_total, 1.0)
            values = jnp.where(saw_keys[:, :1], values / stack_total[:, :1], 0.0)
            out_buf[half, stack] = values.astype(out_buf.dtype)
            lse = jnp.where(saw_keys, stack_top + jnp.log(stack_total), -jnp.inf)
            is_here = lane == stack * stack_rows + row
            lse_row += jnp.where(is_here, lse[:, :1], 0.0)
        lse_buf[half] = jnp.sum(lse_row, axis=0, keepdims=True)
        for copy in out_copies(slot, half):
            copy.start()
        is_leaving[half, 0] = 1

    def first_tile(slot):
        return first_seen(slot) // tile_tokens

    def attend_sequence(state):
        slot, half, buf = state
        following = next_slot(slot + 1)
        has_following = following < end_slot
        end_tile = pl.cdiv(end_seen(slot), tile_tokens)

        @pl.when(has_following)
        def _():
            start_sequence(following, 1 - half)

        for copy in row_copies(slot, half):
            copy.wait()
        top[...] = jnp.full(top.shape, MASKED, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        weighted[...] = jnp.zeros(weighted.shape, jnp.float32)

        def attend_inner_tile(tile, buf):
            """A tile that is all seen, followed by another one of whole pages."""
            tiles.wait_pages(buf, tile_pages)
            copied[1 - buf] = tile_pages

            def start_some_pages(stack):
                for place in range(stack, tile_pages, num_stacks):
                    tiles.start_page(ids[half, 0, (tile + 1) * tile_pages + place], place, 1 - buf)

            attend(
                slot, tile * tile_pages, half, buf,
                length=tile_pages, is_masked=False, between=start_some_pages,
            )  # fmt: skip
            return 1 - buf

        def attend_edge_tile(tile, buf):
            is_last = tile + 1 == end_tile

            @pl.when(~is_last)
            def _():
                start_tile(slot, tile + 1, half, 1 - buf)

            @pl.when(is_last & has_following)
            def _():
                tiles.ids_copy(following, 1 - half).wait()
                start_tile(following, first_tile(following), 1 - half, 1 - buf)

            tiles.wait(buf)

            @pl.when(is_last)
            def _():
                wait_leaving(half)
                write_new_token(slot, tile, half, buf)

            start = tile * tile_pages
            first = jnp.maximum(start, first_seen(slot) // page_size) // part_pages
            end = jnp.minimum(start + tile_pages, pl.cdiv(end_seen(slot), page_size))

            def attend_part(part, _):
                attend(slot, part * part_pages, half, buf, length=part_pages, is_masked=True)

            lax.fori_loop(first, pl.cdiv(end, part_pages), attend_part, None)
            return 1 - buf

        def attend_some_tiles(state):
            tile, buf = state
            is_inner = (is_whole_ref[slot] == 1) & (tile * tile_tokens >= first_seen(slot))
            end_inner = jnp.where(is_inner, end_seen(slot) // tile_tokens - 1, tile)
            end_inner = jnp.maximum(end_inner, tile)
            buf = lax.fori_loop(tile, end_inner, attend_inner_tile, buf)
            return end_inner + 1, attend_edge_tile(end_inner, buf)

        buf = lax.while_loop(
            lambda state: state[0] < end_tile, attend_some_tiles, (first_tile(slot), buf)
        )[1]
        finish(slot, half)
        return following, 1 - half, buf

    for half in range(2):
        for i in range(2):
            is_leaving[half, i] = 0
    slot = next_slot(first_slot)

    @pl.when(slot < end_slot)
    def _():
        start_sequence(slot, 0)
        tiles.ids_copy(slot, 0).wait()
        start_tile(slot, first_tile(slot), 0, 0)

    lax.while_loop(
        lambda state: state[0] < end_slot, attend_sequence, (slot, jnp.int32(0), jnp.int32(0))
    )
    for half in range(2):
        wait_leaving(half)


def paged_decode_tpu(
    arrays: AttentionArrays, settings: AttentionSettings, *, interpret: bool
) -> PagedAttention:
    """`paged_attention` where no sequence has more than one query.

    Rows that belong to no sequence are left unset.
    """
    (
        queries, new_keys, new_values, key_pages, value_pages, block_tables, kv_lens, cu_q_lens,
        sinks,
    ) = arrays  # fmt: skip
    window = settings.window
    chip = chip_traced_for()
    num_rows, num_heads, head_dim = queries.shape
    num_pages, num_kv_heads, page_size, _ = key_pages.shape
    max_pages = block_tables.shape[1]
    dtype = key_pages.dtype
    tile_pages = decode_tile_pages(chip, key_pages, max_pages)
    real_group = num_heads // num_kv_heads
    group = power_of_two_over(real_group)
    heads_per_stack = max(1, 8 // group)
    while num_kv_heads % heads_per_stack:
        heads_per_stack -= 1
    num_stacks = num_kv_heads // heads_per_stack
    stack_rows = -(-heads_per_stack * group // 8) * 8
    part_pages = max(1, min(tile_pages, 256 // page_size))

    def stacked(x):  # [..., N, H] -> [..., J, R, H]
        lead, tail = x.shape[:-2], x.shape[-1]
        x = x.reshape(*lead, num_kv_heads, real_group, tail)
        x = pad(x, -2, group)
        x = x.reshape(*lead, num_stacks, heads_per_stack * group, tail)
        return pad(x, -2, stack_rows)

    def unstacked(x):
        lead, tail = x.shape[:-3], x.shape[-1]
        x = x[..., : heads_per_stack * group, :].reshape(*lead, num_kv_heads, group, tail)
        return x[..., :real_group, :].reshape(*lead, num_heads, tail)

    lse_lanes = -(-num_stacks * stack_rows // LANES) * LANES
    padded_pages = -(-max(max_pages, tile_pages) // LANES) * LANES
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    seen_from = jnp.zeros_like(kv_lens) if window is None else jnp.maximum(kv_lens - window, 0)
    seen_to = jnp.minimum(kv_lens, max_pages * page_size)
    is_active = (q_lens > 0) & (seen_from < seen_to)
    column = jnp.arange(max_pages, dtype=jnp.int32)[None] * page_size
    is_needed = (column + page_size > seen_from[:, None]) & (column < seen_to[:, None])
    is_whole = jnp.all(is_page(block_tables, num_pages) | ~is_needed, axis=1)
    sink_rows = (
        jnp.zeros((num_stacks, stack_rows, LANES), jnp.float32)
        if sinks is None
        else stacked(jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (num_heads, LANES)))
    )
    written_rows = min(page_size, 32 // dtype.itemsize)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    vmem, smem, dma = pltpu.VMEM, pltpu.SMEM, pltpu.SemaphoreType.DMA
    out, lse, key_pages, value_pages = pl.pallas_call(
        functools.partial(
            _decode_kernel, group=group, max_pages=max_pages, settings=settings,
            has_sinks=sinks is not None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(chip.num_cores,),
            in_specs=[hbm, hbm, hbm, pl.BlockSpec(memory_space=vmem), hbm, hbm],
            out_specs=[hbm, hbm, hbm, hbm],
            scratch_shapes=[
                smem((2, 1, padded_pages), jnp.int32),
                vmem((2, num_stacks, stack_rows, head_dim), queries.dtype),
                vmem((2, 2, num_kv_heads, head_dim), dtype),
                vmem((2, num_kv_heads, tile_pages, page_size, head_dim), dtype),
                vmem((2, num_kv_heads, tile_pages, page_size, head_dim), dtype),
                vmem((2, num_stacks, stack_rows, head_dim), queries.dtype),
                vmem((2, 1, lse_lanes), jnp.float32),
                vmem((2, 2, num_kv_heads, written_rows, head_dim), dtype),
                vmem((8, part_pages * page_size), jnp.float32),
                vmem((num_stacks, stack_rows, LANES), jnp.float32),
                vmem((num_stacks, stack_rows, LANES), jnp.float32),
                vmem((num_stacks, stack_rows, heads_per_stack * head_dim), jnp.float32),
                smem((2,), jnp.int32),
                smem((2, 2), jnp.int32),
                *[dma((2,))] * 5,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((num_rows, num_stacks, stack_rows, head_dim), queries.dtype),
            jax.ShapeDtypeStruct((num_rows, 1, lse_lanes), jnp.float32),
            jax.ShapeDtypeStruct(key_pages.shape, dtype),
            jax.ShapeDtypeStruct(value_pages.shape, dtype),
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
        stacked(queries),
        jnp.stack([new_keys, new_values], axis=1).astype(dtype),
        sink_rows,
        key_pages,
        value_pages,
    )  # fmt: skip
    lse = lse[:, 0, : num_stacks * stack_rows].reshape(num_rows, num_stacks, stack_rows, 1)
    return PagedAttention(unstacked(out), key_pages, value_pages, unstacked(lse)[..., 0])
