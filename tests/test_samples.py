"""Several samples of one prompt: each as if it were asked for alone, the prompt stored once."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import (
    VOCAB,
    HistoryDecoder,
    StubDecoder,
    add,
    check_engine,
    make_engine,
    pages_held,
    random_prompts,
    run,
    settled,
    tiny_decoder,
)
from helpers_history import alone
from helpers_llm import END, GREEDY, make_llm, words_tokenizer
from paxkv import Completion, SamplingParams
from paxkv.samples import sample_params, sample_seed

HISTORY = HistoryDecoder(np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype("f4"))
SAMPLED = SamplingParams(max_tokens=9, temperature=1.0, seed=7)


def tokens_of(completion: Completion) -> list[list[int]]:
    return [sample.token_ids for sample in completion.samples]


# Seeds and settings.


def test_seeds_of_samples_are_the_requests_own_and_then_others():
    assert [sample_seed(None, i) for i in range(3)] == [None] * 3
    for seed in (0, 1, -1, 2**70):
        found = [sample_seed(seed, i) for i in range(100)]
        assert found[0] == seed and len(set(found)) == 100
        assert found == [sample_seed(seed, i) for i in range(100)]
    assert not {sample_seed(0, i) for i in range(9)} & {sample_seed(1, i) for i in range(9)}


def test_a_sample_is_asked_for_like_a_single_request():
    params = dataclasses.replace(SAMPLED, n=2, best_of=3, prompt_logprobs=1, stop="x")
    first, *others = sample_params(params)
    assert first == dataclasses.replace(SAMPLED, prompt_logprobs=1, stop="x", logprobs=0)
    assert len(others) == 2 and {its.prompt_logprobs for its in others} == {None}
    assert sample_params(SAMPLED) == [SAMPLED]


def test_fewer_than_n_are_refused():
    with pytest.raises(ValueError, match="best_of=2 must be at least n=3"):
        SamplingParams(n=3, best_of=2)


# What comes back.


@pytest.mark.parametrize("decoder", [HISTORY, tiny_decoder()], ids=["history", "attention"])
@pytest.mark.parametrize("num_samples", [2, 4, 7])  # of 4 slots
def test_samples_are_those_of_single_requests_with_their_seeds(decoder, num_samples):
    llm, prompts = make_llm(decoder, max_slots=4), random_prompts([1, 13, 16, 3])
    found = llm.generate(prompts, dataclasses.replace(SAMPLED, n=num_samples))
    for i in range(num_samples):
        its = dataclasses.replace(SAMPLED, seed=sample_seed(7, i))
        for completion, single in zip(found, llm.generate(prompts, its), strict=True):
            assert completion.samples[i] == single.samples[0]
    for completion in found:
        assert dataclasses.replace(completion, samples=[]) == completion.samples[0]
        assert len({tuple(tokens) for tokens in tokens_of(completion)}) == num_samples
    assert pages_held(llm.engine) == 0


def test_one_sample_is_what_it_was():
    llm = make_llm(HISTORY)
    [completion] = llm.generate([[1, 2, 3]], SAMPLED)
    assert (completion.token_ids, completion.finish_reason) == alone(
        [1, 2, 3], settled(max_tokens=9, temperature=1.0, seed=7), HISTORY
    )
    assert tokens_of(completion) == [completion.token_ids] and completion.score is None
    assert llm.generate([[1, 2, 3]], dataclasses.replace(SAMPLED, n=1, best_of=1)) == [completion]


def test_samples_without_a_seed_differ():
    [completion] = make_llm(HISTORY, max_slots=4).generate(
        [[1, 2, 3]], dataclasses.replace(SAMPLED, seed=None, n=4)
    )
    assert len({tuple(tokens) for tokens in tokens_of(completion)}) == 4


def test_the_best_have_the_highest_mean_log_probability():
    llm = make_llm(HISTORY, max_slots=3)
    params = dataclasses.replace(SAMPLED, stop_token_ids=range(8), logprobs=0)
    [drawn] = llm.generate([[1, 2, 3]], dataclasses.replace(params, n=6))
    [best] = llm.generate([[1, 2, 3]], dataclasses.replace(params, n=2, best_of=6))
    means = {
        tuple(sample.token_ids): np.mean([token.logprob for token in sample.logprobs or ()])
        for sample in drawn.samples
    }
    assert len({len(tokens) for tokens in means}) > 1  # the mean, and not the sum
    expected = sorted(means, key=lambda tokens: -means[tokens])[:2]
    assert tokens_of(best) == [list(tokens) for tokens in expected]
    assert [sample.score for sample in best.samples] == pytest.approx([means[t] for t in expected])
    assert best.token_ids == list(expected[0]) and best.score == best.samples[0].score
    unasked = dataclasses.replace(params, n=2, best_of=6, logprobs=None)
    [again] = llm.generate([[1, 2, 3]], unasked)
    assert tokens_of(again) == tokens_of(best)
    assert [sample.logprobs for sample in again.samples] == [None, None]


def test_log_probabilities_are_each_samples_own_and_the_prompts_are_everyones():
    llm = make_llm(tiny_decoder(), max_slots=4)
    params = dataclasses.replace(SAMPLED, logprobs=2, prompt_logprobs=1)
    [completion] = llm.generate([[5, 6, 7]], dataclasses.replace(params, n=3))
    for i, sample in enumerate(completion.samples):
        its = dataclasses.replace(params, seed=sample_seed(7, i))
        assert [sample] == llm.generate([[5, 6, 7]], its)[0].samples


def test_a_sample_that_fails_does_not_disturb_the_others_and_is_not_the_best():
    table = np.zeros((VOCAB, VOCAB), np.float32)
    table[:32] = np.nan  # every other sample ends here
    params = dataclasses.replace(SAMPLED, max_tokens=2, n=2, best_of=8)
    [completion] = make_llm(StubDecoder(table), max_slots=8).generate([[40]], params)
    assert [sample.error for sample in completion.samples] == [None, None]
    [everyone] = make_llm(StubDecoder(table), max_slots=8).generate(
        [[40]], dataclasses.replace(params, n=8)
    )
    assert {sample.finish_reason for sample in everyone.samples} == {"length", "error"}


def test_samples_end_each_at_its_own_stop():
    decoder, tokenizer = StubDecoder(np.zeros(272, np.float32)), words_tokenizer()
    llm = make_llm(decoder, tokenizer, max_slots=4)
    params = dataclasses.replace(
        SAMPLED, max_tokens=30, n=8, stop=list("abcdefgh"), stop_token_ids=[END, 3, 4, 5]
    )
    [completion] = llm.generate([[65]], params)
    reasons = [sample.finish_reason for sample in completion.samples]
    assert set(reasons) == {"stop", "length"}
    for i, sample in enumerate(completion.samples):
        its = dataclasses.replace(params, n=1, seed=sample_seed(7, i))
        assert [sample] == llm.generate([[65]], its)[0].samples
        assert not set(sample.text) & set("abcdefgh")
    assert pages_held(llm.engine) == 0


def test_several_samples_are_refused_where_one_is_given():
    llm = make_llm(HISTORY)
    for its in ({"n": 2}, {"best_of": 3}):
        with pytest.raises(ValueError, match=r"draw \d samples, and a stream gives one"):
            next(llm.stream([1], dataclasses.replace(GREEDY, **its)))
    [refused] = llm.generate([[VOCAB]], dataclasses.replace(GREEDY, n=3))
    assert "vocabulary" in (refused.error or "") and not llm.engine.has_work


def test_leaving_the_loop_early_frees_all_samples():
    llm = make_llm(HISTORY, max_slots=3)
    params = [dataclasses.replace(SAMPLED, n=2, max_tokens=n) for n in (2, 40)]
    for _ in llm.as_completed([[1, 2], [3, 4]], params):
        break
    check_engine(llm.engine)
    assert pages_held(llm.engine) == 0 and not llm.engine.has_work


# What is stored.


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("length", [21, 20, 19, 1])
def test_prompt_is_stored_once(length, prefix_caching):
    engine = make_engine(HISTORY, prefix_caching=prefix_caching)
    [prompt] = random_prompts([length])
    samples = add(engine, prompt, settled(n=4, temperature=1.0, seed=7, max_tokens=6)).samples
    engine.step(1)
    assert engine.stats.prefill_tokens == length - 1
    # Each has a page of its own, where the prompt's last token is; full ones of all are merged.
    full = (length - 1) // 4
    own = 1 if prefix_caching and length % 4 == 0 else 4
    assert pages_held(engine) == full + own
    check_engine(engine)
    assert engine.stats.peak_pages == full + own
    assert engine.stats.peak_tokens == 4 * full + own * (length - 4 * full)
    run(engine)
    for sample in samples:
        assert (sample.output, sample.finish_reason) == alone(prompt, sample.params, HISTORY)


def test_shared_pages_leave_room_for_more_samples_at_once():
    # 8 pages of prompt and 2 of each sample's own: four times 10 would not fit in 20.
    engine, [prompt] = make_engine(HISTORY, num_pages=21), random_prompts([33])
    add(engine, prompt, settled(n=4, max_tokens=4))
    engine.step(1)
    assert len(engine._scheduler.running) == 4
    run(engine)
    assert engine.stats.num_preemptions == 0


def test_last_sample_that_holds_the_prompt_gives_it_back():
    engine, [prompt] = make_engine(HISTORY), random_prompts([18])
    samples = add(engine, prompt, settled(n=4, temperature=1.0, seed=7, max_tokens=20)).samples
    engine.step(3)
    held = pages_held(engine)
    for sample in samples:
        engine.abort(sample.id)
        check_engine(engine)
        assert pages_held(engine) < held
        held = pages_held(engine)
    assert held == 0


@st.composite
def params(draw) -> SamplingParams:
    return settled(
        max_tokens=draw(st.integers(1, 8)),
        temperature=1.0,
        seed=draw(st.integers(0, 3)),
        n=draw(st.integers(1, 4)),
        stop_token_ids=draw(st.sets(st.integers(0, VOCAB - 1), max_size=8)),
    )


PROMPT = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14)


@settings(max_examples=40)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 2), PROMPT, params()), min_size=1, max_size=6),
    num_pages=st.sampled_from([8, 12]),  # 28 and 44 tokens, of which one request may have 22
    bursts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    aborts=st.sets(st.integers(0, 12), max_size=3),
)
def test_samples_are_served_as_if_alone_in_a_pool_that_is_short(
    arrivals, num_pages, bursts, aborts
):
    engine, lengths = (
        make_engine(HISTORY, num_slots=3, num_pages=num_pages),
        itertools.cycle(bursts),
    )
    requests = []
    for wait, prompt, its in arrivals:
        for _ in range(wait):
            engine.step(next(lengths))
            check_engine(engine)
        requests += add(engine, prompt, its).parts
    for number in aborts & set(range(len(requests))):
        engine.abort(requests[number].id)
        check_engine(engine)
    most = 2 * sum(request.params.max_tokens or 0 for request in requests)
    for _ in range(most):
        if engine.has_work:
            engine.step(next(lengths))
            check_engine(engine)
    assert not engine.has_work and pages_held(engine) == 0
    for number, request in enumerate(requests):
        output, finish_reason = alone(request.prompt, request.params, HISTORY)
        if number in aborts:
            assert request.output == output[: len(request.output)]
        else:
            assert (request.output, request.finish_reason) == (output, finish_reason)
