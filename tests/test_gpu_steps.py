"""Steps of the GPU kernels that are plain JAX, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.pallas_kernels.gpu_steps import in_powers_of_two

SCALE = 0.3


@pytest.mark.parametrize("soft_cap", [1e-2, 1.0, 50.0, 1e3, 1e6, None])
def test_scores_are_right_to_float32_however_far_from_the_cap(soft_cap):
    sizes = np.geomspace(1e-6, 1e4, 4001)
    scores = np.concatenate([-sizes, [0.0], sizes]).astype(np.float32)
    right = SCALE * scores.astype(np.float64)
    if soft_cap is not None:
        right = soft_cap * np.tanh(right / soft_cap)
    right *= np.log2(np.e)
    found = np.asarray(in_powers_of_two(jnp.asarray(scores), SCALE, soft_cap), np.float64)
    assert np.all(np.abs(found - right) <= 1e-6 * np.abs(right))


@pytest.mark.parametrize("soft_cap", [50.0, None])
def test_score_that_is_no_number_stays_none(soft_cap):
    assert jnp.isnan(in_powers_of_two(jnp.full((1,), jnp.nan), SCALE, soft_cap)).all()


def test_infinite_score_is_the_cap():
    found = in_powers_of_two(jnp.array([jnp.inf, -jnp.inf]), SCALE, 50.0)
    np.testing.assert_allclose(found, np.log2(np.e) * np.array([50, -50]), rtol=1e-6)
