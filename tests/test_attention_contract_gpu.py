"""The kernels for GPU, interpreted, do what every implementation of paged attention must do."""

import jax.numpy as jnp
import pytest

from attention_contract import PagedAttentionContract
from paxkv.pallas_kernels import paged_attention
from paxkv.pallas_kernels.attention_cases import Case
from paxkv.pallas_kernels.attention_inputs import random_inputs
from paxkv.pallas_kernels.testing import assert_right


class TestGpu(PagedAttentionContract):
    implementations = ("hopper", "ampere")


@pytest.mark.parametrize("implementation", ["tpu", "gpu"])
def test_public_call_runs_a_named_kernel_interpreted(implementation):
    inputs = random_inputs(Case(lengths=((1, 18), (1, 5))), jnp.bfloat16)
    result = paged_attention(
        **inputs.arguments, max_q_len=1, implementation=implementation, interpret=True
    )
    assert_right(inputs, result)


@pytest.mark.parametrize("window", [2**31 - 1, 2**40])
@pytest.mark.parametrize("implementation", ["reference", "tpu", "gpu"])
def test_window_that_no_sequence_fills_hides_nothing(implementation, window):
    inputs = random_inputs(Case(lengths=((5, 18), (1, 29))), jnp.bfloat16)
    result = paged_attention(
        **inputs.arguments,
        window=window,
        implementation=implementation,
        interpret=implementation != "reference",
    )
    assert_right(inputs, result)
