"""Leaving a loop over completions early, and doing two things at once."""

import dataclasses
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers import assert_greedy, check_engine, pages_held, random_prompts, tiny_decoder
from helpers_llm import GREEDY, make_llm, says, words_tokenizer
from paxkv import SamplingParams
from paxkv.steps import decode_loop_jit


def test_leaving_as_completed_early_frees_everything():
    llm = make_llm()
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (2, 40, 40, 40)]
    for index, completion in llm.as_completed(random_prompts([3, 9, 20, 5]), params):
        assert index == 0 and len(completion.token_ids) == 2
        assert pages_held(llm.engine) > 0
        break
    check_engine(llm.engine)
    assert pages_held(llm.engine) == 0 and not llm.engine.has_work
    assert_greedy(tiny_decoder(), [5], llm.generate([[5]], GREEDY)[0].token_ids)


def test_an_abandoned_stream_frees_its_pages():
    tokenizer = words_tokenizer()
    llm = says(list(b"abcdefghijkl"), tokenizer)
    for piece in llm.stream("A", SamplingParams(max_tokens=12, temperature=0.0)):
        assert piece.text and pages_held(llm.engine) > 0
        break
    check_engine(llm.engine)
    assert pages_held(llm.engine) == 0 and not llm.engine.has_work


def test_an_error_in_the_callers_loop_frees_everything():
    llm = make_llm()
    long = dataclasses.replace(GREEDY, max_tokens=40)
    with pytest.raises(KeyError):
        for _ in llm.as_completed([[1], [2], [3]], [GREEDY, long, long]):
            raise KeyError
    assert pages_held(llm.engine) == 0 and not llm.engine.has_work


def test_ctrl_c_in_the_middle_of_a_step_leaves_a_whole_engine(monkeypatch):
    llm, prompts = make_llm(), random_prompts([3, 9, 5])
    expected = llm.generate(prompts, GREEDY)

    def interrupted(*args, **kwargs):
        result = decode_loop_jit(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)  # the old cache is gone, the new one has no name yet
        return result

    with monkeypatch.context() as patch:
        patch.setattr("paxkv.runner.decode_loop_jit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, dataclasses.replace(GREEDY, max_tokens=40))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    check_engine(llm.engine)
    assert pages_held(llm.engine) == 0 and not llm.engine.has_work
    assert llm.generate(prompts, GREEDY) == expected


def test_a_second_ctrl_c_does_not_wait(monkeypatch):
    def stuck(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it waited")

    monkeypatch.setattr("paxkv.runner.decode_loop_jit", stuck)
    with pytest.raises(KeyboardInterrupt):
        make_llm().generate([[1]], GREEDY)


def test_prompts_that_follow_from_answers_may_be_asked_within_the_loop():
    llm, prompts = make_llm(), random_prompts([3, 9, 5])
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (2, 20, 30)]
    expected = llm.generate(prompts, params)
    follow_up = llm.generate([[7]], dataclasses.replace(GREEDY, max_tokens=40))
    seen = {}
    for index, completion in llm.as_completed(prompts, params):
        seen[index] = completion
        assert llm.generate([[7]], dataclasses.replace(GREEDY, max_tokens=40)) == follow_up
    assert [seen[i] for i in range(3)] == expected


def test_two_streams_may_be_read_in_turn():
    tokenizer = words_tokenizer()
    llm = says(list(b"abcdefgh"), tokenizer)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    pairs = zip(llm.stream("A", params), llm.stream("B", params), strict=False)
    texts = ["".join(piece.text for piece in pieces) for pieces in zip(*pairs, strict=True)]
    assert texts == ["abcdefgh"] * 2 and pages_held(llm.engine) == 0


def test_threads_may_share_an_llm():
    llm, prompts = make_llm(), random_prompts([3, 9, 5])
    right = llm.generate(prompts, GREEDY)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: llm.generate(prompts, GREEDY), range(4)))
    assert found == [right] * 4
