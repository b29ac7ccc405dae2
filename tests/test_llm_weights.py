"""Other weights for the same model, between requests."""

import dataclasses
from typing import Any

import pytest
from flax import nnx

from helpers import assert_greedy, tiny_decoder
from helpers_llm import GREEDY, make_llm
from paxkv.models.llama import LlamaDecoder
from paxkv.steps import decode_loop_jit, prefill_step_jit


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
        with pytest.raises(ValueError, match=r"is \w+\[.* and was float32\[|leaves"):
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
