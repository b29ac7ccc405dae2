"""Five thousand requests of all kinds through one engine that is always short of pages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from helpers import VOCAB, HistoryDecoder, check_engine, make_engine, random_prompts, settled
from paxkv.config import pages_of
from paxkv.engine import Engine
from paxkv.request_state import Request
from paxkv.samples import sample_params
from paxkv.sampling import greedy_sampling, request_key, sample

NUM_REQUESTS, NUM_WARMING = 5_000, 2_000
NUM_SLOTS, PAGE_SIZE, MAX_NEW = 16, 4, 32
STOP = (0,)  # of 64 tokens
# Prefill has 16, 32 or 64 rows, decode 1, 8 or 16; admit, fork and settle are one each; out to the
# host and back go 1, 2, 4, 8 or 16 pages.
MOST_PROGRAMS = 3 + 3 + 3 + 2 * 5
TABLE = 3 * np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype("f4")
PREFIXES = [[], *random_prompts([3, 8, 8, 13, 20])]


def random_request(rng: np.random.Generator, number: int) -> Request:
    prefix = PREFIXES[rng.integers(len(PREFIXES))]
    suffix = rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()
    params = settled(
        max_tokens=int(rng.integers(1, MAX_NEW + 1)),
        temperature=float(rng.choice([0.0, 1.0])),
        top_k=int(rng.choice([0, 5])),
        seed=number,
        n=int(rng.choice([1, 1, 2, 3, 4])),
        stop_token_ids=STOP,
    )
    return Request(prompt=[*prefix, *suffix], params=params, priority=int(rng.integers(0, 3)))


def answers_alone(requests: list[Request]) -> list[list[list[int]]]:
    """What each sample of each request is answered, without a cache, a batch or an engine."""
    asked = [(r.prompt, params) for r in requests for params in sample_params(r.params)]
    checks = [sum((t + 1) * (1 + i % 7) for i, t in enumerate(prompt)) for prompt, _ in asked]
    sampling = dataclasses.replace(
        greedy_sampling(len(asked)),
        temperature=np.array([params.temperature for _, params in asked], np.float32),
        top_k=np.array([params.top_k for _, params in asked], np.int32),
        key=np.stack([request_key(params.seed, 0) for _, params in asked]),
    )
    lengths = np.array([len(prompt) for prompt, _ in asked], np.int32)
    drawn = np.asarray(draw_alone(np.array(checks, np.int32), lengths, sampling))
    outputs = iter(
        until_stop(tokens[: params.max_tokens])
        for (_, params), tokens in zip(asked, drawn.T.tolist(), strict=True)
    )
    return [[next(outputs) for _ in range(r.params.num_samples)] for r in requests]


@jax.jit
def draw_alone(checks, lengths, sampling):
    """What `HistoryDecoder` goes on with, `i32[MAX_NEW, R]`."""

    def step(checks, index):
        logits = jnp.asarray(TABLE)[checks % VOCAB]
        tokens, _ = sample(logits, sampling, jnp.full_like(lengths, index))
        return checks + (tokens + 1) * (1 + (lengths + index) % 7), tokens

    return jax.lax.scan(step, checks, jnp.arange(MAX_NEW, dtype=jnp.int32))[1]


def until_stop(tokens: list[int]) -> list[int]:
    ends = [i + 1 for i, token in enumerate(tokens) if token in STOP]
    return tokens[: ends[0]] if ends else tokens


def soak(engine: Engine, requests: list[Request], rng: np.random.Generator) -> None:
    """Serves requests that come and are aborted at random moments."""
    to_come, num_steps = requests[::-1], 0
    while to_come or engine.has_work:
        for _ in range(rng.integers(0, 13)):
            if to_come and len(engine._scheduler.waiting) < 3 * NUM_SLOTS:
                engine.add(to_come.pop())
        if engine._batching.live and rng.random() < 0.1:
            engine.abort(int(rng.choice(list(engine._batching.live))))
        engine._batching._costs.preemption = ("recompute", "swap")[rng.integers(2)]
        engine.step(int(rng.integers(1, 17)))
        num_steps += 1
        if num_steps % 20 == 0:
            check_engine(engine)


def test_every_answer_is_that_of_the_request_alone_and_everything_comes_back():
    rng = np.random.default_rng(1)
    requests = [random_request(rng, number) for number in range(NUM_REQUESTS)]
    wanted = [pages_of(r.num_tokens + (r.params.max_tokens or 0) - 1, PAGE_SIZE) for r in requests]
    engine = make_engine(
        HistoryDecoder(TABLE),
        num_slots=NUM_SLOTS,
        num_pages=int(NUM_SLOTS * np.mean(wanted)) // 3 + 1,
        max_prefill_tokens=64,
    )
    soak(engine, requests[:NUM_WARMING], rng)
    num_compilations = engine.stats.num_compilations
    soak(engine, requests[NUM_WARMING:], rng)
    check_answers(requests)
    stats, scheduler = engine.stats, engine._scheduler
    assert stats.num_compilations == num_compilations <= MOST_PROGRAMS
    # It was not easy.
    assert stats.num_preemptions > NUM_REQUESTS / 10
    assert min(stats.recomputed_tokens, stats.swapped_tokens) > NUM_REQUESTS
    assert min(stats.prefix_tokens_hit, stats.prefill_tokens) > stats.prompt_tokens / 2
    assert stats.copies_on_write > NUM_REQUESTS / 2
    assert stats.peak_pages == engine.num_pages

    assert not (engine._batching.live or scheduler.running or scheduler.waiting)
    engine.clear_prefixes()
    check_engine(engine)
    [(_, table)] = engine._runner.cache
    assert np.count_nonzero(table.ref_counts) == 1  # the null page's


def check_answers(requests: list[Request]) -> None:
    num_aborted = 0
    for request, answers in zip(requests, answers_alone(requests), strict=True):
        for part, answer in zip(request.parts, answers, strict=True):
            if part.finish_reason == "abort":
                num_aborted += 1
                assert part.output == answer[: len(part.output)]
            else:
                assert part.output == answer
                assert part.finish_reason == ("stop" if answer[-1] in STOP else "length")
    assert NUM_REQUESTS / 20 < num_aborted < NUM_REQUESTS / 4
