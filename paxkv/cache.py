"""The cache of a decoder: a page pool and a block table for each layer group.

The operations of `block_table` on all groups at once, wholly or not at all: when one group
cannot serve, no group changes.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxkv.block_table import (
    BlockTable,
    append,
    fork,
    init_block_table,
    release,
    truncate,
)
from paxkv.config import pages_of
from paxkv.decoder import LayerGroup
from paxkv.page_pool import PagePool, copy_pages, init_page_pool
from paxkv.reservation import no_copies, reserve
from paxkv.sharing import adopt, hold, merge
from paxkv.windows import release_window

type PagedCache = tuple[tuple[PagePool, BlockTable], ...]


def init_cache(
    layer_groups: Sequence[LayerGroup],
    *,
    num_slots: int,
    max_length: int,
    num_pages: int | Sequence[int],
    page_size: int,
    dtype: DTypeLike,
) -> PagedCache:
    """An empty cache.

        groups = (LayerGroup(layers=(0, 1), num_kv_heads=2, head_dim=64),)
        cache = init_cache(
            groups, num_slots=4, max_length=100, num_pages=20, page_size=16, dtype=jnp.float32
        )
        cache, fits = reserve_all(cache, jnp.array([20, 0, 0, 0], jnp.int32))

    Args:
        layer_groups: The decoder's.
        num_slots: `B`, sequences at once.
        max_length: Tokens that one sequence may have.
        num_pages: `P`, pages of each group's pool, the null page counted; for all groups, or one
            for each (see `pages_of_groups` in `paxkv.config`).
        page_size: `S`, tokens per page.
        dtype: Of keys and values.

    Raises:
        ValueError: A size is out of range.
    """
    pages = [num_pages] * len(layer_groups) if isinstance(num_pages, int) else num_pages
    return tuple(
        (
            init_page_pool(
                len(group.layers), num_pages, group.num_kv_heads, page_size, group.head_dim, dtype
            ),
            init_block_table(num_slots, pages_of(max_length, page_size), num_pages, page_size),
        )
        for group, num_pages in zip(layer_groups, pages, strict=True)
    )


def reserve_all(cache: PagedCache, new_tokens: jax.Array) -> tuple[PagedCache, jax.Array]:
    """Gives every slot room for `new_tokens` (`i32[B]`) more, shared pages copied where written.

    Returns:
        The new cache and `bool[]`, whether every group had the room.
    """
    reserved = [reserve(table, new_tokens) for _, table in cache]
    fits = jnp.all(jnp.stack([group_fits for *_, group_fits in reserved]))
    return tuple(
        (
            copy_pages(pool, _choose(fits, copies, no_copies(table))),
            _choose(fits, larger, table),
        )
        for (pool, table), (larger, copies, _) in zip(cache, reserved, strict=True)
    ), fits


def append_all(cache: PagedCache, new_tokens: jax.Array) -> tuple[PagedCache, jax.Array]:
    """Counts `new_tokens` (`i32[B]`) more as stored; False if a group lacks reserved room."""
    return _on_tables(partial(append, new_tokens=new_tokens), cache)


def fork_all(cache: PagedCache, parents: jax.Array) -> tuple[PagedCache, jax.Array]:
    """Has every slot go on from its parent (`i32[B]`), sharing pages; False if none exists."""
    return _on_tables(partial(fork, parents=parents), cache)


def release_all(cache: PagedCache, done: jax.Array) -> tuple[PagedCache, jax.Array]:
    """Empties the slots in `done` (`bool[B]`); False if a group's table is corrupt."""
    return _on_tables(partial(release, done=done), cache)


def truncate_all(cache: PagedCache, lengths: jax.Array) -> tuple[PagedCache, jax.Array]:
    """Shortens every slot to `lengths` (`i32[B]`); False if one is out of range."""
    return _on_tables(partial(truncate, lengths=lengths), cache)


def release_windows(
    cache: PagedCache, layer_groups: Sequence[LayerGroup]
) -> tuple[PagedCache, jax.Array]:
    """Gives back pages that have left their group's window; False if a group's table is corrupt."""
    tables = [
        (table, jnp.array(True)) if group.window is None else release_window(table, group.window)
        for group, (_, table) in zip(layer_groups, cache, strict=True)
    ]
    ok = jnp.all(jnp.stack([group_ok for _, group_ok in tables]))
    return tuple((pool, table) for (pool, _), (table, _) in zip(cache, tables, strict=True)), ok


def adopt_all(
    cache: PagedCache, pages: jax.Array, lengths: jax.Array
) -> tuple[PagedCache, jax.Array]:
    """Lets empty slots begin with pages (`i32[G, B, M]`) that hold `lengths` (`i32[B]`) tokens.

    A page adopted in part is copied at once, so that no slot needs another page for it later.

    Returns:
        The new cache, and `bool[]`; False, and nothing changed, if a page is free, a slot is not
        empty, or the pool has no pages for the copies.
    """
    adopted, ok = _on_tables(partial(adopt, lengths=lengths), cache, pages)
    is_partial = ok & (lengths % cache[0][1].page_size > 0)
    adopted, fits = reserve_all(adopted, is_partial.astype(jnp.int32))
    # Where they do not fit, no page was copied: only the tables are to be taken back.
    return tuple(
        (pool, _choose(fits, new, old))
        for (pool, new), (_, old) in zip(adopted, cache, strict=True)
    ), ok & fits


def settle_all(
    cache: PagedCache, done: jax.Array, holds: jax.Array, same_as: jax.Array
) -> tuple[PagedCache, jax.Array]:
    """Empties the slots in `done` once a prefix index has taken hold of what it wants of them.

    Args:
        cache: The state.
        done: `bool[B]`.
        holds: `i32[G, P]`, see `hold`; a group with fewer pages has its first ones.
        same_as: `i32[G, P]`, see `merge`.

    Returns:
        The new cache, and `bool[]`; False if a group's table is corrupt.
    """

    def settle(
        table: BlockTable, holds: jax.Array, same_as: jax.Array
    ) -> tuple[BlockTable, jax.Array]:
        num_pages = table.ref_counts.shape[0]
        table, holds_ok = hold(table, holds[:num_pages])
        table, merge_ok = merge(table, same_as[:num_pages])
        table, release_ok = release(table, done)
        return table, holds_ok & merge_ok & release_ok

    return _on_tables(settle, cache, holds, same_as)


def _on_tables(
    operation: Callable[..., tuple[BlockTable, jax.Array]],
    cache: PagedCache,
    *of_groups: jax.Array,
) -> tuple[PagedCache, jax.Array]:
    """Applies an operation to the table of each group, with its part of arrays `[G, ...]`."""
    changed = [operation(table, *(x[i] for x in of_groups)) for i, (_, table) in enumerate(cache)]
    ok = jnp.all(jnp.stack([group_ok for _, group_ok in changed]))
    return tuple(
        (pool, _choose(ok, new, old)) for (pool, old), (new, _) in zip(cache, changed, strict=True)
    ), ok


def _choose[T](condition: jax.Array, yes: T, no: T) -> T:
    return jax.tree.map(partial(jnp.where, condition), yes, no)
