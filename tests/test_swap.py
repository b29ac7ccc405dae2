"""Pages that were copied to the host come back as they were, wherever they come back to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.cache import append_all, fork_all, init_cache, release_all, reserve_all
from paxkv.decoder import LayerGroup
from paxkv.integrity import check_integrity
from paxkv.page_pool import dense_from_pages, pages_from_dense
from paxkv.swap import swap_in, swap_out

GROUPS = (LayerGroup(layers=(0, 1), num_kv_heads=2, head_dim=4),)
LENGTHS = jnp.array([11, 6, 0], jnp.int32)


@pytest.fixture
def cache():
    """Slots of 11 and 6 tokens in pages of 4, all different; what is unused is NaN."""
    cache = init_cache(
        GROUPS, num_slots=3, max_length=24, num_pages=9, page_size=4, dtype=jnp.float32
    )
    cache, fits = reserve_all(cache, LENGTHS)
    cache, _ = append_all(cache, LENGTHS)
    [(pool, table)] = cache
    pool = jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), pool)
    for layer in (0, 1):
        values = jnp.arange(3 * 12 * 2 * 4, dtype=jnp.float32).reshape(3, 12, 2, 4) + 1000 * layer
        pool = pages_from_dense(pool, table, layer, values, -values)
    assert fits
    return ((pool, table),)


def dense(cache, slot: int) -> np.ndarray:
    [(pool, table)] = cache
    length = int(table.lengths[slot])
    return np.stack(
        [np.stack(dense_from_pages(pool, table, layer, 12))[:, slot, :length] for layer in (0, 1)]
    )


def test_swapped_sequence_comes_back_in_another_slot(cache):
    before, other = dense(cache, 0), dense(cache, 1)
    contents = jax.device_get(swap_out(cache, 0, num_pages=4))  # a page more than it has
    cache, _ = release_all(cache, jnp.array([True, False, False]))
    cache, ok = swap_in(cache, 2, contents, 0, 11)
    assert ok
    check_integrity(cache[0][1])
    assert np.array_equal(dense(cache, 2), before) and np.array_equal(dense(cache, 1), other)


def test_pages_that_a_slot_has_already_are_left_alone(cache):
    before = dense(cache, 0)
    contents = jax.device_get(swap_out(cache, 0, num_pages=3))
    [(pool, table)] = cache
    cache, _ = fork_all(cache, jnp.array([0, 1, 0], jnp.int32))  # 2 holds 0's pages, full or not
    [(pool, table)] = cache
    assert np.asarray(table.ref_counts)[np.asarray(table.block_tables[2, 0])] == 2
    wrong = jax.tree.map(lambda its: its.copy(), contents)
    for its in jax.tree.leaves(wrong):
        its[:2] = np.nan  # must not be looked at
    cache, _ = release_all(cache, jnp.array([False, False, True]))
    cache, fits = reserve_all(cache, jnp.array([0, 0, 8], jnp.int32))
    cache, _ = append_all(cache, jnp.array([0, 0, 8], jnp.int32))
    [(pool, table)] = cache
    keys = [dense_from_pages(pool, table, layer, 12) for layer in (0, 1)]
    for layer, (k, v) in enumerate(keys):
        shifted = [x.at[2, :8].set(x[0, :8]) for x in (k, v)]
        pool = pages_from_dense(pool, table, layer, *shifted)
    cache, ok = swap_in(((pool, table),), 2, wrong, 2, 11)
    assert fits and ok
    assert np.array_equal(dense(cache, 2), before)


def test_nothing_happens_when_the_pool_is_short(cache):
    contents = jax.device_get(swap_out(cache, 0, num_pages=4))
    cache, fits = reserve_all(cache, jnp.array([0, 0, 8], jnp.int32))  # 7 of 8 pages are held
    assert fits
    cache, _ = release_all(cache, jnp.array([False, False, True]))
    cache, _ = reserve_all(cache, jnp.array([5, 0, 0], jnp.int32))
    before, others = cache, [dense(cache, slot) for slot in (0, 1)]
    cache, ok = swap_in(cache, 2, contents, 0, 13)
    assert not ok
    assert all(map(np.array_equal, jax.tree.leaves(cache[0][1]), jax.tree.leaves(before[0][1])))
    assert all(np.array_equal(dense(cache, slot), others[slot]) for slot in (0, 1))
