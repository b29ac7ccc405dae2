"""Pages that leave a sliding window are given back exactly when no query can see them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from helpers import VOCAB, add, check_engine, make_engine, random_prompts, run, serve, settled
from paxkv.block_table import append, fork, init_block_table, release
from paxkv.config import num_pages_for, page_bytes, pages_of_groups
from paxkv.decoder import Cache, LayerGroup
from paxkv.integrity import check_integrity
from paxkv.reservation import reserve
from paxkv.windows import release_window


def grow(table, tokens: list[int], window: int):
    """Stores tokens in slots and releases what leaves the window; also the copies made."""
    new_tokens = jnp.array(tokens, jnp.int32)
    table, copies, fits = reserve(table, new_tokens)
    assert fits
    table, ok = append(table, new_tokens)
    table, released = release_window(table, window)
    assert ok and released
    check_integrity(table)
    return table, int(np.sum(np.asarray(copies.target) < table.ref_counts.shape[0]))


def pages(table, slot: int) -> list[int]:
    """The pages that a slot names, by the places they have in its row."""
    row = np.asarray(table.block_tables[slot])
    return np.flatnonzero(row).tolist()


@pytest.mark.parametrize("window", [6, 8])
def test_page_leaves_when_the_next_query_cannot_see_its_last_token(window):
    table = init_block_table(num_slots=1, max_pages=8, num_pages=9, page_size=4)
    table, _ = grow(table, [6], window)
    for length in range(7, 7 + 14):
        assert pages(table, 0)[0] == max(0, length - 1 - window + 1) // 4
        table, _ = grow(table, [1], window)
        held = pages(table, 0)
        first_seen = max(0, length - window + 1)  # by the next query, at `length`
        assert held == list(range(first_seen // 4, -(-length // 4)))
        assert len(held) <= 3


@pytest.mark.parametrize("first_out", [0, 1])
def test_fork_of_a_sequence_past_its_window_frees_each_page_once(first_out):
    table = init_block_table(num_slots=2, max_pages=8, num_pages=9, page_size=4)
    table, _ = grow(table, [14, 0], window=8)
    assert pages(table, 0) == [1, 2, 3]  # that of the tokens 0 to 3 is given up
    table, ok = fork(table, jnp.array([0, 0], jnp.int32))
    assert ok
    check_integrity(table)
    assert sorted(np.asarray(table.ref_counts)[1:].tolist()) == [0] * 5 + [2] * 3
    table, num_copies = grow(table, [1, 0], window=8)
    assert num_copies == 1  # the half-full page
    table, _ = grow(table, [0, 6], window=8)
    for slot in (first_out, 1 - first_out):
        table, ok = release(table, jnp.arange(2) == slot)
        assert ok
        check_integrity(table)
    assert np.asarray(table.ref_counts).tolist() == [1] + [0] * 8


@given(
    window=st.integers(1, 12),
    page_size=st.integers(1, 5),
    steps=st.lists(st.integers(0, 7), min_size=1, max_size=8),
)
def test_pages_in_use_are_those_that_queries_to_come_see(window, page_size, steps):
    table = init_block_table(num_slots=1, max_pages=60, num_pages=61, page_size=page_size)
    length = 0
    for tokens in steps:
        table, _ = grow(table, [tokens], window)
        length += tokens
        seen = range(max(0, length - window + 1), length)
        assert pages(table, 0) == sorted({position // page_size for position in seen}) or (
            # of a window of 1 the newest token is not seen by the next, but its page is written
            pages(table, 0) == sorted({p // page_size for p in [*seen, length - 1] if p >= 0})
        )


class WindowedDecoder(nnx.Module):
    """Logits are a row of the table chosen by the tokens that the window shows, and their order."""

    def __init__(self, windows: tuple[int | None, ...]):
        self.vocab_size = VOCAB
        self.layer_groups = tuple(
            LayerGroup(layers=(i,), num_kv_heads=1, head_dim=1, window=window)
            for i, window in enumerate(windows)
        )
        table = 3 * np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype("f4")
        self.table = nnx.Param(jnp.asarray(table))

    def __call__[C: Cache](
        self, tokens: jax.Array, positions: jax.Array, cache: C
    ) -> tuple[jax.Array, C]:
        zeros = jnp.zeros((tokens.shape[0], 1, 1), jnp.float32)  # every key weighs the same
        total = jnp.zeros(tokens.shape[0], jnp.int32)
        checks = ((tokens + 1) * (1 + positions % 7)).astype(jnp.float32)
        for group in self.layer_groups:
            mean, cache = cache.attend(group.layers[0], zeros, zeros, checks[:, None, None])
            seen = positions + 1
            if group.window is not None:
                seen = jnp.minimum(seen, group.window)
            total += jnp.round(mean[:, 0, 0] * seen.astype(jnp.float32)).astype(jnp.int32)
        return (total % self.vocab_size)[:, None], cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self.table[...][hidden[:, 0]]


def expected(prompt: list[int], num_new: int, windows: tuple[int | None, ...]) -> list[int]:
    """What `WindowedDecoder` answers, counted out."""
    table = np.asarray(WindowedDecoder(windows).table[...])
    tokens = list(prompt)
    for _ in range(num_new):
        checks = [(token + 1) * (1 + i % 7) for i, token in enumerate(tokens)]
        total = sum(sum(checks[-window:] if window else checks) for window in windows)
        tokens.append(int(np.argmax(table[total % VOCAB])))
    return tokens[len(prompt) :]


PROMPTS = random_prompts([1, 9, 30, 5, 17])


@pytest.mark.parametrize("windows", [(6,), (None, 6), (3, 8)], ids=str)
def test_answers_with_windows_are_those_of_the_tokens_seen(windows):
    engine = make_engine(WindowedDecoder(windows))
    for request in serve(engine, PROMPTS, settled(max_tokens=25)):
        assert request.output == expected(request.prompt, 25, windows)
    with pytest.raises(ValueError, match="the decoder has sliding windows"):
        engine.warm([1] * 8)


def test_request_goes_on_past_what_the_pool_holds():
    # 7 pages of 4 tokens: two of 50 tokens each run in them side by side.
    engine = make_engine(WindowedDecoder((6,)), num_slots=2, num_pages=15, max_length=200)
    prompts = random_prompts([40, 50], seed=3)
    requests = [add(engine, prompt, settled(max_tokens=120)) for prompt in prompts]
    assert engine.max_length == 200 and engine.capacity == 56
    engine.step(1)
    check_engine(engine)
    run(engine)
    for request in requests:
        assert request.output == expected(request.prompt, 120, (6,))
    assert engine.stats.num_preemptions == 0
    assert engine.stats.peak_pages <= 14


def test_samples_of_a_windowed_prompt_share_and_part():
    engine = make_engine(WindowedDecoder((6,)))
    [prompt] = random_prompts([18])
    request = add(engine, prompt, settled(n=3, max_tokens=12))
    run(engine)
    assert [sample.output for sample in request.samples] == [expected(prompt, 12, (6,))] * 3


def test_pool_of_windowed_layers_beside_full_ones_is_as_large_as_they_can_use():
    full, windowed = (LayerGroup(layers=(i,), num_kv_heads=1, head_dim=1, window=w)
                      for i, w in enumerate([None, 6]))  # fmt: skip
    sizes = {"num_slots": 4, "at_once": 16, "page_size": 4}
    # A window of 6 and 16 tokens of a prompt take 6 pages, or 7 if they begin within one.
    assert pages_of_groups((full, windowed), 65, **sizes) == (65, 1 + 4 * 7)
    assert pages_of_groups((full, windowed), 20, **sizes) == (20, 20)
    assert pages_of_groups((windowed,), 65, **sizes) == (65,)
    page = page_bytes([full], page_size=4, dtype="float32")
    for num_pages, memory in ((65, 65 + 29), (64, 65 + 28), (29, 58), (28, 57)):
        assert num_pages == num_pages_for(memory * page, (full, windowed), dtype="float32", **sizes)
