"""Page pools: their size, their place in memory, and the way to and from a dense cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv import block_table, page_pool, reservation
from paxkv.block_table import BlockTable, init_block_table
from paxkv.config import num_pages_for, page_bytes
from paxkv.decoder import LayerGroup
from paxkv.page_pool import PagePool, copy_pages, init_page_pool
from paxkv.pallas_kernels.layout import NULL_PAGE
from paxkv.reservation import PageCopies

KV_HEADS, HEAD_DIM = 2, 4

reserve = jax.jit(reservation.reserve)
append = jax.jit(block_table.append)
pages_from_dense = jax.jit(page_pool.pages_from_dense, static_argnames="layer")
dense_from_pages = jax.jit(page_pool.dense_from_pages, static_argnames=("layer", "length"))


@pytest.fixture(autouse=True)
def strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


def i32(*numbers: int) -> jax.Array:
    return jnp.array(numbers, jnp.int32)


def poisoned_pool(num_pages: int, page_size: int, dtype=jnp.float32) -> PagePool:
    """Two layers of NaN: whatever is read and was not written shows."""
    pool = init_page_pool(2, num_pages, KV_HEADS, page_size, HEAD_DIM, dtype)
    return jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), pool)


def table_with(*lengths: int, max_pages: int, num_pages: int, page_size: int) -> BlockTable:
    table = init_block_table(len(lengths), max_pages, num_pages, page_size)
    table, _, fits = reserve(table, i32(*lengths))
    table, stored = append(table, i32(*lengths))
    assert fits and stored
    return table


def dense(seed: int, num_slots: int, length: int, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (num_slots, length, KV_HEADS, HEAD_DIM), dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("page_size", [1, 4, 16, 128])
def test_dense_cache_comes_back_from_pages_with_zeros_past_each_length(page_size, dtype):
    lengths = (20, 0, 7)
    table = table_with(*lengths, max_pages=32, num_pages=32, page_size=page_size)
    keys, values = dense(0, 3, 21, dtype), dense(1, 3, 21, dtype)
    pool = poisoned_pool(32, page_size, dtype)
    stored = pages_from_dense(pool, table, layer=1, keys=keys, values=values)
    for given, returned in zip(
        (keys, values), dense_from_pages(stored, table, layer=1, length=24), strict=True
    ):
        assert returned.shape == (3, 24, KV_HEADS, HEAD_DIM) and returned.dtype == dtype
        for slot, length in enumerate(lengths):
            np.testing.assert_array_equal(returned[slot, :length], given[slot, :length])
            assert not returned[slot, length:].any()
    assert jnp.isnan(stored.k_pages[0]).all()  # the other layer
    assert jnp.isnan(stored.k_pages[1][NULL_PAGE]).all()


def test_dense_cache_may_be_cut_short():
    table = table_with(9, max_pages=3, num_pages=4, page_size=4)
    keys = dense(0, 1, 9)
    pool = pages_from_dense(poisoned_pool(4, 4), table, layer=0, keys=keys, values=keys)
    np.testing.assert_array_equal(dense_from_pages(pool, table, layer=0, length=5)[0], keys[:, :5])


def test_pages_given_up_are_neither_written_nor_read():
    table = table_with(9, max_pages=3, num_pages=4, page_size=4)
    table = dataclasses.replace(table, block_tables=i32(NULL_PAGE, 2, 3)[None])
    keys = dense(0, 1, 9)
    pool = pages_from_dense(poisoned_pool(4, 4), table, layer=0, keys=keys, values=keys)
    assert jnp.isnan(pool.k_pages[0][: NULL_PAGE + 2]).all()
    returned, _ = dense_from_pages(pool, table, layer=0, length=9)
    np.testing.assert_array_equal(returned, keys.at[:, :4].set(0))


def test_dense_cache_longer_than_a_row_is_refused():
    table = table_with(9, max_pages=3, num_pages=4, page_size=4)
    keys = dense(0, 1, 13)
    with pytest.raises(ValueError, match=r"length=13 .* 12 tokens: .* max_pages of at least 4"):
        pages_from_dense(poisoned_pool(4, 4), table, layer=0, keys=keys, values=keys)
    with pytest.raises(ValueError, match="length=13"):
        dense_from_pages(poisoned_pool(4, 4), table, layer=0, length=13)


def test_copy_pages_copies_whole_pages_in_every_layer_and_drops_idle_rows():
    pages = jnp.arange(4.0)[:, None, None, None] * jnp.ones((4, KV_HEADS, 2, HEAD_DIM))
    pool = PagePool(k_pages=(pages, pages + 10), v_pages=(pages + 20, pages + 30))
    copies = PageCopies(source=i32(1, NULL_PAGE), target=i32(3, 4 + 1))
    for before, after in zip(
        jax.tree.leaves(pool), jax.tree.leaves(copy_pages(pool, copies)), strict=True
    ):
        np.testing.assert_array_equal(after, before.at[3].set(before[1]))


def addresses(pool: PagePool) -> list[int]:
    return [pages.unsafe_buffer_pointer() for pages in jax.tree.leaves(pool)]


@pytest.mark.parametrize("target", [3, 8], ids=["one page", "no page"])
def test_copy_pages_updates_a_donated_pool_in_place(target):
    pool = poisoned_pool(8, 4)
    before = addresses(pool)
    after = jax.jit(copy_pages, donate_argnums=0)(
        pool, PageCopies(source=i32(1), target=i32(target))
    )
    assert addresses(after) == before


def test_pages_from_dense_updates_a_donated_pool_in_place():
    table = table_with(9, max_pages=3, num_pages=4, page_size=4)
    pool, keys = poisoned_pool(4, 4), dense(0, 1, 9)
    before = addresses(pool)
    store = jax.jit(page_pool.pages_from_dense, static_argnames="layer", donate_argnums=0)
    assert addresses(store(pool, table, layer=1, keys=keys, values=keys)) == before


FULL = LayerGroup(layers=(0, 1, 2, 3), num_kv_heads=2, head_dim=128)
WINDOWED = LayerGroup(layers=(4,), num_kv_heads=1, head_dim=64, window=32)


@pytest.mark.parametrize(("groups", "expected"), [((FULL,), 65536), ((FULL, WINDOWED), 69632)])
def test_page_bytes_are_those_of_the_arrays(groups, expected):
    assert page_bytes(groups, page_size=16, dtype=jnp.bfloat16) == expected
    pools = [
        init_page_pool(len(group.layers), 3, group.num_kv_heads, 16, group.head_dim, jnp.bfloat16)
        for group in groups
    ]
    assert sum(pages.nbytes for pages in jax.tree.leaves(pools)) == 3 * expected


def test_pool_fills_the_memory_it_is_given():
    sizes = {"page_size": 16, "dtype": jnp.bfloat16}
    assert num_pages_for(64 * 2**20, (FULL,), **sizes) == 1024
    assert num_pages_for(64 * 2**20 - 1, (FULL,), **sizes) == 1023


def test_memory_for_less_than_two_pages_is_refused_with_the_arithmetic():
    message = (
        r"131071 bytes hold 1 pages of 65536 bytes.*: 131072 bytes\. One page is 2 \(K and V\) x "
        r"16 tokens x \(4 layers x 2 KV heads x 128\) x 2 bytes\. Give the cache more memory"
    )
    with pytest.raises(ValueError, match=message):
        num_pages_for(131071, (FULL,), page_size=16, dtype=jnp.bfloat16)


def test_heads_that_a_tpu_fills_up_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch):
    table = table_with(9, max_pages=3, num_pages=4, page_size=4)
    keys, values = dense(0, 1, 9), dense(1, 1, 9)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    pool = init_page_pool(1, 4, KV_HEADS, 4, HEAD_DIM, jnp.float32)
    assert pool.k_pages[0].shape == (4, KV_HEADS, 4, 128)
    pool = page_pool.pages_from_dense(pool, table, 0, keys, values)
    assert not pool.k_pages[0][..., HEAD_DIM:].any()
    found = page_pool.dense_from_pages(pool, table, 0, 9, head_dim=HEAD_DIM)
    for returned, given in zip(found, (keys, values), strict=True):
        np.testing.assert_array_equal(returned, given)
