"""Beam search on an engine's cache: which prompts are searched side by side, and what they take."""

import dataclasses
import math
import numbers
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from paxkv.beam_steps import beam_loop_jit, hypotheses_jit, release_all_jit, start_beams_jit
from paxkv.beams import Beams, EarlyStopping, Hypotheses
from paxkv.config import pages_of
from paxkv.engine import Engine
from paxkv.request_state import Request
from paxkv.scheduler import plan_prefill
from paxkv.slots import Requests
from paxkv.steps import prefill_step_jit
from paxkv.transfer import rows_of

_NO_TOKEN = "the search cannot go on: the logits hold NaN or infinity, or every token is forbidden"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """How to search; see `paxkv.LLM.beam_search`.

    Raises:
        TypeError: A value is of the wrong kind.
        ValueError: A value is out of range.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    num_return: int | None = None  # as many as there are beams

    def __post_init__(self) -> None:
        for name in ("width", "num_return"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name}={value!r} must be an integer")
        if self.width < 1:
            raise ValueError(f"width={self.width} must be 1 beam or more")
        if self.num_return is not None and not 1 <= self.num_return <= self.width:
            raise ValueError(
                f"num_return={self.num_return} must be from 1 to width={self.width}: a search "
                "keeps as many answers as it has beams"
            )
        if not isinstance(self.length_penalty, numbers.Real):
            raise TypeError(f"length_penalty={self.length_penalty!r} must be a number")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty={self.length_penalty} must be finite")
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ValueError(
                f'early_stopping={self.early_stopping!r} must be True, False or "never"'
            )


class Found(NamedTuple):
    """One answer."""

    token_ids: list[int]
    score: float
    is_stopped: bool  # by a stop token; otherwise it is as long as was allowed


def search_beams(
    engine: Engine, requests: Sequence[Request], params: BeamParams
) -> Iterator[list[Found] | str]:
    """Searches for each request's best answers; as many at a time as there is room for.

    Args:
        engine: No request may be running on it.
        requests: Not queued (see `Engine.prepare`); all end at the same stop tokens.
        params: How to search.

    Yields:
        For each request, in their order, the answers, best first, or why there are none.

    Raises:
        RuntimeError: Requests are running.
        ValueError: The engine has fewer slots than a prompt has beams.
    """
    if params.width > engine.num_slots:
        raise ValueError(
            f"width={params.width} beams need as many slots, and there are {engine.num_slots}: "
            "raise max_slots or search with fewer beams"
        )
    left = list(requests)
    while left:
        most = left[: engine.num_slots // params.width]
        pages = [pages_at_most(request, params.width, engine.page_size) for request in most]
        num_free = engine.free_pages(sum(pages))
        # One is tried in any case: beams share pages, so it may fit.
        count = max(1, int(np.searchsorted(np.cumsum(pages), num_free, side="right")))
        yield from _search(engine, left[:count], params, num_free)
        left = left[count:]


def pages_at_most(request: Request, width: int, page_size: int) -> int:
    """Pages that the beams of a request take if they part at once.

    Full pages of the prompt are shared; the last token of all is never stored.
    """
    shared = (len(request.prompt) - 1) // page_size
    own = pages_of(request.max_num_tokens - 1, page_size) - shared
    return shared + width * own


def _search(
    engine: Engine, requests: Sequence[Request], params: BeamParams, num_free: int
) -> Iterator[list[Found] | str]:
    try:
        fits = _store_prompts(engine, requests, params.width)
        beams = _start(engine, requests, params)
        while fits and np.any(np.asarray(beams.is_running)):
            beams, fits = _advance(engine, beams)
    finally:
        everything = np.ones(engine.num_slots, bool)
        engine.on_cache(lambda _, cache, __: release_all_jit(cache, everything))
    found, num_steps, has_failed = jax.device_get(
        (hypotheses_jit(beams), beams.num_steps, beams.has_failed)
    )
    for i, request in enumerate(requests):
        if found.is_complete[i]:
            yield _answers(found, i, request.stop_token_ids)[: params.num_return]
        elif has_failed[i]:
            yield _NO_TOKEN
        else:
            yield _too_small(request, params.width, num_free, engine.page_size, int(num_steps))


def _store_prompts(engine: Engine, requests: Sequence[Request], width: int) -> bool:
    """Stores each prompt but its last token in its first beam's slot; False if the pool is small.

    With the program that the engine stores prompts with, so that no other is compiled.
    """
    at = {i * width: request for i, request in enumerate(requests)}
    _, rows = rows_of(at, engine.num_slots, engine.max_length, engine_seed=0)
    left = {slot: len(request.prompt) - 1 for slot, request in at.items()}
    fits = True
    while fits and (plan := plan_prefill(left, engine.max_prefill_tokens)):
        fits = _prefill(engine, rows, *plan)
        left = {slot: tokens - plan[0].get(slot, 0) for slot, tokens in left.items()}
    return fits


def _prefill(engine: Engine, rows: Requests, planned: dict[int, int], num_rows: int) -> bool:
    q_lens = np.array([planned.get(slot, 0) for slot in range(engine.num_slots)], np.int32)
    fits, _ = engine.on_cache(
        lambda decoder, cache, slots: prefill_step_jit(
            decoder,
            cache,
            dataclasses.replace(slots, requests=rows),
            q_lens,
            num_rows=num_rows,
            num_prompt_logprobs=None,  # said, as the engine does: it is part of what is compiled
        )
    )
    return bool(fits)


def _start(engine: Engine, requests: Sequence[Request], params: BeamParams) -> Beams:
    last_tokens, max_tokens = np.zeros((2, engine.num_slots // params.width), np.int32)
    for i, request in enumerate(requests):
        last_tokens[i] = request.prompt[-1]
        max_tokens[i] = request.max_num_tokens - len(request.prompt)
    [beams] = engine.on_cache(
        lambda _, cache, __: start_beams_jit(
            cache, last_tokens, max_tokens, width=params.width, max_length=engine.max_length,
            length_penalty=np.float32(params.length_penalty),
            early_stopping=params.early_stopping, eos_ids=requests[0].stop_token_ids,
        )
    )  # fmt: skip
    return beams


def _advance(engine: Engine, beams: Beams) -> tuple[Beams, bool]:
    beams, fits = engine.on_cache(
        lambda decoder, cache, _: beam_loop_jit(decoder, cache, beams, np.int32(engine.max_burst))
    )
    return beams, bool(fits)


def _answers(found: Hypotheses, prompt: int, stop_token_ids: Sequence[int]) -> list[Found]:
    rows = zip(found.tokens[prompt], found.lengths[prompt], found.scores[prompt], strict=True)
    return [
        Found(tokens[:length].tolist(), float(score), int(tokens[length - 1]) in stop_token_ids)
        for tokens, length, score in rows
        if length
    ]


def _too_small(request: Request, width: int, num_free: int, page_size: int, num_steps: int) -> str:
    num_tokens = len(request.prompt)
    return (
        f"{width} beams of a prompt of {num_tokens} tokens took all {num_free} free pages of "
        f"{page_size} tokens after {num_steps} of {request.max_num_tokens - num_tokens} new "
        f"tokens; {pages_at_most(request, width, page_size)} are enough in any case. Search with "
        "fewer beams or new tokens, or give the KV cache more memory"
    )
