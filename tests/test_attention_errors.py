"""What paged attention refuses, and that the message says what was found and what would do."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.pallas_kernels import paged_attention
from paxkv.pallas_kernels.attention_cases import Case
from paxkv.pallas_kernels.attention_inputs import random_inputs

# 7 rows, 4 query and 2 KV heads of 64 numbers, 8 pages of 16 tokens, 2 sequences of up to 3 pages
INPUTS = random_inputs(
    Case(lengths=((3, 20), (1, 5)), num_rows=7, max_pages=3, num_pages=8), jnp.float32
)


def zeros(*shape: int) -> jax.Array:
    return jnp.zeros(shape)


def integers(*numbers) -> jax.Array:
    return jnp.asarray(numbers, jnp.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": zeros(7, 256)}, "queries must be [T, N, H], found shape (7, 256)"),
        ({"key_pages": zeros(8, 16, 128)}, "found (8, 16, 128) and (8, 2, 16, 64)"),
        ({"value_pages": zeros(9, 2, 16, 64)}, "found (8, 2, 16, 64) and (9, 2, 16, 64)"),
        ({"value_pages": jnp.zeros((8, 2, 16, 64), jnp.bfloat16)}, "found float32 and bfloat16"),
        ({"block_tables": jnp.zeros((2, 0), jnp.int32)}, "at least one row, one sequence and one"),
        ({"queries": zeros(7, 3, 64)}, "3 query heads cannot share 2 KV heads evenly"),
        ({"queries": zeros(7, 33, 64)}, "33 query heads cannot share 2 KV heads evenly"),
        ({"queries": zeros(7, 1, 64)}, "1 query heads cannot share 2 KV heads evenly"),
        ({"queries": zeros(7, 4, 80)}, "pages hold heads of 64 numbers, queries of 80"),
        ({"new_keys": zeros(6, 2, 64)}, "must be (7, 2, 64)"),
        ({"new_values": zeros(7, 4, 64)}, "found (7, 2, 64) and (7, 4, 64)"),
        ({"block_tables": integers(1, 2, 3)}, "found (3,) and (2,)"),
        ({"kv_lens": integers(20, 5, 1)}, "found (2, 3) and (3,)"),
        ({"cu_q_lens": integers(0, 3)}, "cu_q_lens must be [B + 1] = [3], found (2,)"),
        ({"sinks": zeros(2)}, "one logit per query head [4], found (2,)"),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"window": -1}, "window=-1 must be at least 1"),
        ({"soft_cap": 0.0}, "soft_cap=0.0 must be above 0"),
        ({"soft_cap": float("nan")}, "soft_cap=nan must be above 0"),
        ({"soft_cap": float("inf")}, "soft_cap=inf must be above 0 and finite"),
        ({"scale": float("inf")}, "scale=inf must be finite"),
        ({"kv_lens": jnp.array([20.0, 5.0])}, "kv_lens must hold whole numbers, found float32"),
        ({"block_tables": zeros(2, 3)}, "block_tables must hold whole numbers, found float32"),
        ({"max_q_len": 0}, "max_q_len=0 must be at least 1"),
        ({"window": 4.0}, "window=4.0 must be a whole number"),
        ({"max_q_len": jnp.float32(1)}, "must be a whole number that is known when the call is"),
        ({"interpret": True}, "implementation=None names none: name 'tpu' or 'gpu'"),
        ({"interpret": True, "implementation": "reference"}, "'reference' names none"),
        (
            {"implementation": "triton"},
            "implementation='triton' is not one of 'reference', 'tpu', 'gpu' or None",
        ),
        ({"kv_lens": integers(20, -1)}, "between 0 and 48 (pages per row x page size), found -1"),
        ({"kv_lens": integers(49, 5)}, "between 0 and 48 (pages per row x page size), found 5 to"),
        ({"cu_q_lens": integers(1, 3, 4)}, "must start at 0, not fall, and end by the 7 rows"),
        ({"cu_q_lens": integers(0, 3, 2)}, "found [0 3 2]"),
        ({"cu_q_lens": integers(0, 3, 8)}, "found [0 3 8]"),
        (
            {"block_tables": integers([1, 8, 0], [9, 0, 0])},
            "block_tables[0, 1] is page 8, but the pool has pages 0 to 7",
        ),
        (
            {"block_tables": integers([1, 2, 0], [-1, 0, 0])},
            "block_tables[1, 0] is page -1, but the pool has pages 0 to 7",
        ),
    ],
)
def test_call_that_does_not_fit_is_refused_with_the_numbers(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        paged_attention(**{**INPUTS.arguments, **INPUTS.settings, **changes})


@pytest.mark.parametrize("implementation", ["tpu", "gpu"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "does not run on cpu: leave the choice to the platform, or set interpret=True"),
        ({"page_size": 4}, "pages hold 4 tokens; it takes one of (8, 16, 32, 64, 128, 256)"),
        ({"page_size": 24}, "pages hold 24 tokens; it takes one of (8, 16, 32, 64, 128, 256)"),
        ({"page_size": 512}, "pages hold 512 tokens; it takes one of (8, 16, 32, 64, 128, 256)"),
        ({"head_dim": 72}, "heads have 72 numbers; it takes one of (64, 80, 96, 128, 256)"),
        (
            {"num_heads": 32, "num_kv_heads": 1},
            "32 query heads share a KV head; it takes up to 16",
        ),
        ({"num_heads": 17, "num_kv_heads": 1}, "17 query heads share a KV head"),
    ],
)
def test_named_kernel_works_or_says_what_it_takes(implementation, changes, message):
    case = dataclasses.replace(INPUTS.case, max_pages=None, num_pages=None, **changes)
    inputs = random_inputs(case, jnp.bfloat16)
    with pytest.raises(ValueError, match=re.escape(message)):
        paged_attention(**inputs.arguments, implementation=implementation)


@pytest.mark.parametrize(
    ("implementation", "dtype", "message"),
    [
        ("gpu", jnp.float32, "found float32, which tensor cores would round to TF32"),
        (
            "tpu",
            jnp.float16,
            "Mosaic takes no array of float16: keep the pool as its bits, in int16",
        ),
    ],
)
def test_named_kernel_refuses_a_dtype_with_the_reason(implementation, dtype, message):
    inputs = random_inputs(INPUTS.case, dtype)
    with pytest.raises(ValueError, match=re.escape(message)):
        paged_attention(**inputs.arguments, implementation=implementation)


def test_ids_past_the_length_are_not_refused():
    tables = INPUTS.arguments["block_tables"].at[:, 2].set(jnp.asarray([2**31 - 1, -5]))
    result = paged_attention(**{**INPUTS.arguments, "block_tables": tables})
    assert not np.isnan(result.out).any()


def test_shapes_are_refused_within_jit():
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        jax.eval_shape(paged_attention, **{**INPUTS.arguments, "queries": zeros(7, 3, 64)})


@pytest.mark.parametrize("name", ["scale", "soft_cap", "window", "max_q_len"])
def test_setting_that_jit_traces_is_refused(name):
    with pytest.raises(ValueError, match=f"^{name}=.* that is known when the call is compiled"):
        jax.jit(lambda number: paged_attention(**INPUTS.arguments | {name: number}))(1)
