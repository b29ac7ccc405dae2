"""Traces, real ones where there are some, and cases for the diagnosis."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paxkv.diagnose.budget import make_budget
from paxkv.diagnose.diagnosis import Case
from paxkv.diagnose.distributions import sample_trace
from paxkv.diagnose.known_models import find_sizes
from paxkv.diagnose.trace import Prefixes, Trace

OPT_SLOTS = 15_728  # 12 GiB of keys and values of OPT-13B
OPT_CONTEXT = 2048


def trace_path(name: str) -> Path:
    """A real trace below the folder that `PAXKV_TRACES` names, or the test is skipped."""
    folder = os.environ.get("PAXKV_TRACES")
    if not folder:
        pytest.skip("PAXKV_TRACES names no folder with real traces")
    return Path(folder) / name


def make_trace(*lengths: tuple[int, int], seconds: list[float] | None = None) -> Trace:
    """A trace of (prompt, output)."""
    prompts, outputs = np.array(lengths, np.int64).reshape(-1, 2).T
    return Trace(
        name="made",
        prompt_tokens=prompts,
        output_tokens=outputs,
        arrival_seconds=None if seconds is None else np.array(seconds),
    )


def with_blocks(trace: Trace, blocks: list[list[int]], block_tokens: int) -> Trace:
    """The trace with an id for each block of each prompt."""
    prefixes = Prefixes(
        block_tokens=block_tokens,
        ids=np.array([block for row in blocks for block in row], np.int64),
        starts=np.cumsum([0, *map(len, blocks)]),
    )
    return Trace(
        name=trace.name, prompt_tokens=trace.prompt_tokens, output_tokens=trace.output_tokens,
        arrival_seconds=trace.arrival_seconds, prefixes=prefixes,
    )  # fmt: skip


def make_case(trace: Trace | None = None, **changes) -> Case:
    """OPT-13B on 40 GiB, as the PagedAttention paper has it, on the built-in lengths."""
    trace = trace or sample_trace("sharegpt", num_requests=2000)
    sizes = find_sizes("opt-13b")
    budget = make_budget(
        sizes, memory_bytes=40 << 30, weight_bytes=26 << 30, activation_bytes=2 << 30,
        kv_dtype="fp16", num_devices=1,
    )  # fmt: skip
    settings: dict[str, Any] = {"max_length": OPT_CONTEXT, "page_size": 16, "max_running": 1024}
    settings |= {"max_steps": 1500, "step_seconds": 0.03}
    return Case(trace=trace, sizes=sizes, budget=budget, **(settings | changes))
