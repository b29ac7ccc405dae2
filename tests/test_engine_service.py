"""Who is served when: priorities, full queues, deadlines, chunks, aborts, and what is told."""

import asyncio
import itertools
import json

import numpy as np
import pytest

from helpers import (
    add,
    check_engine,
    make_engine,
    pages_held,
    random_prompts,
    run,
    serve,
    settled,
)
from helpers_history import HISTORY, output_alone
from paxkv.async_engine import AsyncEngine
from paxkv.errors import DeadlineExceeded, QueueFull
from paxkv.request_state import Request
from paxkv.runner import decode_rows

LONG, *SHORT = random_prompts([50, 4, 7, 9, 5, 6, 8])


def is_forgotten(engine) -> bool:
    """Whether the engine is as it was before the first request."""
    scheduler = engine._scheduler
    return not (
        engine._batching.live or scheduler.running or scheduler.waiting or pages_held(engine)
    )


def test_lower_priorities_are_served_first_and_equal_ones_in_turn():
    engine, ended = make_engine(HISTORY, num_slots=1), []
    requests = [
        add(engine, prompt, settled(max_tokens=3), priority=priority)
        for prompt, priority in zip(SHORT, [0, 5, 0, -1, 5, 0], strict=True)
    ]
    while engine.has_work:
        ended += [requests.index(r) for r in engine.step() if r.finish_reason]
    assert ended == [3, 0, 2, 5, 1, 4]


def test_request_of_least_priority_is_the_one_sent_back():
    engine = make_engine(HISTORY, num_slots=2, num_pages=13)  # 48 tokens
    late = add(engine, SHORT[0], settled(max_tokens=40), priority=1)
    engine.step(4)
    first = add(engine, SHORT[1], settled(max_tokens=30))
    while not engine.stats.num_preemptions:
        engine.step(2)
        check_engine(engine)
    assert late in engine._scheduler.waiting and first in engine._scheduler.running.values()
    run(engine)
    assert [late.output, first.output] == [output_alone(SHORT[0], 40), output_alone(SHORT[1], 30)]


def test_more_samples_than_may_wait_are_refused_for_good():
    engine = make_engine(HISTORY, max_waiting=2)
    with pytest.raises(ValueError, match="3 samples wait together, and max_waiting=2 requests may"):
        add(engine, SHORT[0], settled(n=3))
    with pytest.raises(ValueError, match="max_waiting=0 must be at least 1"):
        make_engine(HISTORY, max_waiting=0)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_waiting": True}, "max_waiting=True must be at least 1, and whole"),
        ({"max_waiting": float("inf")}, "max_waiting=inf must be"),
        ({"max_swap_bytes": float("nan")}, "max_swap_bytes=nan must be a whole number of bytes"),
        ({"max_swap_bytes": -1}, "max_swap_bytes=-1 must be"),
        ({"max_pinned_share": "x"}, "max_pinned_share='x' must be from 0 to 1"),
        ({"max_pinned_share": float("nan")}, "max_pinned_share=nan must be from 0 to 1"),
        ({"prefill_chunk": 16.0}, "prefill_chunk=16.0 must be a power of two"),
        ({"max_prefill_tokens": None}, "max_prefill_tokens=None must be a power of two"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings, told):
    with pytest.raises(ValueError, match=told):
        make_engine(HISTORY, **settings)


def test_queue_that_is_full_refuses_and_changes_nothing():
    engine = make_engine(HISTORY, num_slots=1, max_waiting=3)
    requests = [add(engine, prompt, settled()) for prompt in SHORT[:2]]
    with pytest.raises(
        QueueFull, match=r"2 requests wait and 3 may.* room for 2 more.*max_waiting"
    ):
        add(engine, SHORT[2], settled(n=2))
    assert set(engine._batching.live) == {request.id for request in requests}
    requests.append(add(engine, SHORT[2], settled()))
    late = Request(prompt=SHORT[3], params=settled())
    with pytest.raises(QueueFull):
        engine.add(late)
    engine.step(1)
    engine.add(late)  # there is room now
    requests.append(late)
    run(engine)
    assert [r.output for r in requests] == [output_alone(r.prompt, 8) for r in requests]
    assert is_forgotten(engine)


def test_deadline_ends_requests_that_wait_or_run_and_no_others():
    now = [0.0]
    engine = make_engine(HISTORY, num_slots=2, clock=lambda: now[0])
    params = settled(max_tokens=20)
    runs = add(engine, SHORT[0], params, timeout_seconds=10)
    free = add(engine, SHORT[1], params)
    waits = add(engine, SHORT[2], settled(n=2, max_tokens=20), timeout_seconds=5)
    now[0] = 4.9
    engine.step(3)
    assert len(runs.output) == 3 and not waits.finish_reason
    now[0] = 10
    changed = engine.step(3)
    check_engine(engine)
    assert {runs, *waits.samples} <= set(changed)
    assert runs.finish_reason == waits.finish_reason == "error"
    assert isinstance(runs.error, DeadlineExceeded) and "it has 3 new tokens" in str(runs.error)
    assert "not done 10 seconds after it was added, and timeout_seconds=5" in str(waits.error)
    run(engine)
    assert free.output == output_alone(SHORT[1], 20)
    assert engine.stats.num_expired == 3 and is_forgotten(engine)
    for strange in (0, "soon"):
        with pytest.raises(ValueError, match=f"timeout_seconds={strange!r} must be above 0"):
            add(engine, SHORT[0], params, timeout_seconds=strange)


def test_running_requests_go_on_while_a_long_prompt_is_stored():
    engine = make_engine(HISTORY, prefill_chunk=16)
    short = add(engine, SHORT[0], settled(max_tokens=40))
    engine.step(2)
    long = add(engine, LONG, settled(max_tokens=5))
    stored = engine.stats.prefill_tokens
    for number in (1, 2, 3):
        engine.step()
        check_engine(engine)
        assert len(short.output) == 2 + number  # one token after each chunk
        assert engine.stats.prefill_tokens - stored == 16 * number
    engine.step()  # the last token of 49, and a whole burst
    assert len(long.output) == 5
    run(engine)
    assert [short.output, long.output] == [output_alone(SHORT[0], 40), output_alone(LONG, 5)]


def test_nothing_is_cut_into_chunks_while_nobody_waits_for_tokens():
    engine = make_engine(HISTORY, prefill_chunk=16)
    requests = [add(engine, prompt, settled(max_tokens=4)) for prompt in (LONG, LONG[::-1])]
    engine.step()
    assert [len(request.output) for request in requests] == [4, 4]


@pytest.mark.parametrize("leaves", ["abort", "deadline", "preemption"])
def test_samples_survive_the_one_that_stores_their_prompt(leaves):
    now = [0.0]
    engine = make_engine(HISTORY, prefill_chunk=16, clock=lambda: now[0])
    busy = add(engine, SHORT[0], settled(max_tokens=40))
    engine.step(2)
    request = add(engine, LONG, settled(n=3, max_tokens=6))
    first, *others = request.samples
    engine.step()
    check_engine(engine)
    assert first.num_stored == 16 and all(its.waits_for is first for its in others)
    if leaves == "abort":
        engine.abort(first.id)
    elif leaves == "deadline":
        first.timeout_seconds, now[0] = 1.0, 2.0
    else:
        scheduler = engine._scheduler
        for sample in reversed(others):  # the last in turn go first
            assert scheduler.running[scheduler.next_victim()] is sample
            engine._batching.settle(scheduler.preempt())
        engine._batching.settle(scheduler.preempt())
    check_engine(engine)
    run(engine)
    whole = output_alone(LONG, 6)
    assert [its.output for its in others] == [whole] * 2
    assert first.output == (whole if leaves == "preemption" else [])
    assert busy.output == output_alone(SHORT[0], 40)
    assert is_forgotten(engine)


def test_abort_takes_all_samples_out_and_unknown_ids_do_no_harm():
    engine = make_engine(HISTORY, num_slots=2, num_pages=24)
    both = add(engine, SHORT[0], settled(n=2, max_tokens=50, ignore_eos=True))
    waiting = add(engine, SHORT[1], settled(max_tokens=4))
    engine.step(3)
    assert [len(sample.output) for sample in both.samples] == [3, 3]
    engine.abort(both.id)
    check_engine(engine)
    assert both.finish_reason == "abort" and not engine._scheduler.running
    assert set(engine._batching.live) == {waiting.id} and pages_held(engine) == 0
    engine.abort(waiting.id)
    assert waiting not in engine._scheduler.waiting
    sent_back = add(engine, SHORT[2], settled(max_tokens=50))
    rest = add(engine, SHORT[3], settled(max_tokens=50))
    while not engine.stats.num_preemptions:
        engine.step(4)
    assert rest in engine._scheduler.waiting
    for request_id in (both.id, 1234, waiting.id, rest.id, rest.id, -1):
        engine.abort(request_id)
        check_engine(engine)
    assert rest not in engine._scheduler.waiting and rest.finish_reason == "abort"
    run(engine)
    assert sent_back.output == output_alone(SHORT[2], 50) and waiting.output == []
    assert rest.output == output_alone(SHORT[3], 50)[: len(rest.output)]
    assert is_forgotten(engine)


def test_step_decodes_at_least_once():
    engine = make_engine(HISTORY)
    for max_steps in (0, -1):
        with pytest.raises(ValueError, match=f"max_steps={max_steps} must be at least 1"):
            engine.step(max_steps)
        with pytest.raises(ValueError, match=f"max_steps={max_steps} must be at least 1"):
            AsyncEngine(engine, max_steps=max_steps)


def test_request_is_added_once():
    engine = make_engine(HISTORY)
    request = add(engine, SHORT[0], settled())
    with pytest.raises(ValueError, match="was added before, as 0: make a new one"):
        engine.add(request)
    with pytest.raises(ValueError, match="as 7: make a new one, without an id"):
        engine.add(Request(prompt=SHORT[0], params=settled(), id=7))
    run(engine)
    assert request.output == output_alone(SHORT[0], 8)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stop_token_ids": (2**40,)}, "must be a tuple of ids, 0 to"),
        ({"stop_token_ids": ("x",)}, "must be a tuple of ids"),
        ({"stop_token_ids": (True,)}, "must be a tuple of ids"),
        ({"stop_token_ids": (-1,)}, "must be a tuple of ids"),
        ({"stop_token_ids": None}, "must be a tuple of ids"),
        ({"prefix_key": ["a"]}, "unhashable"),
        ({"output": [1, 2]}, "has 2 new tokens and finish_reason=None already: make a new one"),
        ({"finish_reason": "stop"}, "finish_reason='stop' already"),
    ],
)
def test_fields_that_would_fail_in_a_step_are_refused_and_others_go_on(fields, told):
    engine = make_engine(HISTORY)
    good = add(engine, SHORT[0], settled())
    with pytest.raises(ValueError, match=told):
        engine.add(Request(prompt=SHORT[1], params=settled(), **fields))
    again = add(engine, SHORT[1], settled())
    run(engine)
    assert good.output == output_alone(SHORT[0], 8)
    assert again.output == output_alone(SHORT[1], 8)


def test_stream_gives_tokens_as_they_come_and_serves_the_others():
    engine = make_engine(HISTORY)
    other = add(engine, SHORT[1], settled(max_tokens=5))
    request = Request(prompt=SHORT[0], params=settled(max_tokens=9))
    pieces = list(engine.stream(engine.add(request)))
    assert max(map(len, pieces)) <= 2
    assert [*itertools.chain(*pieces)] == output_alone(SHORT[0], 9)
    assert other.output == output_alone(SHORT[1], 5)
    with pytest.raises(ValueError, match="no request 1 waits or runs"):
        engine.stream(1)
    left = Request(prompt=SHORT[0], params=settled(max_tokens=9))
    for _ in engine.stream(engine.add(left)):
        break
    assert left.finish_reason == "abort" and is_forgotten(engine)
    several = add(engine, SHORT[0], settled(n=2))
    with pytest.raises(ValueError, match="has 2 samples, and a stream gives one"):
        engine.stream(several.id)


@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_requests_answer_as_if_alone_however_their_tokens_are_kept(
    preemption, prefix_caching
):
    engine = make_engine(
        HISTORY, num_pages=15, preemption=preemption, prefix_caching=prefix_caching,
        max_swap_bytes=2**20,
    )  # fmt: skip
    prompts = random_prompts([5, 9, 3, 12, 7], seed=2)
    for params in (settled(max_tokens=30), settled(max_tokens=30, temperature=1.0, seed=5)):
        for request in serve(engine, prompts, params):
            expected = serve(make_engine(HISTORY, num_slots=1), [request.prompt], params)
            assert request.output == expected[0].output
    stats = engine.stats
    assert stats.num_preemptions > 0
    assert (stats.swapped_tokens > 0) >= (preemption == "swap")
    assert (stats.recomputed_tokens > 0) >= (preemption == "recompute")
    if preemption == "swap":
        assert stats.recomputed_tokens == 0
    assert is_forgotten(engine)


def test_copies_on_the_host_stay_within_their_memory():
    engine = make_engine(HISTORY, num_pages=15, preemption="swap", max_swap_bytes=0)
    serve(engine, random_prompts([5, 9, 3, 12], seed=2), settled(max_tokens=30))
    assert engine.stats.num_preemptions > 0 and engine.stats.swapped_tokens == 0
    with pytest.raises(ValueError, match='preemption=\'drop\' must be "recompute", "swap"'):
        make_engine(HISTORY, preemption="drop")


def test_metrics_tell_how_the_engine_stands():
    now = [0.0]
    engine = make_engine(HISTORY, num_slots=2, max_burst=5, clock=lambda: now[0])
    idle = engine.metrics()
    assert (idle.num_waiting, idle.num_running, idle.free_pages) == (0, 0, 64)
    assert np.isnan(idle.first_token_seconds.p50)
    assert json.loads(json.dumps(idle.asdict(), allow_nan=False))["token_gap_seconds_p99"] is None
    requests = [add(engine, prompt, settled(max_tokens=9)) for prompt in SHORT[:3]]
    now[0] = 2.0
    engine.step(1)
    now[0] = 3.0
    engine.step(4)
    metrics = engine.metrics()
    assert (metrics.num_waiting, metrics.num_running) == (1, 2)
    stored = [len(r.prompt) + 4 for r in requests[:2]]  # 5 new ones, the newest not stored yet
    held = sum(-(-tokens // 4) for tokens in stored)
    assert metrics.held_pages == held and metrics.free_pages + metrics.reusable_pages == 64 - held
    assert metrics.token_share == sum(stored) / (4 * held)
    assert metrics.first_token_seconds.p50 == 2.0 and metrics.token_gap_seconds.p99 == 0.25
    assert metrics.stats.prompt_tokens == sum(len(prompt) for prompt in SHORT[:3])
    assert metrics.stats.decode_tokens == 10
    run(engine)
    assert metrics.stats.decode_tokens == 10  # a picture of that moment
    assert json.loads(json.dumps(engine.metrics().asdict()))["decode_tokens"] == 27
    ready = engine.stats.num_compilations
    serve(engine, SHORT[:3], settled(max_tokens=9))
    assert ready > 0 and engine.stats.num_compilations == ready


def test_copies_on_write_are_counted():
    engine = make_engine(HISTORY)
    add(engine, SHORT[1], settled(n=3))  # six of its seven tokens: a page of 4, and one half full
    run(engine)
    assert engine.stats.copies_on_write == 2  # and one sample keeps it
    add(engine, LONG[:33], settled(n=3))  # 32 tokens in full pages
    run(engine)
    assert engine.stats.copies_on_write == 2


# asyncio


def test_requests_of_an_event_loop_are_served_side_by_side():
    engine = make_engine(HISTORY)
    server = AsyncEngine(engine, max_steps=2)

    async def read(prompt: list[int]) -> list[int]:
        request = Request(prompt=prompt, params=settled(max_tokens=12))
        return [token async for tokens in server.stream(request) for token in tokens]

    async def main():
        several = Request(prompt=SHORT[5], params=settled(n=2, max_tokens=12))
        return await asyncio.gather(*map(read, SHORT[:5])), await server.serve(several)

    outputs, several = asyncio.run(main())
    assert outputs == [output_alone(prompt, 12) for prompt in SHORT[:5]]
    assert [its.output for its in several.samples] == [output_alone(SHORT[5], 12)] * 2
    assert is_forgotten(engine)


def test_request_of_an_event_loop_ends_when_its_reader_leaves():
    engine = make_engine(HISTORY, max_waiting=1)
    server = AsyncEngine(engine, max_steps=1)

    async def main():
        left = Request(prompt=SHORT[0], params=settled(max_tokens=50))
        stream = server.stream(left)
        async for _ in stream:
            break
        await stream.aclose()
        cancelled = Request(prompt=SHORT[1], params=settled(max_tokens=50))
        task = asyncio.create_task(server.serve(cancelled))
        while not cancelled.output:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        aborted = Request(prompt=SHORT[2], params=settled(max_tokens=50))
        task = asyncio.create_task(server.serve(aborted))
        while not aborted.output:
            await asyncio.sleep(0.01)
        await server.abort(aborted.id)
        assert (await task) is aborted
        waiting = engine.add(Request(prompt=SHORT[2], params=settled(max_tokens=50)))
        with pytest.raises(QueueFull):
            await server.serve(Request(prompt=SHORT[3], params=settled()))
        engine.abort(waiting)
        with pytest.raises(ValueError, match="a stream gives one sample, and 2 are asked for"):
            await anext(server.stream(Request(prompt=SHORT[3], params=settled(n=2))))
        return left, cancelled, aborted

    for request in asyncio.run(main()):
        assert request.finish_reason == "abort"
    assert is_forgotten(engine)


def test_request_whose_client_leaves_before_it_is_queued_is_not_served():
    engine = make_engine(HISTORY)
    server = AsyncEngine(engine)
    request = Request(prompt=SHORT[0], params=settled(max_tokens=50))

    async def main():
        with engine.turns.lock:  # as during a step
            task = asyncio.create_task(server.serve(request))
            await asyncio.sleep(0.1)  # a thread waits to add it
            task.cancel()
            await asyncio.sleep(0.1)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert is_forgotten(engine)


def test_request_that_is_served_twice_is_refused_and_goes_on():
    engine = make_engine(HISTORY)
    server = AsyncEngine(engine, max_steps=1)
    request = Request(prompt=SHORT[0], params=settled(max_tokens=20))

    async def main():
        task = asyncio.create_task(server.serve(request))
        while not request.output:
            await asyncio.sleep(0.01)
        with pytest.raises(ValueError, match="was added before"):
            await server.serve(request)
        await task

    asyncio.run(main())
    assert request.output == output_alone(SHORT[0], 20)


def test_what_a_step_raises_reaches_who_waits_for_it(monkeypatch):
    engine = make_engine(HISTORY)
    server = AsyncEngine(engine)

    def broken(*_):
        raise RuntimeError("broken")

    async def main():
        monkeypatch.setattr(engine, "step", broken)
        await server.serve(Request(prompt=SHORT[0], params=settled()))

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(main())
    assert is_forgotten(engine)


def test_decode_works_on_as_many_rows_as_few_programs_allow():
    assert [decode_rows(n, 8) for n in (0, 1, 8)] == [8, 8, 8]
    assert [decode_rows(n, 40) for n in (0, 1, 2, 3, 8, 9, 17, 33)] == [1, 1, 2, 4, 8, 16, 24, 40]
    assert {decode_rows(n, 64) for n in range(65)} == {1, 2, 4, 8, 16, 24, 32, 48, 64}
    assert all(decode_rows(n, 100) >= n for n in range(101))


def test_answers_are_those_of_requests_alone_however_few_of_many_slots_decode():
    engine = make_engine(HISTORY, num_slots=20, num_pages=200)
    prompts = random_prompts([5, 9, 3, 12] * 5, seed=4)
    lengths = [1, 2, 3, 5, 8, 13, 21, 34, 40, 44] * 2
    requests = [
        add(engine, prompt, settled(max_tokens=length))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    run(engine)
    for request, length in zip(requests, lengths, strict=True):
        assert request.output == output_alone(request.prompt, length)


def test_nothing_is_compiled_after_compile():
    engine = make_engine(HISTORY, num_slots=10, max_burst=6)
    engine.compile()
    assert is_forgotten(engine) and engine.stats.num_compilations == 0
    serve(engine, random_prompts([5, 30, 3, 12] * 4, seed=4), settled(max_tokens=9))
    add(engine, SHORT[0], settled(n=3))
    run(engine)
    assert engine.stats.num_compilations == 0


def test_nothing_is_compiled_after_compile_when_requests_are_sent_back():
    engine = make_engine(HISTORY, num_slots=3, num_pages=12, max_length=40, preemption="swap")
    engine.compile()
    assert is_forgotten(engine)
    requests = [add(engine, prompt, settled(max_tokens=24)) for prompt in random_prompts([7] * 5)]
    run(engine)
    assert engine.stats.swapped_tokens and engine.stats.num_compilations == 0
    for request in requests:
        assert request.output == output_alone(request.prompt, 24)
