"""Paged attention on TPU for any number of queries per sequence: prefill, chunks of it, decode.

The packed rows are cut into tiles, one for each step of the grid, whosever the rows are. A step
walks the sequences that have rows in its tile, and of each the tiles of keys that those rows see.
While one tile of keys is computed the next is on its way, across sequences and steps.

New tokens are written first of all, by row groups: as many rows as a register holds are fetched,
merged and sent back, several groups at a time.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from paxkv.pallas_kernels.attention_call import AttentionArrays, AttentionSettings, PagedAttention
from paxkv.pallas_kernels.layout import NULL_PAGE
from paxkv.pallas_kernels.online_softmax import MASKED
from paxkv.pallas_kernels.ragged import is_page
from paxkv.pallas_kernels.tpu_float16 import dtype_of_numbers, dtype_of_words
from paxkv.pallas_kernels.tpu_pages import PageTiles
from paxkv.pallas_kernels.tpu_steps import dot, interpreter, pad
from paxkv.pallas_kernels.tpu_tiles import (
    LANES,
    chip_traced_for,
    power_of_two_over,
    prefill_tile_pages,
    prefill_tile_queries,
)

WRITE_RING = 8  # row groups on their way at a time


def _mixed_kernel(
    cu_q_lens_ref,  # i32[B + 1]
    kv_lens_ref,  # i32[B]
    is_whole_ref,  # i32[B] whether all pages that the queries see exist
    write_pages_ref,  # i32[W] the page of each row group to write, NULL_PAGE for none
    write_starts_ref,  # i32[W] its first position
    write_slots_ref,  # i32[W]
    num_writes_ref,  # i32[1]
    tables_ref,  # i32[B, 1, M]
    queries_ref,  # [K, q * G, H] this step's
    new_ref,  # [2, K, T', H] keys and values in words of 32 bits, `group_rows` rows of nothing first
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
    new_buf,  # [W, 2, K, L, 2 * group_rows, H / L], in parts of at most 128 lanes
    rows_buf,  # [W, 2, K, group_rows, H]
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
    scale, window, soft_cap, _ = settings
    num_slots = kv_lens_ref.shape[0]
    num_pages, num_kv_heads, page_size, head_dim = keys_ref.shape
    tiles = PageTiles(
        pools=(keys_ref, values_ref), bufs=(key_buf, value_buf), tables=tables_ref, ids=ids,
        copied=copied, ids_sems=ids_sems, page_sems=page_sems, max_pages=max_pages,
    )  # fmt: skip
    tile_pages, tile_tokens = tiles.tile_pages, tiles.tile_tokens
    num_rows = queries_ref.shape[1]  # q * G
    tile_queries = num_rows // group
    num_used = cu_q_lens_ref[num_slots]
    step = pl.program_id(0)

    # The walk over pairs of grid step and slot ------------------------------------------------

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

    # Writing -----------------------------------------------------------------------------------

    def write_all():
        num_writes = num_writes_ref[0]
        group_rows = rows_buf.shape[3]
        lead = WRITE_RING // 2

        def source(i):
            """The row of `new_ref` of a group's first position."""
            slot = write_slots_ref[i]
            start = kv_lens_ref[slot] - cu_q_lens_ref[slot + 1]
            return write_starts_ref[i] - start + group_rows

        def read_copies(i):
            ring = i % WRITE_RING
            first = pl.multiple_of(source(i) // group_rows * group_rows, group_rows)
            rows = pl.ds(first, 2 * group_rows)
            for part in range(new_buf.shape[3]):
                lanes = pl.ds(part * new_buf.shape[5], new_buf.shape[5])
                yield pltpu.make_async_copy(
                    new_ref.at[:, :, rows, lanes], new_buf.at[ring, :, :, part], read_sems.at[ring]
                )
            yield from page_copies(i, read_sems, is_read=True)

        def page_copies(i, sems, *, is_read):
            ring = i % WRITE_RING
            offset = pl.multiple_of(write_starts_ref[i] % page_size, group_rows)
            for which, pages in enumerate((keys_ref, values_ref)):
                rows = pages.at[write_pages_ref[i], :, pl.ds(offset, group_rows)]
                here = rows_buf.at[ring, which]
                source, target = (rows, here) if is_read else (here, rows)
                yield pltpu.make_async_copy(source, target, sems.at[ring])

        def if_written(i):
            return pl.when(is_page(write_pages_ref[i], num_pages))

        def start_read(i):
            @if_written(i)
            def _():
                for copy in read_copies(i):
                    copy.start()

        def wait_write(i):
            @if_written(i)
            def _():
                for copy in page_copies(i, write_sems, is_read=False):
                    copy.wait()

        def merge(i):
            @if_written(i)
            def _():
                for copy in read_copies(i):
                    copy.wait()
                ring, slot = i % WRITE_RING, write_slots_ref[i]
                shift = source(i) % group_rows
                shape = (num_kv_heads, group_rows, head_dim)
                position = write_starts_ref[i] + lax.broadcasted_iota(jnp.int32, shape, 1)
                first = position_of(slot, cu_q_lens_ref[slot])
                is_new = (position >= first) & (position < kv_lens_ref[slot])
                for which in range(2):
                    # A load may begin at any row only if it is no wider than a register.
                    new = [
                        new_buf[ring, which, :, part, pl.ds(shift, group_rows)]
                        for part in range(new_buf.shape[3])
                    ]
                    new = jnp.concatenate(new, axis=-1)
                    rows = rows_buf.at[ring, which]
                    rows[...] = jnp.where(is_new, new.astype(rows.dtype), rows[...])
                for copy in page_copies(i, write_sems, is_read=False):
                    copy.start()

        def write_one(i, _):
            merge(i)
            ahead = i + lead

            @pl.when(ahead < num_writes)
            def _():
                pl.when(ahead >= WRITE_RING)(lambda: wait_write(ahead - WRITE_RING))
                start_read(ahead)

        lax.fori_loop(0, jnp.minimum(lead, num_writes), lambda i, _: start_read(i), None)
        lax.fori_loop(0, num_writes, write_one, None)
        first_open = jnp.maximum(num_writes - WRITE_RING, 0)
        lax.fori_loop(first_open, num_writes, lambda i, _: wait_write(i), None)

    # Attention ---------------------------------------------------------------------------------

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
            scores *= scale
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
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
        head_top, head_total, values = top[head], total[head], weighted[head]
        if has_sinks:
            sinks = sinks_ref[head]
            with_sink = jnp.maximum(head_top, sinks)
            shrink = jnp.exp(head_top - with_sink)
            values *= shrink[:, :1]
            head_total = head_total * shrink + jnp.exp(sinks - with_sink)
            head_top = with_sink
        saw_keys = ~(head_top <= MASKED / 2)  # NaN is not hidden
        head_total = jnp.where(saw_keys, head_total, 1.0)
        values = jnp.where(saw_keys[:, :1], values / head_total[:, :1], 0.0)
        out_ref[head] = values.astype(out_ref.dtype)
        lse = jnp.where(saw_keys, head_top + jnp.log(head_total), -jnp.inf)
        # All lanes of a row hold its number: each row keeps its own lane, and rows add up.
        lse = lse.reshape(-1, LANES, LANES)
        is_own = lax.broadcasted_iota(jnp.int32, lse.shape, 1) == lax.broadcasted_iota(
            jnp.int32, lse.shape, 2
        )
        lse_ref[0, head] = jnp.sum(jnp.where(is_own, lse, 0.0), axis=1)

    @pl.when(step == 0)
    def _():
        write_all()
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


def paged_mixed_tpu(
    arrays: AttentionArrays, settings: AttentionSettings, *, interpret: bool
) -> PagedAttention:
    """`paged_attention` for any number of queries per sequence."""
    (
        queries, new_keys, new_values, key_pages, value_pages, block_tables, kv_lens, cu_q_lens,
        sinks,
    ) = arrays  # fmt: skip
    window = settings.window
    chip = chip_traced_for()
    num_tokens, num_heads, head_dim = queries.shape
    num_pages, num_kv_heads, page_size, _ = key_pages.shape
    num_slots, max_pages = block_tables.shape
    dtype = key_pages.dtype
    real_group = num_heads // num_kv_heads
    group = power_of_two_over(real_group)
    tile_pages = prefill_tile_pages(chip, key_pages, max_pages)
    tile_queries = prefill_tile_queries(num_tokens, num_kv_heads, group, head_dim)
    num_rows = tile_queries * group
    chunk_rows = min(num_rows, 128)
    group_rows = min(page_size, 32 // dtype.itemsize)
    parts = max(1, head_dim // LANES)
    num_steps = -(-num_tokens // tile_queries)
    padded_tokens = num_steps * tile_queries

    def by_head(x):  # [T, N, H] -> [K, T' * G, H]
        x = x.reshape(-1, num_kv_heads, real_group, x.shape[-1])
        x = pad(pad(x, 2, group), 0, padded_tokens)
        return x.swapaxes(0, 1).reshape(num_kv_heads, padded_tokens * group, -1)

    def by_token(x):
        x = x.reshape(num_kv_heads, padded_tokens, group, -1).swapaxes(0, 1)
        return x[:num_tokens, :, :real_group].reshape(num_tokens, num_heads, -1)

    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    first = kv_lens - q_lens
    seen_from = jnp.zeros_like(kv_lens) if window is None else jnp.maximum(first - window + 1, 0)
    column = jnp.arange(max_pages, dtype=jnp.int32)[None] * page_size
    is_needed = (column + page_size > seen_from[:, None]) & (column < kv_lens[:, None])
    is_whole = jnp.all(is_page(block_tables, num_pages) | ~is_needed, axis=1)
    writes = _row_groups(
        block_tables, jnp.maximum(first, 0), jnp.where(q_lens > 0, kv_lens, 0),
        num_pages, page_size, group_rows, num_tokens // group_rows + 2 * num_slots,
    )  # fmt: skip
    new = jnp.stack([new_keys, new_values]).astype(dtype)
    new = new.astype(dtype_of_words(dtype)).swapaxes(1, 2)
    tail = -num_tokens % group_rows + 2 * group_rows
    new = jnp.pad(new, ((0, 0), (0, 0), (group_rows, tail), (0, 0)))
    sink_rows = jnp.zeros((num_heads,), jnp.float32) if sinks is None else sinks
    sink_rows = pad(sink_rows.astype(jnp.float32).reshape(num_kv_heads, 1, real_group, 1), 2, group)
    sink_rows = jnp.broadcast_to(sink_rows, (num_kv_heads, tile_queries, group, LANES))
    sink_rows = sink_rows.reshape(num_kv_heads, num_rows, LANES)

    padded_pages = -(-max(max_pages, tile_pages) // LANES) * LANES
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    vmem, smem, dma = pltpu.VMEM, pltpu.SMEM, pltpu.SemaphoreType.DMA
    rows_spec = pl.BlockSpec((num_kv_heads, num_rows, head_dim), lambda i, *_: (0, i, 0))
    lse_shape = (num_kv_heads, num_rows // LANES, LANES)
    out, lse, key_pages, value_pages = pl.pallas_call(
        functools.partial(
            _mixed_kernel, group=group, chunk_rows=chunk_rows, max_pages=max_pages,
            settings=settings, has_sinks=sinks is not None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7,
            grid=(num_steps,),
            in_specs=[hbm, rows_spec, hbm, pl.BlockSpec(memory_space=vmem), hbm, hbm],
            out_specs=[
                rows_spec,
                pl.BlockSpec((1, *lse_shape), lambda i, *_: (i, 0, 0, 0)),
                hbm,
                hbm,
            ],
            scratch_shapes=[
                smem((4,), jnp.int32),
                smem((2, 1, padded_pages), jnp.int32),
                smem((2,), jnp.int32),
                vmem((2, num_kv_heads, tile_pages, page_size, head_dim), dtype),
                vmem((2, num_kv_heads, tile_pages, page_size, head_dim), dtype),
                vmem((8, tile_pages * page_size), jnp.float32),
                vmem((num_kv_heads, num_rows, LANES), jnp.float32),
                vmem((num_kv_heads, num_rows, LANES), jnp.float32),
                vmem((num_kv_heads, num_rows, head_dim), jnp.float32),
                vmem(
                    (WRITE_RING, 2, num_kv_heads, parts, 2 * group_rows, head_dim // parts),
                    new.dtype,
                ),
                vmem((WRITE_RING, 2, num_kv_heads, group_rows, head_dim), dtype),
                dma((2,)),
                dma((2,)),
                dma((WRITE_RING,)),
                dma((WRITE_RING,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((num_kv_heads, padded_tokens * group, head_dim), queries.dtype),
            jax.ShapeDtypeStruct((num_steps, *lse_shape), jnp.float32),
            jax.ShapeDtypeStruct(key_pages.shape, dtype),
            jax.ShapeDtypeStruct(value_pages.shape, dtype),
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
        *writes,
        pad(block_tables, -1, padded_pages)[:, None],
        by_head(queries),
        new,
        sink_rows,
        key_pages,
        value_pages,
    )  # fmt: skip
    lse = lse.reshape(num_steps, num_kv_heads, num_rows).swapaxes(0, 1)
    return PagedAttention(by_token(out), key_pages, value_pages, by_token(lse)[..., 0])


def _row_groups(
    block_tables, first, end, num_pages, page_size, group_rows, most_groups
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The aligned groups of rows that hold the new tokens `[first, end)` (`i32[B]`) of each slot.

    Returns:
        Of each group its page (NULL_PAGE if it has none), first position and slot, `i32[W]` each,
        and how many there are, `i32[1]`.
    """
    num_slots, max_pages = block_tables.shape
    first_group = first // group_rows
    num_groups = jnp.maximum(-(-end // group_rows) - first_group, 0)
    until = jnp.cumsum(num_groups, dtype=jnp.int32)
    number = jnp.arange(most_groups, dtype=jnp.int32)
    slots = jnp.searchsorted(until, number, side="right", method="compare_all")
    slots = jnp.minimum(slots.astype(jnp.int32), num_slots - 1)
    starts = (first_group[slots] + number - (until - num_groups)[slots]) * group_rows
    columns = starts // page_size
    in_table = (columns >= 0) & (columns < max_pages)
    page_ids = block_tables[slots, jnp.where(in_table, columns, 0)]
    page_ids = jnp.where(in_table & is_page(page_ids, num_pages), page_ids, NULL_PAGE)
    return page_ids, starts, slots, until[-1:]
