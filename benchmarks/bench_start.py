"""How long the first token takes: from process start, cold and with a warm compilation cache.

uv run python -m benchmarks.bench_start
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import describe_run, tell

PROMPT = "Why do operating systems use pages?"


def first_token_seconds(cache: str) -> float:
    """Seconds from starting `paxkv generate` to the first character on its standard output."""
    command = [sys.executable, "-m", "paxkv.cli", "generate", PROMPT, "--max-tokens", "8"]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    begin = time.perf_counter()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise RuntimeError(f"{' '.join(command)} printed nothing")
        seconds = time.perf_counter() - begin
        process.stdout.read()
    return seconds


def main() -> None:
    """Measures, prints both and ends with one JSON line."""
    parser = argparse.ArgumentParser(description="How long the first token takes.")
    parser.add_argument("--repeats", type=int, default=3, help="runs with a warm cache")
    parser.add_argument("--json", type=Path, help="also write the JSON line to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        cold = first_token_seconds(cache)
        warm = [first_token_seconds(cache) for _ in range(arguments.repeats)]
    print(f"first token after {cold:.1f} s cold, {statistics.median(warm):.1f} s warm")
    tell(
        {"benchmark": "start", "run": describe_run(), "cold_seconds": cold, "warm_seconds": warm},
        arguments.json,
    )


if __name__ == "__main__":
    main()
