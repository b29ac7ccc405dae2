"""The benchmark of the GPU kernels runs through on tiny shapes without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_gpu_benchmark_runs_through_interpreted():
    command = [sys.executable, "-m", "benchmarks.bench_kernels_gpu", "--interpret", "--rounds", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    record = json.loads(result.stdout.splitlines()[-1])
    assert set(record["cases"].values()) == {"ok"}
    (decode,), (prefill,) = record["decode"], record["prefill"]
    assert decode["gathered"]["differs_from_ours"] < 0.05
    assert "tflops" in prefill["paxkv"]
