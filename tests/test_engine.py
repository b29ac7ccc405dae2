"""Many requests over one pool: each is served as if it were alone."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import (
    TINY_CONFIG,
    VOCAB,
    HistoryDecoder,
    StubDecoder,
    add,
    assert_greedy,
    check_engine,
    make_engine,
    pages_held,
    random_prompts,
    run,
    serve,
    settled,
    tiny_decoder,
)
from helpers_history import HISTORY, alone
from paxkv.models.llama import LlamaDecoder
from paxkv.models.rope import RopeConfig
from paxkv.request import SamplingParams
from paxkv.request_state import Request

PROMPTS = random_prompts([1, 9, 30, 5, 17, 2, 12])
UNIFORM = StubDecoder(np.zeros(1000, np.float32))


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"page_size": 1, "num_pages": 257, "num_slots": 7},
        {"page_size": 16, "num_pages": 17},
        {"page_size": 128, "num_pages": 5, "num_slots": 1},
        {"max_prefill_tokens": 64},
        {"num_pages": 15},  # 56 tokens: requests are sent back and begin again
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_dense_attention_for_any(sizes):
    engine, decoder = make_engine(tiny_decoder(), **sizes), tiny_decoder()
    for prompts in (PROMPTS, PROMPTS[::-1]):
        for request in serve(engine, prompts, settled(max_tokens=20)):
            assert len(request.output) == 20
            assert request.finish_reason == "length"
            assert_greedy(decoder, request.prompt, request.output)
    assert (engine.stats.num_preemptions > 0) == (sizes == {"num_pages": 15})


def test_tokens_of_a_request_do_not_depend_on_how_long_bursts_are():
    engine, outputs = make_engine(tiny_decoder()), []
    for max_steps in (None, 1, 3):
        requests = [add(engine, prompt, settled(max_tokens=9)) for prompt in PROMPTS]
        run(engine, max_steps)
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1] == outputs[2]


@st.composite
def params(draw) -> SamplingParams:
    max_tokens = draw(st.integers(1, 10))
    return settled(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        top_k=draw(st.sampled_from([0, 3])),
        seed=draw(st.integers(0, 3)),
        stop_token_ids=draw(st.sets(st.integers(0, VOCAB - 1), max_size=8)),
        presence_penalty=draw(st.sampled_from([0.0, 1.5])),
        logprobs=draw(st.sampled_from([None, 0, 2])),
    )


PROMPT = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14)


@settings(max_examples=40)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), PROMPT, params()), min_size=1, max_size=9),
    num_pages=st.sampled_from([8, 12]),  # 28 and 44 tokens, of which one request may have 24
    bursts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    aborts=st.sets(st.integers(0, 8), max_size=2),
)
def test_request_is_served_as_if_alone_in_any_company(arrivals, num_pages, bursts, aborts):
    engine = make_engine(HISTORY, num_slots=3, num_pages=num_pages)
    requests, lengths = [], itertools.cycle(bursts)

    def step() -> None:
        oldest = next(iter(engine._scheduler.running.values()), None)
        engine.step(next(lengths))
        check_engine(engine)
        assert oldest is None or oldest not in engine._scheduler.waiting

    for number, (wait, prompt, its) in enumerate(arrivals):
        for _ in range(wait):
            step()
        requests.append(add(engine, prompt, its))
        if number in aborts:
            engine.abort(requests[number // 2].id)
            check_engine(engine)
    # Every step decodes at least one token of the oldest request or sends another one back.
    for _ in range(2 * sum(its.max_tokens for *_, its in arrivals)):
        if engine.has_work:
            step()
    assert not engine.has_work
    assert pages_held(engine) == 0
    for number, request in enumerate(requests):
        output, finish_reason = alone(request.prompt, request.params)
        if number in {n // 2 for n in aborts}:
            assert request.output == output[: len(request.output)]
        else:
            assert (request.output, request.finish_reason) == (output, finish_reason)
        if request.params.logprobs is not None:
            assert [logprob.token_id for logprob in request.logprobs] == request.output


def seeded(engine, others: int = 0, *, before: int = 0, **choices) -> list[int]:
    """What seed 42 draws from even logits, with other requests before and after it in the batch."""
    unseeded = settled(temperature=1.0, max_tokens=11)
    for _ in range(before):
        add(engine, [3], unseeded)
    request = add(engine, [1, 2], settled(temperature=1.0, seed=42, **choices))
    for _ in range(others):
        add(engine, [4], unseeded)
    run(engine)
    return request.output


def test_seeded_request_draws_the_same_ids_in_any_company():
    engine = make_engine(UNIFORM)
    expected = seeded(engine)
    assert len(expected) == 8
    assert len(set(expected)) > 4
    assert seeded(engine, others=1) == expected  # beside a row without a seed
    assert seeded(engine, before=2) == expected  # in another slot
    add(engine, [5], settled(max_tokens=2))  # beside a row that ends
    assert seeded(engine, others=2) == expected
    small = make_engine(UNIFORM, num_pages=5)  # 16 tokens
    assert seeded(small, before=1) == expected  # sent back, and begun again
    assert small.stats.num_preemptions > 0


def test_requests_without_a_seed_draw_from_the_engines():
    def drawn(seed: int) -> list[list[int]]:
        engine = make_engine(UNIFORM, seed=seed)
        return [r.output for r in serve(engine, [[1]] * 3, settled(temperature=1.0))]

    assert drawn(0) == drawn(0)
    assert len({tuple(output) for output in drawn(0) + drawn(1)}) == 6


def test_request_that_can_never_fit_is_refused_and_the_others_are_served():
    engine = make_engine(HISTORY, num_pages=8, num_slots=3)  # 7 usable pages of 4: 28 tokens
    assert engine.num_pages == engine._scheduler.num_pages == 7
    with pytest.raises(ValueError, match=r"the prompt has 30 tokens.*29: the pool holds 28 tokens"):
        add(engine, [1] * 30, settled(max_tokens=2))
    [small] = serve(engine, [[1] * 4], settled(max_tokens=2))
    assert (len(small.output), small.finish_reason) == (2, "length")
    [full] = serve(engine, [[1] * 28], settled(max_tokens=1))  # its last token needs no place
    assert (len(full.output), full.finish_reason) == (1, "length")
    [cut] = serve(engine, [[1] * 20], settled(max_tokens=100))
    assert (len(cut.output), cut.finish_reason) == (9, "length")


def test_request_that_makes_no_sense_is_refused():
    engine = make_engine(HISTORY)
    with pytest.raises(ValueError, match="no tokens; at least 1"):
        add(engine, [], settled())
    for token in (-1, VOCAB):
        with pytest.raises(ValueError, match=f"token id {token} .* 0 to 63"):
            add(engine, [1, token], settled())
    for prompt in ("abc", (1, 2), np.array([1, 2])):
        with pytest.raises(ValueError, match="must be a list of token ids, found"):
            engine.add(Request(prompt=prompt, params=settled()))  # type: ignore[arg-type]
    for no_token in (1.5, True):
        with pytest.raises(ValueError, match=f"holds {no_token}, which is no token id"):
            add(engine, [1, no_token], settled())  # type: ignore[list-item]
    with pytest.raises(ValueError, match="priority='high' must be a whole number"):
        add(engine, [1], settled(), priority="high")
    with pytest.raises(ValueError, match="17 stop tokens, and a request may have 16: name fewer"):
        add(engine, [1], settled(stop_token_ids=range(17)))
    with pytest.raises(ValueError, match="max_prefill_tokens=317 must be a power of two"):
        make_engine(HISTORY, max_prefill_tokens=317)
    assert not engine.has_work


def test_stop_tokens_of_a_request_end_it_and_min_tokens_hold_them_back():
    table = np.zeros(VOCAB, np.float32)
    table[[7, 8]] = 2.0, 1.0  # 7 each time, and 8 where 7 is forbidden
    engine = make_engine(StubDecoder(table))
    of_one = functools.partial(add, engine, [1])
    requests = [
        of_one(settled(stop_token_ids=[7])),
        of_one(settled(), stop_token_ids=[7]),
        of_one(settled(stop_token_ids=[7], min_tokens=3)),
        of_one(settled(max_tokens=3)),
    ]
    run(engine)
    assert [r.output for r in requests] == [[7], [7], [8, 8, 8, 7], [7, 7, 7]]
    assert [r.finish_reason for r in requests] == ["stop", "stop", "stop", "length"]


def test_penalties_and_bias_of_a_request_are_its_own():
    table = np.zeros(VOCAB, np.float32)
    table[:4] = 4.0, 3.0, 2.5, 1.2
    engine = make_engine(StubDecoder(table))
    choices = [
        ({"repetition_penalty": 2.0}, [1, 2, 0, 0]),  # the prompt's 0 counts: 4 becomes 2
        ({"presence_penalty": 1.3}, [0, 1, 0, 0]),
        ({"frequency_penalty": 0.8}, [0, 0, 1, 2]),
        ({"logit_bias": {9: 100.0, 0: -100.0}}, [9, 9, 9, 9]),
        ({"logit_bias": {0: -float("inf")}}, [1, 1, 1, 1]),
        ({}, [0, 0, 0, 0]),
    ]
    requests = [add(engine, [0], settled(max_tokens=4, **choice)) for choice, _ in choices]
    run(engine)
    assert [r.output for r in requests] == [expected for _, expected in choices]


def test_logprobs_of_each_request_are_as_if_it_were_alone():
    table = np.array(HISTORY.table[...])
    table[:, 1::2] = -np.inf  # half of the tokens cannot come
    engine = make_engine(HistoryDecoder(table))
    choices = [
        {"logprobs": 3},
        {},
        {"logprobs": 0, "prompt_logprobs": 2},
        {"logprobs": 20, "temperature": 1.0, "seed": 1},
        {"prompt_logprobs": 0},
    ]
    prompts = [[token & ~1 for token in prompt] for prompt in random_prompts([5, 30, 33, 1, 17])]
    expected = []
    for prompt, its in zip(prompts, choices, strict=True):
        expected += serve(engine, [prompt], settled(**its))
    together = [add(engine, p, settled(**its)) for p, its in zip(prompts, choices, strict=True)]
    run(engine)
    for found, lone, its in zip(together, expected, choices, strict=True):
        assert found.output == lone.output
        assert found.logprobs == lone.logprobs
        assert found.prompt_logprobs == lone.prompt_logprobs
        assert len(found.logprobs) == (8 if "logprobs" in its else 0)
        assert all(len(token.top) == its["logprobs"] for token in found.logprobs)
        if "prompt_logprobs" in its:
            assert found.prompt_logprobs[0] is None
            tokens = [token for token in found.prompt_logprobs if token]
            assert [token.token_id for token in tokens] == found.prompt[1:]
            assert all(len(token.top) == its["prompt_logprobs"] for token in tokens)


def test_logprobs_where_one_token_is_possible_list_the_others_at_minus_infinity():
    table = np.full(VOCAB, -np.inf, np.float32)
    table[6] = 1.0
    [request] = serve(make_engine(StubDecoder(table)), [[1]], settled(max_tokens=1, logprobs=5))
    [token] = request.logprobs
    assert (token.token_id, token.logprob) == (6, 0.0)
    assert token.top[0] == (6, 0.0)
    assert [logprob for _, logprob in token.top[1:]] == [-np.inf] * 4


def test_prompt_logprobs_are_told_once_though_the_request_begins_again():
    engine = make_engine(tiny_decoder(), num_pages=15)
    requests = serve(engine, PROMPTS, settled(max_tokens=20, prompt_logprobs=1))
    assert engine.stats.num_preemptions > 0
    for request in requests:
        assert len(request.prompt_logprobs) == len(request.prompt)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_prompt_logprobs_are_right_though_the_request_was_sent_back_half_stored(preemption):
    *short, long = random_prompts([8] * 6 + [100], seed=3)
    wanted = settled(max_tokens=4, prompt_logprobs=2)
    sizes = {"max_length": 200, "prefix_caching": False}
    [right] = serve(make_engine(HISTORY, num_pages=257, **sizes), [long], wanted)
    engine = make_engine(
        HISTORY, num_slots=8, num_pages=81, preemption=preemption, prefill_chunk=16, **sizes
    )
    others = [add(engine, prompt, settled(max_tokens=60)) for prompt in short]
    while len(others[0].output) < 24:
        engine.step(1)
    request, most = add(engine, long, wanted), 0
    while request.num_stored >= most:  # until it is sent back
        most = request.num_stored
        engine.step(1)
    assert 0 < most < len(long) - 1
    run(engine)
    for found, due in zip(request.prompt_logprobs[1:], right.prompt_logprobs[1:], strict=True):
        assert found and due and found.token_id == due.token_id
        np.testing.assert_allclose(found.logprob, due.logprob, atol=1e-4)


def test_request_with_nan_logits_ends_with_an_error_alone():
    table = np.zeros((VOCAB, VOCAB), np.float32)
    table[:, 5] = 1.0
    table[9] = np.nan
    engine = make_engine(StubDecoder(table))
    wrong, right = add(engine, [9], settled()), add(engine, [1], settled())
    run(engine)
    assert (wrong.output, wrong.finish_reason) == ([], "error")
    assert (right.output, right.finish_reason) == ([5] * 8, "length")


def test_aborted_requests_give_back_their_pages_and_the_others_go_on():
    engine = make_engine(HISTORY)
    requests = [add(engine, prompt, settled(max_tokens=30)) for prompt in PROMPTS[:6]]
    while not requests[2].output:  # the longest prompt is stored in chunks
        engine.step(4)
    held, so_far = pages_held(engine), list(requests[1].output)
    for number in (1, 5):  # one runs, one waits
        engine.abort(requests[number].id)
        check_engine(engine)
    assert pages_held(engine) < held
    run(engine)
    assert requests[1].output == so_far
    for number, request in enumerate(requests):
        output, reason = alone(request.prompt, request.params)
        assert request.finish_reason == ("abort" if number in (1, 5) else reason)
        assert number in (1, 5) or request.output == output
    engine.abort(requests[0].id)  # it has ended: nothing happens
    assert requests[0].finish_reason == "length"


def test_exception_between_steps_or_while_results_are_fetched_leaves_a_working_engine(monkeypatch):
    engine = make_engine(HISTORY)
    expected, _ = alone(PROMPTS[1], settled())
    first = add(engine, PROMPTS[1], settled())
    with pytest.raises(ZeroDivisionError):
        engine.step(2)
        _ = 1 // 0
    run(engine)
    assert first.output == expected

    def interrupt(_):
        raise KeyboardInterrupt

    broken = [add(engine, prompt, settled()) for prompt in PROMPTS]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(jax, "device_get", interrupt)
        engine.step()
    for request in broken:
        engine.abort(request.id)
    [again] = serve(engine, [PROMPTS[1]], settled())
    assert again.output == expected


def test_weights_are_not_changed_between_samples_of_one_prompt():
    engine = make_engine(tiny_decoder(), num_slots=1)
    request = add(engine, PROMPTS[1], settled(max_tokens=2, n=2))
    while not any(sample.finish_reason for sample in request.samples):
        engine.step()
    with pytest.raises(RuntimeError, match="1 requests are running on the old weights"):
        engine.set_decoder(tiny_decoder(seed=1))


def test_new_weights_are_used_once_nothing_runs_on_the_old():
    old, new = tiny_decoder(seed=0), tiny_decoder(seed=1)
    engine = make_engine(old)
    first = add(engine, PROMPTS[1], settled())
    engine.step(1)
    with pytest.raises(RuntimeError, match="1 requests are running on the old weights"):
        engine.set_decoder(new)
    run(engine)
    engine.set_decoder(new)
    [second] = serve(engine, [PROMPTS[1]], settled())
    assert_greedy(old, first.prompt, first.output)
    assert_greedy(new, second.prompt, second.output)
    assert first.output != second.output
    with pytest.raises(ValueError, match="differ from the old ones"):
        engine.set_decoder(tiny_decoder("bfloat16"))


def test_new_weights_wait_for_prompts_that_the_old_have_stored_in_part():
    sizes = {"page_size": 1, "num_pages": 67, "prefix_caching": False}
    engine = make_engine(HISTORY, preemption="swap", **sizes)
    first = add(engine, [1, 2, 3], settled(max_tokens=24))
    engine.step(1)
    late = add(engine, [1] * 60, settled(max_tokens=2), priority=1)
    while not engine.stats.num_preemptions:
        engine.step(1)
    assert late.swapped and not late.output
    engine.abort(first.id)
    with pytest.raises(RuntimeError, match="1 requests are running on the old weights"):
        engine.set_decoder(engine.decoder)
    run(engine)
    engine.set_decoder(engine.decoder)


def test_stats_count_tokens_and_the_fullest_moment():
    engine = make_engine(HISTORY)
    serve(engine, [[1] * 9, [2] * 5], settled(max_tokens=6))
    stats = engine.stats
    assert (stats.prefill_tokens, stats.decode_tokens) == (8 + 4, 12)
    assert stats.num_preemptions == 0
    assert 0 < stats.peak_tokens <= 4 * stats.peak_pages


def test_a_burst_crosses_to_the_host_once(monkeypatch):
    engine = make_engine(HISTORY)
    request = add(engine, PROMPTS[2], settled(max_tokens=40))
    transfers = []
    fetch = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: transfers.append(x) or fetch(x))
    num_steps = 0
    while request.finish_reason is None:
        engine.step()
        num_steps += 1
    assert len(transfers) == num_steps
    assert num_steps > 1


@pytest.mark.parametrize(
    "params",
    [{"stop_token_ids": [VOCAB]}, {"stop_token_ids": [2**31]}, {"logit_bias": {VOCAB: 1.0}}],
)
def test_a_token_outside_the_vocabulary_is_refused_before_it_is_queued(params):
    engine = make_engine(HISTORY)
    with pytest.raises(ValueError, match=f"not in the vocabulary, 0 to {VOCAB - 1}"):
        add(engine, [1, 2], settled(**params))
    assert not engine.has_work


def test_numbers_past_int32_are_as_good_as_the_largest():
    engine = make_engine(HISTORY)
    params = settled(max_tokens=4, top_k=2**31, temperature=1.0, seed=1)
    [request] = serve(engine, [[1, 2]], params)
    assert request.output == alone((1, 2), settled(max_tokens=4, temperature=1.0, seed=1))[0]


def test_a_burst_of_nothing_is_refused():
    with pytest.raises(ValueError, match="max_burst=0 must be at least 1"):
        make_engine(HISTORY, max_burst=0)


def test_decoding_goes_on_past_the_length_a_model_was_made_for():
    rope = RopeConfig(theta=10000.0, scaling="linear", factor=4.0)
    config = dataclasses.replace(TINY_CONFIG, rope=rope, max_position=64)
    decoder = LlamaDecoder(config, rngs=nnx.Rngs(3))
    [prompt] = random_prompts([60])
    [request] = serve(
        make_engine(decoder, max_length=256, num_pages=129), [prompt], settled(max_tokens=20)
    )
    assert len(request.output) == 20
    assert_greedy(decoder, prompt, request.output, length=80)
