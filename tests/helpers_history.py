"""A decoder whose next token depends on all before it, and what it answers to one request alone."""

import functools
from collections.abc import Sequence

import numpy as np

from helpers import VOCAB, HistoryDecoder, make_engine, serve, settled
from paxkv.decoder import Decoder
from paxkv.request import SamplingParams

HISTORY = HistoryDecoder(3 * np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype("f4"))


def alone(
    prompt: Sequence[int], params: SamplingParams, decoder: Decoder = HISTORY
) -> tuple[list[int], str | None]:
    """Output and finish reason of a request that has an engine to itself."""
    return _alone(tuple(prompt), params, decoder)


def output_alone(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The best tokens after a prompt that has an engine to itself."""
    return alone(prompt, settled(max_tokens=max_tokens))[0]


@functools.cache
def _alone(
    prompt: tuple[int, ...], params: SamplingParams, decoder: Decoder
) -> tuple[list[int], str | None]:
    engine = make_engine(decoder, num_slots=1, prefix_caching=False)
    [request] = serve(engine, [prompt], params)
    return request.output, request.finish_reason
