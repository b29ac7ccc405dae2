"""What is special to the Hopper kernel, interpreted with race detection; see attention_contract."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers_attention import DTYPES, WithoutWait, attend_interpreted, interpreted
from paxkv.pallas_kernels import PagedAttention, gpu_hopper_softmax, gpu_hopper_swapped
from paxkv.pallas_kernels.attention_cases import SMALL_CASES, Case
from paxkv.pallas_kernels.attention_inputs import Inputs, random_inputs
from paxkv.pallas_kernels.gpu_hopper import paged_attention_hopper
from paxkv.pallas_kernels.testing import assert_right


@functools.cache
def hopper(num_multiprocessors: int):
    """The kernel for a GPU that has so many."""
    return interpreted(paged_attention_hopper, num_multiprocessors=num_multiprocessors)


def attend(inputs: Inputs, *, num_multiprocessors: int = 1, **changes) -> PagedAttention:
    return attend_interpreted(hopper(num_multiprocessors), inputs, **changes)


# One program does all, and its rings wrap: 2 heads x 3 sequences x 3 tiles of 64 tokens pass 6
# stages; heads of 256 leave room for 2.
DECODE_THAT_WRAPS = Case(lengths=((1, 130), (1, 192), (1, 150)), num_kv_heads=2, num_heads=4)
PREFILL_THAT_WRAPS = Case(lengths=((70, 200),), num_heads=2, num_kv_heads=1, head_dim=256)

# Waits in the order in which they are traced. The interpreter does not follow what products read:
# it notices if memory is written to anew, or a barrier signalled again, before anybody looked. The
# queries of a prefill are but once in a buffer.
_DECODE, _PREFILL = (
    (gpu_hopper_swapped, DECODE_THAT_WRAPS),
    (gpu_hopper_softmax, PREFILL_THAT_WRAPS),
)
LEFT_OUT = {
    "decode, queries": (*_DECODE, 0),
    "decode, keys": (*_DECODE, 1),
    "decode, values": (*_DECODE, 2),
    "prefill, keys": (*_PREFILL, 1),
    "prefill, values": (*_PREFILL, 2),
}


# Without the wait, products may be of what the memory held before: of infinities or NaN, too.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", LEFT_OUT)
def test_copy_that_nobody_waits_for_is_noticed(monkeypatch, name):
    module, case, number = LEFT_OUT[name]
    monkeypatch.setattr(module, "plgpu", WithoutWait(number, of=3))
    call = interpreted(paged_attention_hopper, num_multiprocessors=1)
    inputs = random_inputs(case, jnp.bfloat16)
    max_q_len = 1 if case.is_decode else None
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RACE DETECTED|no threads observed"):
        jax.block_until_ready(attend_interpreted(call, inputs, max_q_len=max_q_len))


class TestHopper:
    @pytest.mark.parametrize("name", ["decode_sinks", "decode_page_256"])
    def test_decode_of_split_work_matches_dense_attention(self, name):
        inputs = random_inputs(SMALL_CASES[name], jnp.bfloat16)
        assert_right(inputs, attend(inputs, num_multiprocessors=8, max_q_len=1))

    def test_float16_and_ragged_queries_in_split_work(self):
        inputs = random_inputs(SMALL_CASES["mixed_all_settings"], DTYPES["float16"])
        assert_right(inputs, attend(inputs, num_multiprocessors=16))

    @pytest.mark.parametrize(("group", "head_dim"), [(12, 64), (2, 256), (3, 80)])
    def test_decode_takes_any_group_and_head_dim(self, group, head_dim):
        # Query heads are 16 columns of products, 8, or rows.
        case = Case(lengths=((1, 18), (1, 70)), num_heads=group, num_kv_heads=1, head_dim=head_dim)
        inputs = random_inputs(case, jnp.bfloat16)
        assert_right(inputs, attend(inputs, max_q_len=1))

    def test_decode_ring_wraps_across_sequences(self):
        inputs = random_inputs(DECODE_THAT_WRAPS, jnp.bfloat16)
        assert_right(inputs, attend(inputs, max_q_len=1))

    def test_prefill_ring_wraps(self):
        inputs = random_inputs(PREFILL_THAT_WRAPS, jnp.bfloat16)
        assert_right(inputs, attend(inputs))

    def test_rows_that_only_see_missing_pages_are_zero(self):
        case = Case(lengths=((2, 9), (1, 12)), page_size=16, num_pages=8)
        inputs = random_inputs(case, jnp.bfloat16)
        tables = jnp.full_like(inputs.arguments["block_tables"], -7)
        result = attend(inputs, block_tables=tables)
        assert not np.asarray(result.out, np.float32).any()
        assert np.isneginf(result.log_sum_exp).all()

    def test_window_past_pages_given_up_reads_the_rest(self):
        case = Case(lengths=((1, 100), (30, 120)), window=20, page_size=8)
        inputs = random_inputs(case, jnp.bfloat16)
        assert_right(inputs, attend(inputs))
        decode = dataclasses.replace(case, lengths=((1, 100), (1, 75)))
        inputs = random_inputs(decode, jnp.bfloat16)
        assert_right(inputs, attend(inputs, max_q_len=1))
