"""The program of the decode kernel: `paxkv.pallas_kernels.tpu_decode` says what it is given."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from paxkv.pallas_kernels.attention_call import AttentionSettings
from paxkv.pallas_kernels.ragged import is_page
from paxkv.pallas_kernels.tpu_float16 import dtype_of_words
from paxkv.pallas_kernels.tpu_pages import PageTiles
from paxkv.pallas_kernels.tpu_stacks import Stacks, StackSoftmax, row_heads


def decode_kernel(
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
    weighted,  # f32[J, R, H for each head of a stack]
    copied,  # SMEM i32[2] pages on their way into each half of key_buf
    is_leaving,  # SMEM i32[2, 2] whether out_buf and written_buf are on their way to HBM
    ids_sems,
    row_sems,
    page_sems,
    out_sems,
    written_sems,
    *,
    stacks: Stacks,
    max_pages: int,
    settings: AttentionSettings,
    has_sinks: bool,
):
    """The program of one core: see the shapes of its references."""
    window = settings.window
    num_slots = kv_lens_ref.shape[0]
    num_pages, num_kv_heads, page_size, head_dim = keys_ref.shape
    tiles = PageTiles(
        pools=(keys_ref, values_ref), bufs=(key_buf, value_buf), tables=tables_ref, ids=ids,
        copied=copied, ids_sems=ids_sems, page_sems=page_sems, max_pages=max_pages,
    )  # fmt: skip
    tile_pages, tile_tokens = tiles.tile_pages, tiles.tile_tokens
    softmax = StackSoftmax(
        stacks=stacks, settings=settings, query_buf=query_buf, key_buf=key_buf,
        value_buf=value_buf, bias=bias, top=top, total=total, weighted=weighted,
        row_head=row_heads(stacks),
    )  # fmt: skip
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

    def finish(slot, half):
        """Normalises a sequence's softmax and sends it off."""
        shape = stacks.rows, lse_buf.shape[2]
        lane = lax.broadcasted_iota(jnp.int32, shape, 1)
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        lse_row = jnp.zeros(shape, jnp.float32)
        for stack in range(stacks.count):
            values, lse = softmax.finished(stack, sinks_ref[stack] if has_sinks else None)
            out_buf[half, stack] = values.astype(out_buf.dtype)
            lse_row += jnp.where(lane == stack * stacks.rows + row, lse[:, :1], 0.0)
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
        softmax.clear()

        def attend_inner_tile(tile, buf):
            """A tile that is all seen, followed by another one of whole pages."""
            tiles.wait_pages(buf, tile_pages)
            copied[1 - buf] = tile_pages

            def start_some_pages(stack):
                for place in range(stack, tile_pages, stacks.count):
                    tiles.start_page(ids[half, 0, (tile + 1) * tile_pages + place], place, 1 - buf)

            whole = pl.ds(0, tile_pages)
            softmax.attend(whole, half, buf, is_masked=False, between=start_some_pages)
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
                first_page = part * part_pages
                tiles.hide_unseen(
                    bias, first_page, first_seen(slot), end_seen(slot), is_whole_ref[slot] == 1,
                    half, buf,
                )  # fmt: skip
                pages = pl.ds(first_page % tile_pages, part_pages)
                softmax.attend(pages, half, buf, is_masked=True)

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
