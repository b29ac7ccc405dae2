"""The TPU kernels, interpreted with race detection on, in tiles so small that all rings wrap."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from paxkv.pallas_kernels import NULL_PAGE, PagedAttention, tpu_decode, tpu_mixed
from paxkv.pallas_kernels.attention_cases import SMALL_CASES, Case
from paxkv.pallas_kernels.attention_inputs import Inputs, random_inputs
from paxkv.pallas_kernels.testing import (
    assert_right,
    assert_same_bits,
    dense_attention,
    right_pages,
)
from paxkv.pallas_kernels.tpu import paged_attention_tpu, tpu_refusal
from paxkv.pallas_kernels.tpu_pages import PageTiles
from paxkv.pallas_kernels.tpu_tiles import Chip

SETTINGS = ("scale", "window", "soft_cap", "max_q_len", "interpret")
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
# What the two dtypes do differently is rounding and the number of rows that are written at once.
FLOAT32_CASES = ("decode_all_settings", "decode_page_8", "mixed_all_settings", "chunks_page_16")

DECODE_HEADS = {
    f"decode_heads_{num_heads}_{num_kv_heads}": Case(
        lengths=((1, 18), (1, 29), (1, 12)), num_heads=num_heads, num_kv_heads=num_kv_heads
    )
    for num_heads, num_kv_heads in ((16, 1), (3, 3), (9, 3), (14, 2), (8, 8))
}
DECODE_CASES = DECODE_HEADS | {
    "decode_head_dim_80": Case(lengths=((1, 18), (1, 29)), head_dim=80),
    "decode_three_tiles_in_a_row": Case(lengths=((1, 70), (1, 48), (1, 100)), window=64),
}
MIXED_CASES = {
    # Steps of 64 rows: sequences that share one, sequences that span some, steps of padding only.
    "mixed_steps": Case(lengths=((5, 18), (100, 130), (1, 29), (30, 30)), num_rows=220),
    "mixed_steps_window": Case(lengths=((60, 70), (4, 60), (70, 90)), window=20, page_size=8),
}
CASES = SMALL_CASES | DECODE_CASES | MIXED_CASES
NAMED_DECODE = [
    (name, "bfloat16")
    for name in CASES
    if (name.startswith("decode_") and not name.endswith("page_1")) or name == "nothing_stored"
] + [(name, "float32") for name in FLOAT32_CASES if name.startswith("decode")]
NAMED_MIXED = [
    (name, "bfloat16")
    for name in (
        "mixed_plain", "mixed_all_settings", "mixed_huge_scores", "mixed_window_5", "mixed_steps",
        "mixed_steps_window", "chunks_page_8", "chunks_page_128", "nothing_asked", "decode_sinks",
        "heads_5_1", "heads_9_3", "head_dim_80", "head_dim_256",
    )
] + [(name, "float32") for name in FLOAT32_CASES if not name.startswith("decode")]  # fmt: skip


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch):
    def tile_pages(_chip, key_pages, _max_pages):
        return max(1, 32 // key_pages.shape[2])

    def two_cores():
        return Chip("", 2, 64 * 2**20)

    monkeypatch.setattr(tpu_decode, "chip_traced_for", two_cores)
    monkeypatch.setattr(tpu_decode, "decode_tile_pages", tile_pages)
    monkeypatch.setattr(tpu_mixed, "prefill_tile_pages", tile_pages)
    monkeypatch.setattr(
        tpu_mixed, "prefill_tile_queries", lambda _rows, _heads, group, _dim: max(1, 128 // group)
    )


def attend(inputs: Inputs, *, max_q_len: int | None, **changes) -> PagedAttention:
    arguments = {"sinks": None, **inputs.arguments, **inputs.settings, **changes}
    arguments["scale"] = arguments["scale"] or inputs.case.head_dim**-0.5
    call = jax.jit(
        functools.partial(paged_attention_tpu, interpret=True, max_q_len=max_q_len),
        static_argnames=SETTINGS,
    )
    out, lse, key_pages, value_pages = call(**arguments)
    return PagedAttention(out, key_pages, value_pages, lse)


@pytest.mark.parametrize(("name", "dtype"), NAMED_DECODE)
def test_decode_matches_dense_attention(name, dtype):
    inputs = random_inputs(CASES[name], DTYPES[dtype])
    assert_right(inputs, attend(inputs, max_q_len=1))


@pytest.mark.parametrize(("name", "dtype"), NAMED_MIXED)
def test_mixed_matches_dense_attention(name, dtype):
    inputs = random_inputs(CASES[name], DTYPES[dtype])
    assert_right(inputs, attend(inputs, max_q_len=None))


@pytest.mark.parametrize("max_q_len", [1, None])
@pytest.mark.parametrize("columns", [[1], [2], [0, 1, 2]])
def test_ids_that_name_no_page_are_never_read_or_written(max_q_len, columns):
    q_len = max_q_len or 3
    case = Case(lengths=((q_len, 21),) * 6, page_size=8, num_pages=20)
    inputs = random_inputs(case, jnp.float32)
    wrong = np.array([20, 21, -1, -(2**31), 2**31 - 1, NULL_PAGE], np.int32)
    tables, known = np.array(inputs.arguments["block_tables"]), inputs.tables.copy()
    tables[:, columns], known[:, columns] = wrong[:, None], NULL_PAGE
    result = attend(inputs, max_q_len=max_q_len, block_tables=jnp.asarray(tables))
    is_stored = ~np.isin(np.arange(21) // 8, columns)
    for slot in range(6):
        rows = slice(slot * q_len, (slot + 1) * q_len)
        out, lse = dense_attention(
            inputs.queries[slot], inputs.keys[slot], inputs.values[slot], is_stored=is_stored
        )
        np.testing.assert_allclose(np.asarray(result.out)[rows], out, atol=1e-5)
        np.testing.assert_allclose(np.asarray(result.log_sum_exp)[rows], lse, atol=1e-5)
    pools = right_pages(dataclasses.replace(inputs, tables=known))
    for found, right in zip((result.key_pages, result.value_pages), pools, strict=True):
        assert_same_bits(found, right)


@pytest.mark.parametrize("max_q_len", [1, None])
def test_tile_that_nobody_waits_for_is_a_race(max_q_len, monkeypatch):
    monkeypatch.setattr(PageTiles, "wait", lambda self, buf: None)
    inputs = random_inputs(Case(lengths=((1, 70), (1, 40))), jnp.bfloat16)
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"[Rr]ace"):
            jax.block_until_ready(attend(inputs, max_q_len=max_q_len))
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({"dtype": jnp.float16}, "float16"),
        ({"page_size": 4}, "4"),
        ({"head_dim": 72}, "72"),
        ({"num_heads": 34}, "34"),
        ({"num_kv_heads": 64, "num_heads": 64, "head_dim": 256, "page_size": 256}, "16,777,216"),
    ],
)
def test_refusal_names_the_number(change, number):
    shape = {
        "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": jnp.bfloat16
    } | change  # fmt: skip
    queries = jnp.empty((1, shape["num_heads"], shape["head_dim"]), shape["dtype"])
    page = (shape["num_kv_heads"], shape["page_size"], shape["head_dim"])
    reason = tpu_refusal(queries, jnp.empty((2, *page), shape["dtype"]))
    assert reason is not None
    assert number in reason


def test_shapes_of_the_contract_are_not_refused():
    for case in SMALL_CASES.values():
        if case.page_size > 1:
            inputs = random_inputs(case, jnp.bfloat16)
            reason = tpu_refusal(inputs.arguments["queries"], inputs.arguments["key_pages"])
            assert reason is None
