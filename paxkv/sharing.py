"""Pages that a block table shares with an index of known prefixes (`paxkv.prefix_index`).

table, ok = hold(table, jnp.array([0, 0, 0, 1, 0, 0]))  # page 3 stays when its slot leaves
table, ok = adopt(table, jnp.array([[3, 0], [0, 0]]), jnp.array([16, 0]))  # slot 0 begins so
table, ok = merge(table, jnp.array([0, 1, 2, 3, 3, 5]))  # who names page 4 names page 3
table, ok = hold(table, jnp.array([0, 0, 0, -1, 0, 0]))  # page 3 is free once no slot names it
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from paxkv.block_table import BlockTable, held_pages
from paxkv.pallas_kernels.layout import NULL_PAGE


def adopt(table: BlockTable, pages: jax.Array, lengths: jax.Array) -> tuple[BlockTable, jax.Array]:
    """Lets empty slots begin with pages that hold their first tokens, or changes nothing.

    The last page may be adopted in part: like every shared page that is about to be written,
    `reserve` replaces it by a copy.

    Args:
        table: The state.
        pages: `i32[B, M]` in token order, none twice in a row; past the length they do not count.
        lengths: `i32[B]`, tokens that they hold; 0 leaves a slot as it is.

    Returns:
        The new table and `bool[]`; False if a length is out of range, a slot is not empty, or a
        page is free.
    """
    num_slots, max_pages = table.block_tables.shape
    chex.assert_shape(pages, (num_slots, max_pages))
    chex.assert_shape(lengths, (num_slots,))
    pool_pages = table.ref_counts.shape[0]
    is_new = lengths > 0
    num_pages = jnp.where(is_new, held_pages(lengths, table.page_size), 0)
    is_adopted = jnp.arange(max_pages, dtype=jnp.int32)[None] < num_pages[:, None]  # bool[B, M]
    in_pool = (pages != NULL_PAGE) & (pages >= 0) & (pages < pool_pages)
    is_live = in_pool & (table.ref_counts[jnp.where(in_pool, pages, NULL_PAGE)] > 0)
    in_range = (lengths >= 0) & (lengths <= max_pages * table.page_size)
    is_empty = table.num_pages == 0
    ok = jnp.all(in_range & (is_empty | ~is_new)) & jnp.all(is_live | ~is_adopted)
    is_adopted, is_new = is_adopted & ok, is_new & ok
    return dataclasses.replace(
        table,
        block_tables=jnp.where(is_adopted, pages, table.block_tables),
        num_pages=jnp.where(is_new, num_pages, table.num_pages),
        lengths=jnp.where(is_new, lengths, table.lengths),
        ref_counts=table.ref_counts.at[jnp.where(is_adopted, pages, pool_pages)].add(
            1, mode="drop"
        ),
    ), ok


def hold(table: BlockTable, change: jax.Array) -> tuple[BlockTable, jax.Array]:
    """Counts references to pages from outside the table, or changes nothing.

    Args:
        table: The state.
        change: `i32[P]`, 1 keeps a page for when no slot names it any more, -1 lets go of it.

    Returns:
        The new table and `bool[]`; False if a page is free or the null page.
    """
    chex.assert_shape(change, table.ref_counts.shape)
    ref_counts = table.ref_counts + change
    is_live = (table.ref_counts > 0) & (ref_counts >= 0)
    ok = jnp.all(is_live | (change == 0)) & (change[NULL_PAGE] == 0)
    return dataclasses.replace(table, ref_counts=jnp.where(ok, ref_counts, table.ref_counts)), ok


def merge(table: BlockTable, same_as: jax.Array) -> tuple[BlockTable, jax.Array]:
    """Lets entries name another page with the same contents, or changes nothing.

    A page that nothing names or holds any more is free.

    Args:
        table: The state.
        same_as: `i32[P]`, for each page the one to name in its place, as a rule itself. No slot
            may name both.

    Returns:
        The new table and `bool[]`; False if a page to be named is free or none of the pool's, or
        if the null page is among them.
    """
    chex.assert_shape(same_as, table.ref_counts.shape)
    pool_pages = table.ref_counts.shape[0]
    is_moved = same_as != jnp.arange(pool_pages, dtype=jnp.int32)
    in_pool = (same_as != NULL_PAGE) & (same_as >= 0) & (same_as < pool_pages)
    is_live = in_pool & (table.ref_counts[jnp.where(in_pool, same_as, NULL_PAGE)] > 0)
    ok = jnp.all(is_live | ~is_moved) & ~is_moved[NULL_PAGE]
    table = jax.lax.cond(ok & jnp.any(is_moved), _rename, lambda table, _: table, table, same_as)
    return table, ok


def _rename(table: BlockTable, same_as: jax.Array) -> BlockTable:
    renamed = same_as[table.block_tables]  # the null page is itself
    ref_counts = table.ref_counts.at[table.block_tables].add(-1).at[renamed].add(1)
    return dataclasses.replace(table, block_tables=renamed, ref_counts=ref_counts)
