"""What an import brings in with it."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("paxkv", "jax"),
        ("paxkv.pallas_kernels", "flax"),
        ("paxkv.prefix_index", "jax"),
        ("paxkv.request", "jax"),
        ("paxkv.scheduler", "jax"),
        ("paxkv.stop_strings", "jax"),
    ],
)
def test_import_does_without(module: str, absent: str):
    program = f"import sys, {module}; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
