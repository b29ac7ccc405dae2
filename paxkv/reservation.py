"""Taking pages from the pool: the one operation that needs free ones."""

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from paxkv.block_table import BlockTable, held_pages
from paxkv.pallas_kernels.layout import NULL_PAGE


class PageCopies(NamedTuple):
    """Pages to copy before the next write. A row that copies nothing targets `P + row`."""

    source: jax.Array  # i32[B] the shared page, or NULL_PAGE
    target: jax.Array  # i32[B] its slot's own page; no id twice


def no_copies(table: BlockTable) -> PageCopies:
    """What `reserve` returns when no shared page is about to be written."""
    num_slots, num_pages = table.lengths.shape[0], table.ref_counts.shape[0]
    return PageCopies(
        source=jnp.full(num_slots, NULL_PAGE, jnp.int32),
        target=num_pages + jnp.arange(num_slots, dtype=jnp.int32),
    )


def reserve(table: BlockTable, new_tokens: jax.Array) -> tuple[BlockTable, PageCopies, jax.Array]:
    """Gives every slot room for `new_tokens` more tokens, or changes nothing.

    Room that a slot holds already counts, so asking twice takes no more pages. A half-full page
    that a slot shares with others is replaced by one of its own, for the others' tokens to stay;
    where all who share it are about to write, the first of them keeps it.

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
    wanted = jnp.maximum(held_pages(tokens, table.page_size) - table.num_pages, 0)
    is_written_shared = _writes_shared_page(table, (new_tokens > 0) & rows_fit)
    # Most decode steps of a slot cross no page boundary: search the pool only when one does.
    table, copies, pool_fits = jax.lax.cond(
        jnp.any((wanted > 0) | is_written_shared),
        _take_pages,
        _take_nothing,
        table,
        wanted,
        is_written_shared,
    )
    return table, copies, rows_fit & pool_fits


def _last_page(table: BlockTable) -> tuple[jax.Array, jax.Array]:
    """Each slot's column `i32[B]` of the page that its next token goes to, and that page.

    A slot whose pages are full has no such page yet: the null page.
    """
    column = jnp.minimum(table.lengths // table.page_size, table.block_tables.shape[1] - 1)
    page = jnp.take_along_axis(table.block_tables, column[:, None], axis=1)[:, 0]
    return column, jnp.where(table.lengths % table.page_size > 0, page, NULL_PAGE)


def _writes_shared_page(table: BlockTable, is_writing: jax.Array) -> jax.Array:
    _, page = _last_page(table)
    return is_writing & (page != NULL_PAGE) & (table.ref_counts[page] > 1)


def _take_pages(
    table: BlockTable, wanted: jax.Array, is_written_shared: jax.Array
) -> tuple[BlockTable, PageCopies, jax.Array]:
    """Hands out the lowest free pages, to each slot in turn, or none.

    A slot of `is_written_shared` (`bool[B]`) gets one in place of its last page, unless it is the
    one to keep that, and every slot gets `wanted` (`i32[B]`) new ones.
    """
    num_slots, pool_pages = table.lengths.shape[0], table.ref_counts.shape[0]
    slot = jnp.arange(num_slots, dtype=jnp.int32)
    last_column, last_page = _last_page(table)
    written = jnp.where(is_written_shared, last_page, pool_pages)
    num_writers = jnp.zeros(pool_pages, jnp.int32).at[written].add(1, mode="drop")
    first_writer = jnp.full(pool_pages, num_slots, jnp.int32).at[written].min(slot, mode="drop")
    is_kept = (num_writers == table.ref_counts)[last_page] & (first_writer[last_page] == slot)
    is_replaced = is_written_shared & ~is_kept

    page_ids = jnp.arange(pool_pages, dtype=jnp.int32)
    is_free = table.ref_counts == 0
    nth_free = jnp.cumsum(is_free, dtype=jnp.int32) - 1  # from 0, where a page is free
    # A scatter of P ids: `nonzero` counts them one by one, a search costs B * M look-ups.
    free_pages = (
        jnp.zeros(pool_pages, jnp.int32)
        .at[jnp.where(is_free, nth_free, pool_pages + page_ids)]
        .set(page_ids, mode="drop", unique_indices=True)
    )
    num_taken = wanted + is_replaced.astype(jnp.int32)
    fits = jnp.sum(num_taken, dtype=jnp.int32) <= nth_free[-1] + 1
    wanted, num_taken = jnp.where(fits, wanted, 0), jnp.where(fits, num_taken, 0)
    is_replaced &= fits
    ends = jnp.cumsum(num_taken, dtype=jnp.int32)  # slot by slot, the free pages given so far
    first = ends - num_taken
    own_page = free_pages[jnp.where(is_replaced, first, 0)]
    column = jnp.arange(table.block_tables.shape[1], dtype=jnp.int32)[None]
    new_column = column - table.num_pages[:, None]
    is_new = (new_column >= 0) & (new_column < wanted[:, None])  # bool[B, M]
    pages = free_pages[jnp.where(is_new, (ends - wanted)[:, None] + new_column, 0)]
    pages = jnp.where(is_new, pages, table.block_tables)
    is_own = is_replaced[:, None] & (column == last_column[:, None])
    given_up = jnp.where(is_replaced, last_page, pool_pages)
    ref_counts = jnp.where(is_free & (nth_free < ends[-1]), 1, table.ref_counts)
    larger = dataclasses.replace(
        table,
        block_tables=jnp.where(is_own, own_page[:, None], pages),
        num_pages=table.num_pages + wanted,
        ref_counts=ref_counts.at[given_up].add(-1, mode="drop"),
    )
    copies = PageCopies(
        source=jnp.where(is_replaced, last_page, NULL_PAGE),
        target=jnp.where(is_replaced, own_page, pool_pages + slot),
    )
    return larger, copies, fits


def _take_nothing(
    table: BlockTable, wanted: jax.Array, is_written_shared: jax.Array
) -> tuple[BlockTable, PageCopies, jax.Array]:
    return table, no_copies(table), jnp.array(True)
