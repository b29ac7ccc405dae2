"""The benchmark of the memory's log runs through on a tiny batch."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_memory_trace_benchmark_runs_through():
    command = [sys.executable, "-m", "benchmarks.bench_memory_trace", "--slots", "2"]
    command += ["--prompt-tokens", "8", "--layers", "1", "--repeats", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    record = json.loads(result.stdout.splitlines()[-1])
    assert set(record["seconds"]) == {"step", "account", "line"} and record["share"] > 0
