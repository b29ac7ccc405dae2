import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.models.rope import RopeConfig, inverse_frequencies, rotate, rotation

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
BY_LAYER_TYPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, 0.814617),
        ({"rope_theta": 1000000.0, "rope_scaling": None}, 0.805842),
        ({}, 0.865964),
    ],
)
def test_theta_is_found_in_old_and_new_place(config, expected):
    frequencies = inverse_frequencies(RopeConfig.from_hf(config), 128)
    np.testing.assert_allclose(frequencies[1], expected, atol=1e-6)
    assert frequencies.dtype == np.float32 and frequencies.shape == (64,)


def test_settings_by_layer_type_are_picked_by_type_or_refused():
    config = {"rope_parameters": BY_LAYER_TYPE}
    full = inverse_frequencies(RopeConfig.from_hf(config, layer_type="full_attention"), 128)
    sliding = inverse_frequencies(RopeConfig.from_hf(config, layer_type="sliding_attention"), 128)
    np.testing.assert_allclose(800 * full[:2], [100, 800 / 8 * 0.805842], rtol=1e-6)
    np.testing.assert_allclose(800 * sliding[:2], [800, 800 * 0.865964], rtol=1e-6)
    with pytest.raises(ValueError, match="by type of layer"):
        RopeConfig.from_hf(config)


def test_a_local_base_is_that_of_windowed_layers_which_no_scaling_reaches():
    config = {
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    full = RopeConfig.from_hf(config, layer_type="full_attention")
    assert full == RopeConfig(theta=1000000.0, scaling="linear", factor=8.0)
    sliding = RopeConfig.from_hf(config, layer_type="sliding_attention")
    assert sliding == RopeConfig(theta=10000.0)
    both = {"rope_parameters": BY_LAYER_TYPE, "rope_local_base_freq": 5000.0}
    with pytest.raises(ValueError, match=r"disagree: 10000\.0 against 5000\.0"):
        RopeConfig.from_hf(both, layer_type="sliding_attention")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500000.0}},
            "disagree: 500000.0 against 10000.0",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": LLAMA3},
            "rope_parameters and rope_scaling disagree",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 2.0}},
            "rope_type and type disagree",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "supported are default, linear, llama3"),
        ({"rope_scaling": {"type": "linear"}}, r"needs the settings \['factor'\]"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "beta_fast": 32}}, r"not understood: \['beta_fast'\]"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "must be greater"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "positive"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_understood_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_hf(config)


def test_both_places_may_say_the_same():
    config = {"rope_theta": 500000.0, "rope_parameters": {"rope_theta": 500000.0, **LLAMA3}}
    assert RopeConfig.from_hf(config) == RopeConfig.from_hf(
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3}
    )


def test_llama3_keeps_fast_pairs_and_slows_slow_ones():
    plain = inverse_frequencies(RopeConfig(theta=500000.0), 128)
    scaled = inverse_frequencies(
        RopeConfig.from_hf({"rope_theta": 5e5, "rope_scaling": LLAMA3}), 128
    )
    np.testing.assert_allclose(scaled[0], plain[0], rtol=1e-6)
    np.testing.assert_allclose(scaled[-1], plain[-1] / 8, rtol=1e-6)
    assert np.all(scaled[1:] < scaled[:-1])


@pytest.mark.parametrize("position", [0, 63, 64, 255, 100_000])
def test_rotation_follows_the_formula_past_the_trained_positions(position):
    rope = RopeConfig(theta=10000.0, scaling="linear", factor=4.0)
    x = np.random.default_rng(0).standard_normal((1, 2, 8)).astype(np.float32)
    cos, sin = rotation(rope, 8, jnp.array([position], jnp.int32))
    turned = np.asarray(rotate(jnp.asarray(x), cos, sin))
    angles = position / 4 * 10000.0 ** -(np.arange(4) / 4)
    pairs = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)
    expected = np.concatenate([pairs.real, pairs.imag], axis=-1)
    np.testing.assert_allclose(turned, expected, atol=1e-5 if position < 1000 else 1e-2)


def test_neighbouring_positions_past_the_trained_ones_differ():
    cos, _ = rotation(RopeConfig(theta=1e4), 8, jnp.array([63, 64, 65], jnp.int32))
    assert np.all(np.abs(np.diff(np.asarray(cos), axis=0)).max(axis=-1) > 1e-3)
