"""What is special to the TPU kernels, interpreted with race detection; see attention_contract."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from helpers_attention import attend, attend_interpreted, interpreted, small_tpu_tiles
from paxkv.pallas_kernels.attention_call import AttentionArrays
from paxkv.pallas_kernels.attention_cases import SMALL_CASES, Case
from paxkv.pallas_kernels.attention_inputs import random_inputs
from paxkv.pallas_kernels.testing import assert_right
from paxkv.pallas_kernels.tpu import paged_attention_tpu, tpu_refusal
from paxkv.pallas_kernels.tpu_pages import PageTiles

DECODE_CASES = {
    # Rows of queries are padded to a power of two per KV head, the heads to a whole register.
    "heads_16_1": Case(lengths=((1, 18), (1, 29), (1, 12)), num_heads=16, num_kv_heads=1),
    "heads_9_3": Case(lengths=((1, 18), (1, 29), (1, 12)), num_heads=9, num_kv_heads=3),
    "head_dim_80": Case(lengths=((1, 18), (1, 29)), head_dim=80),
    "three_tiles_in_a_row": Case(lengths=((1, 70), (1, 48), (1, 100)), window=64),
}
MIXED_CASES = {
    # Steps of 64 rows: sequences that share one, sequences that span some, steps of padding only.
    "steps": Case(lengths=((5, 18), (100, 130), (1, 29), (30, 30)), num_rows=220),
    "steps_window": Case(lengths=((60, 70), (4, 60), (70, 90)), window=20, page_size=8),
}

# Several steps of 128 queries, each of two chunks; two tiles of 512 keys; three parts of 256 of
# one tile of 1,024.
FULL_TILE_CASES = {
    "mixed": Case(lengths=((150, 600), (5, 40)), num_heads=2, num_kv_heads=1, page_size=64),
    "decode": Case(lengths=((1, 600), (1, 300)), num_heads=2, num_kv_heads=1, page_size=64),
}


@pytest.mark.parametrize("name", DECODE_CASES)
def test_decode_matches_dense_attention(name):
    inputs = random_inputs(DECODE_CASES[name], jnp.bfloat16)
    assert_right(inputs, attend("tpu", inputs, max_q_len=1))


@pytest.mark.parametrize("name", MIXED_CASES)
def test_mixed_matches_dense_attention(name):
    inputs = random_inputs(MIXED_CASES[name], jnp.bfloat16)
    assert_right(inputs, attend("tpu", inputs))


@pytest.mark.parametrize("name", FULL_TILE_CASES)
def test_tiles_as_large_as_on_a_chip_match_dense_attention(name):
    inputs = random_inputs(FULL_TILE_CASES[name], jnp.bfloat16)
    call = interpreted(paged_attention_tpu)
    max_q_len = 1 if inputs.case.is_decode else None
    assert_right(inputs, attend_interpreted(call, inputs, max_q_len=max_q_len))


@pytest.mark.parametrize("max_q_len", [1, None])
def test_window_past_the_table_leaves_the_sink_alone(max_q_len):
    case = Case(lengths=((1, 80), (1, 5)), window=16, max_pages=5, has_sinks=True)
    inputs = random_inputs(case, jnp.bfloat16)
    kv_lens = inputs.arguments["kv_lens"].at[0].set(100)
    result = attend("tpu", inputs, max_q_len=max_q_len, kv_lens=kv_lens)
    assert (result.out[0] == 0).all()
    assert (result.log_sum_exp[0] == inputs.arguments["sinks"]).all()
    assert jnp.isneginf(result.log_sum_exp[2:]).all()  # padding


@pytest.mark.parametrize("max_q_len", [1, None])
def test_tile_that_nobody_waits_for_is_a_race(max_q_len, monkeypatch):
    monkeypatch.setattr(PageTiles, "wait", lambda self, buf: None)
    call = small_tpu_tiles()(interpreted(paged_attention_tpu))
    inputs = random_inputs(Case(lengths=((1, 70), (1, 40))), jnp.bfloat16)
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"[Rr]ace"):
            jax.block_until_ready(attend_interpreted(call, inputs, max_q_len=max_q_len))
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize(
    ("dtype", "pages", "found"),
    [
        (jnp.float16, (2, 16, 64), "float16"),
        (jnp.int8, (2, 16, 64), "int8"),
        (jnp.float32, (2, 16, 64), "queries are bfloat16 and pages float32"),
        (jnp.bfloat16, (64, 256, 256), "16,777,216"),
    ],
)
def test_refusal_names_what_was_found(dtype, pages, found):
    arrays = AttentionArrays(*[jnp.empty(0)] * 8)._replace(
        queries=jnp.empty((1, 64, pages[2]), jnp.bfloat16 if dtype == jnp.float32 else dtype),
        key_pages=jnp.empty((2, *pages), dtype),
    )
    assert found in str(tpu_refusal(arrays))


def test_shapes_of_the_contract_are_not_refused():
    for case in SMALL_CASES.values():
        inputs = random_inputs(case, jnp.bfloat16)
        assert tpu_refusal(AttentionArrays(**inputs.arguments)) is None
