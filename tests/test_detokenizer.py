"""Text that comes token by token is the text of all tokens."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_text import byte_level_tokenizer, sentencepiece_tokenizer
from paxkv.models.detokenizer import Detokenizer
from paxkv.models.tokenizer import Tokenizer

BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
SENTENCEPIECE_UNSTRIPPED = sentencepiece_tokenizer(strips_space=False)
ALL = [BYTE_LEVEL, SENTENCEPIECE, SENTENCEPIECE_UNSTRIPPED]
SMILE = "\U0001f642"  # F0 9F 99 82

each_tokenizer = pytest.mark.parametrize("tokenizer", ALL, ids=["bytes", "marks", "marks_kept"])


def _ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = [tokenizer.backend.token_to_id(token) for token in tokens]
    assert None not in ids
    return ids  # pyright: ignore[reportReturnType]


def _deltas(tokenizer: Tokenizer, output: list[int], prompt: list[int] | None = None) -> list[str]:
    """What each token adds, and what the end adds."""
    detokenizer = Detokenizer(tokenizer, prompt or [])
    deltas = [detokenizer.push(token_id) for token_id in output]
    return [*deltas, detokenizer.finish()]


@each_tokenizer
def test_character_of_four_tokens_comes_whole(tokenizer: Tokenizer):
    output = [*SMILE.encode(), *SMILE.encode(), *_ids(tokenizer, "a")]
    assert _deltas(tokenizer, output) == ["", "", "", SMILE, "", "", "", SMILE, "a", ""]
    assert tokenizer.decode(output) == tokenizer.backend.decode(output) == SMILE + SMILE + "a"


@each_tokenizer
def test_output_cut_inside_a_character_is_streamed_as_decoded(tokenizer: Tokenizer):
    output = [*SMILE.encode(), *SMILE.encode()][:6]
    deltas = _deltas(tokenizer, output)
    assert deltas[:-1] == ["", "", "", SMILE, "", ""]
    assert set(deltas[-1]) == {"\ufffd"}
    assert "".join(deltas) == tokenizer.decode(output)


@each_tokenizer
def test_stream_goes_on_after_an_invalid_byte(tokenizer: Tokenizer):
    output = [*SMILE.encode(), 0xFF, *SMILE.encode(), *_ids(tokenizer, "a")]
    deltas = _deltas(tokenizer, output)
    assert deltas == ["", "", "", SMILE, "\ufffd", "", "", "", SMILE, "a", ""]
    assert "".join(deltas) == tokenizer.decode(output)


@each_tokenizer
def test_character_begun_in_the_prompt_comes_with_the_output(tokenizer: Tokenizer):
    prompt, output = [*b"x", *SMILE.encode()[:2]], [*SMILE.encode()[2:]]
    assert _deltas(tokenizer, output, prompt) == ["", SMILE, ""]


def test_leading_space_of_the_whole_text_is_stripped_once():
    output = _ids(SENTENCEPIECE, "\u2581", "\u2581leading", "\u2581x")
    assert "".join(_deltas(SENTENCEPIECE, output)) == " leading x"
    assert SENTENCEPIECE.backend.decode(output) == " leading x"


def test_leading_space_of_a_continuation_is_kept():
    output = _ids(SENTENCEPIECE, "\u2581", "\u2581leading", "\u2581x")
    assert "".join(_deltas(SENTENCEPIECE, output, _ids(SENTENCEPIECE, "a"))) == "  leading x"
    # A begin token is no text, so that the output begins the text.
    assert "".join(_deltas(SENTENCEPIECE, output, _ids(SENTENCEPIECE, "<s>"))) == " leading x"


def test_leading_space_of_a_byte_level_token_is_kept():
    assert _deltas(BYTE_LEVEL, _ids(BYTE_LEVEL, "\u0120x")) == [" x", ""]
    assert _deltas(BYTE_LEVEL, _ids(BYTE_LEVEL, "\u0120x"), [*b"a"]) == [" x", ""]


@each_tokenizer
def test_special_and_unknown_ids_are_no_text(tokenizer: Tokenizer):
    end = _ids(tokenizer, "</s>")[0]
    output = [end, *SMILE.encode()[:2], end, tokenizer.vocab_size + 5, *SMILE.encode()[2:]]
    assert "".join(_deltas(tokenizer, output)) == SMILE
    assert tokenizer.decode([end], skip_special_tokens=False) == "</s>"


@each_tokenizer
@given(data=st.data())
def test_joined_deltas_are_the_decoded_text(tokenizer: Tokenizer, data: st.DataObject):
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12)
    text = st.text(st.sampled_from(f" ax\u00e9\u2581{SMILE}"), max_size=6).map(tokenizer.encode)
    prompt, output = data.draw(ids | text), data.draw(ids | text)
    shown = Detokenizer(tokenizer)  # the prompt's text as far as its characters are whole
    before = shown.push(prompt)
    after = "".join(_deltas(tokenizer, output, prompt))
    assert before + after == tokenizer.decode(prompt + output)

    pieces = Detokenizer(tokenizer, prompt)
    cut = data.draw(st.integers(0, len(output)))
    assert pieces.push(output[:cut]) + pieces.push(output[cut:]) + pieces.finish() == after


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=16))
def test_byte_level_text_is_the_librarys(ids: list[int]):
    assert BYTE_LEVEL.decode(ids) == BYTE_LEVEL.backend.decode(ids)


@pytest.mark.parametrize("tokenizer", ALL[1:], ids=["marks", "marks_kept"])
@given(data=st.data())
def test_sentencepiece_text_is_the_librarys_where_it_is_valid(
    tokenizer: Tokenizer, data: st.DataObject
):
    pieces = st.sampled_from([[*c.encode()] for c in ("a", " ", "\n", "\u00e9", SMILE)])
    words = st.integers(256, tokenizer.vocab_size - 1).map(lambda token_id: [token_id])
    ids = [*itertools.chain(*data.draw(st.lists(pieces | words, max_size=8)))]
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)
