"""The block table against an oracle of dicts and lists, and what its check finds."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from helpers_oracle import Oracle
from paxkv import block_table, reservation, sharing
from paxkv.block_table import BlockTable, init_block_table
from paxkv.integrity import check_integrity
from paxkv.pallas_kernels.layout import NULL_PAGE

NUM_SLOTS, MAX_PAGES = 3, 4
SIZES = {1: 9, 4: 6, 16: 14, 128: 6}  # page size: pages; 13 serve everyone, fewer run out

reserve = jax.jit(reservation.reserve)
append = jax.jit(block_table.append)
fork = jax.jit(block_table.fork)
release = jax.jit(block_table.release)
truncate = jax.jit(block_table.truncate)
adopt = jax.jit(sharing.adopt)
hold = jax.jit(sharing.hold)
merge = jax.jit(sharing.merge)


@pytest.fixture(autouse=True)
def strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


def i32(*numbers: int) -> jax.Array:
    return jnp.array(numbers, jnp.int32)


def table_with(*lengths: int, num_pages: int = 14, page_size: int = 4) -> BlockTable:
    """A table with a slot of each length, its pages in order from page 1."""
    table = init_block_table(len(lengths), MAX_PAGES, num_pages, page_size)
    table, _, fits = reserve(table, i32(*lengths))
    table, stored = append(table, i32(*lengths))
    assert fits and stored
    return table


def num_free(table: BlockTable) -> int:
    return int((table.ref_counts == 0).sum())


class TableMachine(RuleBasedStateMachine):
    """Any sequence of operations: same verdict, same rows, nothing changed when refused."""

    @initialize(page_size=st.sampled_from(sorted(SIZES)))
    def start(self, page_size: int) -> None:
        sizes = {"num_pages": SIZES[page_size], "page_size": page_size}
        self.table = init_block_table(NUM_SLOTS, MAX_PAGES, **sizes)
        self.oracle = Oracle(num_slots=NUM_SLOTS, max_pages=MAX_PAGES, **sizes)

    def draw_tokens(self, data: st.DataObject) -> list[int]:
        page_size = self.oracle.page_size
        tokens = st.one_of(
            st.sampled_from([0, 1, page_size]),
            st.integers(0, page_size + 1),
            st.integers(0, MAX_PAGES * page_size),
            st.sampled_from([-1, MAX_PAGES * page_size + 1, 2**31 - 1]),
        )
        return data.draw(st.lists(tokens, min_size=NUM_SLOTS, max_size=NUM_SLOTS))

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        new_tokens = self.draw_tokens(data)
        table, copies, fits = reserve(self.table, i32(*new_tokens))
        num_pages = SIZES[self.oracle.page_size]
        expected, expected_copies = self.oracle.reserve(new_tokens)
        none = {slot: (NULL_PAGE, num_pages + slot) for slot in range(NUM_SLOTS)}
        pairs = zip(copies.source.tolist(), copies.target.tolist(), strict=True)
        assert dict(enumerate(pairs)) == none | expected_copies
        self.check(table, fits, expected)
        if expected:
            # Nothing is ever written to a page that was given up: it lies before a window.
            gone = [NULL_PAGE in row for row in self.oracle.rows.values()]
            written = np.where(gone, 0, new_tokens)
            check_integrity(table, self.held(), new_tokens=written)

    @rule(parents=st.lists(st.integers(0, NUM_SLOTS - 1), min_size=NUM_SLOTS, max_size=NUM_SLOTS))
    def fork(self, parents: list[int]) -> None:
        table, ok = fork(self.table, i32(*parents))
        self.check(table, ok, self.oracle.fork(parents))

    @rule(parent=st.sampled_from([-1, NUM_SLOTS]))
    def fork_from_nowhere(self, parent: int) -> None:
        parents = [parent, *range(1, NUM_SLOTS)]
        table, ok = fork(self.table, i32(*parents))
        self.check(table, ok, self.oracle.fork(parents))

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        new_tokens = self.draw_tokens(data)
        table, fits = append(self.table, i32(*new_tokens))
        self.check(table, fits, self.oracle.append(new_tokens))

    @rule()
    def fill_what_is_reserved(self) -> None:
        held = [len(row) * self.oracle.page_size for row in self.oracle.rows.values()]
        room = [tokens - self.oracle.lengths[slot] for slot, tokens in enumerate(held)]
        table, fits = append(self.table, i32(*room))
        self.check(table, fits, self.oracle.append(room))

    @rule(done=st.lists(st.booleans(), min_size=NUM_SLOTS, max_size=NUM_SLOTS))
    def release(self, done: list[bool]) -> None:
        table, ok = release(self.table, jnp.array(done))
        self.check(table, ok, self.oracle.release(done))

    @rule(data=st.data(), off_by=st.sampled_from([0, 0, 0, -1, 1]))
    def truncate(self, data: st.DataObject, off_by: int) -> None:
        lengths = [data.draw(st.integers(0, length)) for length in self.oracle.lengths.values()]
        lengths[0] += off_by
        table, ok = truncate(self.table, i32(*lengths))
        self.check(table, ok, self.oracle.truncate(lengths))

    @precondition(lambda self: any(map(any, self.oracle.rows.values())))
    @rule(data=st.data())
    def give_up_first_page(self, data: st.DataObject) -> None:
        slots = [slot for slot, row in self.oracle.rows.items() if any(row)]
        slot = data.draw(st.sampled_from(slots))
        column = next(i for i, page in enumerate(self.oracle.rows[slot]) if page != NULL_PAGE)
        self.oracle.give_up_first_page(slot)
        self.check(give_up_page(self.table, slot, column), True, True)

    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        """Empty slots begin as another one does, with held pages, or with any at all."""
        may_share = self.oracle.unreserved
        known = [[page for page in row if page in may_share] for row in self.oracle.rows.values()]
        held = [page for page in may_share if self.oracle.holds[page]]
        anything = data.draw(st.permutations(may_share))
        pages, lengths = [], []
        for row in self.oracle.rows.values():
            source = data.draw(st.sampled_from([*known, *known, held, anything]))[:MAX_PAGES]
            room = len(source) * self.oracle.page_size
            length = data.draw(st.one_of(st.just(0), st.just(room), st.integers(-1, room)))
            pages.append([*source, *[NULL_PAGE] * (MAX_PAGES - len(source))])
            lengths.append(0 if row and data.draw(st.integers(0, 7)) else length)
        table, ok = adopt(self.table, jnp.array(pages, jnp.int32), i32(*lengths))
        self.check(table, ok, self.oracle.adopt(pages, lengths))

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        pages = self.oracle.unreserved
        live = [page for page in pages if self.oracle.is_live(page)]
        held = [page for page in pages if self.oracle.holds[page]]
        change = {}
        if live:
            change |= dict.fromkeys(data.draw(st.sets(st.sampled_from(live), max_size=3)), 1)
        if held:
            change |= dict.fromkeys(data.draw(st.sets(st.sampled_from(held), max_size=3)), -1)
        if data.draw(st.integers(0, 7)) == 0:
            change[data.draw(st.sampled_from(self.oracle.free or [NULL_PAGE]))] = 1
        of_pages = np.zeros(SIZES[self.oracle.page_size], np.int32)
        of_pages[list(change)] = list(change.values())
        table, ok = hold(self.table, jnp.asarray(of_pages))
        self.check(table, ok, self.oracle.hold(change))

    @precondition(lambda self: len(self.oracle.unreserved) > 1)
    @rule(data=st.data())
    def merge(self, data: st.DataObject) -> None:
        page, other, *_ = data.draw(st.permutations(self.oracle.unreserved))
        if set(self.oracle.owners(page)) & set(self.oracle.owners(other)):
            return  # a sequence never has a page's tokens twice at the same place
        same_as = jnp.arange(SIZES[self.oracle.page_size], dtype=jnp.int32).at[page].set(other)
        table, ok = merge(self.table, same_as)
        self.check(table, ok, self.oracle.merge({page: other}))

    def held(self) -> np.ndarray:
        return np.array([self.oracle.holds[p] for p in range(SIZES[self.oracle.page_size])])

    def check(self, table: BlockTable, verdict: jax.Array | bool, expected: bool) -> None:
        assert bool(verdict) == expected
        if not expected:
            chex.assert_trees_all_equal(table, self.table)
        check_integrity(table, self.held())
        rows = [row + [NULL_PAGE] * (MAX_PAGES - len(row)) for row in self.oracle.rows.values()]
        assert table.block_tables.tolist() == rows
        assert table.num_pages.tolist() == [len(row) for row in self.oracle.rows.values()]
        assert table.lengths.tolist() == list(self.oracle.lengths.values())
        assert np.flatnonzero(table.ref_counts == 0).tolist() == self.oracle.free
        self.table = table


def give_up_page(table: BlockTable, slot: int, column: int) -> BlockTable:
    page = table.block_tables[slot, column]
    return dataclasses.replace(
        table,
        block_tables=table.block_tables.at[slot, column].set(NULL_PAGE),
        ref_counts=table.ref_counts.at[page].add(-1),
    )


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 2, 1), "num_slots=0 must be at least 1"),
        ((1, 0, 2, 1), "max_pages=0 must be at least 1"),
        ((1, 1, 1, 1), "num_pages=1 must be at least 2"),
        ((1, 1, 2, 0), "page_size=0 must be at least 1"),
        ((1, 2**27, 2, 16), "lower max_pages to 134217726"),
    ],
)
def test_init_refuses_sizes_out_of_range(sizes, message):
    with pytest.raises(ValueError, match=message):
        init_block_table(*sizes)


def test_null_page_is_never_handed_out():
    table = table_with(16, 16, num_pages=9)
    assert num_free(table) == 0 and not (table.block_tables == NULL_PAGE).any()


def test_pages_reserved_for_a_prompt_are_not_taken_again_by_its_chunks():
    table, _, _ = reserve(init_block_table(2, MAX_PAGES, 9, 4), i32(10, 0))
    for chunk in (4, 4, 2):
        table, _, fits = reserve(table, i32(chunk, 0))
        table, stored = append(table, i32(chunk, 0))
        assert fits and stored
    assert table.num_pages.tolist() == [3, 0]
    check_integrity(table)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "peak"), [(16, 1, 4), (16, 2, 5), (13, 4, 4), (15, 8, 6)]
)
def test_pages_a_request_takes_are_those_of_its_stored_tokens(prompt, max_tokens, peak):
    """The last sampled token is never stored, so it needs no room."""
    table, _, _ = reserve(init_block_table(1, 8, 9, 4), i32(prompt))
    table, _ = append(table, i32(prompt))
    for _ in range(max_tokens - 1):
        table, _, _ = reserve(table, i32(1))
        table, _ = append(table, i32(1))
    assert table.num_pages.tolist() == [peak] and num_free(table) == 8 - peak


def test_row_reused_by_a_shorter_sequence_names_no_left_over_page():
    table = table_with(16, 4)
    table, _ = release(table, jnp.array([True, False]))
    table, _, _ = reserve(table, i32(3, 0))
    assert table.block_tables[0].tolist() == [1, NULL_PAGE, NULL_PAGE, NULL_PAGE]
    check_integrity(table)


def shared_table() -> BlockTable:
    """Two slots of 8 tokens that share page 1; page 2 and page 3 are their own."""
    table = table_with(8, 8)
    return dataclasses.replace(
        table,
        block_tables=table.block_tables.at[1, 0].set(1).at[1, 1].set(3),
        ref_counts=table.ref_counts.at[1].set(2).at[4].set(0),
    )


@pytest.mark.parametrize("first", [0, 1])
def test_shared_page_is_free_when_its_last_owner_leaves(first):
    table = shared_table()
    check_integrity(table)
    for slot, count in ((first, 1), (1 - first, 0)):
        table, ok = release(table, jnp.arange(2) == slot)
        assert ok and table.ref_counts[1] == count
        check_integrity(table)
    assert num_free(table) == 13


def test_shared_page_released_by_both_owners_at_once_is_free():
    table, ok = release(shared_table(), jnp.array([True, True]))
    assert ok and num_free(table) == 13
    check_integrity(table)


def test_page_freed_twice_is_refused_and_nothing_changes():
    table = shared_table()
    corrupt = dataclasses.replace(table, ref_counts=table.ref_counts.at[1].set(1))
    for operation, argument in ((release, jnp.array([True, True])), (truncate, i32(0, 0))):
        after, ok = operation(corrupt, argument)
        assert not ok
        chex.assert_trees_all_equal(after, corrupt)


def test_given_up_pages_count_for_positions_and_are_not_freed_again():
    table = give_up_page(table_with(14, 4), 0, 0)
    check_integrity(table)
    table, _, fits = reserve(table, i32(2, 0))  # position 15 is in the fourth page still
    assert fits and table.num_pages.tolist() == [4, 1]
    table, ok = release(table, jnp.array([True, True]))
    assert ok and num_free(table) == 13 and table.ref_counts[NULL_PAGE] == 1
    check_integrity(table)


@pytest.mark.parametrize("operation", ["reserve", "append", "fork", "release", "truncate"])
def test_operations_are_traced_once_and_take_a_donated_table(operation):
    module = reservation if operation == "reserve" else block_table
    traced_once = chex.assert_max_traces(getattr(module, operation), n=1)
    step = jax.jit(traced_once, donate_argnums=0)
    arguments = [i32(0, 1), i32(3, 0), i32(0, 0), i32(0, 60), i32(1, 1)]
    table = table_with(8, 0)
    for argument in arguments:
        table, *_ = step(table, argument > 0 if operation == "release" else argument)
    check_integrity(table)


def test_reserve_and_release_run_inside_a_loop():
    """One slot of two decodes 40 tokens and starts anew whenever its row is full."""

    def step(_, table: BlockTable) -> BlockTable:
        table, _, _ = reservation.reserve(table, i32(1, 0))
        table, _ = block_table.append(table, i32(1, 0))
        table, _ = block_table.release(table, table.lengths == MAX_PAGES * 4)
        return table

    start = table_with(0, 5)
    table = jax.jit(lambda table: jax.lax.fori_loop(0, 40, step, table))(start)
    assert table.lengths.tolist() == [40 % 16, 5]
    check_integrity(table)


def changed(table: BlockTable, name: str, index, value: int) -> BlockTable:
    return dataclasses.replace(table, **{name: getattr(table, name).at[index].set(value)})


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("ref_counts", 9, 1, "page 9 has a reference count of 1, but 0 table entries"),  # leaked
        ("ref_counts", 2, 0, "page 2 has a reference count of 0, but 1 table entries"),
        ("ref_counts", 9, -1, "page 9 has a reference count of -1"),
        ("ref_counts", NULL_PAGE, 0, f"page {NULL_PAGE} has a reference count of 0"),
        ("block_tables", (1, 0), 2, "page 2 has a reference count of 1, but 2 table entries"),
        ("block_tables", (1, 2), 5, "slot 1 counts 1 pages, yet names page 5 at 2"),  # stale
        ("block_tables", (0, 0), 2, "slot 0 names page 2 more than once"),
        ("block_tables", (0, 0), 14, "slot 0 names page 14 at 0; the pool has 14 pages"),
        ("block_tables", (0, 0), -1, "slot 0 names page -1 at 0; the pool has 14 pages"),
        ("lengths", 1, 5, "slot 1 stores 5 tokens; its 1 pages of 4 have room for 0 to 4"),
        ("lengths", 0, -1, "slot 0 stores -1 tokens"),
        ("num_pages", 0, 5, "slot 0 counts 5 pages; a row has room for 0 to 4"),
    ],
)
def test_check_integrity_says_what_is_corrupt(name, index, value, message):
    table = table_with(10, 4)
    check_integrity(table)
    with pytest.raises(AssertionError, match=message):
        check_integrity(changed(table, name, index, value))


def test_check_integrity_counts_holds_of_a_prefix_index():
    held = np.zeros(14, np.int32)
    held[[1, 9]] = 1  # a page in use, and one that no sequence names
    table = changed(changed(table_with(10, 4), "ref_counts", 1, 2), "ref_counts", 9, 1)
    check_integrity(table, held)
    with pytest.raises(AssertionError, match="page 1 has a reference count of 2, but 1 table"):
        check_integrity(table)


def test_check_integrity_wants_one_owner_for_pages_about_to_be_written():
    table, _ = truncate(shared_table(), i32(7, 3))  # slot 1 would write into shared page 1
    check_integrity(table, new_tokens=i32(1, 0))
    with pytest.raises(AssertionError, match="slot 1 is about to write page 1 at 0, which has"):
        check_integrity(table, new_tokens=i32(0, 1))
    with pytest.raises(AssertionError, match="slot 0 is about to store 9 tokens; its 2 pages of"):
        check_integrity(table, new_tokens=i32(2, 0))
