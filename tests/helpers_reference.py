"""The reference, alive: torch and transformers, in an interpreter of their own."""

import os
import subprocess
from pathlib import Path

import pytest

_SCRIPTS = Path(__file__).parent / "reference"


def run_reference(script: str, *arguments: str | Path) -> None:
    """Runs a script of `tests/reference`; skips the test where no interpreter is named."""
    python = os.environ.get("PAXKV_REFERENCE_PYTHON")
    if not python:
        pytest.skip("PAXKV_REFERENCE_PYTHON names no interpreter")
    result = subprocess.run(
        [python, _SCRIPTS / script, *arguments],
        # Beside other tests, threads of torch that wait for each other take many times as long.
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
