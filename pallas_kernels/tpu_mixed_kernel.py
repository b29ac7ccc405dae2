"""The program of the mixed kernel: `paxkv.pallas_kernels.tpu_mixed` says what it is given."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from paxkv.pallas_kernels.attention_call import AttentionSettings
from paxkv.pallas_kernels.online_softmax import MASKED
from paxkv.pallas_kernels.tpu_float16 import dtype_of_numbers
from paxkv.pallas_kernels.tpu_pages import PageTiles
from paxkv.pallas_kernels.tpu_row_groups import RowGroups
from paxkv.pallas_kernels.tpu_steps import dot, finish_softmax, scale_and_cap
from paxkv.pallas_kernels.tpu_tiles import LANES


def mixed_kernel(
    cu_q_lens_ref,  # i32[B + 1]
    kv_lens_ref,  # i32[B]
    is_whole_ref,  # i32[B] whether all pages that the queries see exist
    write_pages_ref,  # i32[W] of each group of rows to write, see RowGroups
    write_starts_ref,  # i32[W]
    write_slots_ref,  # i32[W]
    num_writes_ref,  # i32[1]
    tables_ref,  # i32[B, 1, M]
    queries_ref,  # [K, q * G, H] this step's
    new_ref,  # [2, K, T', H] new keys and values, see RowGroups
    sinks_ref,  # f32[K, q * G, 128]
    _keys_ref,
    _values_ref,
    out_ref,  # [K, q * G, H]
    lse_ref,  # f32[1, K, q * G / 128, 128]
    keys_ref,  # [P, K, S, H]
    values_ref,
    place,  # SMEM i32[4] grid step and slot to do next, half of ids, half of key_buf
    ids,  # SMEM i32[2, 1, M]
    copied,  # SMEM i32[2] pages on their way into each half of key_buf
    key_buf,  # [2, K, C, S, H]
    value_buf,
    bias,  # f32[8, C * S] 0 or MASKED
    top,  # f32[K, q * G, 128]
    total,
    weighted,  # f32[K, q * G, H]
    new_buf,  # see RowGroups, like the next
    rows_buf,
    ids_sems,
    page_sems,
    read_sems,
    write_sems,
    *,
    group: int,
    chunk_rows: int,
    max_pages: int,
    settings: AttentionSettings,
    has_sinks: bool,
):
    """One step of the grid: see the shapes of its references."""
    window = settings.window
    num_slots = kv_lens_ref.shape[0]
    _, num_kv_heads, page_size, head_dim = keys_ref.shape
    tiles = PageTiles(
        pools=(keys_ref, values_ref), bufs=(key_buf, value_buf), tables=tables_ref, ids=ids,
        copied=copied, ids_sems=ids_sems, page_sems=page_sems, max_pages=max_pages,
    )  # fmt: skip
    tile_pages, tile_tokens = tiles.tile_pages, tiles.tile_tokens
    groups = RowGroups(
        pages=write_pages_ref, starts=write_starts_ref, slots=write_slots_ref,
        count=num_writes_ref, cu_q_lens=cu_q_lens_ref, kv_lens=kv_lens_ref, new=new_ref,
        pools=(keys_ref, values_ref), new_buf=new_buf, rows_buf=rows_buf,
        read_sems=read_sems, write_sems=write_sems,
    )  # fmt: skip
    num_rows = queries_ref.shape[1]  # q * G
    tile_queries = num_rows // group
    num_used = cu_q_lens_ref[num_slots]
    step = pl.program_id(0)

    def rows_of(step, slot):
        """The packed rows of a slot within a step's tile."""
        first = jnp.maximum(cu_q_lens_ref[slot], step * tile_queries)
        return first, jnp.minimum(cu_q_lens_ref[slot + 1], (step + 1) * tile_queries)

    def position_of(slot, row):
        return kv_lens_ref[slot] - cu_q_lens_ref[slot + 1] + row

    def seen(step, slot):
        """The tokens that some query of the pair sees, `[first, end)`."""
        first_row, end_row = rows_of(step, slot)
        first = position_of(slot, first_row)
        first = jnp.maximum(0 if window is None else first - window + 1, 0)
        end = jnp.minimum(position_of(slot, end_row), max_pages * page_size)
        return first, jnp.where((first_row < end_row) & (kv_lens_ref[slot] > 0), end, 0)

    def is_within(step, slot):
        return (slot < num_slots) & (step * tile_queries < num_used)

    def advance(step, slot):
        ends_here = cu_q_lens_ref[slot + 1] <= (step + 1) * tile_queries
        return jnp.where(ends_here, step, step + 1), jnp.where(ends_here, slot + 1, slot)

    def next_pair(step, slot):
        """The first pair at or after one with something to see."""

        def is_idle(pair):
            step, slot = pair
            first, end = seen(step, jnp.minimum(slot, num_slots - 1))
            return is_within(step, slot) & (first >= end)

        return lax.while_loop(is_idle, lambda pair: advance(*pair), (step, slot))

    def start_tile(pair, tile, half, buf):
        tiles.start(tile, *seen(*pair), half, buf)

    def attend_chunk(chunk, pair, tile, buf, *, is_masked: bool):
        """Merges a tile of keys into some rows of all heads."""
        step, slot = pair
        rows = pl.ds(pl.multiple_of(chunk * chunk_rows, chunk_rows), chunk_rows)

        def row_of(shape):
            """The packed row that each row of such an array belongs to."""
            row = chunk * chunk_rows + lax.broadcasted_iota(jnp.int32, shape, 0)
            return step * tile_queries + row // group

        def set_own(ref, head, new):
            """Leaves the rows of other sequences alone: weights of 0 times NaN would be NaN."""
            if is_masked:
                row, (first_row, end_row) = row_of(new.shape), rows_of(step, slot)
                new = jnp.where((row >= first_row) & (row < end_row), new, ref[head, rows])
            ref[head, rows] = new

        def attend_head(head, _):
            scores = dot(
                queries_ref[head, rows], key_buf[buf, head].reshape(tile_tokens, head_dim), (1, 1)
            )
            scores = scale_and_cap(scores, settings)
            if is_masked:
                token = tile * tile_tokens + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
                position = position_of(slot, row_of(scores.shape))
                is_seen = token <= position
                if window is not None:
                    is_seen &= token > position - window
                is_seen &= jnp.broadcast_to(bias[0:1], scores.shape) == 0
                scores = jnp.where(is_seen, scores, MASKED)
            old_top = top[head, rows]
            new_top = jnp.maximum(old_top, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp(scores - new_top[:, :1])
            keep = jnp.exp(old_top - new_top)
            new_total = keep * total[head, rows] + jnp.sum(weights, axis=1, keepdims=True)
            values = value_buf[buf, head].reshape(tile_tokens, head_dim)
            new_weighted = keep[:, :1] * weighted[head, rows] + dot(
                weights.astype(dtype_of_numbers(values.dtype)), values, (1, 0)
            )
            set_own(top, head, new_top)
            set_own(total, head, new_total)
            set_own(weighted, head, new_weighted)

        lax.fori_loop(0, num_kv_heads, attend_head, None)

    def attend_tile(pair, tile, half, buf):
        step, slot = pair
        is_whole = is_whole_ref[slot] == 1
        tiles.hide_unseen(bias, tile * tile_pages, *seen(*pair), is_whole, half, buf)
        first_row, end_row = rows_of(step, slot)
        start = tile * tile_tokens
        chunk_queries = chunk_rows // group
        # Rows before the first that sees the tile at all, and whose window has left it, are out.
        first_seeing = jnp.maximum(first_row, start - position_of(slot, 0))
        end_seeing = end_row
        if window is not None:
            last = start + tile_tokens - 1 + window - position_of(slot, 0)
            end_seeing = jnp.minimum(end_row, last)
        base = step * tile_queries

        def attend_some(chunk, _):
            first = base + chunk * chunk_queries
            end = first + chunk_queries
            is_masked = (
                (first < first_row)
                | (end > end_row)
                | (position_of(slot, first) < start + tile_tokens - 1)
                | (start + tile_tokens > seen(*pair)[1])
                | ~is_whole
            )
            if window is not None:
                is_masked |= position_of(slot, end - 1) - window >= start
            pl.when(is_masked)(lambda: attend_chunk(chunk, pair, tile, buf, is_masked=True))
            pl.when(~is_masked)(lambda: attend_chunk(chunk, pair, tile, buf, is_masked=False))

        lax.fori_loop(
            (first_seeing - base) // chunk_queries, pl.cdiv(end_seeing - base, chunk_queries),
            attend_some, None,
        )  # fmt: skip

    def first_tile(pair):
        return seen(*pair)[0] // tile_tokens

    def attend_pair(slot):
        half, pair = place[2], (step, slot)
        following = next_pair(*advance(step, slot))
        has_following = is_within(*following)
        end_tile = pl.cdiv(seen(*pair)[1], tile_tokens)

        @pl.when(has_following)
        def _():
            tiles.ids_copy(following[1], 1 - half).start()

        def attend_next(tile, buf):
            is_last = tile + 1 == end_tile

            @pl.when(~is_last)
            def _():
                start_tile(pair, tile + 1, half, 1 - buf)

            @pl.when(is_last & has_following)
            def _():
                tiles.ids_copy(following[1], 1 - half).wait()
                start_tile(following, first_tile(following), 1 - half, 1 - buf)

            tiles.wait(buf)
            attend_tile(pair, tile, half, buf)
            return 1 - buf

        place[3] = lax.fori_loop(first_tile(pair), end_tile, attend_next, place[3])
        place[0], place[1] = following
        place[2] = 1 - half
        return jnp.where(following[0] == step, following[1], num_slots)

    def finish(head, _):
        sinks = sinks_ref[head] if has_sinks else None
        values, lse = finish_softmax(top[head], total[head], weighted[head], sinks)
        out_ref[head] = values.astype(out_ref.dtype)
        # All lanes of a row hold its number: each row keeps its own lane, and rows add up.
        lse = lse.reshape(-1, LANES, LANES)
        is_own = lax.broadcasted_iota(jnp.int32, lse.shape, 1) == lax.broadcasted_iota(
            jnp.int32, lse.shape, 2
        )
        lse_ref[0, head] = jnp.sum(jnp.where(is_own, lse, 0.0), axis=1)

    @pl.when(step == 0)
    def _():
        groups.write_all()
        pair = next_pair(jnp.int32(0), jnp.int32(0))
        place[0], place[1] = pair
        place[2] = place[3] = 0

        @pl.when(is_within(*pair))
        def _():
            tiles.ids_copy(pair[1], 0).start()
            tiles.ids_copy(pair[1], 0).wait()
            start_tile(pair, first_tile(pair), 0, 0)

    top[...] = jnp.full(top.shape, MASKED, jnp.float32)
    total[...] = jnp.zeros(total.shape, jnp.float32)
    weighted[...] = jnp.zeros(weighted.shape, jnp.float32)
    is_mine = (place[0] == step) & is_within(place[0], place[1])
    slot = jnp.where(is_mine, place[1], num_slots)
    lax.while_loop(lambda slot: slot < num_slots, attend_pair, slot)
    lax.fori_loop(0, num_kv_heads, finish, None)
