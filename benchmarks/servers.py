"""Engines under one face, so that a benchmark serves the same requests with each of them."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

import paxkv.runner
from benchmarks import contiguous_engine
from benchmarks.contiguous_engine import ContiguousEngine
from benchmarks.device_time import count_compilations, watch_programs
from benchmarks.serving_load import Asked, Held, MemoryUse
from paxkv.config import pages_of
from paxkv.decoder import Decoder
from paxkv.engine import Engine
from paxkv.request import SamplingParams
from paxkv.request_state import Request

_EXTRA = {"preemptions": "num_preemptions", "recomputed_tokens": "recomputed_tokens",
          "swapped_tokens": "swapped_tokens"}  # fmt: skip


class Answer(Protocol):
    """A request that an engine works on."""

    output: list[int]


class Steps(Protocol):
    """What engines have in common."""

    @property
    def has_work(self) -> bool: ...

    def step(self, max_steps: int | None = None) -> Sequence[Answer]: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """An engine that is warm, and what is to be known of it."""

    engine: Steps
    add: Callable[[Asked], Answer]
    module: ModuleType  # that calls the compiled programs
    capacity: int  # tokens that its cache has slots for
    room_of: Callable[[int], int]  # slots that a request with so many tokens takes
    counts: Callable[[], dict[str, int]]  # what the engine counts, since it was made


def paxkv_server(
    decoder: Decoder,
    *,
    num_slots: int,
    num_pages: int,
    page_size: int,
    max_length: int,
    dtype: str,
    max_burst: int,
) -> Server:
    """Paxkv with so many pages that can be handed out."""
    engine = Engine(
        decoder,
        num_slots=num_slots,
        max_length=max_length,
        num_pages=num_pages + 1,  # the null page
        page_size=page_size,
        dtype=dtype,
        max_burst=max_burst,
    )

    engine.compile()
    return Server(
        engine=engine,
        add=lambda asked: queue(engine, asked.prompt, asked.new_tokens),
        module=paxkv.runner,
        capacity=num_pages * page_size,
        room_of=lambda tokens: pages_of(tokens, page_size) * page_size,
        counts=lambda: dataclasses.asdict(engine.stats),
    )


def contiguous_server(
    decoder: Decoder,
    requests: Sequence[Asked],
    *,
    num_slots: int,
    max_length: int,
    dtype: str,
    max_burst: int,
    is_static: bool,
) -> Server:
    """A cache of one row of maximum length per slot."""
    engine = ContiguousEngine(
        decoder,
        num_slots=num_slots,
        max_length=max_length,
        dtype=dtype,
        max_burst=max_burst,
        is_static=is_static,
    )
    engine.warm_up(len(asked.prompt) for asked in requests)
    return Server(
        engine=engine,
        add=lambda asked: engine.add(*asked),
        module=contiguous_engine,
        capacity=num_slots * max_length,
        room_of=lambda _: max_length,
        counts=dict,
    )


def queue(engine: Engine, prompt: list[int], num_tokens: int) -> Request:
    """Asks for exactly so many tokens, the likeliest each time."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    request = Request(prompt=prompt, params=params.with_defaults())
    engine.add(request)
    return request


def run(engine: Steps) -> None:
    """Serves all that waits."""
    while engine.has_work:
        engine.step()


def serve(server: Server, requests: Sequence[Asked]) -> dict[str, Any]:
    """Serves requests that all come at once: seconds, and what the memory was used for.

    The host's share is that of `step` outside of waiting for compiled programs (`DeviceWatch`).
    """
    before = server.counts()
    bursts = []
    with watch_programs(server.module) as watch, count_compilations() as compiled:
        begin = time.perf_counter()
        answers = [server.add(asked) for asked in requests]
        added = time.perf_counter()
        num_before = [0] * len(answers)
        while server.engine.has_work:
            server.engine.step()
            num_after = [len(answer.output) for answer in answers]
            bursts.append((num_before, num_after))
            num_before = num_after
        end = time.perf_counter()
    assert [len(answer.output) for answer in answers] == [asked.new_tokens for asked in requests]
    memory = MemoryUse(server.capacity, server.room_of)
    for burst in bursts:
        _note_burst(memory, requests, *burst)
    counts = {name: now - before[name] for name, now in server.counts().items()}
    return {
        "seconds": end - begin,
        "host_share": 1 - watch.waited_seconds / (end - added),
        "compilations": len(compiled),
        **memory.summary(),
        **_extra_work(counts),
    }


def _note_burst(
    memory: MemoryUse, requests: Sequence[Asked], before: list[int], after: list[int]
) -> None:
    """Accounts for a burst, from how many new tokens each request had before and after it."""
    burst = [
        Held(
            num_stored=len(asked.prompt) - 1 + num_before,
            most_stored=asked.most_stored,
            num_steps=num_after - num_before,
        )
        for asked, num_before, num_after in zip(requests, before, after, strict=True)
        if num_after > num_before
    ]
    is_waiting = any(
        num_before == num_after < asked.new_tokens
        for asked, num_before, num_after in zip(requests, before, after, strict=True)
    )
    memory.note(burst, is_waiting=is_waiting)


def _extra_work(counts: dict[str, int]) -> dict[str, int]:
    """What was computed more than once, where the engine counts it."""
    return {name: counts[kind] for name, kind in _EXTRA.items() if kind in counts}
