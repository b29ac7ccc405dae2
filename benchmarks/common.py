"""What the benchmarks share: the machine they ran on, its memory bandwidth, and their last line."""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import psutil

ROOT = Path(__file__).parents[1]
_BANDWIDTH_BYTES = 1 << 30  # far more than any cache holds
_QUIET_SHARE = 0.03  # of the CPUs, for others
_VERSIONS_OF = ("paxkv", "jax", "jaxlib", "flax", "numpy")


class Spread(NamedTuple):
    """What repeated measurements came to."""

    median: float
    lowest: float
    highest: float


def spread(samples: Sequence[float]) -> Spread:
    """The median of some measurements, and their range."""
    return Spread(statistics.median(samples), min(samples), max(samples))


def seconds_of(call: Callable[[], Any]) -> float:
    """Seconds until the arrays that `call` returns are ready."""
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin


def memory_bandwidth(repeats: int = 5) -> float:
    """Bytes per second at which all cores together read memory: the best of some readings."""
    array = jnp.ones(_BANDWIDTH_BYTES // 4, jnp.float32)
    read = jax.jit(jnp.sum)
    jax.block_until_ready(read(array))
    return array.nbytes / min(seconds_of(lambda: read(array)) for _ in range(repeats))


class CpuWatch:
    """Tells how much of the CPUs others took since it was made.

    Where threads wait for each other, as in most of the peers, a busy neighbour costs many times
    the share that it takes: figures are worth something where this is near 0.
    """

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._busy, self._own = _busy_seconds(), _own_seconds()

    def others_share(self) -> float:
        """Share of all CPU time, 0 to 1; also what a hypervisor took away."""
        busy, own = _busy_seconds() - self._busy, _own_seconds() - self._own
        there_were = (time.perf_counter() - self._begin) * (psutil.cpu_count() or 1)
        return min(1.0, max(0.0, (busy - own) / there_were))


def num_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def describe_run() -> dict[str, Any]:
    """The device, versions and commit that figures belong to."""
    return {
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "cpu": _cpu_name(),
        "num_cpus": num_cpus(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in _VERSIONS_OF},
        "commit": _commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def tell_if_disturbed(others_share: float) -> None:
    """Warns where others took so much of the CPUs that figures mean little."""
    if others_share > _QUIET_SHARE:
        print(f"Others took up to {others_share:.0%} of the CPUs: measure again when it is quiet.")


def parse_sizes(parser: argparse.ArgumentParser, tiny: dict[str, Any]) -> argparse.Namespace:
    """Parses the command line; `--tiny` has the sizes in `tiny` in place of all others."""
    parser.add_argument("--tiny", action="store_true", help="a tiny model and little to do")
    parser.add_argument("--json", type=Path, help="a file for the record that is also printed last")
    options = parser.parse_args()
    if options.tiny:
        vars(options).update(tiny)
    return options


def tell_results(
    benchmark: str, run: dict[str, Any], options: argparse.Namespace, **results: Any
) -> None:
    """Tells the record of a benchmark: what ran where, with which options, and what came of it."""
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    record = {"benchmark": benchmark, "run": run, "settings": settings}
    tell(record | results, options.json)


def tell(record: dict[str, Any], path: Path | None) -> None:
    """Writes a record to a file, if one is named, and prints it as the last line."""
    if path:
        path.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record), flush=True)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    kinds = ("user", "nice", "system", "irq", "softirq", "steal")  # not every system has all
    return sum(getattr(times, kind, 0.0) for kind in kinds)


def _own_seconds() -> float:
    """CPU time of this process and of the children that have ended."""
    return sum(os.times()[:4])


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    """The commit, with `-dirty` where tracked files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
