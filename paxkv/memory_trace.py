"""A log of what an engine's memory was used for, which `paxkv diagnose` reads.

JSON lines, written as things happen, so that the log of a running engine can be followed:

- the first one describes the pool: `paxkv_memory_trace` (the version of this format), `model`,
  `page_size`, `num_slots`, `max_length`, and `groups`, one per layer group: `layers`, `window`,
  `num_pages` that can be handed out, `bytes_per_token`, and how many of these are the layout's
  `padding_bytes`;
- one for each request that has ended: `id`, `arrival_seconds` since the log began,
  `arrival_step` (decode steps made before), `prompt_tokens`, `output_tokens`, `finish`, and
  `hash_ids`, one per full page of the prompt: equal ids mean that prompts are equal up to there;
- one for each burst of decode steps: `end_seconds`, `running` requests step by step, how many are
  `waiting`, `groups` with the tokens of each kind (see `paxkv.waste`) step by step, and so far
  `preemptions` and `recomputed_tokens`;
- at the end `closed`.

A log is replayed step by step, as the engine ran, with `paxkv diagnose LOG --columns
arrival=arrival_step --step-ms 1000`: a step is a second then. A step is measured as
`paxkv.memory_series` says, and with bursts of one step both agree token for token.

Ids are hashes under a key that is thrown away: a log does not tell what was asked.
"""

import itertools
import json
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from paxkv.cache import PagedCache
from paxkv.config import page_bytes
from paxkv.content_keys import content_keys
from paxkv.decoder import LayerGroup
from paxkv.memory_series import KINDS as _SERIES_KINDS
from paxkv.memory_series import MemorySeries
from paxkv.request_state import Request
from paxkv.waste import padding_bytes

FORMAT = "paxkv_memory_trace"
VERSION = 1
KINDS = ("used", "tail", "reusable", "free", "external")  # the null page is none of the pool's


class MemoryTrace:
    """Writes the log of one engine, and closes it when the engine is gone, if not before.

        with MemoryTrace("engine.jsonl") as trace:
            LLM(memory_trace=trace).generate(prompts)

    Args:
        path: A file that is begun anew.
        model: The model's name.

    Raises:
        ValueError: Something else stands in that file.
    """

    def __init__(self, path: str | Path, *, model: str = "") -> None:
        _refuse_to_overwrite(Path(path))
        self._file = Path(path).open("w", encoding="utf-8")
        self._model = model
        self._close = weakref.finalize(self, _close, self._file)
        self._key = os.urandom(16)
        self._begin = time.monotonic()
        self._num_steps = 0
        self._arrivals: dict[int, dict[str, float]] = {}
        self._page_size = 0

    def write_header(self, **about: Any) -> None:
        """Describes the pool, by the names that the module lists."""
        self._page_size = about["page_size"]
        _write(self._file, {FORMAT: VERSION, "model": self._model} | about)

    def note_arrival(self, request: Request) -> None:
        """Notes when a request was queued."""
        seconds = round(time.monotonic() - self._begin, 6)
        self._arrivals[request.id] = {"arrival_seconds": seconds, "arrival_step": self._num_steps}

    def write_steps(
        self, series: MemorySeries, num_steps: int, *, waiting: int, **so_far: int
    ) -> None:
        """Adds the steps of a burst, whose arrays have been fetched.

        Args:
            series: Of them.
            num_steps: How many were made.
            waiting: Requests that wait.
            **so_far: `preemptions` and `recomputed_tokens`.
        """
        if not num_steps:
            return
        self._num_steps += num_steps
        by_kind = np.moveaxis(np.asarray(series.tokens)[:num_steps], 0, -1)  # [G, kinds, steps]
        groups = [
            {kind: group[_SERIES_KINDS.index(kind)].tolist() for kind in KINDS} for group in by_kind
        ]
        _write(self._file, {
            "end_seconds": round(time.monotonic() - self._begin, 6),
            "running": np.asarray(series.running)[:num_steps].tolist(),
            "waiting": waiting,
            "groups": groups,
            **so_far,
        })  # fmt: skip

    def write_request(self, request: Request) -> None:
        """Adds a request that has ended; one that never ran is left out."""
        arrival = self._arrivals.pop(request.id, None)
        if arrival is None or not request.output:
            return
        _write(self._file, {
            "id": request.id,
            **arrival,
            "prompt_tokens": len(request.prompt),
            "output_tokens": len(request.output),
            "finish": request.finish_reason,
            "hash_ids": self._hash_ids(request),
        })  # fmt: skip

    def close(self) -> None:
        """Ends the log, once."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hash_ids(self, request: Request) -> list[int]:
        """One id for each full page of the prompt, of that page and all before it."""
        num_full = len(request.prompt) // self._page_size
        keys = content_keys(request.prompt, self._page_size, request.prefix_key, secret=self._key)
        # 63 bits: an int64, and not negative.
        return [int.from_bytes(key[:8]) >> 1 for key in itertools.islice(keys, num_full)]


def open_trace(trace: MemoryTrace | str | Path | None, *, model: str = "") -> MemoryTrace | None:
    """The log itself, a new one in a file of that name, or none."""
    return MemoryTrace(trace, model=model) if isinstance(trace, str | Path) else trace


def describe(layer_groups: Sequence[LayerGroup], cache: PagedCache) -> dict[str, Any]:
    """A decoder's cache, as a log's header has it."""
    page_size, dtype = cache[0][1].page_size, cache[0][0].k_pages[0].dtype
    groups = [
        {
            "layers": len(group.layers),
            "window": group.window,
            "num_pages": table.ref_counts.shape[0] - 1,
            "bytes_per_token": page_bytes([group], page_size=page_size, dtype=dtype) // page_size,
            "padding_bytes": padding_bytes([group], page_size=page_size, dtype=dtype) // page_size,
        }
        for group, (_, table) in zip(layer_groups, cache, strict=True)
    ]
    return {"page_size": page_size, "groups": groups}


def _refuse_to_overwrite(path: Path) -> None:
    start = f'{{"{FORMAT}"'
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            if file.read(len(start)) != start.encode():
                raise ValueError(
                    f"{path} exists and is no log of this kind, so it is left as it is: name "
                    "another file for the memory trace"
                )


def _write(file: IO[str], line: Mapping[str, Any]) -> None:
    file.write(json.dumps(line, separators=(",", ":")) + "\n")
    file.flush()  # for who follows the log


def _close(file: IO[str]) -> None:
    if file.tell():  # something was logged
        _write(file, {"closed": True})
    file.close()
