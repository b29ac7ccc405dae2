"""Several layer groups move together, and the pool stays where it is."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv import cache as paged
from paxkv.cache import PagedCache, init_cache
from paxkv.decoder import LayerGroup
from paxkv.integrity import check_integrity

GROUPS = (
    LayerGroup(layers=(0, 2), num_kv_heads=2, head_dim=4),
    LayerGroup(layers=(1,), num_kv_heads=1, head_dim=8, window=4),
)


@pytest.fixture(autouse=True)
def strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


def i32(*numbers: int) -> jax.Array:
    return jnp.array(numbers, jnp.int32)


def two_slots() -> PagedCache:
    """Room for 4 pages a slot; each group has 7 to hand out, the first slot holds 10 tokens."""
    cache = init_cache(
        GROUPS, num_slots=2, max_length=15, num_pages=8, page_size=4, dtype=jnp.float32
    )
    cache, fits = jax.jit(paged.reserve_all)(cache, i32(10, 0))
    cache, stored = jax.jit(paged.append_all)(cache, i32(10, 0))
    assert fits and stored
    return cache


def test_init_cache_makes_a_pool_and_a_table_per_group():
    cache = two_slots()
    assert [len(pool.k_pages) for pool, _ in cache] == [2, 1]
    assert [pool.v_pages[0].shape for pool, _ in cache] == [(8, 2, 4, 4), (8, 1, 4, 8)]
    assert [table.block_tables.shape for _, table in cache] == [(2, 4), (2, 4)]


@pytest.mark.parametrize(
    ("operation", "argument", "lengths", "num_pages"),
    [
        (paged.reserve_all, i32(2, 16), [10, 0], [3, 4]),  # all 7 pages
        (paged.append_all, i32(2, 0), [12, 0], [3, 0]),
        (paged.fork_all, i32(0, 0), [10, 10], [3, 3]),
        (paged.truncate_all, i32(4, 0), [4, 0], [1, 0]),
        (paged.release_all, jnp.array([True, False]), [0, 0], [0, 0]),
    ],
)
def test_operation_changes_every_group(operation, argument, lengths, num_pages):
    cache, ok = jax.jit(operation)(two_slots(), argument)
    assert ok
    for _, table in cache:
        check_integrity(table)
        assert table.lengths.tolist() == lengths
        assert table.num_pages.tolist() == num_pages


@pytest.mark.parametrize(
    ("operation", "argument", "poorer"),
    [
        (paged.reserve_all, i32(0, 9), {"ref_counts": jnp.ones(8, jnp.int32)}),
        (paged.append_all, i32(2, 0), {"lengths": i32(11, 0)}),
        (paged.truncate_all, i32(10, 0), {"lengths": i32(9, 0)}),
        (paged.release_all, jnp.array([True, False]), {"ref_counts": jnp.zeros(8, jnp.int32)}),
    ],
)
@pytest.mark.parametrize("group", [0, 1])
def test_one_group_that_cannot_serve_leaves_all_as_they_were(operation, argument, poorer, group):
    cache = list(two_slots())
    pool, table = cache[group]
    cache[group] = (pool, dataclasses.replace(table, **poorer))
    after, ok = jax.jit(operation)(tuple(cache), argument)
    assert not ok
    chex.assert_trees_all_equal(after, tuple(cache))


@pytest.mark.parametrize("operation", [paged.reserve_all, paged.append_all, paged.truncate_all])
def test_operations_leave_a_donated_pool_in_place(operation):
    def addresses(cache: PagedCache) -> list[int]:
        return [
            pages.unsafe_buffer_pointer() for pool, _ in cache for pages in jax.tree.leaves(pool)
        ]

    cache = two_slots()
    before = addresses(cache)
    cache, ok = jax.jit(operation, donate_argnums=0)(cache, i32(1, 0))
    assert ok and addresses(cache) == before


def test_no_pool_is_copied_in_a_loop_of_steps():
    """XLA would hold a copied pool in temporary memory."""

    def steps(cache: PagedCache) -> PagedCache:
        def step(_, cache: PagedCache) -> PagedCache:
            cache, _ = paged.reserve_all(cache, i32(1, 1))
            cache, _ = paged.append_all(cache, i32(1, 1))
            cache, _ = paged.release_all(cache, cache[0][1].lengths >= 15)
            return cache

        return jax.lax.fori_loop(0, 40, step, cache)

    groups = (LayerGroup(layers=(0, 1), num_kv_heads=4, head_dim=64),)
    cache = init_cache(
        groups, num_slots=2, max_length=15, num_pages=512, page_size=4, dtype=jnp.float32
    )
    layer_bytes = cache[0][0].k_pages[0].nbytes
    compiled = jax.jit(steps, donate_argnums=0).lower(cache).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= 4 * layer_bytes
    assert memory.temp_size_in_bytes < layer_bytes / 4
    cache = compiled(cache)
    check_integrity(cache[0][1])
    assert cache[0][1].lengths.tolist() == [40 % 15] * 2


def test_first_write_to_a_shared_page_copies_that_page_in_every_layer():
    cache = tuple(
        (jax.tree.map(lambda pages: random_like(pages), pool), table) for pool, table in two_slots()
    )
    cache, ok = jax.jit(paged.fork_all)(cache, i32(0, 0))
    before = jax.device_get(cache)
    # Both write token 10 into page 3: slot 0 keeps it, slot 1 gets page 4 with what stood there.
    cache, fits = jax.jit(paged.reserve_all)(cache, i32(1, 1))
    assert ok and fits
    for (pool, table), (old_pool, _) in zip(cache, before, strict=True):
        check_integrity(table, new_tokens=i32(1, 1))
        assert table.block_tables.tolist() == [[1, 2, 3, 0], [1, 2, 4, 0]]
        assert table.ref_counts.tolist() == [1, 2, 2, 1, 1, 0, 0, 0]
        for pages, old in zip(jax.tree.leaves(pool), jax.tree.leaves(old_pool), strict=True):
            np.testing.assert_array_equal(pages[4], old[3])
            np.testing.assert_array_equal(np.delete(pages, 4, 0), np.delete(old, 4, 0))


def test_shared_page_is_not_copied_when_the_pool_is_short():
    cache, _ = jax.jit(paged.fork_all)(two_slots(), i32(0, 0))
    held, _ = jax.jit(paged.reserve_all)(cache, i32(5, 0))  # own page 4 and page 5 more
    check_integrity(held[0][1], new_tokens=i32(5, 0))
    after, fits = jax.jit(paged.reserve_all)(cache, i32(7, 0))
    assert not fits
    chex.assert_trees_all_equal(after, cache)


def random_like(pages: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.key(pages.size), pages.shape, pages.dtype)
