"""A log of what an engine's memory was used for, which `paxkv diagnose` reads.

JSON lines, written as things happen, so that the log of a running engine can be followed:

- the first one describes the pool: `paxkv_memory_trace` (the version of this format), `model`,
  `page_size`, `num_pages` that can be handed out, `num_slots`, `max_length`, and `groups`, one per
  layer group: `layers`, `window`, `bytes_per_token`, and `padding_bytes` of a token's, which are
  the layout's;
- one for each request that has ended: `id`, `arrival_seconds` since the log began,
  `arrival_step` (decode steps made before), `prompt_tokens`, `output_tokens`, `finish`, and
  `hash_ids`, one per full page of the prompt: equal ids mean that prompts are equal up to there;
- one for each burst of decode steps: `end_seconds`, `running` requests step by step, how many are
  `waiting`, `groups` with the tokens of each kind (see `paxkv.waste`) step by step, and so far
  `preemptions` and `recomputed_tokens`;
- at the end `closed`.

Ids are hashes under a key that is thrown away: a log does not tell what was asked.
"""

import itertools
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paxkv.content_keys import content_keys
from paxkv.memory_series import MemorySeries
from paxkv.request_state import Request

FORMAT = "paxkv_memory_trace"
VERSION = 1
KINDS = ("used", "tail", "reusable", "free", "external")  # the null page is none of the pool's


class MemoryTrace:
    """Writes the log of one engine.

    Args:
        path: A file that is begun anew.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("w", encoding="utf-8")
        self._key = os.urandom(16)
        self._begin = time.monotonic()
        self._num_steps = 0
        self._arrivals: dict[int, dict[str, float]] = {}
        self._page_size = 0

    def write_header(self, **about: Any) -> None:
        """Describes the pool; `page_size` must be among it."""
        self._page_size = about["page_size"]
        self._write({FORMAT: VERSION} | about)

    def note_arrival(self, request: Request) -> None:
        """Notes when a request was queued."""
        seconds = round(time.monotonic() - self._begin, 6)
        self._arrivals[request.id] = {"arrival_seconds": seconds, "arrival_step": self._num_steps}

    def write_steps(
        self, series: MemorySeries, num_steps: int, *, waiting: int, counts: Mapping[str, int]
    ) -> None:
        """Adds the steps of a burst, whose arrays have been fetched.

        Args:
            series: Of them.
            num_steps: How many were made.
            waiting: Requests that wait.
            counts: `preemptions` and `recomputed_tokens` so far.
        """
        if not num_steps:
            return
        self._num_steps += num_steps
        groups = [
            {kind: np.asarray(getattr(account, kind))[:num_steps].tolist() for kind in KINDS}
            for account in series.accounts
        ]
        self._write({
            "end_seconds": round(time.monotonic() - self._begin, 6),
            "running": np.asarray(series.running)[:num_steps].tolist(),
            "waiting": waiting,
            "groups": groups,
            **counts,
        })  # fmt: skip

    def write_request(self, request: Request) -> None:
        """Adds a request that has ended; one that never ran is left out."""
        arrival = self._arrivals.pop(request.id, None)
        if arrival is None or not request.output:
            return
        self._write({
            "id": request.id,
            **arrival,
            "prompt_tokens": len(request.prompt),
            "output_tokens": len(request.output),
            "finish": request.finish_reason,
            "hash_ids": self._hash_ids(request),
        })  # fmt: skip

    def close(self) -> None:
        """Ends the log, once."""
        if not self._file.closed:
            self._write({"closed": True})
            self._file.close()

    def _hash_ids(self, request: Request) -> list[int]:
        """One id for each full page of the prompt, of that page and all before it."""
        num_full = len(request.prompt) // self._page_size
        keys = content_keys(request.prompt, self._page_size, request.prefix_key, secret=self._key)
        # 63 bits: an int64, and not negative.
        return [int.from_bytes(key[:8]) >> 1 for key in itertools.islice(keys, num_full)]

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()  # for who follows the log
