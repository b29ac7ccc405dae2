"""The tools that read the code find nothing: style, types and the direction of imports."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = Path(sys.executable).parent  # of this environment, whatever else is on the PATH


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check"],
        ["ruff", "format", "--check"],
        ["pyright", "--pythonpath", sys.executable],
        ["lint-imports", "--no-cache"],
    ],
    ids=" ".join,
)
def test_tool_finds_nothing(command: list[str]):
    tool, *arguments = command
    result = subprocess.run(
        [TOOLS / tool, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
