"""The kernel for Ampere and later chips, interpreted with race detection on.

`mma` and copies without a barrier are replaced (see `gpu_ampere_steps`); the compile tests hold the
real ones to the chips' compilers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers_attention import DTYPES
from paxkv.pallas_kernels import NULL_PAGE, PagedAttention
from paxkv.pallas_kernels.attention_cases import CASES, Case
from paxkv.pallas_kernels.attention_inputs import Inputs, random_inputs
from paxkv.pallas_kernels.gpu_ampere import paged_attention_ampere
from paxkv.pallas_kernels.testing import assert_close, assert_right, dense_attention

if not hasattr(plgpu, "InterpretGPUParams"):
    pytest.skip("jax before 0.12 does not interpret kernels for GPU", allow_module_level=True)

SETTINGS = ("scale", "window", "soft_cap", "max_q_len", "interpret")
paged_attention_ampere_jit = jax.jit(
    paged_attention_ampere,
    static_argnames=SETTINGS,
    compiler_options={"xla_backend_optimization_level": 0},
)

NAMED = (
    "decode_plain", "decode_all_settings", "mixed_plain", "mixed_all_settings",
    "mixed_huge_scores", "decode_window_1", "mixed_window_16", "nothing_stored", "nothing_asked",
    "decode_page_8", "chunks_page_8", "decode_page_128", "chunks_page_256",
    "heads_5_1", "heads_9_3", "heads_16_2",
    "head_dim_80", "head_dim_96", "head_dim_256",
)  # fmt: skip
LONG = {
    "ring that wraps": Case(lengths=((1, 700), (1, 333), (1, 64), (1, 500)), page_size=32),
    "ring that wraps, in chunks": Case(
        lengths=((70, 300), (3, 700)), num_heads=4, num_kv_heads=1, page_size=64, window=250
    ),
    "splits": Case(lengths=((1, 700), (1, 7), (1, 0), (1, 130)), num_heads=12, num_kv_heads=1),
    "splits with all settings": Case(
        lengths=((1, 700), (1, 90)), num_heads=2, num_kv_heads=1,
        soft_cap=4.0, has_sinks=True, window=411, head_dim=128,
    ),
}  # fmt: skip


def attend(inputs: Inputs, **changes) -> PagedAttention:
    arguments = {**inputs.arguments, **inputs.settings, **changes}
    if arguments["scale"] is None:
        arguments["scale"] = inputs.case.head_dim**-0.5
    arguments.setdefault("max_q_len", 1 if inputs.case.is_decode else None)
    out, lse, key_pages, value_pages = paged_attention_ampere_jit(**arguments, interpret=True)
    return PagedAttention(out, key_pages, value_pages, lse)


@pytest.mark.parametrize("name", NAMED)
def test_case_matches_dense_attention(name):
    inputs = random_inputs(CASES[name], jnp.bfloat16)
    assert_right(inputs, attend(inputs))


@pytest.mark.parametrize("name", LONG)
def test_long_case_matches_dense_attention(name):
    inputs = random_inputs(LONG[name], jnp.bfloat16)
    assert_right(inputs, attend(inputs))


def test_float16_matches_dense_attention():
    inputs = random_inputs(CASES["mixed_all_settings"], jnp.float16)
    assert_right(inputs, attend(inputs))


@pytest.mark.parametrize("max_q_len", [1, 3])
def test_ids_that_name_no_page_are_never_read(max_q_len):
    case = Case(lengths=((max_q_len, 41),) * 6, page_size=8, num_pages=40)
    inputs = random_inputs(case, jnp.bfloat16)
    wrong = np.array([40, 41, -1, -(2**31), 2**31 - 1, NULL_PAGE], np.int32)
    tables = np.array(inputs.arguments["block_tables"])
    tables[:, [0, 2]] = wrong[:, None]
    result = attend(inputs, block_tables=jnp.asarray(tables), max_q_len=max_q_len)
    is_stored = ~np.isin(np.arange(41) // 8, [0, 2])
    for slot in range(6):
        rows = slice(slot * max_q_len, (slot + 1) * max_q_len)
        out, lse = dense_attention(
            inputs.queries[slot], inputs.keys[slot], inputs.values[slot], is_stored=is_stored
        )
        assert_close(result.out[rows], out, DTYPES["bfloat16"])
        assert_close(result.log_sum_exp[rows], lse, DTYPES["bfloat16"])
