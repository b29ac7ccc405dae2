"""Beam search said slowly, one candidate at a time, and searches to compare with it."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from helpers import VOCAB
from paxkv.beam_steps import beam_search
from paxkv.beams import Hypotheses
from paxkv.cache import PagedCache, init_cache
from paxkv.decoder import Decoder
from paxkv.integrity import check_integrity
from test_decode_loop import occupy

LONGEST, MAX_TOKENS = 12, 16  # of prompt and output: one shape for all tests
PAGE_SIZE, NUM_PAGES = 4, 200


class Answer(NamedTuple):
    score: float
    tokens: list[int]


class Expected(NamedTuple):
    answers: list[Answer]
    gap: float  # by how little the closest decision was made


def beam_oracle(
    next_logits: Callable[[list[int]], np.ndarray],
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int = MAX_TOKENS,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    eos_ids: Sequence[int] = (),
) -> Expected:
    """What transformers' beam search keeps, in Python's own numbers."""
    beams, answers, gap = [Answer(0.0, [])], [], math.inf
    for length in range(1, max_tokens + 1):
        candidates = sorted(
            (
                Answer(beam.score + logprob, [*beam.tokens, token])
                for beam in beams
                for token, logprob in enumerate(log_softmax(next_logits([*prompt, *beam.tokens])))
            ),
            key=lambda candidate: -candidate.score,
        )[: max(2, 1 + len(eos_ids)) * width + 1]
        gap = min(gap, closest(candidates))
        going = []
        for rank, (score, tokens) in enumerate(candidates[:-1]):
            if tokens[-1] not in eos_ids and length < max_tokens:
                going.append(Answer(score, tokens))
            elif rank < width:
                answers.append(Answer(score / length**length_penalty, tokens))
        beams = going[:width]
        answers = sorted(answers, key=lambda answer: -answer.score)
        gap = min(gap, closest(answers[: width + 1]))
        answers = answers[:width]
        if len(answers) == width and beams:
            hoped_for = length
            if early_stopping == "never" and length_penalty > 0:
                hoped_for = max_tokens
            best = beams[0].score / hoped_for**length_penalty
            gap = min(gap, abs(best - answers[-1].score))
            if early_stopping is True or best <= answers[-1].score:
                break
    return Expected(answers, gap)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.logaddexp.reduce(logits)


def closest(answers: Sequence[Answer]) -> float:
    scores = [answer.score for answer in answers]
    return min((a - b for a, b in itertools.pairwise(scores)), default=math.inf)


def history_logits(table: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """What a `HistoryDecoder` of this table says after these tokens."""
    total = sum((token + 1) * (1 + place % 7) for place, token in enumerate(tokens))
    return table[total % len(table)]


def history_table(seed: int, eos_ids: Sequence[int] = (), favour: float = 0.0) -> np.ndarray:
    """Random logits; above 0, tokens that end a text are favoured so much."""
    table = 1.5 * np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)).astype(np.float32)
    table[:, list(eos_ids)] += np.float32(favour)
    return table


def make_beam_cache(decoder: Decoder, num_slots: int, num_pages: int) -> PagedCache:
    """Unused memory holds NaN."""
    cache = init_cache(
        decoder.layer_groups, num_slots=num_slots, max_length=LONGEST + MAX_TOKENS,
        num_pages=num_pages, page_size=PAGE_SIZE, dtype=jnp.float32,
    )  # fmt: skip
    return tuple((jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), p), t) for p, t in cache)


def padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts `i32[G, LONGEST]` and their lengths `i32[G]`."""
    rows = np.full((len(prompts), LONGEST), VOCAB - 1, np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    return rows, np.array([len(prompt) for prompt in prompts], np.int32)


search_jit = jax.jit(
    functools.partial(beam_search, max_tokens=MAX_TOKENS),
    static_argnames=("width", "early_stopping", "eos_ids"),
    donate_argnames="cache",
)


def search(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    width: int = 4,
    early_stopping: bool | str = False,
    eos_ids: tuple[int, ...] = (),
    length_penalty: float = 1.0,
    num_free: int = NUM_PAGES - 1,
) -> tuple[PagedCache, Hypotheses, jax.Array]:
    """A search on a cache that has one slot more than it needs, and so many free pages."""
    cache = make_beam_cache(decoder, len(prompts) * width + 1, NUM_PAGES)
    return search_jit(
        decoder, occupy(cache, num_free), *padded(prompts), width=width,
        early_stopping=early_stopping, eos_ids=eos_ids, length_penalty=np.float32(length_penalty),
    )  # fmt: skip


def is_empty(cache: PagedCache, num_free: int = NUM_PAGES - 1) -> bool:
    """Whether no slot holds a page, and the tables are whole."""
    for _, table in cache:
        held = np.arange(len(table.ref_counts)) > num_free
        check_integrity(table, held.astype(np.int32))
    return all(not np.any(table.num_pages) for _, table in cache)


def answers_of(found: Hypotheses, prompt: int) -> list[Answer]:
    """The answers to one prompt; places of fewer hypotheses than beams are empty."""
    tokens, lengths, scores = (np.asarray(x[prompt]) for x in found[:3])
    count = int(np.sum(lengths > 0))
    assert np.all(lengths[count:] == 0) and np.all(scores[count:] == -np.inf)
    assert all(not row[length:].any() for row, length in zip(tokens, lengths, strict=True))
    return [
        Answer(float(score), row[:length].tolist())
        for score, row, length in zip(scores[:count], tokens, lengths, strict=False)
    ]


def assert_answers(found: Sequence[Answer], expected: Expected) -> None:
    """The same answers in the same order, unless a decision was too close for float32."""
    assert len(found) == len(expected.answers)
    np.testing.assert_allclose(
        [answer.score for answer in found],
        [answer.score for answer in expected.answers],
        rtol=1e-5,
        atol=1e-4 if expected.gap > 1e-5 else 1e-1,
    )
    if expected.gap > 1e-5:
        assert [answer.tokens for answer in found] == [a.tokens for a in expected.answers]
    else:
        print(f"a decision was {expected.gap} close: {expected.answers}")
