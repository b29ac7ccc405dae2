"""Requests that begin with what others have stored are served as if they had stored it."""

import dataclasses
import itertools
import threading
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import (
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
from paxkv.decoder import Cache, LayerGroup
from paxkv.engine import Engine
from paxkv.llm import LLM
from paxkv.prefix_index import PrefixKey
from paxkv.request import SamplingParams

[SYSTEM] = random_prompts([20])  # 5 pages of 4
[LONG] = random_prompts([160], seed=1)
SUFFIXES = random_prompts([1, 3, 6, 9, 2, 7, 5], seed=2)


def num_reusable(engine: Engine) -> int:
    index = engine._scheduler.index
    return index.num_pages - index.num_used


def assert_all_pages_come_back(engine: Engine) -> None:
    engine.clear_prefixes()
    check_engine(engine)
    for _, table in engine._runner.cache:
        assert np.count_nonzero(table.ref_counts) == 1  # the null page's


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_warm_results_are_the_cold_ones_token_for_token(page_size):
    engine, decoder = (
        make_engine(tiny_decoder(), page_size=page_size, num_pages=257),
        tiny_decoder(),
    )
    cold = make_engine(decoder, page_size=page_size, num_pages=257, prefix_caching=False)
    prompts = [SYSTEM + suffix for suffix in SUFFIXES]
    expected = [request.output for request in serve(cold, prompts, settled(max_tokens=20))]
    assert cold.stats.prefix_tokens_hit == 0
    for _ in range(3):
        for request, output in zip(
            serve(engine, prompts, settled(max_tokens=20)), expected, strict=True
        ):
            assert request.output == output
            assert_greedy(decoder, request.prompt, request.output)
    assert engine.stats.prefix_tokens_hit > 2 * len(SYSTEM) * len(prompts)
    assert_all_pages_come_back(engine)


def test_prompt_that_is_known_is_not_stored_again_but_for_its_last_token():
    engine = make_engine(HISTORY)
    first, again = (serve(engine, [SYSTEM], settled(max_tokens=4))[0] for _ in range(2))
    assert first.output == again.output == alone(SYSTEM, settled(max_tokens=4))[0]
    assert engine.stats.prefill_tokens == len(SYSTEM) - 1
    assert engine.stats.prefix_tokens_hit == len(SYSTEM) - 1
    assert engine.stats.prefix_tokens_copied == 3  # the page is full, but its last token is due


def test_shared_prefix_is_stored_once_and_prefilled_once():
    engine = make_engine(HISTORY)
    assert engine.warm(SYSTEM) == 20
    assert (engine.stats.prefill_tokens, num_reusable(engine)) == (20, 5)
    requests = [add(engine, SYSTEM + suffix, settled(max_tokens=9)) for suffix in SUFFIXES[:4]]
    engine.step(1)
    check_engine(engine)
    tables = np.asarray(engine._runner.cache[0][1].block_tables)
    assert np.all(tables[:, :5] == tables[0, :5])
    assert engine._scheduler.num_pages_used == 5 + 1 + 1 + 2 + 3
    assert engine.stats.prefill_tokens == 20 + sum(len(suffix) - 1 for suffix in SUFFIXES[:4])
    run(engine)
    for request in requests:
        assert request.output == alone(request.prompt, request.params)[0]


def test_requests_that_come_together_wait_for_the_first_to_store_what_they_share():
    engine = make_engine(HISTORY, max_length=256, num_pages=257, page_size=16)
    requests = [add(engine, LONG + suffix, settled()) for suffix in SUFFIXES[:4]]
    assert len(engine.step()) == 1  # it makes one step, for the others not to wait long
    assert len(requests[0].output) == 1
    run(engine)
    stored = len(LONG) + sum(len(suffix) - 1 for suffix in SUFFIXES[:4])
    assert engine.stats.prefill_tokens == stored
    assert engine.stats.peak_pages == 10 + 4
    assert engine.stats.peak_tokens <= engine.stats.peak_pages * 16
    cold = make_engine(HISTORY, max_length=256, num_pages=257, page_size=16, prefix_caching=False)
    assert [r.output for r in serve(cold, [r.prompt for r in requests], settled())] == [
        r.output for r in requests
    ]


def test_pages_that_two_requests_fill_alike_are_merged():
    """Prompts of 6 tokens at once: the second page of each is its own, and so is what follows."""
    engine = make_engine(HISTORY)
    [prompt] = random_prompts([6])
    its = [settled(max_tokens=6, temperature=1.0, seed=seed) for seed in (1, 2)]
    requests = [add(engine, prompt, params) for params in its]
    engine.step(1)
    check_engine(engine)
    table = engine._runner.cache[0][1]
    assert table.block_tables[0, 0] == table.block_tables[1, 0]
    assert table.ref_counts[table.block_tables[0, 0]] == 3  # two slots and the index
    assert table.block_tables[0, 1] != table.block_tables[1, 1]
    run(engine)
    for request in requests:
        assert request.output == alone(prompt, request.params)[0]
    assert requests[0].output != requests[1].output
    assert_all_pages_come_back(engine)


def test_who_borrows_a_page_of_a_request_that_still_decodes_writes_to_a_copy():
    engine = make_engine(HISTORY)
    [prompt] = random_prompts([6])
    its = [settled(max_tokens=6, temperature=1.0, seed=seed) for seed in (1, 2)]
    lender = add(engine, prompt, its[0])
    engine.step(3)  # 8 tokens are stored: the second page is full, with two of its own answer
    assert all(len(node.tokens) == 4 for node in engine._scheduler.index.nodes())
    keys, table = engine._runner.cache[0][0].k_pages[0], engine._runner.cache[0][1]
    page = int(table.block_tables[0, 1])
    before = np.array(keys[page])
    borrower = add(engine, prompt, its[1])
    engine.step(1)
    check_engine(engine)
    assert engine.stats.prefix_tokens_copied == 1  # of the second page; the last is recomputed
    keys, table = engine._runner.cache[0][0].k_pages[0], engine._runner.cache[0][1]
    np.testing.assert_array_equal(np.array(keys[page]), before)
    assert table.block_tables[0, 1] == page != table.block_tables[1, 1]
    run(engine)
    for request in (lender, borrower):
        assert request.output == alone(prompt, request.params)[0]
    [again] = serve(engine, [prompt], its[0])
    assert again.output == lender.output != borrower.output
    assert_all_pages_come_back(engine)


def test_answer_is_part_of_the_prefix_of_the_next_question():
    engine = make_engine(HISTORY)
    [first] = serve(engine, [SYSTEM], settled(max_tokens=13))
    hits = engine.stats.prefix_tokens_hit
    [second] = serve(engine, [[*first.prompt, *first.output, 1, 2, 3]], settled())
    # The last token of an answer is not stored: 32 tokens are, in 8 pages.
    assert engine.stats.prefix_tokens_hit - hits == 32
    assert second.output == alone(second.prompt, settled())[0]


def test_hits_are_decided_when_a_request_is_admitted():
    engine = make_engine(HISTORY, num_slots=1, max_length=28, num_pages=8)
    engine.warm(SYSTEM[:12])
    [other] = random_prompts([22], seed=5)
    requests = [add(engine, other, settled(max_tokens=1)), add(engine, SYSTEM[:14], settled())]
    run(engine)  # the first one takes 6 of 7 pages: one of the 3 stays
    assert engine.stats.prefix_tokens_hit == 4
    for request in requests:
        assert request.output == alone(request.prompt, request.params)[0]


def test_requests_sent_back_begin_again_with_the_pages_that_are_left():
    engine = make_engine(HISTORY, num_pages=15)  # 56 tokens
    prompts = [SYSTEM + suffix for suffix in SUFFIXES]
    requests = serve(engine, prompts, settled(max_tokens=20))
    assert engine.stats.num_preemptions > 0
    assert engine.stats.prefix_tokens_hit > len(SYSTEM)
    for request in requests:
        assert request.output == alone(request.prompt, request.params)[0]
    assert_all_pages_come_back(engine)


def test_aborted_requests_leave_their_full_pages_and_nothing_else():
    engine = make_engine(HISTORY)
    requests = [add(engine, SYSTEM + suffix, settled(max_tokens=30)) for suffix in SUFFIXES[:2]]
    engine.step(4)
    engine.abort(requests[1].id)
    check_engine(engine)
    assert pages_held(engine) == -(-(20 + 1 + 4 - 1) // 4)
    engine.abort(requests[0].id)
    check_engine(engine)
    assert pages_held(engine) == 0 and num_reusable(engine) == 6 + 1
    [request] = serve(engine, [SYSTEM + SUFFIXES[1]], settled(max_tokens=30))
    assert request.output == alone(request.prompt, request.params)[0]
    assert_all_pages_come_back(engine)


def test_new_weights_find_no_pages_of_the_old():
    old, new = tiny_decoder(seed=0), tiny_decoder(seed=1)
    engine = make_engine(old)
    engine.warm(SYSTEM, pin=True)
    [first] = serve(engine, [SYSTEM], settled())
    engine.set_decoder(new)
    check_engine(engine)
    assert engine._scheduler.index.num_pages == 0
    hits = engine.stats.prefix_tokens_hit
    [second] = serve(engine, [SYSTEM], settled())
    assert engine.stats.prefix_tokens_hit == hits
    assert_greedy(old, SYSTEM, first.output)
    assert_greedy(new, SYSTEM, second.output)


def test_prompt_logprobs_are_complete_though_the_prompt_is_known():
    engine = make_engine(HISTORY)
    params = settled(prompt_logprobs=1, max_tokens=2)
    first, second = (serve(engine, [SYSTEM[:8]], params)[0] for _ in range(2))
    assert len(first.prompt_logprobs) == 8
    assert first.prompt_logprobs == second.prompt_logprobs
    assert engine.stats.prefix_tokens_hit == 0
    assert engine._scheduler.index.num_pages == 2  # the second one's were merged into the first's


def test_requests_of_different_keys_share_nothing():
    engine, hits = make_engine(HISTORY), []
    adapter, salt = PrefixKey(adapter="x"), PrefixKey(salt="x")
    for key in (adapter, salt, adapter, salt, PrefixKey()):
        before = engine.stats.prefix_tokens_hit
        request = add(engine, SYSTEM[:9], settled(max_tokens=1), prefix_key=key)
        run(engine)
        hits.append(engine.stats.prefix_tokens_hit - before)
        assert request.output == alone(SYSTEM[:9], request.params)[0]
    assert hits == [0, 0, 8, 8, 0]


def test_pages_of_a_request_whose_logits_are_nan_are_not_kept():
    table = np.zeros((VOCAB, VOCAB), np.float32)
    table[9] = np.nan
    engine = make_engine(StubDecoder(table))
    [request] = serve(engine, [[1] * 8 + [9]], settled())
    assert request.finish_reason == "error" and engine._scheduler.index.num_pages == 0


def test_pinned_prefix_outlives_the_want_of_pages():
    engine = make_engine(HISTORY, num_pages=25, max_length=48)  # 24 pages, of which 12 may be
    assert engine.warm(SYSTEM, pin=True) == 20
    serve(engine, random_prompts([40] * 6, seed=3), settled())
    hits = engine.stats.prefix_tokens_hit
    serve(engine, [[*SYSTEM, 1]], settled())
    assert engine.stats.prefix_tokens_hit - hits == 20
    engine.unpin(SYSTEM)
    serve(engine, random_prompts([40] * 6, seed=4), settled())
    hits = engine.stats.prefix_tokens_hit
    serve(engine, [[*SYSTEM, 1]], settled())
    assert engine.stats.prefix_tokens_hit - hits < 20
    assert_all_pages_come_back(engine)


def test_prefix_is_warmed_though_another_thread_serves_what_waits(monkeypatch):
    engine = make_engine(HISTORY)
    add_request = engine.add

    def serve_all():
        if engine.turns.lock.acquire(blocking=False):
            run(engine)
            engine.turns.lock.release()

    def add_and_let_others_in(request):
        request_id = add_request(request)
        thread = threading.Thread(target=serve_all)
        thread.start()
        thread.join()
        return request_id

    monkeypatch.setattr(engine, "add", add_and_let_others_in)
    assert engine.warm(SYSTEM, pin=True) == 20


def test_pins_leave_room_for_the_longest_request():
    engine = make_engine(HISTORY, num_pages=25, max_length=81)  # which takes 20 of 24 pages
    assert engine.warm(SYSTEM[:16], pin=True) == 16
    [other] = random_prompts([8], seed=6)
    with pytest.raises(ValueError, match="pins would hold 6 pages and may hold 4"):
        engine.warm(other, pin=True)
    [longest] = random_prompts([80], seed=7)
    [request] = serve(engine, [longest], settled(max_tokens=1))
    assert request.finish_reason == "length"
    with pytest.raises(ValueError, match="not pinned; 1 others are"):
        engine.unpin(other)
    engine.unpin(SYSTEM[:16])
    assert engine.warm(other, pin=True) == 8
    with pytest.raises(ValueError, match="fills 0 pages of 4"):
        engine.warm([1, 2], pin=True)
    with pytest.raises(ValueError, match="max_pinned_share=2 must be from 0 to 1"):
        make_engine(HISTORY, max_pinned_share=2)


def test_engine_without_prefix_caching_keeps_nothing():
    engine = make_engine(HISTORY, prefix_caching=False)
    for _ in range(2):
        serve(engine, [SYSTEM], settled())
    assert np.count_nonzero(engine._runner.cache[0][1].ref_counts) == 1
    assert engine.stats.prefill_tokens == 2 * (len(SYSTEM) - 1)
    with pytest.raises(ValueError, match="prefix_caching is off"):
        engine.warm(SYSTEM)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_llm_keeps_prefixes_unless_told_otherwise(prefix_caching):
    llm = LLM(
        tiny_decoder(), dtype="float32", page_size=4, max_slots=2, max_length=64,
        prefix_caching=prefix_caching, compilation_cache=False,
    )  # fmt: skip
    params = SamplingParams(max_tokens=2, temperature=0.0)
    first, second = (llm.generate(SYSTEM, params) for _ in range(2))
    assert first == second
    assert llm.engine.stats.prefix_tokens_hit == (len(SYSTEM) - 1 if prefix_caching else 0)


def test_clearing_while_requests_run_takes_nothing_from_them():
    engine = make_engine(HISTORY)
    request = add(engine, SYSTEM, settled(max_tokens=30))
    for _ in range(6):
        engine.step(3)
        engine.clear_prefixes()
        check_engine(engine)
    run(engine)
    assert request.output == alone(SYSTEM, request.params)[0]
    assert_all_pages_come_back(engine)


def test_table_that_is_not_as_the_scheduler_takes_it_is_an_error():
    engine = make_engine(HISTORY)
    engine.warm(SYSTEM)
    pool, table = engine._runner.cache[0]
    freed = dataclasses.replace(table, ref_counts=table.ref_counts.at[1:].set(0))
    engine._runner.cache = ((pool, freed),)
    add(engine, SYSTEM, settled())
    with pytest.raises(RuntimeError, match="operations on the cache were refused"):
        engine.step()


class TwoGroups(HistoryDecoder):
    """Two layers in groups of their own, whose block tables need not be alike."""

    layer_groups = tuple(LayerGroup(layers=(i,), num_kv_heads=1, head_dim=1) for i in range(2))

    def __call__[C: Cache](
        self, tokens: jax.Array, positions: jax.Array, cache: C
    ) -> tuple[jax.Array, C]:
        hidden, cache = super().__call__(tokens, positions, cache)
        heads = hidden.astype("float32")[:, None]
        out, cache = cache.attend(1, 0 * heads, 0 * heads, heads)
        total = jax.numpy.round(out[:, 0, 0] * (positions + 1).astype("float32"))
        return (total.astype("int32") % self.vocab_size)[:, None], cache


def test_each_layer_group_has_pages_of_its_own():
    decoder = TwoGroups(HISTORY.table[...])
    engine, cold = make_engine(decoder), make_engine(decoder, prefix_caching=False)
    (first, (pool, table)) = engine._runner.cache
    taken = dataclasses.replace(table, ref_counts=table.ref_counts.at[1:3].set(1))
    engine._runner.cache = (first, (pool, taken))  # its first page is page 3
    prompts = [SYSTEM + suffix for suffix in SUFFIXES]
    expected = [request.output for request in serve(cold, prompts, settled())]
    requests = [add(engine, prompt, settled()) for prompt in prompts * 2]
    while engine.has_work:
        engine.step()
    assert [request.output for request in requests] == expected * 2
    assert {node.pages for node in engine._scheduler.index.nodes()} >= {(1, 3)}
    engine.clear_prefixes()
    assert np.flatnonzero(engine._runner.cache[0][1].ref_counts).tolist() == [0]
    assert np.flatnonzero(engine._runner.cache[1][1].ref_counts).tolist() == [0, 1, 2]


@st.composite
def prompts(draw) -> list[int]:
    """Most begin like others: some tokens of one of two texts, and a few of 0 and 1."""
    text = draw(st.sampled_from([SYSTEM, LONG]))[: draw(st.integers(0, 10))]
    tail = draw(st.lists(st.integers(0, 1), max_size=4))
    return text + tail or [0]


@st.composite
def sampling(draw) -> SamplingParams:
    return settled(
        max_tokens=draw(st.integers(1, 10)),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 1)),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
    )


def between_steps(engine: Engine, action: str) -> None:
    if action == "clear":
        engine.clear_prefixes()
    elif action == "pin":
        engine.warm(SYSTEM[:4], pin=True)


@settings(max_examples=40, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 3), prompts(), sampling(), st.sampled_from(["", "", "clear", "pin"])
        ),
        min_size=1,
        max_size=9,
    ),
    num_pages=st.sampled_from([9, 13]),  # 32 and 48 tokens, of which one request may have 24
    bursts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    aborts=st.sets(st.integers(0, 8), max_size=2),
)
def test_request_is_served_as_if_alone_though_it_shares_pages(arrivals, num_pages, bursts, aborts):
    engine = make_engine(HISTORY, num_slots=3, num_pages=num_pages, max_length=24)
    requests, lengths = [], itertools.cycle(bursts)

    def steps(count: int) -> Iterator[None]:
        for _ in range(count):
            engine.step(next(lengths))
            check_engine(engine)
            yield

    for number, (wait, prompt, its, action) in enumerate(arrivals):
        list(steps(wait))
        requests.append(add(engine, prompt, its))
        if number in aborts:
            engine.abort(requests[number // 2].id)
        between_steps(engine, action)
        check_engine(engine)
    for _ in steps(4 * sum(its.max_tokens for _, _, its, _ in arrivals)):
        if not engine.has_work:
            break
    assert not engine.has_work and pages_held(engine) == 0
    for number, request in enumerate(requests):
        output, finish_reason = alone(request.prompt, request.params)
        if number in {n // 2 for n in aborts}:
            assert request.output == output[: len(request.output)]
        else:
            assert (request.output, request.finish_reason) == (output, finish_reason)
    assert_all_pages_come_back(engine)
