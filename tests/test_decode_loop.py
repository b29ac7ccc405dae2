"""How long the decode loop goes on, and what it does when something does not fit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import VOCAB, StubDecoder, random_prompts
from helpers_steps import (
    MAX_BURST,
    MAX_TOKENS,
    NUM_PAGES,
    NUM_ROWS,
    decode,
    generate,
    make_cache,
    make_slots,
    tokens_of,
)
from paxkv.cache import PagedCache
from paxkv.integrity import check_integrity
from paxkv.logits_processors import chain, default_processors
from paxkv.sampling import same_sampling
from paxkv.slots import Finish
from paxkv.steps import prefill_step_jit, settle_step_jit
from test_logits_processors import forbid_repeats


def occupy(cache: PagedCache, num_free: int) -> PagedCache:
    """Leaves so many pages free; the rest are held from outside the table."""
    pool, table = cache[0]
    counts = table.ref_counts.at[num_free + 1 :].add(1)
    return ((pool, dataclasses.replace(table, ref_counts=counts)),)


COUNTER = StubDecoder(10.0 * np.roll(np.eye(VOCAB, dtype=np.float32), 1, axis=1))  # next: token + 1


def counted(start: int, count: int) -> list[int]:
    return [(start + i) % VOCAB for i in range(1, count + 1)]


def test_prefill_that_does_not_fit_changes_nothing_and_says_so():
    cache = occupy(make_cache(COUNTER), num_free=5)
    slots = make_slots(random_prompts([9, 5, 12]))
    before = jax.device_get(cache)
    q_lens = np.array([8, 4, 11], np.int32)  # 2 + 1 + 3 pages
    cache, fits, _ = prefill_step_jit(COUNTER, cache, slots, q_lens, num_rows=NUM_ROWS)
    assert not fits
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(cache), before)
    q_lens = np.array([8, 4, 8], np.int32)  # one page less
    cache, fits, _ = prefill_step_jit(COUNTER, cache, slots, q_lens, num_rows=NUM_ROWS)
    assert fits
    np.testing.assert_array_equal(cache[0][1].lengths, q_lens)


def test_loop_leaves_when_the_pool_is_full_and_goes_on_after_a_release():
    cache = occupy(make_cache(COUNTER), num_free=5)
    slots = make_slots([[1], [2], [3]])  # 8 tokens each are 2 pages each
    cache, slots, burst = decode(COUNTER, cache, slots)
    assert not burst.fits
    assert burst.num_steps == 4
    assert tokens_of(burst) == [counted(1, 4), counted(2, 4), counted(3, 4)]
    np.testing.assert_array_equal(burst.lengths, [4, 4, 4])
    held = np.asarray(cache[0][1].ref_counts) > 0
    assert held.sum() == NUM_PAGES - 2  # a step that does not fit takes no page
    before = jax.device_get((cache, slots))
    cache, slots, burst = decode(COUNTER, cache, slots)
    assert (burst.num_steps, burst.fits) == (0, False)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((cache, slots)), before)

    done, pages = np.array([False, True, False]), np.arange(NUM_PAGES, dtype=np.int32)[None]
    cache, slots, ok = settle_step_jit(cache, slots, done, np.zeros_like(pages), pages)
    assert ok
    cache, slots, burst = decode(COUNTER, cache, slots)
    assert burst.fits
    assert tokens_of(burst) == [counted(5, 4), [], counted(7, 4)]
    np.testing.assert_array_equal(burst.news.finish, [Finish.LENGTH, 0, Finish.LENGTH])


def test_pages_are_taken_and_given_back_inside_the_loop():
    # 11 tokens each are 3 pages each; 4 are free, so that each goes on when the last has ended.
    cache = occupy(make_cache(COUNTER), num_free=4)
    slots = make_slots([[1], [2], [3]], max_tokens=[3, 4, 12])
    cache, slots, burst = decode(COUNTER, cache, slots)
    assert burst.fits
    assert tokens_of(burst) == [counted(1, 3), counted(2, 4), counted(3, 12)]
    np.testing.assert_array_equal(burst.lengths, [0, 0, 0])
    _, table = cache[0]
    held = np.where(np.arange(NUM_PAGES) > 4, 1, 0)
    check_integrity(table, held)
    assert not np.any(slots.is_active)


def test_loop_ends_when_nothing_lives():
    cache, slots, burst = generate(COUNTER, make_slots([[1], [2, 3], [4]], max_tokens=[2, 5, 1]))
    assert burst.num_steps == 5
    assert tokens_of(burst) == [[2, 3], counted(3, 5), [5]]
    cache, slots, burst = decode(COUNTER, cache, slots)
    assert (burst.num_steps, burst.fits) == (0, True)
    assert tokens_of(burst) == [[], [], []]
    np.testing.assert_array_equal(burst.news.finish, [0, 0, 0])  # told once


def test_loop_returns_when_a_request_ends_if_asked_to():
    state = generate(COUNTER, make_slots([[1], [2], [3]], max_tokens=[4, 2, 9]), until_finish=True)
    found = [tokens_of(state[2])]
    for _ in range(2):
        state = decode(COUNTER, *state[:2], until_finish=True)
        found.append(tokens_of(state[2]))
    assert found == [[[2, 3], [3, 4], [4, 5]], [[4, 5], [], [6, 7]], [[], [], counted(7, 5)]]


def test_loop_makes_no_more_steps_than_it_may_and_than_news_have_room():
    slots = make_slots([[1], [2], [3]], max_tokens=MAX_TOKENS)
    cache, slots, burst = generate(COUNTER, slots, 3)
    assert burst.num_steps == 3
    cache, slots, burst = decode(COUNTER, cache, slots, 1000)
    assert burst.num_steps == MAX_BURST
    assert tokens_of(burst)[0] == counted(4, MAX_BURST)
    cache, slots, burst = decode(COUNTER, cache, slots, 0)
    assert burst.num_steps == 0


def test_request_ends_at_a_stop_token_or_at_its_length():
    slots = make_slots([[1], [2], [6]], max_tokens=[4, 6, 20], stop_id=8)
    _, slots, burst = generate(COUNTER, slots)
    assert tokens_of(burst) == [[2, 3, 4, 5], [3, 4, 5, 6, 7, 8], [7, 8]]  # the stop is kept
    assert burst.news.finish.tolist() == [Finish.LENGTH, Finish.STOP, Finish.STOP]
    np.testing.assert_array_equal(slots.requests.tokens[2, :3], [6, 7, 8])


def test_prompt_that_is_half_stored_waits_for_prefill():
    slots = make_slots([[1, 2, 3], [5], [6]], max_tokens=3)
    cache = make_cache(COUNTER)
    cache, _, _ = prefill_step_jit(
        COUNTER, cache, slots, np.array([1, 0, 0], np.int32), num_rows=NUM_ROWS
    )
    cache, slots, burst = decode(COUNTER, cache, slots, 2)
    assert tokens_of(burst) == [[], [6, 7], [7, 8]]
    cache, _, _ = prefill_step_jit(
        COUNTER, cache, slots, np.array([1, 0, 0], np.int32), num_rows=NUM_ROWS
    )
    cache, slots, burst = decode(COUNTER, cache, slots)
    assert tokens_of(burst) == [[4, 5, 6], [8], [9]]


def test_row_of_nan_logits_ends_with_an_error_and_leaves_its_neighbours_alone():
    table = np.array(COUNTER.table[...])
    table[10] = np.nan
    decoder = StubDecoder(table)
    _, _, burst = generate(decoder, make_slots([[1], [8], [10]], max_tokens=6))
    assert tokens_of(burst) == [counted(1, 6), [9, 10], []]
    assert burst.news.finish.tolist() == [Finish.LENGTH, Finish.ERROR, Finish.ERROR]
    np.testing.assert_array_equal(burst.lengths, [0, 0, 0])
    assert np.isfinite(np.asarray(burst.news.logprobs)).all()


def test_mixed_temperatures_take_the_best_token_or_a_valid_one():
    table = np.zeros((VOCAB, VOCAB), np.float32)
    table[:, 40] = 30.0  # far above the others
    table[0, 3] = -np.inf
    table[1] = np.where(np.arange(VOCAB) % 2 == 1, 0.0, -np.inf)  # only odd tokens
    table[6] = np.nan
    temperatures = [0.0, 0.8, 1e-3, 1e-4, 1e-5, 1e-6, 0.8]
    tokens, finish = [], []
    for kinds in ([0, 1, 2], [3, 6, 1], [4, 5, 0]):
        sampling = dataclasses.replace(
            same_sampling(3, jax.random.key(0)),
            temperature=jnp.array([temperatures[kind] for kind in kinds], jnp.float32),
        )
        slots = make_slots([[kind] for kind in kinds], max_tokens=1, sampling=sampling)
        _, _, burst = generate(StubDecoder(table), slots)
        tokens += tokens_of(burst)
        finish += burst.news.finish.tolist()
        assert not np.isnan(burst.news.logprobs).any()
    odd, nan, odd_too = tokens[1], tokens.pop(4), tokens.pop(4)
    assert odd[0] % 2 == odd_too[0] % 2 == 1
    assert nan == []
    assert tokens == [[40], odd, [40], [40], [40], [40], [40]]
    assert finish == [Finish.LENGTH] * 4 + [Finish.ERROR] + [Finish.LENGTH] * 4


def test_processor_of_ones_own_keeps_its_state_inside_the_loop():
    processor = chain(default_processors(), forbid_repeats())
    table = np.zeros(VOCAB, np.float32)
    table[[5, 9]] = 2.0, 1.0  # 5 each time, and 9 where 5 is forbidden
    _, slots, burst = generate(
        StubDecoder(table),
        make_slots([[5], [9], [1]], max_tokens=[1, 4, 5], processor=processor),
        processor=processor,
    )
    assert tokens_of(burst) == [[5], [5, 9, 5, 9], [5, 9, 5, 9, 5]]
    np.testing.assert_array_equal(slots.processor_state[1], [5, 9, 5])


@pytest.mark.parametrize("idle", [0, 1, 2])
def test_step_on_the_rows_that_live_is_as_a_step_on_all(idle):
    """Sampled, penalised and by a processor with a state; two rows for two of three slots."""
    table = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32)
    processor = chain(default_processors(), forbid_repeats())
    prompts = [[] if slot == idle else [slot + 1] for slot in range(3)]
    slots = make_slots(
        prompts, max_tokens=[6, 4, 8], processor=processor,
        sampling=same_sampling(3, jax.random.key(1), temperature=2.0, top_p=0.9),
    )  # fmt: skip
    settings = slots.requests.settings
    settings = dataclasses.replace(settings, presence_penalty=jnp.array([0.5, 1.0, -1.0]))
    slots = dataclasses.replace(
        slots, requests=dataclasses.replace(slots.requests, settings=settings)
    )

    def found(num_rows: int | None):
        own = jax.tree.map(jnp.copy, slots)
        state = generate(StubDecoder(table), own, processor=processor, num_rows=num_rows)
        return jax.device_get(state[1:])

    on_all, on_few = found(None), found(2)
    assert [len(tokens) for tokens in tokens_of(on_all[1])] == [
        0 if slot == idle else count for slot, count in enumerate([6, 4, 8])
    ]
    jax.tree.map(np.testing.assert_array_equal, on_few, on_all)
