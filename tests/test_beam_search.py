"""Beam search in the compiled loop, against the same said slowly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import VOCAB, HistoryDecoder, StubDecoder, logits_of, random_prompts, tiny_decoder
from helpers_beams import (
    LONGEST,
    MAX_TOKENS,
    NUM_PAGES,
    answers_of,
    assert_answers,
    beam_oracle,
    history_logits,
    history_table,
    is_empty,
    make_beam_cache,
    padded,
    search,
    search_jit,
)
from paxkv.beam_steps import beam_step, start_beams
from paxkv.cache import append_all, reserve_all
from paxkv.integrity import check_integrity
from paxkv.page_pool import dense_from_pages
from paxkv.steps import store

PROMPTS = random_prompts([9, 1, 12])
EOS = (3, 40)
SETTINGS = {"width": 4, "eos_ids": EOS, "early_stopping": False}


@pytest.mark.parametrize(
    ("width", "early_stopping"),
    [(1, False), (2, "never"), (4, False), (4, True), (4, "never"), (6, True)],
)
def test_answers_are_those_of_the_oracle(width, early_stopping):
    settings = {"width": width, "early_stopping": early_stopping, "eos_ids": EOS}
    lengths = set()
    for seed, favour in enumerate((0.0, 2.0, 4.0, 6.0)):
        table = history_table(seed, EOS, favour)
        for length_penalty in (0.0, 0.7, 1.0, 2.0, -0.5):
            its = {**settings, "length_penalty": length_penalty}
            cache, found, fits = search(HistoryDecoder(table), PROMPTS, **its)
            assert fits and np.all(found.is_complete) and is_empty(cache)
            for i, prompt in enumerate(PROMPTS):
                answers = answers_of(found, i)
                assert_answers(
                    answers, beam_oracle(functools.partial(history_logits, table), prompt, **its)
                )
                lengths |= {len(answer.tokens) for answer in answers}
    assert {MAX_TOKENS} < lengths  # some ended early, some did not


def test_tokens_that_end_nothing_leave_answers_of_full_length():
    table = history_table(7)
    _, found, _ = search(HistoryDecoder(table), PROMPTS)
    for i, prompt in enumerate(PROMPTS):
        expected = beam_oracle(functools.partial(history_logits, table), prompt, width=4)
        assert_answers(answers_of(found, i), expected)
    assert np.all(found.lengths == MAX_TOKENS)


def test_answers_of_a_real_model_are_those_of_dense_attention():
    decoder = tiny_decoder()

    def next_logits(tokens: list[int]) -> np.ndarray:
        return logits_of(decoder, tokens, length=LONGEST + MAX_TOKENS)[-1]

    _, found, fits = search(decoder, PROMPTS, **SETTINGS)
    assert fits
    for i, prompt in enumerate(PROMPTS):
        assert_answers(answers_of(found, i), beam_oracle(next_logits, prompt, **SETTINGS))


def test_tables_are_whole_and_shared_at_every_step():
    """And each beam's pages hold its own tokens: a wrong one would show in the next logits."""
    width, decoder = 4, HistoryDecoder(history_table(1, EOS, 2.0))
    prompts, lens = padded([PROMPTS[0], PROMPTS[2]])
    num_slots = 2 * width
    most = 2 + 2 + width * (4 + 5)  # full pages of the prompts are shared, whatever comes
    cache = make_beam_cache(decoder, num_slots, most + 1)
    q_lens = jnp.zeros(num_slots, jnp.int32).at[jnp.arange(2) * width].set(lens - 1)
    cache, stored = jax.jit(prefilled)(decoder, cache, prompts, q_lens)
    assert stored
    cache, beams = jax.jit(
        functools.partial(start_beams, width=width, max_length=MAX_TOKENS, eos_ids=EOS)
    )(cache, prompts[np.arange(2), lens - 1], np.full(2, MAX_TOKENS, np.int32))
    step, held = jax.jit(beam_step), []
    while np.any(beams.is_running):
        [(_, table)] = cache
        check_integrity(table)
        running = np.repeat(beams.is_running, width)
        np.testing.assert_array_equal(
            table.lengths, np.where(running, np.repeat(lens, width) - 1 + beams.num_steps, 0)
        )
        held.append(int(np.sum(np.asarray(table.ref_counts) > 0)) - 1)
        cache, beams, fits = step(decoder, cache, beams)
        assert fits
    assert is_empty(cache)
    assert held[0] == 2 + 3 and max(held) < most  # 8 and 11 tokens are stored before the start


def prefilled(decoder, cache, prompts, q_lens):
    cache, fits, *_ = store(
        decoder, cache, q_lens, lambda rows: prompts[rows.slots // 4, rows.positions],
        num_rows=2 * LONGEST,
    )  # fmt: skip
    return cache, fits


def test_pool_that_is_too_small_ends_the_search_and_is_left_empty():
    decoder, fitted = HistoryDecoder(history_table(2)), []
    for num_free in (0, 1, 3, 6, 9, 15, 30, 60):
        cache, found, fits = search(decoder, PROMPTS, num_free=num_free)
        assert is_empty(cache, num_free)
        assert np.all(found.is_complete == bool(fits))
        fitted.append(bool(fits))
    assert fitted[0] is False and fitted == sorted(fitted) and fitted[-1] is True


def test_pages_that_beams_may_need_are_enough():
    # 27 tokens are stored at most: 2 full pages of the prompt, then 5 pages of each beam.
    _, found, fits = search(
        HistoryDecoder(history_table(2)), [PROMPTS[2], [], []], num_free=2 + 4 * 5
    )
    assert fits and found.is_complete.tolist() == [True, False, False]


def test_prompt_whose_logits_are_nan_fails_and_leaves_the_others_alone():
    table = np.array(history_table(3)[0])
    table = np.tile(table, (VOCAB, 1))
    table[:, 7], table[7] = -30.0, np.nan  # after token 7, which none of the others meets
    cache, found, fits = search(StubDecoder(table), [[1], [7], [2]], **SETTINGS)
    assert fits and is_empty(cache)
    assert found.is_complete.tolist() == [True, False, True]
    expected = beam_oracle(lambda tokens: table[tokens[-1]], [1], **SETTINGS)
    assert_answers(answers_of(found, 0), expected)


def test_fewer_continuations_than_beams_are_each_found_once():
    table = np.full((4, 4), -np.inf, np.float32)
    table[:, :2] = [0.0, -1.0]  # two tokens are possible, of which one ends the text
    cache, found, fits = search(StubDecoder(table), [[0]], width=6, eos_ids=(1,))
    assert fits and is_empty(cache)
    answers = answers_of(found, 0)
    assert len({tuple(answer.tokens) for answer in answers}) == len(answers) == 6
    assert all(set(answer.tokens[:-1]) <= {0} for answer in answers)


def test_rows_without_a_prompt_and_other_slots_are_left_alone():
    decoder = HistoryDecoder(history_table(4, EOS, 2.0))
    cache = make_beam_cache(decoder, 3 * 4 + 1, NUM_PAGES)
    others = jnp.zeros(13, jnp.int32).at[12].set(6)
    cache, _ = reserve_all(cache, others)
    cache, _ = append_all(cache, others)
    [(pool, table)] = cache
    pages = table.block_tables[12, :2]
    pool = jax.tree.map(lambda x: x.at[pages].set(5.0), pool)
    prompts, lens = padded(PROMPTS)
    cache, found, fits = search_jit(
        decoder, ((pool, table),), prompts, np.where([True, False, True], lens, 0).astype(np.int32),
        length_penalty=np.float32(1), **SETTINGS,
    )  # fmt: skip
    assert fits and found.is_complete.tolist() == [True, False, True]
    assert answers_of(found, 1) == []
    [(pool, table)] = cache
    assert table.lengths.tolist() == [0] * 12 + [6]
    keys, values = dense_from_pages(pool, table, 0, length=6)
    assert np.all(keys[12] == 5.0) and np.all(values[12] == 5.0)
    _, alone, _ = search(decoder, PROMPTS, **SETTINGS)
    for i in (0, 2):
        assert answers_of(found, i) == answers_of(alone, i)


def test_cache_with_too_few_slots_is_refused_with_the_numbers():
    cache = make_beam_cache(tiny_decoder(), 11, 20)
    with pytest.raises(ValueError, match=r"3 prompts of width=4 beams need 12 slots.* has 11"):
        search_jit(tiny_decoder(), cache, *padded(PROMPTS), width=4, eos_ids=())
