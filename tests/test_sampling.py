"""The next token of every slot: which tokens may come, how often, and whatever the company."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paxkv import sampling
from paxkv.sampling import Sampling, greedy_sampling, log_probabilities, request_key, sample


@pytest.fixture(autouse=True)
def strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


def rows(*settings_of_rows: dict) -> Sampling:
    """One row for each dict of settings; what a dict leaves out is off, its key of seed 0."""

    def column(name, off, dtype):
        return jnp.array([row.get(name, off) for row in settings_of_rows], dtype)

    return Sampling(
        temperature=column("temperature", 1.0, jnp.float32),
        top_k=column("top_k", 0, jnp.int32),
        top_p=column("top_p", 1.0, jnp.float32),
        min_p=column("min_p", 0.0, jnp.float32),
        key=jnp.array([request_key(row.get("seed", 0), 0) for row in settings_of_rows]),
    )


sample_jit = jax.jit(sample)


def draw(logits, num_draws: int, *, jitted=sample_jit, **settings) -> np.ndarray:
    """Tokens 0 to num_draws of one request whose logits never change.

    Short rows are padded with tokens that must not come, so that few shapes are compiled.
    """
    padding = (0, max(0, 12 - len(logits)))
    logits = np.pad(np.asarray(logits, np.float32), padding, constant_values=-np.inf)
    logits = jnp.broadcast_to(logits, (num_draws, len(logits)))
    tokens, ok = jitted(logits, rows(*[settings] * num_draws), jnp.arange(num_draws))
    assert np.all(ok)
    return np.asarray(tokens)


def reference(
    logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0
) -> tuple[np.ndarray, float]:
    """Probabilities by a stable sort, in float64, and how close a token is to top-p's edge."""
    scaled = np.asarray(logits, np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    weights = np.exp(scaled[order] - scaled[order[0]])
    weights[top_k or len(weights) :] = 0.0
    share = weights / weights.sum()
    before = np.cumsum(share) - share
    gap = 1.0 if top_p == 1.0 else float(np.min(np.abs(before - top_p)))
    if top_p < 1.0:
        weights[before >= top_p] = 0.0
    weights[weights < min_p] = 0.0
    probabilities = np.zeros_like(weights)
    probabilities[order] = weights / weights.sum()
    return probabilities, gap


def assert_distributed(tokens: np.ndarray, probabilities: np.ndarray):
    """A chi-square test, five standard deviations wide, rare tokens taken together."""
    assert np.all(probabilities[tokens] > 0)
    expected = probabilities * len(tokens)
    found = np.bincount(tokens, minlength=len(expected)).astype(float)
    is_rare = expected < 8
    expected = np.append(expected[~is_rare], max(expected[is_rare].sum(), 1e-9))
    found = np.append(found[~is_rare], found[is_rare].sum())
    chi_square = np.sum((found - expected) ** 2 / np.maximum(expected, 1.0))
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom) + 5


# What is kept

# Each is traced when it is first called, with the length of the short list that holds then.
SAMPLE_BY_FEW = {few: jax.jit(lambda *args: sample(*args)) for few in (1, 64)}


@pytest.mark.parametrize("few", [1, 64], ids=["by rejection", "from the few best"])
@settings(max_examples=40, deadline=None)
@given(
    levels=st.lists(st.sampled_from([-np.inf, 0.0, 0.5, 1.0]), min_size=12, max_size=12),
    top_k=st.integers(0, 13),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 0.999)),
    min_p=st.sampled_from([0.0, 0.5, 0.7, 1.0]),
)
def test_kept_tokens_are_those_of_a_stable_sort(few, levels, top_k, top_p, min_p):
    assume(max(levels) > -np.inf)
    cuts = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    probabilities, gap = reference(levels, **cuts)
    assume(gap > 1e-5)  # closer than rounding, either answer is right
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_FEW", few)
        tokens = draw(levels, 600, jitted=SAMPLE_BY_FEW[few], **cuts)
    assert set(tokens) == set(np.flatnonzero(probabilities))


CUTS = {
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 20},
    "large top-k": {"top_k": 300},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "top-k, top-p": {"top_k": 50, "top_p": 0.9},
    "large top-k, top-p": {"top_k": 300, "top_p": 0.7},
    "all": {"temperature": 1.5, "top_k": 100, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("spread", [0.1, 2.0], ids=["flat", "peaked"])
def test_tokens_come_as_often_as_their_probability(cuts, spread):
    logits = spread * np.random.default_rng(1).standard_normal(1000, np.float32)
    tokens = draw(logits, 4000, seed=5, **cuts)
    assert_distributed(tokens, reference(logits, **cuts)[0])


def test_wide_vocabulary_draws_from_first_to_last_token():
    vocab_size = 256_001
    logits = np.full(vocab_size, -np.inf, np.float32)
    wanted = [0, 255, 256, 70_000, vocab_size - 1]
    logits[wanted] = 3.0
    assert set(draw(logits, 32, top_p=0.99)) == set(wanted)
    assert set(draw(logits, 32)) == set(wanted)
    assert set(draw(logits, 32, top_k=5)) == set(wanted)


def test_top_k_past_the_vocabulary_keeps_all_tokens():
    assert set(draw(np.zeros(12), 600, top_k=1000)) == set(range(12))
    assert set(draw(np.zeros(12), 600, top_k=-1)) == set(range(12))


def test_smallest_top_p_and_largest_min_p_keep_the_best_token():
    logits = np.array([0.0, 2.0, 1.0], np.float32)
    assert set(draw(logits, 600, top_p=1e-45)) == {1}
    assert set(draw(logits, 600, top_p=1e-45, top_k=2)) == {1}
    assert set(draw(logits, 600, min_p=1.0)) == {1}


# Greedy rows and tiny temperatures


def test_greedy_takes_the_first_of_equal_logits():
    logits = jnp.array([[1.0, 3.0, 3.0], [-jnp.inf, -5.0, -jnp.inf], [2.0, 2.0, 2.0]])
    tokens, ok = sample_jit(logits, greedy_sampling(3), jnp.zeros(3, jnp.int32))
    assert tokens.tolist() == [1, 1, 0]
    assert ok.tolist() == [True] * 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_mixed_rows_with_tiny_temperatures_take_the_best_and_a_nan_row_fails_alone(dtype):
    logits = np.random.default_rng(0).uniform(-30, 29, (7, 500)).astype(np.float32)
    logits[:, 123] = 30.0
    logits[0, 7] = -np.inf
    logits[6] = np.nan
    temperatures = [0.0, 0.8, 1e-3, 1e-4, 1e-5, 1e-6, 1.0]
    settings_of_rows = rows(*[{"temperature": t} for t in temperatures])
    tokens, ok = sample_jit(
        jnp.asarray(logits).astype(dtype), settings_of_rows, jnp.zeros(7, jnp.int32)
    )
    assert ok.tolist() == [True] * 6 + [False]
    assert tokens[0] == 123
    assert tokens[2:6].tolist() == [123] * 4
    assert 0 <= tokens[1] < 500
    assert tokens[6] == 0


@pytest.mark.parametrize("temperature", [1e-37, 1e-38, 1e-45])
def test_temperatures_at_the_edge_of_float32_take_the_best(temperature):
    assert set(draw([1.0, 1.0001, -np.inf], 600, temperature=temperature)) == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_without_a_finite_best_fails_alone(temperature):
    good = np.linspace(0, 1, 77, dtype=np.float32)
    logits = np.tile(good, (80, 1))
    logits[np.arange(77), np.arange(77)] = np.nan  # wherever it stands
    logits[77] = -np.inf
    logits[78, 3] = np.inf
    settings_of_rows = rows(*[{"temperature": temperature, "top_p": 0.9}] * 80)
    index = jnp.zeros(80, jnp.int32)
    tokens, ok = sample_jit(jnp.asarray(logits), settings_of_rows, index)
    assert ok.tolist() == [False] * 79 + [True]
    assert not np.any(tokens[:79])
    alone = jax.tree.map(lambda x: x[79:], settings_of_rows)
    assert tokens[79] == sample_jit(jnp.asarray(logits[79:]), alone, index[79:])[0][0]


# Seeds


def test_seeded_request_draws_the_same_in_any_company():
    num_tokens, logits = 8, jnp.zeros(1000)
    seeded = {"seed": 42}
    others = [{"temperature": 0.0}, {"top_k": 3}, {"top_k": 400, "top_p": 0.4}, {"min_p": 0.3}]

    def outputs(slot_of_step, company):
        """The seeded request's tokens when it stands in a slot that may change at each step."""
        tokens = []
        for index in range(num_tokens):
            slot = slot_of_step(index)
            batch = [*company[:slot], seeded, *company[slot:]]
            counts = jnp.full(len(batch), 90 + index, jnp.int32).at[slot].set(index)
            batch_logits = jnp.broadcast_to(logits, (len(batch), 1000))
            tokens.append(int(sample_jit(batch_logits, rows(*batch), counts)[0][slot]))
        return tokens

    alone = outputs(lambda index: 0, [])
    assert len(set(alone)) > 1
    assert outputs(lambda index: 0, [{"seed": 7}]) == alone
    assert outputs(lambda index: 1, [{"seed": 7}]) == alone
    assert outputs(lambda index: index % 5, others) == alone  # moved, as after a preemption


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_row_is_the_same_alone_and_beside_every_other_kind(cuts):
    logits = jnp.asarray(np.random.default_rng(3).standard_normal((9, 700), np.float32))
    batch = rows(cuts, *CUTS.values())
    index = jnp.arange(9)
    together = sample_jit(logits, batch, index)[0]
    alone = sample_jit(logits[:1], jax.tree.map(lambda x: x[:1], batch), index[:1])[0]
    assert together[0] == alone[0]


def test_request_key_is_jax_random_key_of_the_seed():
    for seed in (0, 42, 2**32 - 1):
        assert request_key(seed, 3).tolist() == jax.random.key_data(jax.random.key(seed)).tolist()
    assert request_key(42, 0).tolist() == request_key(42, 1).tolist()


def test_request_keys_of_different_seeds_and_requests_differ():
    keys = [request_key(seed, 0) for seed in (-1, 0, 1, 2**32, 2**63)]
    keys += [request_key(None, i, engine_seed) for i in range(50) for engine_seed in (0, -1)]
    assert len({tuple(key) for key in keys}) == len(keys)
    assert request_key(None, 4, 9).tolist() == request_key(None, 4, 9).tolist()
    assert all(key.dtype == np.uint32 and key.shape == (2,) for key in keys)


# Log-probabilities


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_log_probabilities_match_float64(dtype, num_top):
    logits = jnp.asarray(5 * np.random.default_rng(2).standard_normal((3, 101))).astype(dtype)
    logits = logits.at[1].set(-jnp.inf).at[1, 8].set(2.0)  # one token allowed
    tokens = jnp.array([4, 8, 100])
    chosen, top_ids, top = jax.jit(log_probabilities, static_argnums=2)(logits, tokens, num_top)
    exact = np.asarray(logits.astype(jnp.float32), np.float64)
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(chosen, exact[np.arange(3), tokens], atol=1e-5)
    assert top_ids.shape == top.shape == (3, num_top)
    order = np.argsort(-exact, axis=-1, kind="stable")[:, :num_top]
    assert top_ids.tolist() == order.tolist()
    np.testing.assert_allclose(top, np.take_along_axis(exact, order, -1), atol=1e-5)


def test_log_probabilities_of_a_row_do_not_depend_on_the_others():
    logits = jnp.asarray(np.random.default_rng(4).standard_normal((3, 64), np.float32))
    tokens = jnp.array([1, 2, 3])
    together = log_probabilities(logits.at[1].set(jnp.nan), tokens, 3)
    alone = log_probabilities(logits[2:], tokens[2:], 3)
    for one, other in zip(together, alone, strict=True):
        assert one[2].tolist() == other[0].tolist()
