"""Log-probabilities of tokens that were written, of prompts, and of texts to score."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers import StubDecoder, logits_of, pages_held, random_prompts, tiny_decoder
from helpers_llm import GREEDY, make_llm
from paxkv import SamplingParams


def test_log_probabilities_are_the_models_own():
    llm, prompts = make_llm(), random_prompts([5, 3])
    params = SamplingParams(max_tokens=6, seed=3, logprobs=4, prompt_logprobs=2, temperature=2.0)
    for prompt, completion in zip(prompts, llm.generate(prompts, params), strict=True):
        tokens = prompt + completion.token_ids
        expected = np.asarray(jax.nn.log_softmax(logits_of(tiny_decoder(), tokens), axis=1))
        assert completion.logprobs is not None and completion.prompt_logprobs is not None
        assert completion.prompt_logprobs[0] is None
        assert [len(token.top) for token in completion.logprobs] == [4] * 6
        for place, token in enumerate(completion.prompt_logprobs + completion.logprobs):
            if token is None:
                continue
            assert token.token_id == tokens[place]
            row = expected[place - 1]
            assert token.logprob == pytest.approx(row[token.token_id], abs=1e-4)
            best = np.sort(row)[::-1][: len(token.top)]
            np.testing.assert_allclose([x for _, x in token.top], best, atol=1e-4)
            np.testing.assert_allclose([row[i] for i, _ in token.top], best, atol=1e-4)


def test_log_probabilities_are_each_requests_own_choice():
    llm = make_llm(max_slots=3)
    choices = [dataclasses.replace(GREEDY, logprobs=n) for n in (3, None, 0)]
    alone = [llm.generate([[7, 8]], params)[0] for params in choices]
    assert llm.generate([[7, 8]] * 3, choices) == alone
    three, none, zero = (completion.logprobs for completion in alone)
    assert none is None and three is not None and zero is not None
    assert [token.logprob for token in three] == [token.logprob for token in zero]
    assert {len(token.top) for token in three} == {3} and {token.top for token in zero} == {()}


def test_a_token_that_cannot_be_has_minus_infinity():
    table = np.full((8, 8), -np.inf, np.float32)
    table[:, 3] = 1.0
    params = SamplingParams(max_tokens=2, logprobs=5, prompt_logprobs=0)
    [completion] = make_llm(StubDecoder(table)).generate([[3, 3, 1]], params)
    assert completion.token_ids == [3, 3]
    assert completion.logprobs is not None and completion.prompt_logprobs is not None
    [token, _] = completion.logprobs
    assert token.logprob == 0.0 and token.top[0] == (3, 0.0)
    assert [logprob for _, logprob in token.top[1:]] == [-math.inf] * 4
    assert [t and t.logprob for t in completion.prompt_logprobs] == [None, 0.0, -math.inf]


def test_long_prompts_have_log_probabilities_of_every_chunk():
    llm, [prompt] = make_llm(), random_prompts([50])  # in chunks of 16
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    first, second = llm.generate([prompt] * 2, params)
    assert first == second and first.prompt_logprobs is not None
    assert [token and token.token_id for token in first.prompt_logprobs] == [None, *prompt[1:]]


# Scores.


def test_score_is_the_softmax_of_full_logits():
    llm, prompts = make_llm(), random_prompts([2, 40, 17, 5])
    for prompt, score in zip(prompts, llm.score(prompts), strict=True):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            jnp.asarray(logits_of(tiny_decoder(), prompt)[:-1]), jnp.asarray(prompt[1:])
        )
        assert score.token_ids == prompt
        np.testing.assert_allclose(score.logprobs, -losses, atol=1e-4)
        assert score.perplexity == pytest.approx(float(jnp.exp(jnp.mean(losses))), rel=1e-4)
    assert pages_held(llm.engine) == 0


def test_score_of_text_that_cannot_be_is_infinite_perplexity():
    table = np.full((8, 8), -np.inf, np.float32)
    table[:, 3] = 1.0
    [score] = make_llm(StubDecoder(table)).score([[3, 1]])
    assert score.logprobs == [-math.inf] and score.perplexity == math.inf


def test_score_of_one_token_has_no_perplexity():
    [score] = make_llm().score([[3]])
    assert score.logprobs == [] and math.isnan(score.perplexity)


def test_score_refuses_what_it_cannot_read():
    with pytest.raises(ValueError, match=r"cannot be scored: .*vocabulary"):
        make_llm().score([[3, 4], [64]])
