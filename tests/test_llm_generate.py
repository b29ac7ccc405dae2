"""Prompts in, completions out: which are served, which are refused, and what they may ask for."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from helpers import StubDecoder, assert_greedy, pages_held, random_prompts, tiny_decoder
from helpers_llm import END, GREEDY, both_ways, make_llm, says, words_tokenizer
from paxkv import SamplingParams


def test_one_result_per_prompt_in_their_order_with_more_prompts_than_slots():
    llm, prompts = make_llm(), random_prompts([3, 17, 1, 30, 8, 2, 5])
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (8, 1, 5, 8, 3, 20, 2)]
    completions = llm.generate(prompts, params)
    for prompt, its, completion in zip(prompts, params, completions, strict=True):
        assert completion.prompt_token_ids == prompt
        assert completion.finish_reason == "length" and completion.error is None
        assert len(completion.token_ids) == its.max_tokens
        assert_greedy(tiny_decoder(), prompt, completion.token_ids)
    assert pages_held(llm.engine) == 0


def test_a_prompt_is_text_or_ids_and_may_stand_alone():
    tokenizer = words_tokenizer()
    llm = says(list(b"ok"), tokenizer)
    expected = llm.generate([[65]], SamplingParams(temperature=0.0, stop_token_ids=(END,)))
    assert expected[0].text == "ok" and expected[0].prompt_token_ids == [65]
    params = SamplingParams(temperature=0.0, stop_token_ids=(END,))
    assert llm.generate("A", params) == llm.generate(["A"], params) == expected
    assert llm.generate([65], params) == llm.generate((prompt for prompt in ["A"]), params)
    assert llm.generate([], params) == []


def test_a_number_among_several_prompts_is_none_and_the_others_are_served():
    params = SamplingParams(temperature=0.0, stop_token_ids=(END,))
    for prompts in ([5, "A"], ["A", 5]):
        answers = dict(
            zip(
                prompts, says(list(b"ok"), words_tokenizer()).generate(prompts, params), strict=True
            )
        )
        assert answers["A"].text == "ok"
        assert "a prompt must be text or a list of token ids, found 5" in str(answers[5].error)


def test_text_without_a_tokenizer_is_refused_and_ids_are_not():
    good, bad = make_llm().generate([[1, 2], "text"], GREEDY)
    assert good.finish_reason == "length" and good.text == ""
    assert bad.finish_reason == "error" and "tokenizer" in str(bad.error)


@pytest.mark.parametrize("prompts", [5, np.array(5)])
def test_what_is_no_prompt_is_refused(prompts):
    message = f"prompts={prompts!r} must be text, token ids, or several of them"
    with pytest.raises(ValueError, match=re.escape(message)):
        make_llm().generate(prompts, GREEDY)


def test_params_are_one_for_all_or_one_each():
    with pytest.raises(ValueError, match="2 params for 3 prompts"):
        make_llm().generate([[1], [2], [3]], [GREEDY, GREEDY])


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ([], "no tokens"),
        ([1, 64], "token id 64 is not in the vocabulary, 0 to 63"),
        ([-1], "token id -1"),
        ([1] * 64, "the prompt has 64 tokens.*64"),
        ([1] * 1000, "1000 tokens.*raise max_length"),
    ],
    ids=["empty", "past_the_vocabulary", "negative", "one_too_long", "much_too_long"],
)
def test_a_bad_prompt_is_told_and_the_others_are_served(prompt, told):
    llm, good = make_llm(), [[5, 6, 7], [8], [9, 10]]
    alone = llm.generate(good, GREEDY)
    first, second, bad, third = llm.generate([*good[:2], prompt, good[2]], GREEDY)
    assert bad.finish_reason == "error" and bad.token_ids == [] and bad.text == ""
    assert bad.prompt_token_ids == prompt
    assert re.search(told, str(bad.error))
    assert [first, second, third] == alone
    with pytest.raises(ValueError, match=told):
        next(llm.stream(prompt, GREEDY))
    assert llm.generate(good, GREEDY) == alone and pages_held(llm.engine) == 0


def test_empty_text_is_refused_where_no_begin_token_stands_for_it():
    [completion] = says([], words_tokenizer()).generate("", GREEDY)
    assert completion.finish_reason == "error" and "no tokens" in str(completion.error)


def test_the_longest_prompt_that_is_allowed_has_one_new_token():
    llm, [prompt] = make_llm(), random_prompts([63])
    [completion] = llm.generate([prompt], GREEDY)
    assert completion.finish_reason == "length" and len(completion.token_ids) == 1
    assert_greedy(tiny_decoder(), prompt, completion.token_ids)


def test_nan_from_the_model_is_an_error_of_its_request_alone():
    table = np.zeros((64, 64), np.float32)
    table[7] = np.nan
    good, bad = make_llm(StubDecoder(table)).generate([[1], [7]], GREEDY)
    assert good.finish_reason == "length" and len(good.token_ids) == 8
    assert bad.finish_reason == "error" and "NaN" in str(bad.error)


@pytest.mark.parametrize("prompt", [b"AB", [1.5, 2.0], [None], 7.5])
def test_what_is_no_prompt_is_told_and_the_others_are_served(prompt):
    bad, good = make_llm().generate([prompt, [5, 6]], GREEDY)
    assert bad.finish_reason == "error" and "text or a list of token ids" in str(bad.error)
    assert good.finish_reason != "error"


def test_arrays_of_token_ids_are_prompts():
    llm = make_llm()
    expected = llm.generate([[5, 6, 7]], GREEDY)
    prompt: Any = np.array([5, 6, 7])
    assert llm.generate(prompt, GREEDY) == expected
    assert llm.generate([prompt], GREEDY) == expected


# What a request may ask for.


def test_stop_tokens_end_a_request_and_have_no_text():
    params = SamplingParams(max_tokens=9, temperature=0.0, stop_token_ids=(ord("c"),))
    completion = both_ways(says(list(b"abcd"), words_tokenizer()), [65], params)[1]
    assert completion.text == "ab" and completion.finish_reason == "stop"
    assert bytes(completion.token_ids) == b"abc"


def test_end_of_text_ends_it_unless_it_is_ignored():
    llm = says(list(b"ab"), words_tokenizer())
    llm.generation = dataclasses.replace(llm.generation, eos_token_ids=(END,))
    [stopped] = llm.generate([[65]], SamplingParams(max_tokens=4, temperature=0.0))
    assert stopped.token_ids == [*b"ab", END] and stopped.finish_reason == "stop"
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    [ignored] = llm.generate([[65]], params)
    assert ignored.token_ids == [*b"ab", END, END] and ignored.finish_reason == "length"
    assert ignored.text == stopped.text == "ab"


def test_no_stop_token_before_min_tokens():
    llm = says(list(b"a"), words_tokenizer())
    params = SamplingParams(max_tokens=9, temperature=0.0, stop_token_ids=(END,), min_tokens=4)
    [completion] = llm.generate([[65]], params)
    assert len(completion.token_ids) == 5 and completion.finish_reason == "stop"


def test_the_models_defaults_hold_where_nothing_is_said():
    llm, prompt = make_llm(), [3, 4, 5]
    llm.generation = dataclasses.replace(llm.generation, temperature=0.0)
    [completion] = llm.generate([prompt], SamplingParams(max_tokens=8))
    assert_greedy(tiny_decoder(), prompt, completion.token_ids)
    [sampled] = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=5.0, seed=1))
    assert sampled.token_ids != completion.token_ids


def test_a_seed_gives_the_same_tokens_in_any_company():
    llm, seeded = make_llm(), SamplingParams(max_tokens=8, seed=42)
    [alone] = llm.generate([[1, 2]], seeded)
    assert llm.generate([[9], [1, 2]], [SamplingParams(max_tokens=3), seeded])[1] == alone
    assert llm.generate([[1, 2]] * 3, seeded) == [alone] * 3
    first, second = llm.generate([[1, 2]] * 2, SamplingParams(max_tokens=8))
    assert first.token_ids != second.token_ids


def test_the_seed_of_the_llm_makes_unseeded_requests_repeat():
    params = SamplingParams(max_tokens=8)
    runs = [make_llm(seed=seed).generate([[1], [1]], params) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
