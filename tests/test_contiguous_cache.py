"""The cache that paging is compared with gives the same tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.contiguous_cache import piece_lengths
from benchmarks.contiguous_engine import ContiguousEngine, prompt_bucket
from helpers import add, assert_greedy, make_engine, random_prompts, run, settled, tiny_decoder

LENGTHS = 1, 3, 37, 8, 7, 9, 15, 44  # on both sides of where pieces end
NEW_TOKENS = 5, 1, 9, 20, 6, 3, 8, 17


@pytest.mark.parametrize("is_static", [False, True])
def test_contiguous_engine_gives_paxkvs_tokens(is_static):
    engine = ContiguousEngine(
        tiny_decoder(),
        num_slots=3,
        max_length=64,
        max_burst=4,
        is_static=is_static,
        smallest_piece=8,
    )
    prompts = random_prompts(LENGTHS)
    requests = [engine.add(*asked) for asked in zip(prompts, NEW_TOKENS, strict=True)]
    while engine.has_work:
        assert len(engine.step()) <= 3
    paged = make_engine(tiny_decoder())
    for request, num_tokens in zip(requests, NEW_TOKENS, strict=True):
        ours = add(paged, request.prompt, settled(max_tokens=num_tokens))
        run(paged)
        assert len(request.output) == num_tokens
        if request.output != ours.output:  # only a near tie may be the reason
            assert_greedy(tiny_decoder(), request.prompt, request.output)


def test_static_batches_wait_for_their_longest():
    engine = ContiguousEngine(
        tiny_decoder(), num_slots=2, max_length=64, max_burst=4, is_static=True
    )
    first, long, third = (engine.add([1, 2], n) for n in (1, 9, 2))
    engine.step()
    engine.step()
    assert (first.num_left, long.num_left, third.num_left) == (0, 1, 2)


@given(st.integers(1, 5000), st.sampled_from([16, 256]))
def test_pieces_are_as_long_as_all_before_them(max_length, smallest):
    lengths = np.array(piece_lengths(max_length, smallest))
    assert lengths.sum() == max_length and lengths[0] == min(smallest, max_length)
    before = np.cumsum(lengths)[:-1]
    assert np.all(lengths[1:-1] == before[:-1]) if len(lengths) > 2 else True
    assert np.all(lengths[1:] <= before)


def test_long_prompts_are_attended_tile_by_tile():
    [prompt] = random_prompts([601])
    engine = ContiguousEngine(tiny_decoder(), num_slots=1, max_length=1024)
    request = engine.add(prompt, 8)
    engine.step()
    assert_greedy(tiny_decoder(), prompt, request.output, length=640)


@given(st.integers(1, 2048))
def test_prompts_are_padded_by_a_quarter_at_most(num_tokens):
    rows = prompt_bucket(num_tokens, 2048)
    assert num_tokens <= rows <= max(num_tokens + 31, 1.25 * num_tokens)
