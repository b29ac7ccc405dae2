"""Text that an LLM writes, whole and in pieces, and the conversations that it answers."""

import dataclasses

import pytest

from helpers import pages_held
from helpers_llm import END, both_ways, says, words_tokenizer
from helpers_text import byte_level_tokenizer, sentencepiece_tokenizer
from paxkv import SamplingParams
from paxkv.models.tokenizer import Tokenizer

SMILE = "\U0001f642"


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = [tokenizer.backend.token_to_id(token) for token in tokens]
    return [token_id for token_id in ids if token_id is not None]


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
