"""The oldest jax that is supported gives the same results."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE_TESTS = [
    "tests/test_attention_errors.py",
    "tests/test_attention_programs.py",
    "tests/test_block_table.py",
    "tests/test_cache.py",
    "tests/test_decode_loop.py",
    "tests/test_llama.py",
    "tests/test_logits_processors.py",
    "tests/test_page_pool.py",
    "tests/test_sampling.py",
    "tests/test_sharing.py",
    "tests/test_steps.py",
]


def test_core_passes_on_the_oldest_jax():
    python = os.environ.get("PAXKV_JAX_0_11_PYTHON")
    if not python:
        pytest.skip("PAXKV_JAX_0_11_PYTHON names no interpreter that has jax 0.11.2")
    version = "import jax; print(jax.__version__)"
    result = subprocess.run([python, "-c", version], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("0.11.")
    result = subprocess.run(
        # Without the project's own options, which want plugins.
        [python, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", *CORE_TESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
