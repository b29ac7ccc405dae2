"""Compiles functions for chips that are not here, and says what the compilers made of them.

    compiled = compile_all("v6e", "benchmarks.aot_cases:jobs", names)

The compilers (libtpu, the CUDA plugin with ptxas) are those of the interpreter that the environment
variable PAXKV_AOT_PYTHON names. It runs in a process of its own, since a kernel that uses what a
target lacks ends the process; then the rest of the list goes on in another one.
"""

import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.aot_reports import Ptxas, Scratch
from benchmarks.bundles import Bundles, Region
from benchmarks.chips import CHIPS, Chip

ROOT = Path(__file__).parents[1]
PYTHON_VARIABLE = "PAXKV_AOT_PYTHON"
# XLA's own kernels around ours, a third of the time, are not optimised; ours come out the same.
_QUICK_GPU_FLAGS = "--xla_backend_optimization_level=0 --xla_gpu_force_compilation_parallelism=1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One function to compile."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # trees of jax.ShapeDtypeStruct
    donated: tuple[int, ...] = ()  # arguments that the result replaces
    pool: tuple[int, ...] | None = None  # the shape that must not be copied
    # Whether it is to lie row by row, as a kernel reads it. By default a TPU packs an array whose
    # rows are no multiple of 128 otherwise, and copies it on its way into a program and out.
    in_rows: bool = True
    setup: Callable[[Chip], None] | None = None  # what a peer needs before it is traced


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What became of one job."""

    name: str
    error: str | None = None  # None: it compiled
    seconds: float = 0.0
    pool_copies: int = 0  # copies of the pool's shape in the compiled text
    host_transfers: int = 0
    temp_bytes: int = 0
    kernels: tuple[str, ...] = ()  # custom calls of the compiled text
    scratch: tuple[Scratch, ...] = ()
    ptxas: tuple[Ptxas, ...] = ()  # of each GPU kernel
    bundles: Mapping[str, Bundles] = dataclasses.field(default_factory=dict)  # of TPU kernels


def aot_python() -> str | None:
    """The interpreter that has the compilers, if one is named."""
    return os.environ.get(PYTHON_VARIABLE)


def compile_all(
    chip: str, jobs: str, names: Iterable[str], *, wants_figures: bool = False
) -> dict[str, Compiled]:
    """Compiles jobs for one chip, on all CPUs.

    Args:
        chip: A key of `CHIPS`.
        jobs: `module:function`, which returns the jobs by name when called with the `Chip`.
        names: Which of them.
        wants_figures: Whether registers or bundles are read too, which takes longer.
    """
    names = list(names)
    num_processes = min(os.cpu_count() or 1, len(names))
    with ThreadPoolExecutor(num_processes) as pool:
        shares = [names[i::num_processes] for i in range(num_processes)]
        done = pool.map(lambda share: _compile_share(chip, jobs, share, wants_figures), shares)
        found = {name: result for results in done for name, result in results.items()}
    return {name: found[name] for name in names}


def _compile_share(
    chip: str, jobs: str, names: list[str], wants_figures: bool
) -> dict[str, Compiled]:
    """Compiles in one process, and in another one what an abort has left."""
    left, results = names, {}
    while left:
        done = _run(chip, jobs, left, wants_figures)
        results |= done
        left = [name for name in left if name not in done]
    return results


def _run(chip: str, jobs: str, names: list[str], wants_figures: bool) -> dict[str, Compiled]:
    """Compiles until the end or until the process ends early: then the last one is to blame."""
    python = aot_python()
    if python is None:
        raise RuntimeError(f"{PYTHON_VARIABLE} names no interpreter that has the compilers")
    with tempfile.TemporaryDirectory() as folder:
        task = {"chip": chip, "jobs": jobs, "names": names, "wants_figures": wants_figures}
        process = subprocess.run(
            [python, "-m", "benchmarks.aot_worker", json.dumps(task), folder],
            cwd=ROOT,
            env=_environment(CHIPS[chip], Path(folder), wants_figures),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        results = Path(folder) / "results.jsonl"
        lines = results.read_text().splitlines() if results.exists() else []
    done = {result.name: result for result in map(_read_result, lines)}
    if process.returncode != 0:
        tail = process.stderr[-2000:]
        if len(done) == len(names):
            raise RuntimeError(f"the compiling process failed when it was done: {tail}")
        culprit = names[len(done)]
        if not lines and "started" not in process.stdout:
            raise RuntimeError(f"the compiling process did not start: {tail}")
        error = f"the process ended with {process.returncode}: {tail}"
        done[culprit] = Compiled(name=culprit, error=error)
    return done


def _read_result(line: str) -> Compiled:
    fields = json.loads(line)
    fields["kernels"] = tuple(fields["kernels"])
    fields["scratch"] = tuple(Scratch(*figures) for figures in fields["scratch"])
    fields["ptxas"] = tuple(Ptxas(*figures) for figures in fields["ptxas"])
    fields["bundles"] = {
        kernel: Bundles(tuple(Region(*region) for region in regions), tuple(capacity))
        for kernel, (regions, capacity) in fields["bundles"].items()
    }
    return Compiled(**fields)


def _environment(chip: Chip, folder: Path, wants_figures: bool) -> dict[str, str]:
    environment = dict(os.environ)
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_NUMPY_RANK_PROMOTION"):
        environment.pop(name, None)
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": str(ROOT),
    }
    if chip.platform == "tpu":
        # As on a host of four chips: libtpu asks nobody which one it is on.
        environment |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it only compiles
        }
        if wants_figures:
            dump = folder / "dump"
            dump.mkdir()
            environment["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
    elif wants_figures:
        environment["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    else:
        environment["XLA_FLAGS"] = _QUICK_GPU_FLAGS
    return environment
