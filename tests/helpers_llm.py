"""A small LLM, one that says what a test tells it to, and streams checked as they are read."""

from typing import Any

import numpy as np

from helpers import StubDecoder, tiny_decoder
from helpers_text import byte_level_tokenizer
from paxkv import LLM, Completion, SamplingParams
from paxkv.decoder import Decoder
from paxkv.models.tokenizer import Tokenizer

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


def both_ways(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[list[str], Completion]:
    """The pieces of a stream and the completion, which must be that of `generate`."""
    pieces = list(llm.stream(prompt, params))
    texts = [piece.text for piece in pieces]
    assert [piece.completion is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    [completion] = llm.generate([prompt], params)
    assert pieces[-1].completion == completion and "".join(texts) == completion.text
    return texts, completion
