"""float16 as TPUs store it, by its bits in int16."""

import jax.numpy as jnp
import numpy as np
import pytest

from helpers_attention import attend
from paxkv.pallas_kernels import layout, movers
from paxkv.pallas_kernels.attention_cases import Case
from paxkv.pallas_kernels.attention_inputs import random_inputs
from paxkv.pallas_kernels.testing import assert_same_bits
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


@pytest.mark.parametrize("max_q_len", [1, None])
def test_pages_of_bits_change_nothing_elsewhere(max_q_len):
    inputs = random_inputs(Case(lengths=((1, 20), (1, 33))), jnp.float16)
    pools = {
        name: layout.to_stored(inputs.arguments[name], jnp.int16)
        for name in ("key_pages", "value_pages")
    }
    right = attend("reference", inputs, max_q_len=max_q_len)
    found = attend("reference", inputs, max_q_len=max_q_len, **pools)
    assert_same_bits(found.out, right.out)
    for name in pools:
        assert getattr(found, name).dtype == jnp.int16
        assert_same_bits(getattr(found, name), getattr(right, name), name)


def test_tokens_are_written_as_bits():
    pages = jnp.zeros((2, 1, 8, 8), jnp.int16)
    one = jnp.ones(1, jnp.int32)
    written = movers.write_tokens(pages, one, one, jnp.full((1, 1, 8), 1.5, jnp.float16))
    assert (layout.from_stored(written)[1, 0, 1] == 1.5).all()


def test_pool_for_a_tpu_holds_bits(monkeypatch):
    assert layout.stored_dtype(jnp.float16) == jnp.float16
    monkeypatch.setattr("jax.default_backend", lambda: "tpu")
    assert layout.stored_dtype(jnp.float16) == jnp.int16
    assert layout.stored_dtype(jnp.bfloat16) == jnp.bfloat16
