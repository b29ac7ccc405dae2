"""Which pages hold which sequence: arrays in, arrays out, every operation wholly or not at all.

    table = init_block_table(num_slots=2, max_pages=4, num_pages=6, page_size=16)
    table, copies, fits = reserve(table, jnp.array([20, 5], jnp.int32))  # 2 pages and 1
    table, fits = append(table, jnp.array([20, 5], jnp.int32))  # their tokens are stored
    table, ok = release(table, jnp.array([True, False]))  # slot 0 is free again

A page's reference count is the number of table entries that name it (and of holds from outside
the table, where there are any); a count of 0 means free. Entries at and past `num_pages` are
`NULL_PAGE`, and so are entries whose page was given up because it left a sliding window.
"""

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from paxkv.pallas_kernels.layout import NULL_PAGE

_INT32_MAX = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """Which pages hold which sequence, and how far each sequence has come.

    Pages held past `lengths` are reserved: room for tokens that are still to be written.
    """

    block_tables: jax.Array  # i32[B, M] page ids in token order, then NULL_PAGE
    num_pages: jax.Array  # i32[B] entries in use; given-up pages keep theirs
    lengths: jax.Array  # i32[B] tokens stored
    ref_counts: jax.Array  # i32[P] 0 means free; the null page's is always 1
    page_size: int = dataclasses.field(metadata={"static": True})  # S, tokens per page


class PageCopies(NamedTuple):
    """Pages to copy before the next write. A row that copies nothing targets `P + row`."""

    source: jax.Array  # i32[B] the shared page, or NULL_PAGE
    target: jax.Array  # i32[B] its slot's own page; no id twice


def init_block_table(num_slots: int, max_pages: int, num_pages: int, page_size: int) -> BlockTable:
    """An empty table.

    Args:
        num_slots: `B`, sequences at once.
        max_pages: `M`, pages one sequence may hold.
        num_pages: `P`, pages of the pool, the null page counted.
        page_size: `S`, tokens per page.

    Raises:
        ValueError: A size is out of range.
    """
    for name, size, smallest in (
        ("num_slots", num_slots, 1),
        ("max_pages", max_pages, 1),
        ("num_pages", num_pages, 2),
        ("page_size", page_size, 1),
    ):
        if size < smallest:
            raise ValueError(f"{name}={size} must be at least {smallest}")
    if (max_pages + 1) * page_size > _INT32_MAX:
        raise ValueError(
            f"{max_pages=} pages of {page_size=} tokens are more positions than int32 counts "
            f"({_INT32_MAX}); lower max_pages to {_INT32_MAX // page_size - 1}"
        )
    return BlockTable(
        block_tables=jnp.full((num_slots, max_pages), NULL_PAGE, jnp.int32),
        num_pages=jnp.zeros(num_slots, jnp.int32),
        lengths=jnp.zeros(num_slots, jnp.int32),
        ref_counts=jnp.zeros(num_pages, jnp.int32).at[NULL_PAGE].set(1),
        page_size=page_size,
    )


def no_copies(table: BlockTable) -> PageCopies:
    """What `reserve` returns when no shared page is about to be written."""
    num_slots, num_pages = table.lengths.shape[0], table.ref_counts.shape[0]
    return PageCopies(
        source=jnp.full(num_slots, NULL_PAGE, jnp.int32),
        target=num_pages + jnp.arange(num_slots, dtype=jnp.int32),
    )


def reserve(table: BlockTable, new_tokens: jax.Array) -> tuple[BlockTable, PageCopies, jax.Array]:
    """Gives every slot room for `new_tokens` more tokens, or changes nothing.

    Room that a slot holds already counts, so asking twice takes no more pages.

    Args:
        table: The state.
        new_tokens: `i32[B]`, 0 for slots that write nothing.

    Returns:
        The new table; the pages to copy in every layer before the tokens are written; `bool[]`,
        whether the pool had the pages and every row had room (a negative number never fits).
    """
    chex.assert_shape(new_tokens, table.lengths.shape)
    room = table.block_tables.shape[1] * table.page_size - table.lengths
    rows_fit = jnp.all((new_tokens >= 0) & (new_tokens <= room))
    # Added only where it fits: the sum cannot overflow.
    tokens = table.lengths + jnp.where(rows_fit, new_tokens, 0)
    wanted = jnp.maximum(_pages_of(tokens, table.page_size) - table.num_pages, 0)
    # Most decode steps of a slot cross no page boundary: search the pool only when one does.
    table, pool_fits = jax.lax.cond(jnp.any(wanted > 0), _take_pages, _take_nothing, table, wanted)
    return table, no_copies(table), rows_fit & pool_fits


def append(table: BlockTable, new_tokens: jax.Array) -> tuple[BlockTable, jax.Array]:
    """Counts `new_tokens` (`i32[B]`) more tokens as stored, or changes nothing.

    Returns:
        The new table and `bool[]`, whether every slot had reserved the room.
    """
    chex.assert_shape(new_tokens, table.lengths.shape)
    room = table.num_pages * table.page_size - table.lengths
    fits = jnp.all((new_tokens >= 0) & (new_tokens <= room))
    lengths = table.lengths + jnp.where(fits, new_tokens, 0)
    return dataclasses.replace(table, lengths=lengths), fits


def release(table: BlockTable, done: jax.Array) -> tuple[BlockTable, jax.Array]:
    """Empties the slots in `done` (`bool[B]`) and gives back their pages, or changes nothing.

    Returns:
        The new table and `bool[]`; False if a page would be freed twice, so the table is corrupt.
    """
    chex.assert_shape(done, table.lengths.shape)
    kept_pages = jnp.where(done, 0, table.num_pages)
    return _shorten(table, jnp.where(done, 0, table.lengths), kept_pages)


def truncate(table: BlockTable, lengths: jax.Array) -> tuple[BlockTable, jax.Array]:
    """Shortens every slot to `lengths` tokens, or changes nothing.

    Every page past them is given back, reserved ones included.

    Args:
        table: The state.
        lengths: `i32[B]`, none above the slot's length now.

    Returns:
        The new table and `bool[]`; False if a length is negative or above the slot's, or if a
        page would be freed twice, so the table is corrupt.
    """
    chex.assert_shape(lengths, table.lengths.shape)
    in_range = jnp.all((lengths >= 0) & (lengths <= table.lengths))
    kept_pages = jnp.where(in_range, _pages_of(lengths, table.page_size), table.num_pages)
    table, ok = _shorten(table, jnp.where(in_range, lengths, table.lengths), kept_pages)
    return table, in_range & ok


def _pages_of(tokens: jax.Array, page_size: int) -> jax.Array:
    return (tokens + page_size - 1) // page_size


def _take_pages(table: BlockTable, wanted: jax.Array) -> tuple[BlockTable, jax.Array]:
    """Hands out the lowest free pages, `wanted` (`i32[B]`) to each slot in turn, or none."""
    pool_pages = table.ref_counts.shape[0]
    page_ids = jnp.arange(pool_pages, dtype=jnp.int32)
    is_free = table.ref_counts == 0
    nth_free = jnp.cumsum(is_free, dtype=jnp.int32) - 1  # from 0, where a page is free
    # A scatter of P ids: `nonzero` counts them one by one, a search costs B * M look-ups.
    free_pages = (
        jnp.zeros(pool_pages, jnp.int32)
        .at[jnp.where(is_free, nth_free, pool_pages + page_ids)]
        .set(page_ids, mode="drop", unique_indices=True)
    )
    fits = jnp.sum(wanted, dtype=jnp.int32) <= nth_free[-1] + 1
    wanted = jnp.where(fits, wanted, 0)
    ends = jnp.cumsum(wanted, dtype=jnp.int32)  # slot by slot, the free pages given so far
    column = jnp.arange(table.block_tables.shape[1], dtype=jnp.int32)[None]
    column = column - table.num_pages[:, None]
    is_new = (column >= 0) & (column < wanted[:, None])  # bool[B, M]
    pages = free_pages[jnp.where(is_new, (ends - wanted)[:, None] + column, 0)]
    return dataclasses.replace(
        table,
        block_tables=jnp.where(is_new, pages, table.block_tables),
        num_pages=table.num_pages + wanted,
        ref_counts=jnp.where(is_free & (nth_free < ends[-1]), 1, table.ref_counts),
    ), fits


def _take_nothing(table: BlockTable, _: jax.Array) -> tuple[BlockTable, jax.Array]:
    return table, jnp.array(True)


def _shorten(
    table: BlockTable, lengths: jax.Array, kept_pages: jax.Array
) -> tuple[BlockTable, jax.Array]:
    """Keeps each slot's first `kept_pages` (`i32[B]`) entries, or everything if that is corrupt."""
    return jax.lax.cond(
        jnp.any(kept_pages < table.num_pages),
        _give_back,
        _give_back_nothing,
        table,
        lengths,
        kept_pages,
    )


def _give_back(
    table: BlockTable, lengths: jax.Array, kept_pages: jax.Array
) -> tuple[BlockTable, jax.Array]:
    num_pages = table.ref_counts.shape[0]
    column = jnp.arange(table.block_tables.shape[1], dtype=jnp.int32)[None]
    is_kept = column < kept_pages[:, None]  # bool[B, M]
    is_dropped = ~is_kept & (column < table.num_pages[:, None]) & (table.block_tables != NULL_PAGE)
    # Several slots may give back one shared page, so these ids need not be unique.
    dropped = jnp.where(is_dropped, table.block_tables, num_pages)
    ref_counts = table.ref_counts.at[dropped].add(-1, mode="drop")
    ok = jnp.all(ref_counts >= 0)
    shorter = dataclasses.replace(
        table,
        block_tables=jnp.where(is_kept, table.block_tables, NULL_PAGE),
        num_pages=kept_pages,
        lengths=lengths,
        ref_counts=ref_counts,
    )
    return jax.tree.map(lambda new, old: jnp.where(ok, new, old), shorter, table), ok


def _give_back_nothing(
    table: BlockTable, lengths: jax.Array, _: jax.Array
) -> tuple[BlockTable, jax.Array]:
    return dataclasses.replace(table, lengths=lengths), jnp.array(True)
