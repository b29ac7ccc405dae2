"""`LLM.beam_search`: the answers of transformers on the same weights, and what is refused."""

import functools
import json
from typing import Any

import numpy as np
import pytest

import paxkv.beam_batches
from helpers import NEAR_TIE, VOCAB, HistoryDecoder, StubDecoder, pages_held, random_prompts
from helpers_beams import (
    Answer,
    Expected,
    assert_answers,
    beam_oracle,
    history_logits,
    history_table,
)
from helpers_checkpoints import write_folder
from helpers_llm import END, GREEDY, make_llm, says, words_tokenizer
from helpers_reference import run_reference
from paxkv import LLM, Completion
from paxkv.models.load import load_model
from reference.make_llama_cases import CASES, DATA, make_weights

TINY = "biases_everywhere"
EXPECTED = json.loads((DATA / "beam_search.json").read_text())[TINY]
TABLE = history_table(5, [3], 2.0)
HISTORY = HistoryDecoder(TABLE)


def search_case(llm: LLM, case: dict[str, Any]) -> list[Completion]:
    settings = dict(case["settings"])
    stops = settings.pop("eos_ids")
    prompt = case["prompt_ids"]
    [answers] = llm.beam_search([prompt], **settings, stop_token_ids=stops, ignore_eos=True)
    return answers


def assert_finds(answers: list[Completion], case: dict[str, Any]) -> None:
    """The same answers; those whose scores are nearly equal may have changed places."""
    scores = {tuple(tokens): score for tokens, score in case["answers"]}
    assert [answer.score for answer in answers] == pytest.approx([*scores.values()], abs=NEAR_TIE)
    for answer in answers:
        assert answer.score == pytest.approx(scores[tuple(answer.token_ids)], abs=NEAR_TIE)
        is_stopped = answer.token_ids[-1] in case["settings"]["eos_ids"]
        assert answer.finish_reason == ("stop" if is_stopped else "length")


def test_answers_of_a_tiny_model_are_those_of_transformers(tmp_path):
    folder = write_folder(tmp_path, CASES[TINY], make_weights(CASES[TINY]))
    llm = make_llm(load_model(folder, dtype="float32").decoder, max_slots=7, max_length=48)
    lengths = set()
    for case in EXPECTED:
        assert_finds(search_case(llm, case), case)
        lengths |= {len(tokens) for tokens, _ in case["answers"]}
    assert len(lengths) > 8 and pages_held(llm.engine) == 0


def test_stored_answers_are_what_the_reference_says_now(tmp_path):
    run_reference("make_beam_cases.py", "--data", tmp_path)
    now = json.loads((tmp_path / "beam_search.json").read_text())[TINY]
    for case, stored in zip(now, EXPECTED, strict=True):
        assert case["settings"] == stored["settings"]
        pairs = zip(case["answers"], stored["answers"], strict=True)
        for (tokens, score), (stored_tokens, stored_score) in pairs:
            assert tokens == stored_tokens and score == pytest.approx(stored_score, abs=1e-4)


# What the oracle says, through the whole of it.


def expect(prompt: list[int], **settings) -> Expected:
    return beam_oracle(functools.partial(history_logits, TABLE), prompt, **settings)


def answers_of(completions: list[Completion]) -> list[Answer]:
    return [Answer(answer.score or 0.0, answer.token_ids) for answer in completions]


def test_more_prompts_than_slots_and_pages_are_searched_in_turn():
    prompts = random_prompts([3, 20, 7, 9, 1])
    for max_slots, kv_memory in ((9, None), (30, 32 * 40)):
        llm = make_llm(HISTORY, max_length=40, max_slots=max_slots, kv_memory=kv_memory)
        found = llm.beam_search(prompts, width=4, max_tokens=10, stop_token_ids=[3])
        for prompt, answers in zip(prompts, found, strict=True):
            expected = expect(prompt, width=4, max_tokens=10, eos_ids=[3])
            assert_answers(answers_of(answers), expected)
            assert all(answer.prompt_token_ids == prompt for answer in answers)
        assert pages_held(llm.engine) == 0


def test_answers_are_as_many_as_asked_for_and_no_longer_than_fits():
    llm = make_llm(HISTORY, max_slots=4, max_length=20)
    [answers] = llm.beam_search([[5] * 15], width=4, num_return=2, length_penalty=0.5)
    expected = expect([5] * 15, width=4, max_tokens=5, length_penalty=0.5)
    assert_answers(answers_of(answers), expected._replace(answers=expected.answers[:2]))
    assert [answer.finish_reason for answer in answers] == ["length"] * 2


def test_answers_are_text_without_what_ends_it():
    llm = says([72, 105, END], words_tokenizer(), max_slots=2)
    for prompts in ("A", ["A"], [65], [[65]]):
        [[best, second]] = llm.beam_search(prompts, width=2, stop_token_ids=[END])
        assert (best.text, best.finish_reason) == ("Hi", "stop")
        assert best.token_ids == [72, 105, END] and best.prompt_token_ids == [65]
        assert best.score is not None and second.score is not None
        assert best.score > second.score


def test_prompt_that_cannot_be_served_is_told_why_and_the_others_are_served():
    llm = make_llm(HISTORY, max_slots=4)
    found = llm.beam_search([[], [1, 2], [VOCAB]], width=4, max_tokens=6)
    assert [len(answers) for answers in found] == [1, 4, 1]
    assert "no tokens" in (found[0][0].error or "") and "vocabulary" in (found[2][0].error or "")
    assert_answers(answers_of(found[1]), expect([1, 2], width=4, max_tokens=6))


def test_pool_that_is_too_small_is_told_with_the_numbers():
    llm = make_llm(HISTORY, max_slots=6, kv_memory=32 * 12)  # 11 pages of 4 tokens
    # Beams that part at once need 2 + 6 * 6 pages for the first prompt, and 6 for the second.
    found = llm.beam_search([[9] * 10, [1, 2]], width=6, max_tokens=20)
    [refused] = found[0]
    assert refused.finish_reason == "error" and refused.token_ids == []
    assert refused.error is not None and refused.prompt_token_ids == [9] * 10
    assert "6 beams of a prompt of 10 tokens took all 11 free pages of 4 tokens" in refused.error
    assert "of 20 new tokens; 38 are enough in any case" in refused.error
    [_, answers] = llm.beam_search([[9] * 10, [1, 2]], width=6, max_tokens=3)
    assert_answers(answers_of(answers), expect([1, 2], width=6, max_tokens=3))
    assert pages_held(llm.engine) == 0


def test_logits_of_nan_are_told():
    table = np.zeros((8, 8), np.float32)
    table[7] = np.nan
    found = make_llm(StubDecoder(table), max_slots=4).beam_search([[7], [1]], width=2, max_tokens=1)
    assert "NaN" in (found[0][0].error or "")
    assert [answer.error for answer in found[1]] == [None] * 2


def test_search_waits_for_no_running_request_and_leaves_waiting_ones_be():
    llm = make_llm(HISTORY)
    answers = llm.as_completed([[1, 2]], GREEDY)
    request = llm._add([1, 2], GREEDY)
    before = [llm.beam_search([[4, 5]], width=2, max_tokens=4)]
    llm.engine.step(1)
    with pytest.raises(RuntimeError, match="1 requests are running on the cache that a search"):
        llm.beam_search([[4, 5]], width=2)
    while llm.engine.has_work:
        llm.engine.step()
    assert [llm.beam_search([[4, 5]], width=2, max_tokens=4)] == before
    [(_, completion)] = answers
    assert completion.token_ids == request.output


def test_search_that_is_interrupted_leaves_the_slots_and_pages_free(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    llm = make_llm(HISTORY)
    expected = llm.generate([[1, 2, 3]], GREEDY)
    with monkeypatch.context() as patched:
        patched.setattr(paxkv.beam_batches, "beam_loop_jit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.beam_search([[1, 2, 3]], width=2)
    assert pages_held(llm.engine) == 0 and not llm.engine.has_work
    assert llm.generate([[1, 2, 3]], GREEDY) == expected


@pytest.mark.parametrize(
    ("settings", "error", "needle"),
    [
        ({"width": 0}, ValueError, "width=0 must be 1 beam or more"),
        ({"width": 3}, ValueError, "width=3 beams need as many slots, and there are 2"),
        ({"width": True}, TypeError, "width=True must be an integer"),
        ({"num_return": 5}, ValueError, "num_return=5 must be from 1 to width=2"),
        ({"num_return": 0}, ValueError, "num_return=0 must be from 1 to width=2"),
        ({"length_penalty": float("nan")}, ValueError, "length_penalty=nan must be finite"),
        ({"length_penalty": "1"}, TypeError, "length_penalty='1' must be a number"),
        ({"early_stopping": "always"}, ValueError, 'must be True, False or "never"'),
        ({"max_tokens": 0}, ValueError, "max_tokens=0 must be 1 or more"),
    ],
)
def test_setting_that_makes_no_sense_is_refused(settings, error, needle):
    with pytest.raises(error, match=needle):
        make_llm(HISTORY).beam_search([[1]], **({"width": 2} | settings))
