"""The memory that holds keys and values, a page at a time."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxkv.block_table import BlockTable
from paxkv.pallas_kernels import layout, movers
from paxkv.reservation import PageCopies


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PagePool:
    """Keys and values of a layer group, one pair of arrays per layer."""

    k_pages: tuple[jax.Array, ...]  # per layer [P, K, S, H]
    v_pages: tuple[jax.Array, ...]  # per layer [P, K, S, H]


def init_page_pool(
    num_layers: int,
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: DTypeLike,
) -> PagePool:
    """A pool of zeros: `num_pages` (`P`, the null page counted) for each of the layers."""
    shape = (num_pages, *layout.page_shape(num_kv_heads, page_size, head_dim))
    dtype = layout.stored_dtype(dtype)
    return PagePool(
        k_pages=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        v_pages=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
    )


def copy_pages(pool: PagePool, copies: PageCopies) -> PagePool:
    """Copies whole pages, in every layer. Costs next to nothing when there are none to copy."""
    is_any = jnp.any(copies.target < pool.k_pages[0].shape[0])
    return jax.lax.cond(is_any, _copy_pages, _copy_none, pool, copies)


def _copy_pages(pool: PagePool, copies: PageCopies) -> PagePool:
    return jax.tree.map(lambda pages: movers.copy_pages(pages, *copies), pool)


def _copy_none(pool: PagePool, _: PageCopies) -> PagePool:
    return pool


def pages_from_dense(
    pool: PagePool, table: BlockTable, layer: int, keys: jax.Array, values: jax.Array
) -> PagePool:
    """Stores a dense cache of one layer in pages.

        table = init_block_table(num_slots=2, max_pages=4, num_pages=8, page_size=16)
        pool = init_page_pool(1, num_pages=8, num_kv_heads=2, page_size=16, head_dim=4, dtype="f4")
        keys = values = jnp.ones([2, 20, 2, 4])  # 20 and 7 tokens, the second row padded
        lengths = jnp.array([20, 7], jnp.int32)
        table, _, fits = reserve(table, lengths)
        table, _ = append(table, lengths)
        pool = pages_from_dense(pool, table, 0, keys, values)

    Args:
        pool: Where to store them.
        table: Says which pages hold a sequence's tokens, and how many tokens it has.
        layer: Which of the pool's layers.
        keys: `[B, length, K, H]`. Tokens past a slot's length are left out.
        values: `[B, length, K, H]`.
    """
    num_slots, length, num_kv_heads, head_dim = keys.shape
    chex.assert_shape(table.lengths, (num_slots,))
    positions = jnp.arange(length, dtype=jnp.int32)
    page_ids = _page_ids(table, length)
    is_stored = (positions[None] < table.lengths[:, None]) & (page_ids != layout.NULL_PAGE)
    nowhere = pool.k_pages[layer].shape[0] + jnp.arange(num_slots * length, dtype=jnp.int32)
    page_ids = jnp.where(is_stored.ravel(), page_ids.ravel(), nowhere)
    offsets = jnp.tile(positions % table.page_size, num_slots)

    def write(pages: jax.Array, tokens: jax.Array) -> jax.Array:
        packed = tokens.reshape(num_slots * length, num_kv_heads, head_dim)
        packed = layout.fill_heads(packed, pages.shape[-1])
        return movers.write_tokens(pages, page_ids, offsets, packed)

    return _replace_layer(
        pool, layer, write(pool.k_pages[layer], keys), write(pool.v_pages[layer], values)
    )


def dense_from_pages(
    pool: PagePool, table: BlockTable, layer: int, length: int, *, head_dim: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """The first `length` tokens of every slot as a dense cache of one layer.

        keys, values = dense_from_pages(pool, table, 0, length=20)  # [2, 20, 2, 4] each

    Args:
        pool: Where they are.
        table: Says which pages hold a sequence's tokens, and how many tokens it has.
        layer: Which of the pool's layers.
        length: Tokens of each slot.
        head_dim: `H`, where the pool's heads are filled up with zeros (see `layout.page_shape`).

    Returns:
        Keys and values, `[B, length, K, H]`. Tokens past a slot's length are zero, and so are
        those of pages given up.
    """
    _check_length(table, length)
    num_columns = -(-length // table.page_size)
    page_ids = table.block_tables[:, :num_columns]
    first = jnp.arange(num_columns, dtype=jnp.int32)[None] * table.page_size
    stop = jnp.clip(table.lengths[:, None] - first, 0, table.page_size)
    stop = jnp.where(page_ids == layout.NULL_PAGE, 0, stop)

    def read(pages: jax.Array) -> jax.Array:
        tokens = layout.from_stored(layout.gather_pages(pages, page_ids, stop=stop))
        return tokens.swapaxes(1, 2)[:, :length, :, :head_dim]

    return read(pool.k_pages[layer]), read(pool.v_pages[layer])


def _page_ids(table: BlockTable, length: int) -> jax.Array:
    """The page of each of the first `length` positions, `i32[B, length]`."""
    _check_length(table, length)
    return table.block_tables[:, jnp.arange(length, dtype=jnp.int32) // table.page_size]


def _check_length(table: BlockTable, length: int) -> None:
    max_length = table.block_tables.shape[1] * table.page_size
    if length > max_length:
        raise ValueError(
            f"a dense cache of {length=} tokens is longer than a row of the block table, "
            f"{max_length} tokens: make the table with max_pages of at least "
            f"{-(-length // table.page_size)}, or cut the dense cache"
        )


def _replace_layer(pool: PagePool, layer: int, keys: jax.Array, values: jax.Array) -> PagePool:
    def replaced(layers: tuple[jax.Array, ...], pages: jax.Array) -> tuple[jax.Array, ...]:
        return (*layers[:layer], pages, *layers[layer + 1 :])

    return PagePool(k_pages=replaced(pool.k_pages, keys), v_pages=replaced(pool.v_pages, values))
