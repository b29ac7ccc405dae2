"""How many pages an LLM takes, and how long requests may then be."""

import dataclasses

import numpy as np
import pytest

from helpers import StubDecoder, assert_greedy, pages_held, random_prompts, tiny_decoder
from helpers_llm import GREEDY, make_llm
from paxkv import LayerGroup
from paxkv.config import page_bytes


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
        ({"max_length": 0}, "max_length=0 must be a whole number, at least 2"),
        ({"max_length": 1}, "max_length=1 must be a whole number, at least 2"),
        ({"max_slots": 0}, "max_slots=0 must be a whole number, at least 1"),
        ({"max_slots": 1.5}, "max_slots=1.5 must be a whole number"),
        ({"max_length": 10.5}, "max_length=10.5 must be a whole number"),
        ({"seed": None}, "seed=None must be a whole number"),
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
