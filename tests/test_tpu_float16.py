"""float16 numbers from their bits, as the TPU kernels read them."""

import jax.numpy as jnp
import numpy as np

from helpers_attention import attend
from paxkv.pallas_kernels.attention_cases import Case
from paxkv.pallas_kernels.attention_inputs import random_inputs
from paxkv.pallas_kernels.tpu_float16 import numbers

SMALLEST = 2.0**-14  # of the numbers that float16 holds with all its digits


def test_every_number_is_read_from_its_bits():
    bits = np.arange(2**16, dtype=np.uint16).view(np.int16)
    right = bits.view(np.float16).astype(np.float32)
    found = np.asarray(numbers(jnp.asarray(bits)))
    is_full = np.isfinite(right) & (np.abs(right) >= SMALLEST)
    np.testing.assert_array_equal(found[is_full], right[is_full])
    assert np.isnan(found[~np.isfinite(right)]).all()
    is_small = np.isfinite(right) & ~is_full
    assert ((found[is_small] == right[is_small]) | (found[is_small] == 0)).all()


def test_float16_that_overflowed_shows_in_its_sequence_alone():
    inputs = random_inputs(Case(lengths=((1, 20), (1, 20))), jnp.float16)
    new_values = inputs.arguments["new_values"].at[0].set(jnp.inf)
    result = attend("tpu", inputs, max_q_len=1, new_values=new_values)
    assert np.isnan(result.out[0]).all() and np.isfinite(result.out[1]).all()
    assert (result.value_pages == jnp.inf).sum() == new_values[0].size
