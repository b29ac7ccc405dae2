"""The accounts of a pool: every slot is of one kind, and of the right one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.block_table import BlockTable, append, fork, init_block_table, release, truncate
from paxkv.decoder import LayerGroup
from paxkv.reservation import reserve
from paxkv.waste import (
    account_pool,
    account_slots,
    duplicate_tokens,
    in_bytes,
    padding_bytes,
    page_fill,
    pages_of_slot_groups,
)

SLOTS, MAX_PAGES, POOL_PAGES, PAGE_SIZE = 3, 5, 12, 4


def make_table(*tokens: int) -> BlockTable:
    """Slots that store so many tokens."""
    return store(init_block_table(SLOTS, MAX_PAGES, POOL_PAGES, PAGE_SIZE), *tokens)


def store(table: BlockTable, *tokens: int, reserved: tuple[int, ...] | None = None) -> BlockTable:
    new = jnp.array(tokens, jnp.int32)
    table, _, fits = reserve(table, new if reserved is None else jnp.array(reserved, jnp.int32))
    assert fits
    table, fits = append(table, new)
    assert fits
    return table


account_jit, slots_jit = jax.jit(account_pool), jax.jit(account_slots)
reserve_jit, fork_jit, truncate_jit, release_jit = map(jax.jit, (reserve, fork, truncate, release))


def kinds(table: BlockTable, **flags) -> dict[str, int]:
    account = jax.device_get(account_jit(table, **flags))
    return {field.name: int(getattr(account, field.name)) for field in dataclasses.fields(account)}


def test_an_empty_pool_is_free_but_for_the_null_page():
    expected = {"used": 0, "tail": 0, "reusable": 0, "free": 44, "external": 0, "null": 4}
    assert kinds(make_table(0, 0, 0)) == expected


def test_pages_of_sequences_that_have_ended_are_reusable():
    table = make_table(5, 4, 1)
    assert kinds(table, is_live=jnp.array([True, False, True])) == {
        "used": 6, "tail": 6, "reusable": 4, "free": 28, "external": 0, "null": 4,
    }  # fmt: skip


def test_tokens_before_a_window_are_tail():
    # At 9 tokens the next query, at position 9, sees 4 tokens: 6 to 9. Page 0 could be released.
    table = make_table(9, 0, 0)
    assert kinds(table)["used"] == 9
    account = jax.device_get(account_pool(table, window=4))
    assert (account.used, account.tail) == (3, 9)
    slots = jax.device_get(account_slots(table, window=4))
    assert (slots.used[0], slots.tail[0]) == (3, 9)


def test_tails_are_what_pages_hold_past_the_tokens():
    assert kinds(make_table(5, 4, 1)) == {
        "used": 10, "tail": 6, "reusable": 0, "free": 28, "external": 0, "null": 4,
    }  # fmt: skip


def test_reserved_pages_are_tail():
    table = store(make_table(0, 0, 0), 3, 0, 0, reserved=(11, 0, 0))
    assert kinds(table)["used"] == 3 and kinds(table)["tail"] == 9


def test_free_pages_are_external_while_a_request_waits():
    account = kinds(make_table(5, 4, 1), is_waiting=True)
    assert account["external"] == 28 and account["free"] == 0


def test_a_shared_slot_counts_once_and_the_furthest_sequence_says_how_full_its_page_is():
    table, ok = fork(make_table(6, 0, 0), jnp.array([0, 0, 2], jnp.int32))
    assert ok
    assert kinds(table)["used"] == 6 and kinds(table)["tail"] == 2
    # Slot 0 goes on in a copy of the half-full page, slot 1 falls back to the full one.
    table = store(table, 1, 0, 0)
    assert kinds(table)["used"] == 4 + 2 + 3
    slots = jax.device_get(account_slots(table))
    assert slots.used.tolist() == [7, 6, 0]
    assert slots.tail.tolist() == [1, 2, 0]
    assert slots.shared.tolist() == [4, 4, 0]


def test_pages_that_only_an_index_holds_are_reusable():
    table = make_table(8, 0, 0)
    first = int(table.block_tables[0, 0])
    table = dataclasses.replace(table, ref_counts=table.ref_counts.at[first].add(1))
    table, ok = release(table, jnp.array([True, False, False]))
    assert ok
    assert kinds(table) == {
        "used": 0, "tail": 0, "reusable": 4, "free": 40, "external": 0, "null": 4,
    }  # fmt: skip


def test_tokens_that_left_a_window_are_in_no_account():
    table = make_table(10, 0, 0)
    gone = int(table.block_tables[0, 0])
    table = dataclasses.replace(
        table,
        block_tables=table.block_tables.at[0, 0].set(0),
        ref_counts=table.ref_counts.at[gone].set(0),
    )
    assert kinds(table)["used"] == 6 and kinds(table)["free"] == 36
    assert int(account_slots(table).used[0]) == 6


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "reserve", "fork", "truncate", "release"]),
            st.integers(0, SLOTS - 1),
            st.integers(0, 2 * PAGE_SIZE),
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_kinds_add_up_to_the_pool_whatever_happens(operations, is_waiting):
    table = make_table(0, 0, 0)
    for operation, slot, tokens in operations:
        is_slot = np.arange(SLOTS) == slot
        new = jnp.where(is_slot, tokens, 0).astype(jnp.int32)
        if operation in ("store", "reserve"):
            table, _, fits = reserve_jit(table, new)
            table = append(table, new)[0] if operation == "store" and fits else table
        elif operation == "fork":
            table, _ = fork_jit(table, jnp.where(is_slot, tokens % SLOTS, jnp.arange(SLOTS)))
        elif operation == "truncate":
            table, _ = truncate_jit(table, jnp.where(is_slot, table.lengths // 2, table.lengths))
        else:
            table, _ = release_jit(table, jnp.array(is_slot))
        account = kinds(table, is_waiting=is_waiting)
        assert sum(account.values()) == POOL_PAGES * PAGE_SIZE
        assert min(account.values()) >= 0
        slots = jax.device_get(slots_jit(table))
        assert np.all(slots.used == table.lengths) and np.all(slots.tail >= 0)
        assert account["used"] == int(page_fill(table).sum()) <= int(slots.used.sum())


def test_a_decode_loop_carries_the_accounts_of_every_step():
    @jax.jit
    def loop(table):
        def step(table, _):
            one = jnp.array([1, 1, 0], jnp.int32)
            table, _, _ = reserve(table, one)
            table, _ = append(table, one)
            return table, account_pool(table)

        return jax.lax.scan(step, table, length=6)

    _, series = loop(make_table(2, 4, 0))
    assert series.used.tolist() == [8, 10, 12, 14, 16, 18]
    assert series.tail.tolist() == [4, 2, 4, 2, 4, 2]


def test_bytes_do_not_overflow():
    account = jax.device_get(account_pool(make_table(5, 4, 1)))
    assert in_bytes(account, bytes_per_token=2**40)["used"] == 10 * 2**40


@pytest.mark.parametrize(("backend", "padding"), [("cpu", 0), ("tpu", 32_768)])
def test_heads_are_filled_up_on_tpus(backend, padding, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    group = LayerGroup(layers=(0, 1, 2, 3), num_kv_heads=2, head_dim=64)
    assert padding_bytes([group], page_size=16, dtype=jnp.bfloat16) == padding


def test_duplicates_are_all_copies_but_the_fullest():
    assert duplicate_tokens(["a", "b", "a", None, "a"], [4, 4, 3, 0, 4]) == 7
    assert duplicate_tokens([None, "b"], [0, 4]) == 0


def test_pages_of_a_group_count_once_if_shared():
    table = init_block_table(5, MAX_PAGES, POOL_PAGES, PAGE_SIZE)
    table = store(table, 10, 0, 3, 0, 6)  # 3, 0, 1, 0 and 2 pages
    table, ok = fork(table, jnp.array([0, 0, 2, 3, 4]))
    assert ok
    pages = pages_of_slot_groups(table, 2)  # the fifth slot has no second
    assert (pages.alone.tolist(), pages.shared.tolist()) == ([6, 1], [3, 1])
    table = store(table, 1, 1, 1, 0, 1)  # each of the forked ones writes to a page of its own
    pages = pages_of_slot_groups(table, 2)
    assert (pages.alone.tolist(), pages.shared.tolist()) == ([6, 1], [4, 1])
