"""Pages of a sequence that make room: copied to the host, and back into the pool later.

contents = jax.device_get(swap_out(cache, slot, num_pages=4))  # then `release_all` its slot
cache, ok = swap_in(cache, other_slot, contents, first_page=0, length=60)
"""

from functools import partial

import jax
import jax.numpy as jnp

from paxkv.cache import PagedCache, append_all, reserve_all
from paxkv.page_pool import PagePool
from paxkv.pallas_kernels import movers
from paxkv.pallas_kernels.layout import NULL_PAGE

type Contents = tuple[PagePool, ...]  # of each layer group; arrays `[n, K, S, H]`


def swap_out(cache: PagedCache, slot: jax.Array | int, *, num_pages: int) -> Contents:
    """The contents of a slot's first `num_pages` (`n`) pages, in token order.

    Args:
        cache: The state, which stays as it is.
        slot: `i32[]`.
        num_pages: At most `M`; each number is compiled once.
    """
    return tuple(
        jax.tree.map(partial(_take, page_ids=table.block_tables[slot, :num_pages]), pool)
        for pool, table in cache
    )


def swap_in(
    cache: PagedCache,
    slot: jax.Array | int,
    contents: Contents,
    first_page: jax.Array | int,
    length: jax.Array | int,
) -> tuple[PagedCache, jax.Array]:
    """Goes on with a slot at `length` tokens, whose pages were swapped out.

    Args:
        cache: Donate it where you `jit`.
        slot: `i32[]`, one that holds nothing, or full pages that `contents` has too.
        contents: Of `swap_out`.
        first_page: `i32[]`, pages that the slot holds already: those of `contents` are left out.
        length: `i32[]`, tokens that it had when it was swapped out.

    Returns:
        The new cache, and `bool[]`; False, and nothing changed, if the pool lacks the pages.
    """
    lengths = cache[0][1].lengths
    is_slot = jnp.arange(lengths.shape[0], dtype=jnp.int32) == slot
    new_tokens = jnp.where(is_slot, length - lengths, 0)
    cache, fits = reserve_all(cache, new_tokens)
    new_tokens = jnp.where(fits, new_tokens, 0)
    filled = tuple(
        (_fill(pool, its, table.block_tables[slot], first_page, fits), table)
        for (pool, table), its in zip(cache, contents, strict=True)
    )
    cache, ok = append_all(filled, new_tokens)
    return cache, fits & ok


def _take(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    return movers.take_pages(pages, page_ids)


def _fill(
    pool: PagePool, contents: PagePool, row: jax.Array, first_page: jax.Array | int, fits: jax.Array
) -> PagePool:
    """Writes the contents, from `first_page` on, to the pages that a row `i32[M]` names."""
    pool_pages, num_pages = pool.k_pages[0].shape[0], contents.k_pages[0].shape[0]
    column = jnp.arange(num_pages, dtype=jnp.int32)
    row = row[:num_pages]
    is_written = fits & (column >= first_page) & (row != NULL_PAGE)
    page_ids = jnp.where(is_written, row, pool_pages + column)  # past the end: dropped
    return jax.tree.map(lambda pages, its: movers.put_pages(pages, page_ids, its), pool, contents)
