"""The Hopper kernel, interpreted with race detection: what two warpgroups share is in order.

Interpretation is slow, so few of the named cases are run, those that take different ways through
the kernel: decode and prefill, work split or not, rings that wrap, edges, holes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers_attention import DTYPES
from paxkv.pallas_kernels import NULL_PAGE, PagedAttention
from paxkv.pallas_kernels.attention_cases import SMALL_CASES, Case
from paxkv.pallas_kernels.attention_inputs import Inputs, random_inputs
from paxkv.pallas_kernels.gpu_hopper import paged_attention_hopper
from paxkv.pallas_kernels.testing import assert_close, assert_right, dense_attention

SETTINGS = ("scale", "window", "soft_cap", "max_q_len", "interpret", "num_multiprocessors")
hopper_jit = jax.jit(
    paged_attention_hopper,
    static_argnames=SETTINGS,
    compiler_options={"xla_backend_optimization_level": 0},
)

DECODE = ("decode_all_settings", "decode_huge_scores", "decode_page_8", "decode_page_256")
MIXED = (
    "mixed_all_settings", "chunks_page_8", "chunks_page_128", "heads_5_1", "head_dim_80",
    "head_dim_96", "nothing_stored",
)  # fmt: skip


def attend(inputs: Inputs, *, num_multiprocessors: int, **changes) -> PagedAttention:
    scale = inputs.case.head_dim**-0.5 if inputs.case.scale is None else inputs.case.scale
    arguments = {"sinks": None, "max_q_len": None, **inputs.arguments, **inputs.settings}
    out, lse, key_pages, value_pages = hopper_jit(
        **{**arguments, "scale": scale, **changes},
        interpret=True,
        num_multiprocessors=num_multiprocessors,
    )
    return PagedAttention(out, key_pages, value_pages, lse)


class TestHopper:
    @pytest.mark.parametrize("name", DECODE)
    def test_decode_matches_dense_attention(self, name):
        inputs = random_inputs(SMALL_CASES[name], jnp.bfloat16)
        assert_right(inputs, attend(inputs, num_multiprocessors=2, max_q_len=1))

    @pytest.mark.parametrize("name", ["decode_sinks", "decode_page_256"])
    def test_decode_of_split_work_matches_dense_attention(self, name):
        inputs = random_inputs(SMALL_CASES[name], jnp.bfloat16)
        assert_right(inputs, attend(inputs, num_multiprocessors=8, max_q_len=1))

    @pytest.mark.parametrize("name", MIXED)
    def test_ragged_queries_match_dense_attention(self, name):
        inputs = random_inputs(SMALL_CASES[name], jnp.bfloat16)
        assert_right(inputs, attend(inputs, num_multiprocessors=1))

    def test_float16_and_ragged_queries_in_split_work(self):
        inputs = random_inputs(SMALL_CASES["mixed_all_settings"], DTYPES["float16"])
        assert_right(inputs, attend(inputs, num_multiprocessors=16))

    def test_decode_ring_wraps_across_sequences(self):
        # One program does all: 2 heads x 3 sequences x 3 tiles of 64 tokens pass 6 stages.
        case = Case(lengths=((1, 130), (1, 192), (1, 150)), num_kv_heads=2, num_heads=4)
        inputs = random_inputs(case, jnp.bfloat16)
        assert_right(inputs, attend(inputs, num_multiprocessors=1, max_q_len=1))

    def test_prefill_ring_wraps(self):
        # Heads of 256 leave room for 2 stages of 64 tokens.
        case = Case(lengths=((70, 200),), num_heads=2, num_kv_heads=1, head_dim=256)
        inputs = random_inputs(case, jnp.bfloat16)
        assert_right(inputs, attend(inputs, num_multiprocessors=1))

    @pytest.mark.parametrize("max_q_len", [1, None])
    def test_ids_that_name_no_page_are_never_read(self, max_q_len):
        case = Case(lengths=((1, 21),) * 6, page_size=8, num_pages=20)
        inputs = random_inputs(case, jnp.bfloat16)
        wrong = np.array([20, 21, -1, -(2**31), 2**31 - 1, NULL_PAGE], np.int32)
        tables = np.array(inputs.arguments["block_tables"])
        tables[:, 1] = wrong
        known = inputs.tables.copy()
        known[:, 1] = NULL_PAGE
        result = attend(
            inputs, num_multiprocessors=1, block_tables=jnp.asarray(tables), max_q_len=max_q_len
        )
        is_stored = np.arange(21) // 8 != 1
        for slot in range(6):
            out, lse = dense_attention(
                inputs.queries[slot], inputs.keys[slot], inputs.values[slot], is_stored=is_stored
            )
            assert_close(result.out[slot : slot + 1], out, jnp.bfloat16)
            assert_close(result.log_sum_exp[slot : slot + 1], lse, jnp.bfloat16)

    def test_rows_that_only_see_missing_pages_are_zero(self):
        case = Case(lengths=((2, 9), (1, 12)), page_size=16, num_pages=8)
        inputs = random_inputs(case, jnp.bfloat16)
        tables = jnp.full_like(inputs.arguments["block_tables"], -7)
        result = attend(inputs, num_multiprocessors=1, block_tables=tables)
        assert not np.asarray(result.out, np.float32).any()
        assert np.isneginf(result.log_sum_exp).all()

    def test_window_past_pages_given_up_reads_the_rest(self):
        case = Case(lengths=((1, 100), (30, 120)), window=20, page_size=8)
        inputs = random_inputs(case, jnp.bfloat16)
        assert_right(inputs, attend(inputs, num_multiprocessors=1))
        decode = dataclasses.replace(case, lengths=((1, 100), (1, 75)))
        inputs = random_inputs(decode, jnp.bfloat16)
        assert_right(inputs, attend(inputs, num_multiprocessors=1, max_q_len=1))
