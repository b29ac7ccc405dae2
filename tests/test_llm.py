import dataclasses
import math
import re
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from helpers import (
    StubDecoder,
    assert_greedy,
    check_engine,
    logits_of,
    pages_held,
    random_prompts,
    tiny_decoder,
)
from helpers_text import byte_level_tokenizer, sentencepiece_tokenizer
from paxkv import LLM, Completion, LayerGroup, SamplingParams
from paxkv.config import page_bytes
from paxkv.decoder import Decoder
from paxkv.models.llama import LlamaDecoder
from paxkv.models.tokenizer import Tokenizer
from paxkv.steps import decode_loop_jit, prefill_step_jit

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
WORDS = ("DEF", "HI", "xDE", "GX", "abcd")
END = 257  # </s> of both small tokenizers
SCRIPT_VOCAB = 272  # more ids than the small tokenizers have


def make_llm(
    decoder: Decoder | None = None, tokenizer: Tokenizer | None = None, **sizes: Any
) -> LLM:
    """An LLM of sizes that these tests share, so that few programs are compiled."""
    defaults: dict[str, Any] = {
        "max_slots": 2,
        "max_length": 64,
        "page_size": 4,
        "max_prefill_tokens": 16,
    }
    return LLM(
        decoder or tiny_decoder(),
        tokenizer=tokenizer,
        dtype="float32",
        compilation_cache=False,
        **(defaults | sizes),
    )


def words_tokenizer() -> Tokenizer:
    """Bytes, and some words of several letters."""
    tokenizer = byte_level_tokenizer()
    tokenizer.backend.add_tokens(list(WORDS))
    return tokenizer


class ScriptDecoder(StubDecoder):
    """Says one thing after every prompt of one token, then END for ever."""

    def __init__(self, script: list[int]) -> None:
        table = np.zeros((SCRIPT_VOCAB, SCRIPT_VOCAB), np.float32)
        table[np.arange(len(script)), script] = 10
        table[len(script) :, END] = 10
        super().__init__(table)

    def __call__(self, tokens, positions, cache):
        _, cache = super().__call__(tokens, positions, cache)
        return positions[:, None], cache


def says(script: list[int], tokenizer: Tokenizer, **sizes) -> LLM:
    return make_llm(ScriptDecoder(script), tokenizer, **sizes)


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = [tokenizer.backend.token_to_id(token) for token in tokens]
    return [token_id for token_id in ids if token_id is not None]


def both_ways(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[list[str], Completion]:
    """The pieces of a stream and the completion, which must be that of `generate`."""
    pieces = list(llm.stream(prompt, params))
    texts = [piece.text for piece in pieces]
    assert [piece.completion is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    [completion] = llm.generate([prompt], params)
    assert pieces[-1].completion == completion and "".join(texts) == completion.text
    return texts, completion


# Prompts in, completions out.


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


def test_text_without_a_tokenizer_is_refused_and_ids_are_not():
    good, bad = make_llm().generate([[1, 2], "text"], GREEDY)
    assert good.finish_reason == "length" and good.text == ""
    assert bad.finish_reason == "error" and "tokenizer" in str(bad.error)


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


# Text.


@pytest.mark.parametrize(
    ("stops", "tokens", "text", "reason"),
    [
        (["DEFGHIJ"], ["DEF", "G", "HI", "J"], "", "stop"),
        (["DEFGHIJ"], ["xDE", "F", "GX"], "xDEFGX", "length"),
        (["DEFGHIJ"], ["y", "DEF"], "yDEF", "length"),
        (["b", "abc"], ["abcd"], "", "stop"),
        (["GX"], ["y", "DEF", "GX", "y"], "yDEF", "stop"),
    ],
)
def test_stop_strings_are_found_over_token_boundaries(stops, tokens, text, reason):
    tokenizer = words_tokenizer()
    script = ids_of(tokenizer, *tokens)
    params = SamplingParams(max_tokens=len(script), temperature=0.0, stop=stops)
    texts, completion = both_ways(says(script, tokenizer), [65], params)
    assert (completion.text, completion.finish_reason) == (text, reason)
    for piece in range(len(texts)):
        assert text.startswith("".join(texts[:piece]))  # nothing was shown and then taken back


def test_what_was_decoded_past_a_stop_string_is_dropped():
    tokenizer = words_tokenizer()
    llm = says(list(b"one two three"), tokenizer)
    params = SamplingParams(max_tokens=13, temperature=0.0, stop=" tw", logprobs=0)
    completion = both_ways(llm, [65], params)[1]
    assert completion.text == "one" and bytes(completion.token_ids) == b"one tw"
    assert completion.logprobs is not None
    assert [token.token_id for token in completion.logprobs] == completion.token_ids
    assert pages_held(llm.engine) == 0


SMILE = "\U0001f642"


def test_characters_split_over_tokens_come_whole():
    tokenizer = words_tokenizer()
    script = [*SMILE.encode() * 2, ord("a")]
    params = SamplingParams(max_tokens=len(script), temperature=0.0)
    texts, completion = both_ways(says(script, tokenizer), [65], params)
    assert completion.text == SMILE * 2 + "a" == tokenizer.decode(script)
    assert [text for text in texts if text] == [SMILE, SMILE, "a"]


def test_a_character_cut_by_the_limit_is_marked():
    params = SamplingParams(max_tokens=6, temperature=0.0)
    llm = says(list(SMILE.encode() * 2), words_tokenizer())
    completion = both_ways(llm, [65], params)[1]
    assert completion.text == SMILE + "\ufffd" and completion.finish_reason == "length"


def test_an_invalid_byte_does_not_end_the_stream():
    params = SamplingParams(max_tokens=3, temperature=0.0)
    completion = both_ways(says([ord("a"), 0xFF, ord("b")], words_tokenizer()), [65], params)[1]
    assert completion.text == "a\ufffdb"


@pytest.mark.parametrize(
    ("prompt", "text"), [([256], " leading x"), ([ord("a")], "  leading x")], ids=["whole", "rest"]
)
def test_leading_spaces_are_neither_lost_nor_doubled(prompt, text):
    tokenizer = sentencepiece_tokenizer()
    script = ids_of(tokenizer, "\u2581", "\u2581leading", "\u2581x")
    params = SamplingParams(max_tokens=3, temperature=0.0)
    completion = both_ways(says(script, tokenizer), prompt, params)[1]
    assert completion.text == text
    assert tokenizer.decode(prompt) + completion.text == tokenizer.decode(prompt + script)


def test_a_first_token_with_a_space_keeps_it():
    tokenizer = byte_level_tokenizer()
    script = ids_of(tokenizer, "\u0120x", "he")
    params = SamplingParams(max_tokens=2, temperature=0.0)
    assert both_ways(says(script, tokenizer), [65], params)[1].text == " xhe"


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


# Conversations.

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def test_chat_asks_in_the_models_format():
    tokenizer = dataclasses.replace(words_tokenizer(), chat_template=TEMPLATE)
    prompt = "s:Be kind.\nu:Hi\na:"
    llm = says([0] * (len(prompt) - 1) + list(b"Hello"), tokenizer)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert bytes(llm.chat_prompt(messages)).decode() == prompt
    answer = llm.chat(messages, SamplingParams(temperature=0.0, stop_token_ids=(END,)))
    assert answer.text == "Hello" and answer.finish_reason == "stop"


def test_chat_without_a_template_is_refused():
    with pytest.raises(ValueError, match="no chat template"):
        says([], words_tokenizer()).chat([{"role": "user", "content": "Hi"}])


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


# Other weights.


def num_programs() -> list[int]:
    steps: list[Any] = [prefill_step_jit, decode_loop_jit]
    return [step._cache_size() for step in steps]


def test_set_weights_changes_what_is_said_and_compiles_nothing():
    llm, other, prompt = make_llm(), tiny_decoder(seed=1), [3, 1, 4, 1, 5]
    before = llm.weights
    [old] = llm.generate([prompt], GREEDY)
    programs = num_programs()
    llm.set_weights(nnx.state(other))
    [new] = llm.generate([prompt], GREEDY)
    assert_greedy(other, prompt, new.token_ids)
    assert new.token_ids != old.token_ids
    llm.set_weights(before)
    assert llm.generate([prompt], GREEDY) == [old]
    assert num_programs() == programs


def test_set_weights_refuses_another_model():
    llm = make_llm()
    wide = dataclasses.replace(tiny_decoder().config, intermediate_size=64)
    deep = dataclasses.replace(tiny_decoder().config, num_layers=3)
    others = [LlamaDecoder(config, rngs=nnx.Rngs(0)) for config in (wide, deep)]
    for other in (*others, tiny_decoder("bfloat16")):
        with pytest.raises(ValueError, match=r"shape|leaves"):
            llm.set_weights(nnx.state(other))
    [completion] = llm.generate([[1, 2, 3]], GREEDY)
    assert_greedy(tiny_decoder(), [1, 2, 3], completion.token_ids)


def test_set_weights_waits_for_running_requests():
    llm = make_llm()
    stream = llm.stream([1, 2, 3], GREEDY)
    assert llm.weights
    llm.engine.step(1)  # nothing runs yet: a stream begins when it is read
    llm.set_weights(llm.weights)
    running = llm.as_completed([[1], [2, 3]], [GREEDY, dataclasses.replace(GREEDY, max_tokens=40)])
    next(running)
    with pytest.raises(RuntimeError, match="1 requests are running"):
        llm.set_weights(llm.weights)
    running.close()
    llm.set_weights(llm.weights)
    stream.close()


# Leaving early, and doing two things at once.


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
        patch.setattr("paxkv.engine.decode_loop_jit", interrupted)
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

    monkeypatch.setattr("paxkv.engine.decode_loop_jit", stuck)
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


# Sizes.


def test_the_pool_is_as_large_as_the_memory_given():
    decoder = tiny_decoder()
    each = page_bytes(decoder.layer_groups, page_size=4, dtype="float32")
    assert each == 2 * 4 * 2 * 2 * 8 * 4  # K and V, tokens, layers, heads, head_dim, bytes
    assert make_llm(kv_memory=10 * each).engine.num_pages == 9  # and the null page
    assert make_llm(kv_memory=f"{10 * each / 1024}KiB").engine.num_pages == 9
    assert make_llm(kv_memory=11 * each - 1).engine.num_pages == 9


def test_a_pool_of_its_own_choice_is_no_larger_than_can_be_used():
    assert make_llm(max_slots=2, max_length=64, page_size=4).engine.num_pages == 2 * 16


def test_the_share_is_of_the_free_memory(monkeypatch):
    each = page_bytes(tiny_decoder().layer_groups, page_size=4, dtype="float32")
    monkeypatch.setattr("paxkv.llm.free_bytes", lambda: 40 * each)
    assert make_llm(memory_share=0.25).engine.num_pages == 9
    with pytest.raises(ValueError, match=r"memory_share=1\.5 must be above 0 and at most 1"):
        make_llm(memory_share=1.5)


def test_memory_for_not_one_page_is_refused_with_the_arithmetic():
    with pytest.raises(ValueError) as refusal:
        make_llm(kv_memory=1000)
    said = str(refusal.value)
    assert "1000 bytes hold 0 pages of 1024 bytes" in said and "2048 bytes" in said
    assert "2 (K and V) x 4 tokens x (2 layers x 2 KV heads x 8) x 4 bytes" in said


def test_a_request_may_be_as_long_as_the_pool_and_no_longer():
    each = page_bytes(tiny_decoder().layer_groups, page_size=4, dtype="float32")
    llm = make_llm(kv_memory=8 * each)  # 28 tokens, and the last one is not stored
    fits, does_not = llm.generate([[1] * 28, [1] * 29], GREEDY)
    assert len(fits.token_ids) == 1 and fits.finish_reason == "length"
    assert "29 tokens" in str(does_not.error) and "7 pages of 4" in str(does_not.error)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"max_length": 0}, "max_length=0 must be at least 2"),
        ({"max_length": 1}, "max_length=1 must be at least 2"),
        ({"max_slots": 0}, "num_slots=0"),
        ({"page_size": 0}, "page_size=0"),
        ({"max_prefill_tokens": 100}, "max_prefill_tokens=100 must be a power of two"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, told):
    with pytest.raises(ValueError, match=told):
        make_llm(**sizes)


def test_a_small_pool_serves_all_in_turn():
    each = page_bytes(tiny_decoder().layer_groups, page_size=4, dtype="float32")
    llm, prompts = make_llm(kv_memory=8 * each), random_prompts([9, 12, 3, 7, 14])
    params = dataclasses.replace(GREEDY, max_tokens=12)
    for prompt, completion in zip(prompts, llm.generate(prompts, params), strict=True):
        assert len(completion.token_ids) == 12
        assert_greedy(tiny_decoder(), prompt, completion.token_ids)
    assert pages_held(llm.engine) == 0


def test_two_layer_groups_share_the_memory():
    class Mixed(StubDecoder):
        layer_groups = (
            LayerGroup(layers=(0,), num_kv_heads=1, head_dim=1),
            LayerGroup(layers=(1,), num_kv_heads=1, head_dim=1, window=4),
        )

    llm = make_llm(Mixed(np.zeros(8)), kv_memory=10 * 2 * 2 * 4 * 4)
    assert llm.engine.num_pages == 9


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
