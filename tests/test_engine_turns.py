"""Threads, garbage collection and signals meet an engine in the middle of what it does."""

import asyncio
import gc
import signal
import threading
from string import ascii_lowercase

import pytest

from helpers import (
    add,
    check_engine,
    make_engine,
    pages_held,
    random_prompts,
    run,
    settled,
)
from helpers_history import HISTORY, output_alone
from helpers_llm import says, words_tokenizer
from paxkv import LLM, SamplingParams
from paxkv.async_engine import AsyncEngine
from paxkv.engine import Engine
from paxkv.output_text import OutputText
from paxkv.request_state import Request

PROMPTS = random_prompts([5, 9, 30, 3])


@pytest.mark.parametrize("where", ["decode", "fetch", "settle"])
def test_stream_that_is_collected_during_a_step_ends_after_it(monkeypatch, where):
    engine = make_engine(HISTORY)
    left, other = (add(engine, prompt, settled(max_tokens=20)) for prompt in PROMPTS[:2])
    stream = engine.stream(left.id)
    next(stream)
    in_a_cycle: list[object] = [stream]
    in_a_cycle.append(in_a_cycle)
    del stream, in_a_cycle
    method, reasons = getattr(engine._runner, where), []

    def collect_garbage(*args, **kwargs):
        result = method(*args, **kwargs)
        gc.collect()
        reasons.append(left.finish_reason)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, where, collect_garbage)
        engine.step(2)
    assert reasons[0] is None and left.finish_reason == "abort"
    check_engine(engine)
    run(engine)
    assert other.output == output_alone(PROMPTS[1], 20)
    assert pages_held(engine) == 0


def test_signal_handler_may_abort_during_a_step(monkeypatch):
    engine = make_engine(HISTORY)
    ended, other = (add(engine, prompt, settled(max_tokens=20)) for prompt in PROMPTS[:2])
    fetch = engine._runner.fetch

    def interrupted(*args):
        result = fetch(*args)
        signal.raise_signal(signal.SIGUSR1)
        return result

    before = signal.signal(signal.SIGUSR1, lambda *_: engine.abort(ended.id))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "fetch", interrupted)
            engine.step(2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended.finish_reason == "abort"
    check_engine(engine)
    run(engine)
    assert other.output == output_alone(PROMPTS[1], 20)


class _GrowsWhenRead(list):
    """The tokens of a request that another thread serves just after they have been read."""

    engine: Engine | None = None

    def __getitem__(self, index):
        found, engine = super().__getitem__(index), self.engine
        if engine and engine.has_work:
            self.engine = None  # what the step reads does not count
            engine.step()
            self.engine = engine
        return found


def test_stream_loses_no_token_that_another_thread_adds_in_between():
    engine = make_engine(HISTORY)
    output = _GrowsWhenRead()
    request = add(engine, PROMPTS[0], settled(max_tokens=8), output=output)
    output.engine = engine
    streamed = [token for tokens in engine.stream(request.id) for token in tokens]
    assert streamed == output_alone(PROMPTS[0], 8)


def test_async_stream_loses_no_token_that_another_thread_adds_in_between():
    engine = make_engine(HISTORY)
    output = _GrowsWhenRead()
    request = Request(prompt=PROMPTS[0], params=settled(max_tokens=8), output=output)
    output.engine = engine

    async def main():
        return [token async for tokens in AsyncEngine(engine).stream(request) for token in tokens]

    assert asyncio.run(main()) == output_alone(PROMPTS[0], 8)


def streamed(llm: LLM, params: SamplingParams) -> str:
    return "".join(piece.text for piece in llm.stream([65], params))


def completed(llm: LLM, params: SamplingParams) -> str:
    [(_, completion)] = llm.as_completed([[65]], params)
    return completion.text


@pytest.mark.parametrize("read", [streamed, completed])
def test_text_is_whole_though_another_thread_serves_just_after_it_was_read(monkeypatch, read):
    llm = says(list(ascii_lowercase.encode()), words_tokenizer(), max_burst=2)
    advance = OutputText.advance

    def step_if_it_is_nobodys_turn() -> None:
        if llm.engine.turns.lock.acquire(blocking=False):
            llm.engine.step(1)
            llm.engine.turns.lock.release()

    def and_then_the_other_thread(output: OutputText) -> str:
        read_now = advance(output)
        other = threading.Thread(target=step_if_it_is_nobodys_turn)
        other.start()
        other.join()
        return read_now

    monkeypatch.setattr(OutputText, "advance", and_then_the_other_thread)
    for max_tokens in range(1, 27):  # the last token may come by any step of either
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        assert read(llm, params) == ascii_lowercase[:max_tokens]


def test_who_awaits_a_request_hears_of_its_end_by_another_threads_step(monkeypatch):
    engine = make_engine(HISTORY)
    server = AsyncEngine(engine, max_steps=1)
    step = engine.step
    long, short = (
        Request(prompt=prompt, params=settled(max_tokens=max_tokens))
        for prompt, max_tokens in zip(PROMPTS[:2], [40, 4], strict=True)
    )
    # What changed was told to the other thread.
    monkeypatch.setattr(engine, "step", lambda max_steps: step(max_steps) and [])

    async def main():
        serving = asyncio.create_task(server.serve(long))
        await server.serve(short)
        num_made = len(long.output)
        await serving
        return num_made

    assert asyncio.run(main()) < 40
    assert long.output == output_alone(PROMPTS[0], 40)
    assert short.output == output_alone(PROMPTS[1], 4)
