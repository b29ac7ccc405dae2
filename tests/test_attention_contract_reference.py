"""The reference does what every implementation of paged attention must do."""

import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_contract import PagedAttentionContract
from helpers_attention import attend
from paxkv.pallas_kernels.attention_cases import Case
from paxkv.pallas_kernels.attention_inputs import random_inputs
from paxkv.pallas_kernels.testing import assert_right


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
