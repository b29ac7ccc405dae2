"""Penalties, bias and least length against one row at a time in numpy, and one's own processor."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.logits_processors import (
    NO_TOKEN,
    LogitsProcessor,
    SlotView,
    chain,
    default_processors,
    logit_bias,
    min_tokens,
    neutral_settings,
    penalties,
    stateless,
)

NUM_SLOTS, MAX_LENGTH, VOCAB, NUM_STOPS = 4, 9, 11, 3


@pytest.fixture(autouse=True)
def strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


@dataclasses.dataclass
class Row:
    """One request, as plain Python has it."""

    prompt: list[int]
    output: list[int]
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_ids: list[int] = dataclasses.field(default_factory=list)
    bias: dict[int, float] = dataclasses.field(default_factory=dict)

    def expected(self, logits: np.ndarray) -> np.ndarray:
        out = logits.copy()
        for token, bias in self.bias.items():
            out[token] += bias
        for token in {*self.prompt, *self.output}:
            if out[token] > 0:
                out[token] /= self.repetition_penalty
            else:
                out[token] *= self.repetition_penalty
        for token in set(self.output):
            out[token] -= self.frequency_penalty * self.output.count(token)
            out[token] -= self.presence_penalty
        if len(self.output) < self.min_tokens:
            out[self.stop_ids] = -np.inf
        return out


def padded(values, length: int, filler) -> list:
    return [*values, *[filler] * (length - len(values))]


def view(rows: list[Row]) -> SlotView:
    """The slots of some rows, padded with what must not matter."""
    neutral = neutral_settings(len(rows), NUM_STOPS)

    def column(name: str, like: jax.Array) -> jax.Array:
        return jnp.array([getattr(row, name) for row in rows], like.dtype)

    scalars = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")
    biases = neutral.bias_ids.shape[1]
    return SlotView(
        tokens=jnp.array([padded(row.prompt + row.output, MAX_LENGTH, 1) for row in rows]),
        prompt_lens=jnp.array([len(row.prompt) for row in rows]),
        num_tokens=jnp.array([len(row.prompt + row.output) for row in rows]),
        settings=dataclasses.replace(
            neutral,
            **{name: column(name, getattr(neutral, name)) for name in scalars},
            stop_ids=jnp.array([padded(row.stop_ids, NUM_STOPS, VOCAB) for row in rows]),
            bias_ids=jnp.array([padded(row.bias, biases, NO_TOKEN) for row in rows]),
            bias_values=jnp.array([padded(row.bias.values(), biases, 3.0) for row in rows]),
        ),
    )


def run(processor: LogitsProcessor, logits: jax.Array, slots: SlotView) -> jax.Array:
    return processor.apply(processor.init(logits.shape[0]), logits, slots)


apply_defaults = jax.jit(lambda logits, slots: run(default_processors(), logits, slots))

token = st.integers(0, VOCAB - 1)
requests = st.builds(
    Row,
    prompt=st.lists(token, min_size=1, max_size=4),
    output=st.lists(token, max_size=5),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, -1.5, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -0.25, 0.5]),
    min_tokens=st.sampled_from([0, 3, 9]),
    stop_ids=st.lists(token, max_size=NUM_STOPS),
    bias=st.dictionaries(token, st.sampled_from([-np.inf, -100.0, 0.5]), max_size=4),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@settings(max_examples=60, deadline=None)
@given(rows=st.lists(requests, min_size=NUM_SLOTS, max_size=NUM_SLOTS), seed=st.integers(0, 99))
def test_each_row_is_as_plain_python_has_it(dtype, rows, seed):
    logits = 3 * np.random.default_rng(seed).standard_normal((NUM_SLOTS, VOCAB), np.float32)
    logits[:, seed % VOCAB] = -np.inf
    given_logits = jnp.asarray(logits).astype(dtype)
    rounded = np.asarray(given_logits.astype(jnp.float32))
    expected = [row.expected(one) for row, one in zip(rows, rounded, strict=True)]
    out = apply_defaults(given_logits, view(rows))
    assert out.dtype == given_logits.dtype
    tolerance = 1e-6 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("neighbour_asks", [False, True])
def test_row_that_asks_for_nothing_keeps_its_logits_to_the_bit(neighbour_asks):
    plain = Row(prompt=[1, 2], output=[3])
    asking = Row([1], [2, 2], 1.5, 1.0, 1.0, min_tokens=9, stop_ids=[4], bias={5: 2.0})
    logits = jnp.array([[-0.0, 0.0, jnp.nan, -jnp.inf, 1e-30, *range(6)]] * 2)
    out = apply_defaults(logits, view([plain, asking if neighbour_asks else plain]))
    np.testing.assert_array_equal(
        np.asarray(out[0]).view(np.int32), np.asarray(logits[0]).view(np.int32)
    )
    assert neighbour_asks == bool(jnp.any(out[1, 3:] != logits[1, 3:]))


def test_idle_slot_with_old_settings_is_left_alone():
    idle = Row([], [], 1.5, 1.0, 1.0, min_tokens=9, stop_ids=[4], bias={5: 2.0})
    logits = jnp.arange(2.0 * VOCAB).reshape(2, VOCAB)
    assert apply_defaults(logits, view([idle, idle])).tolist() == logits.tolist()


def test_penalties_count_the_prompt_only_for_repetition():
    row = Row(prompt=[1, 1], output=[2, 2], presence_penalty=1.0, frequency_penalty=0.25)
    out = run(penalties(), jnp.zeros((1, VOCAB)), view([row]))
    assert out[0, :4].tolist() == [0.0, 0.0, -1.5, 0.0]


def test_min_tokens_forbids_stops_until_the_output_is_long_enough():
    rows = [
        Row([1, 2, 3], [4] * num_outputs, min_tokens=2, stop_ids=[0, 7]) for num_outputs in range(4)
    ]
    out = run(min_tokens(), jnp.zeros((4, VOCAB)), view(rows))
    assert jnp.isneginf(out).sum(axis=-1).tolist() == [2, 2, 0, 0]
    assert jnp.isneginf(out)[0, jnp.array([0, 7])].tolist() == [True, True]


def test_bias_past_the_vocabulary_is_dropped():
    out = run(logit_bias(), jnp.zeros((1, VOCAB)), view([Row([1], [], bias={VOCAB: 1.0, 2: 0.5})]))
    assert out[0].tolist() == [0.0, 0.0, 0.5, *[0.0] * (VOCAB - 3)]


def forbid_repeats() -> LogitsProcessor:
    """The module docstring's example."""

    def init(num_slots):
        return jnp.full(num_slots, NO_TOKEN, jnp.int32)

    def apply(last, logits, slots):
        rows = jnp.arange(logits.shape[0])
        return logits.at[rows, last].set(-jnp.inf, mode="drop")

    def update(last, tokens, is_live, slots):
        return jnp.where(is_live, tokens, last)

    return LogitsProcessor(init, apply, update)


def test_processor_of_ones_own_keeps_a_state_inside_a_compiled_loop():
    processor = chain(stateless(lambda logits, slots: logits * 2.0), forbid_repeats())
    slots = view([Row([1], []), Row([2], [])])
    logits = jnp.zeros((2, VOCAB)).at[:, 4].set(2.0).at[:, 6].set(1.0)
    is_live = jnp.array([True, False])

    def step(state, _):
        tokens = jnp.argmax(processor.apply(state, logits, slots), axis=-1)
        return processor.update(state, tokens, is_live, slots), tokens

    _, tokens = jax.jit(lambda: jax.lax.scan(step, processor.init(2), None, length=4))()
    assert tokens.T.tolist() == [[4, 6, 4, 6], [4, 4, 4, 4]]


def test_chain_of_nothing_changes_nothing():
    logits = jnp.ones((2, VOCAB))
    slots = view([Row([1], [])] * 2)
    assert run(chain(), logits, slots) is logits
    assert chain().update((), jnp.zeros(2, jnp.int32), jnp.ones(2, bool), slots) == ()
