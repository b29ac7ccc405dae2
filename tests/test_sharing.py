"""Pages that a table shares with a prefix index: what is refused, and that nothing is lost."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv import block_table, reservation, sharing
from paxkv.block_table import BlockTable, init_block_table
from paxkv.integrity import check_integrity
from paxkv.pallas_kernels.layout import NULL_PAGE

NUM_SLOTS, MAX_PAGES, NUM_PAGES, S = 3, 4, 14, 4

adopt = jax.jit(sharing.adopt)
hold = jax.jit(sharing.hold)
merge = jax.jit(sharing.merge)
reserve = jax.jit(reservation.reserve)
release = jax.jit(block_table.release)
append = jax.jit(block_table.append)


@pytest.fixture(autouse=True)
def strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


def i32(*numbers: int) -> jax.Array:
    return jnp.array(numbers, jnp.int32)


def per_page(**numbers: int) -> jax.Array:
    """`i32[P]` that is 0 but for pages p1, p2, ..."""
    change = np.zeros(NUM_PAGES, np.int32)
    for page, number in numbers.items():
        change[int(page[1:])] = number
    return jnp.asarray(change)


def same_as(**pages: int) -> jax.Array:
    """Every page as itself but for those that are named."""
    to = np.arange(NUM_PAGES, dtype=np.int32)
    for page, other in pages.items():
        to[int(page[1:])] = other
    return jnp.asarray(to)


def rows(*pages: tuple[int, ...]) -> jax.Array:
    padded = [[*row, *[NULL_PAGE] * (MAX_PAGES - len(row))] for row in pages]
    return jnp.array([*padded, *[[NULL_PAGE] * MAX_PAGES] * (NUM_SLOTS - len(padded))], jnp.int32)


def donor_table(length: int = 10) -> BlockTable:
    """Slot 0 has tokens in pages 1, 2 and 3; an index holds pages 1 and 2."""
    table = init_block_table(NUM_SLOTS, MAX_PAGES, NUM_PAGES, S)
    table, _, _ = reserve(table, i32(length, 0, 0))
    table, _ = append(table, i32(length, 0, 0))
    table, ok = hold(table, per_page(p1=1, p2=1))
    assert ok
    return table


def check(table: BlockTable, **held: int) -> None:
    check_integrity(table, per_page(**held))


def test_held_pages_outlive_their_slot_and_can_be_adopted():
    table, ok = release(donor_table(), jnp.array([True, False, False]))
    assert ok and np.flatnonzero(table.ref_counts).tolist() == [NULL_PAGE, 1, 2]
    check(table, p1=1, p2=1)
    table, ok = adopt(table, rows((), (1, 2), (1,)), i32(0, 8, 4))
    assert ok
    assert table.block_tables[1].tolist() == [1, 2, 0, 0]
    assert (table.lengths.tolist(), table.num_pages.tolist()) == ([0, 8, 4], [0, 2, 1])
    assert table.ref_counts[1] == 3 and table.ref_counts[2] == 2
    check(table, p1=1, p2=1)
    table, ok = release(table, jnp.array([False, True, True]))
    table, dropped = hold(table, per_page(p1=-1, p2=-1))
    assert ok and dropped and np.count_nonzero(table.ref_counts) == 1
    check(table)


def test_letting_go_of_a_page_in_use_frees_nothing():
    table, _ = adopt(donor_table(), rows((), (1, 2)), i32(0, 8, 0))
    table, ok = hold(table, per_page(p1=-1, p2=-1))
    assert ok and table.ref_counts[1] == table.ref_counts[2] == 2
    check(table)


@pytest.mark.parametrize("length", [5, 7])
def test_page_adopted_in_part_is_copied_before_it_is_written(length):
    table, ok = adopt(donor_table(), rows((), (1, 2)), i32(0, length, 0))
    assert ok and table.num_pages[1] == 2
    table, copies, fits = reserve(table, i32(0, 1, 0))
    assert fits
    assert (copies.source[1], copies.target[1]) == (2, table.block_tables[1, 1])
    assert table.block_tables[1].tolist() == [1, 4, 0, 0]
    check_integrity(table, per_page(p1=1, p2=1), new_tokens=i32(0, 1, 0))


@pytest.mark.parametrize(
    ("pages", "lengths"),
    [
        (rows((), (5,)), i32(0, 4, 0)),  # page 5 is free
        (rows((), (1, NULL_PAGE)), i32(0, 5, 0)),
        (rows((), (NUM_PAGES,)), i32(0, 4, 0)),
        (rows((), (-1,)), i32(0, 4, 0)),
        (rows((1,)), i32(4, 0, 0)),  # slot 0 is not empty
        (rows((), (1, 2)), i32(0, -1, 0)),
        (rows((), (1, 2)), i32(0, MAX_PAGES * S + 1, 0)),
        (rows((), (1, 2)), i32(0, 2**31 - 1, 0)),
        (rows((), (1, 2), (5,)), i32(0, 8, 1)),  # one of two
    ],
)
def test_adopting_what_is_not_there_changes_nothing(pages, lengths):
    table = donor_table()
    after, ok = adopt(table, pages, lengths)
    assert not ok
    chex.assert_trees_all_equal(after, table)


@pytest.mark.parametrize("change", [{"p5": 1}, {"p5": -1}, {"p3": -2}, {"p0": 1}, {"p0": -1}])
def test_holding_a_free_page_or_the_null_page_changes_nothing(change):
    table = donor_table()
    after, ok = hold(table, per_page(p1=1, **change))
    assert not ok
    chex.assert_trees_all_equal(after, table)


def test_equal_pages_become_one_and_the_second_is_free():
    table, _, _ = reserve(donor_table(), i32(0, 8, 0))  # pages 4 and 5
    table, _ = append(table, i32(0, 8, 0))
    table, _ = block_table.fork(table, i32(0, 1, 1))  # two slots name them
    table, ok = merge(table, same_as(p4=1, p5=2))
    assert ok
    assert table.block_tables.tolist() == [[1, 2, 3, 0], [1, 2, 0, 0], [1, 2, 0, 0]]
    assert table.ref_counts[:6].tolist() == [1, 4, 4, 1, 0, 0]
    check(table, p1=1, p2=1)


@pytest.mark.parametrize("to", [5, NULL_PAGE, NUM_PAGES, -1])
def test_merging_into_a_page_that_is_not_there_changes_nothing(to):
    table = donor_table()
    after, ok = merge(table, same_as(p3=to))
    assert not ok
    chex.assert_trees_all_equal(after, table)


def test_null_page_is_not_renamed():
    table = donor_table()
    after, ok = merge(table, same_as(p0=1))
    assert not ok
    chex.assert_trees_all_equal(after, table)


@pytest.mark.parametrize("operation", ["adopt", "hold", "merge"])
def test_operations_are_traced_once_and_take_a_donated_table(operation):
    traced_once = chex.assert_max_traces(getattr(sharing, operation), n=1)
    step = jax.jit(traced_once, donate_argnums=0)
    arguments = {
        "adopt": [(rows((), (1,)), i32(0, 4, 0)), (rows(), i32(0, 0, 0))],
        "hold": [(per_page(p3=1),), (per_page(p3=-1),)],
        "merge": [(same_as(),), (same_as(p3=3),)],
    }
    table = donor_table()
    for its in arguments[operation]:
        table, ok = step(table, *its)
        assert ok
    check(table, p1=1, p2=1)
