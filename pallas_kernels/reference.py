"""Paged attention in plain JAX: the definition the kernels are held to, and the CPU's path.

Both walks below visit only tiles of keys that hold tokens a query may see, so their cost follows
the tokens stored and not the width of the block table.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from paxkv.pallas_kernels.attention_call import AttentionArrays, AttentionSettings, PagedAttention
from paxkv.pallas_kernels.layout import NULL_PAGE, gather_pages
from paxkv.pallas_kernels.online_softmax import (
    PartialSoftmax,
    empty_softmax,
    merge,
    merge_into_rows,
    normalise,
    tile_softmax,
)
from paxkv.pallas_kernels.ragged import Ragged, is_page, ragged_rows, write_new_tokens

# Measured on CPUs (benchmarks/bench_serving.py and bench_paging.py): fewer tokens a turn pay more
# for the turn, more waste the last one.
_DECODE_TILE_TOKENS = 128  # keys of one slot that are gathered together
_DECODE_TILES = (64, 32)  # tiles a turn, while there are so many and then; at most 2 for each row
_PREFILL_TILE_QUERIES = 64
_PREFILL_TILE_TOKENS = 128


def paged_attention_reference(
    arrays: AttentionArrays, settings: AttentionSettings
) -> PagedAttention:
    """`paged_attention` in plain JAX."""
    rows = ragged_rows(arrays.queries.shape[0], arrays.cu_q_lens, arrays.kv_lens)
    arrays = write_new_tokens(arrays, rows)
    attend = _decode if settings.is_decode else _prefill
    out, lse = normalise(attend(arrays, settings, rows), arrays.sinks)
    out = jnp.where(rows.is_token[:, None, None], out, 0.0).astype(arrays.queries.dtype)
    lse = jnp.where(rows.is_token[:, None], lse, -jnp.inf)
    return PagedAttention(out, arrays.key_pages, arrays.value_pages, lse)


class _Tiles(NamedTuple):
    """R tiles of consecutive pages, and which of their tokens count as keys."""

    page_ids: jax.Array  # i32[R, m]
    start: jax.Array | None  # i32[R, m] where the keys begin in each page; None: at once
    stop: jax.Array  # i32[R, m] where they end
    positions: jax.Array  # i32[R, m * S]
    is_key: jax.Array  # bool[R, m * S]


def _find_tiles(
    block_tables: jax.Array,
    slots: jax.Array,
    first_column: jax.Array,
    first_seen: jax.Array | None,
    kv_lens: jax.Array,
    *,
    num_columns: int,
    num_pages: int,
    page_size: int,
) -> _Tiles:
    """The `num_columns` pages of each tile's slot from `first_column` (`i32[R]`) on.

    Keys are the tokens from `first_seen` (`i32[R]`; None: the first) to `kv_lens` (`i32[R]`).
    Entries that name no page of the pool are not to be read: their keys count as absent.
    """
    columns = first_column[:, None] + jnp.arange(num_columns, dtype=jnp.int32)[None]
    in_table = columns < block_tables.shape[1]
    page_ids = block_tables[slots[:, None], jnp.where(in_table, columns, 0)]
    is_held = in_table & is_page(page_ids, num_pages)
    first = columns * page_size
    stop = jnp.where(is_held, jnp.clip(kv_lens[:, None] - first, 0, page_size), 0)
    start = None if first_seen is None else jnp.clip(first_seen[:, None] - first, 0, page_size)
    offset = jnp.arange(page_size, dtype=jnp.int32)[None, None]
    is_key = offset < stop[..., None]
    if start is not None:
        is_key &= offset >= start[..., None]
    shape = (slots.shape[0], num_columns * page_size)
    return _Tiles(
        page_ids=jnp.where(stop > 0, page_ids, NULL_PAGE),
        start=start,
        stop=stop,
        positions=(first[..., None] + offset).reshape(shape),
        is_key=is_key.reshape(shape),
    )


def _decode(
    arrays: AttentionArrays, settings: AttentionSettings, rows: Ragged
) -> PartialSoftmax:  # of [T, N]
    """At most one query per sequence: tiles of many sequences side by side.

    All tiles of all sequences form one list; each turn of a loop takes the next ones, whosever they
    are, and merges them into their rows: many while there are many, then few, so that the last turn
    has little to waste. Uneven lengths cost nothing. The list is the same for all layers, so XLA
    makes it once per step.
    """
    del rows  # tiles find their own
    queries, _, _, key_pages, value_pages, block_tables, kv_lens, cu_q_lens, _ = arrays
    scale, window, soft_cap, _ = settings
    num_rows, num_heads, head_dim = queries.shape
    num_slots, max_pages = block_tables.shape
    num_pages, num_kv_heads, page_size, _ = key_pages.shape
    by_head = num_rows, num_kv_heads, num_heads // num_kv_heads
    queries = queries.reshape(*by_head, head_dim)
    tile_pages = min(max(1, _DECODE_TILE_TOKENS // page_size), max_pages)
    tile_tokens = tile_pages * page_size
    most_tiles = num_slots * -(-max_pages // tile_pages)
    many, few = (min(turn, 2 * num_rows, most_tiles) for turn in _DECODE_TILES)

    has_query = (cu_q_lens[1:] > cu_q_lens[:-1]) & (kv_lens > 0)
    first_seen = None if window is None else jnp.maximum(kv_lens - window, 0)
    first_tile = jnp.zeros_like(kv_lens) if first_seen is None else first_seen // tile_tokens
    in_table = jnp.minimum(kv_lens, max_pages * page_size)
    num_tiles = jnp.maximum(-(-in_table // tile_tokens) - first_tile, 0)
    num_tiles = jnp.where(has_query, num_tiles, 0)
    tiles_until = jnp.cumsum(num_tiles, dtype=jnp.int32)

    number = jnp.arange(most_tiles + few, dtype=jnp.int32)  # no turn reaches past the end
    slots = jnp.searchsorted(tiles_until, number, side="right", method="compare_all")
    slots = jnp.minimum(slots.astype(jnp.int32), num_slots - 1)
    tile = first_tile[slots] + number - (tiles_until - num_tiles)[slots]
    is_tile = number < tiles_until[-1]
    tiles = _find_tiles(
        block_tables, slots, tile * tile_pages, None if first_seen is None else first_seen[slots],
        jnp.where(is_tile, kv_lens[slots], 0),
        num_columns=tile_pages, num_pages=num_pages, page_size=page_size,
    )  # fmt: skip
    owners = jnp.where(is_tile, cu_q_lens[slots], num_rows)  # the rows whose tiles they are

    def merge_tiles(
        turn: int, state: tuple[jax.Array, PartialSoftmax]
    ) -> tuple[jax.Array, PartialSoftmax]:
        done, softmax = state
        some, their_rows = jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, done, turn), (tiles, owners)
        )
        part = tile_softmax(
            queries.at[their_rows].get(mode="clip"),
            gather_pages(key_pages, some.page_ids),
            gather_pages(value_pages, some.page_ids, start=some.start, stop=some.stop),
            some.is_key[:, None], scale, soft_cap,
        )  # fmt: skip
        return done + turn, merge_into_rows(softmax, part, their_rows)

    state = jnp.int32(0), empty_softmax(by_head, head_dim)
    for turn in sorted({many, few}, reverse=True):
        at_least = 1 if turn == few else turn
        state = lax.while_loop(
            lambda state, at_least=at_least: tiles_until[-1] - state[0] >= at_least,
            functools.partial(merge_tiles, turn),
            state,
        )
    return jax.tree.map(lambda x: x.reshape(num_rows, num_heads, *x.shape[3:]), state[1])


def _prefill(
    arrays: AttentionArrays, settings: AttentionSettings, rows: Ragged
) -> PartialSoftmax:  # of [T, N]
    """Any number of queries per sequence: one tile of one sequence's queries at a time.

    Query tiles are taken in row order, so what a tile writes past the end of its sequence is
    overwritten by the next one, and only rows of padding are left to clear.
    """
    del rows  # tiles of queries find their own
    queries, _, _, key_pages, value_pages, block_tables, kv_lens, cu_q_lens, _ = arrays
    scale, window, soft_cap, _ = settings
    num_rows, num_heads, head_dim = queries.shape
    max_pages = block_tables.shape[1]
    num_pages, num_kv_heads, page_size, _ = key_pages.shape
    group = num_heads // num_kv_heads
    tile_rows = min(_PREFILL_TILE_QUERIES, num_rows)
    tile_pages = min(max(1, _PREFILL_TILE_TOKENS // page_size), max_pages)
    tile_tokens = tile_pages * page_size

    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    tiles_until = jnp.cumsum(-(-q_lens // tile_rows))
    tiles_before = jnp.concatenate([jnp.zeros_like(tiles_until[:1]), tiles_until[:-1]])
    padded = jnp.pad(queries, ((0, tile_rows), (0, 0), (0, 0)))
    row_in_tile = jnp.arange(tile_rows, dtype=jnp.int32)

    def attend_one_tile(
        state: tuple[jax.Array, PartialSoftmax],
    ) -> tuple[jax.Array, PartialSoftmax]:
        number, softmax = state
        slot = jnp.searchsorted(tiles_until, number, side="right", method="compare_all")
        slot = slot.astype(jnp.int32)
        first_row = cu_q_lens[slot] + (number - tiles_before[slot]) * tile_rows
        tile = lax.dynamic_slice_in_dim(padded, first_row, tile_rows)  # [q, N, H]
        tile = tile.reshape(tile_rows, num_kv_heads, group, head_dim).transpose(1, 0, 2, 3)
        tile = tile.reshape(1, num_kv_heads, tile_rows * group, head_dim)
        position = kv_lens[slot] - cu_q_lens[slot + 1] + first_row + row_in_tile  # i32[q]
        first_seen = jnp.int32(0)
        if window is not None:
            first_seen = jnp.maximum(position[0] - window + 1, 0)
        end = jnp.minimum(position[-1] + 1, kv_lens[slot])

        def merge_keys(state: tuple[jax.Array, PartialSoftmax]) -> tuple[jax.Array, PartialSoftmax]:
            column, so_far = state
            tiles = _find_tiles(
                block_tables, slot[None], column[None],
                None if window is None else first_seen[None], kv_lens[slot][None],
                num_columns=tile_pages, num_pages=num_pages, page_size=page_size,
            )  # fmt: skip
            visible = tiles.is_key & (tiles.positions <= position[:, None])  # bool[q, t]
            if window is not None:
                visible &= tiles.positions > position[:, None] - window
            visible = jnp.repeat(visible, group, axis=0)[None]
            part = tile_softmax(
                tile,
                gather_pages(key_pages, tiles.page_ids),
                gather_pages(value_pages, tiles.page_ids, start=tiles.start, stop=tiles.stop),
                visible, scale, soft_cap,
            )  # fmt: skip
            return column + tile_pages, merge(so_far, part)

        empty = empty_softmax((1, num_kv_heads, tile_rows * group), head_dim)
        first_column = first_seen // tile_tokens * tile_pages
        _, part = lax.while_loop(
            lambda state: state[0] * page_size < end, merge_keys, (first_column, empty)
        )

        def as_rows(x: jax.Array) -> jax.Array:  # [1, K, q * G, ...] -> [q, N, ...]
            x = x.reshape(num_kv_heads, tile_rows, group, *x.shape[3:])
            return x.swapaxes(0, 1).reshape(tile_rows, num_heads, *x.shape[3:])

        softmax = jax.tree.map(
            lambda whole, x: lax.dynamic_update_slice_in_dim(whole, as_rows(x), first_row, axis=0),
            softmax, part,
        )  # fmt: skip
        return number + 1, softmax

    empty = empty_softmax((num_rows + tile_rows, num_heads), head_dim)
    _, softmax = lax.while_loop(
        lambda state: state[0] < tiles_until[-1], attend_one_tile, (jnp.int32(0), empty)
    )
    return jax.tree.map(lambda x: x[:num_rows], softmax)
