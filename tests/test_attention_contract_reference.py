"""The reference does what every implementation of paged attention must do."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_contract import PagedAttentionContract
from helpers_attention import attend
from paxkv.pallas_kernels.attention_cases import Case
from paxkv.pallas_kernels.attention_inputs import random_inputs
from paxkv.pallas_kernels.testing import assert_right, assert_same_bits


class TestReference(PagedAttentionContract):
    implementations = ("reference",)


@settings(max_examples=40)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 70)).map(lambda x: (min(x), x[1])),
        min_size=1,
        max_size=5,
    ),
    page_size=st.sampled_from([1, 4]),
    window=st.sampled_from([None, 7]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_lengths_match_dense_attention(lengths, page_size, window, seed):
    lengths = (*lengths, *[(0, 0)] * (5 - len(lengths)))
    case = Case(
        lengths=lengths, page_size=page_size, window=window,
        num_rows=64, max_pages=72 // page_size + 1, num_pages=5 * (72 // page_size + 1) + 1,
    )  # fmt: skip
    inputs = random_inputs(case, jnp.float32, seed)
    assert_right(inputs, attend("reference", inputs))
    if case.is_decode:
        assert_right(inputs, attend("reference", inputs, max_q_len=1))


@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=((1, 384),), page_size=128, max_pages=3, num_rows=1),
        Case(lengths=((1, 320),) * 3, page_size=64, max_pages=5, num_rows=3),
        Case(lengths=((1, 500), (1, 7), (0, 40), (1, 129))),
        Case(lengths=((1, 256),) * 33, page_size=128, max_pages=2, num_rows=33),
        Case(lengths=(*[(1, 300)] * 39, (1, 20)), num_rows=40, num_pages=1000),
    ],
    ids=["full_table", "full_tables", "uneven", "long_turns_full", "long_turns"],
)
def test_turns_over_many_tiles_match_dense_attention(case):
    inputs = random_inputs(case, jnp.float32)
    assert_right(inputs, attend("reference", inputs, max_q_len=1))


@pytest.mark.parametrize("loudest", [0, 150, 298])
def test_loudest_key_wins_whichever_tile_it_is_in(loudest):
    inputs = random_inputs(Case(lengths=((1, 300),)), jnp.float32)
    page, offset = inputs.tables[0][loudest // 16], loudest % 16
    quiet = jnp.zeros_like(inputs.arguments["key_pages"])
    changes = {
        "queries": jnp.ones_like(inputs.arguments["queries"]),
        "new_keys": jnp.zeros_like(inputs.arguments["new_keys"]),
        "key_pages": quiet.at[page, :, offset].set(20.0),
    }
    result = attend("reference", inputs, **changes, max_q_len=1, scale=1.0)
    right = np.repeat(inputs.values[0][loudest], result.out.shape[1] // 2, axis=0)
    np.testing.assert_allclose(np.asarray(result.out[0]), right, rtol=1e-6)


def test_slots_past_their_tables_take_no_tile_twice():
    inputs = random_inputs(Case(lengths=((1, 96),) * 20, max_pages=6), jnp.float32)
    tables = inputs.arguments["block_tables"][:, :3]
    results = [
        attend("reference", inputs, block_tables=tables, max_q_len=max_q_len)
        for max_q_len in (1, None)
    ]
    decoded, mixed = (np.asarray(result.log_sum_exp)[:20] for result in results)
    np.testing.assert_allclose(decoded, mixed, rtol=1e-5)


@pytest.mark.parametrize("max_q_len", [1, None])
def test_what_lies_behind_the_window_in_a_page_that_is_held_changes_no_bit(max_q_len):
    inputs = random_inputs(Case(lengths=((1, 300), (1, 43)), window=21), jnp.float32)
    pools = {name: np.array(inputs.arguments[name]) for name in ("key_pages", "value_pages")}
    for table, (_, kv_len) in zip(inputs.tables, inputs.case.lengths, strict=True):
        column, offset = divmod(kv_len - 21, inputs.case.page_size)
        assert offset > 0
        for pages in pools.values():
            pages[table[column], :, :offset] = np.nan
    poisoned = {name: jnp.asarray(pages) for name, pages in pools.items()}
    clean, dirty = (
        attend("reference", inputs, max_q_len=max_q_len, **changes) for changes in ({}, poisoned)
    )
    assert_same_bits(np.asarray(dirty.out), np.asarray(clean.out))
