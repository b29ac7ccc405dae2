"""What is special to the kernel for Ampere and later chips, interpreted; see attention_contract.

`mma` and copies without a barrier are replaced (see `gpu_ampere_steps`); the compile tests hold the
real ones to the chips' compilers.
"""

import jax
import jax.numpy as jnp
import pytest

from helpers_attention import WithoutWait, attend, attend_interpreted, interpreted
from paxkv.pallas_kernels import gpu_ampere_steps
from paxkv.pallas_kernels.attention_cases import Case
from paxkv.pallas_kernels.attention_inputs import random_inputs
from paxkv.pallas_kernels.gpu_ampere import paged_attention_ampere
from paxkv.pallas_kernels.testing import assert_right

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


@pytest.mark.parametrize("name", LONG)
def test_long_case_matches_dense_attention(name):
    inputs = random_inputs(LONG[name], jnp.bfloat16)
    max_q_len = 1 if inputs.case.is_decode else None
    assert_right(inputs, attend("ampere", inputs, max_q_len=max_q_len))


# Without the wait, products may be of what the memory held before: of infinities or NaN, too.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_copy_that_nobody_waits_for_is_a_race(monkeypatch):
    monkeypatch.setattr(gpu_ampere_steps, "plgpu", WithoutWait(0, of=1))
    call = interpreted(paged_attention_ampere)
    inputs = random_inputs(Case(lengths=((1, 130), (1, 40))), jnp.bfloat16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        jax.block_until_ready(attend_interpreted(call, inputs, max_q_len=1))
