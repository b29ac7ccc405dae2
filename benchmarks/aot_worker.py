"""The process that compiles, run by `benchmarks.aot` in the interpreter that has the compilers."""

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    SingleDeviceSharding,
    use_abstract_mesh,
)

from benchmarks.aot import Compiled, Job
from benchmarks.aot_reports import (
    count_copies,
    count_host_transfers,
    custom_calls,
    read_ptxas,
    scratch_of,
)
from benchmarks.bundles import read_bundles
from benchmarks.chips import CHIPS, Chip


def main() -> None:
    task, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    chip = CHIPS[task["chip"]]
    device = device_of(chip)
    module, function = task["jobs"].split(":")
    jobs = getattr(importlib.import_module(module), function)(chip)
    print("started", flush=True)
    for name in task["names"]:
        result = compile_job(name, jobs[name], chip, device, folder)
        with (folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")


def device_of(chip: Chip) -> Any:
    """A device that compiles and does not run."""
    if chip.platform == "tpu":
        return topologies.get_topology_desc(chip.topology, platform="tpu").devices[0]
    return topologies.get_topology_desc(
        "", platform="cuda", target_config=chip.target_config, topology="1x1x1"
    ).devices[0]


@contextlib.contextmanager
def tracing_for(chip: Chip, device: Any) -> Iterator[None]:
    """What a kernel finds when it asks what it is traced for."""
    if chip.platform == "cuda":
        with jax.default_device(device):
            yield
    else:
        abstract = AbstractDevice(
            device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu"
        )
        mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=abstract)
        with use_abstract_mesh(mesh):
            yield


def compile_job(name: str, job: Job, chip: Chip, device: Any, folder: Path) -> Compiled:
    dump = folder / "dump"
    before = set(dump.iterdir()) if dump.exists() else set()
    log = folder / "log"
    begin = time.perf_counter()
    try:
        with tracing_for(chip, device), output_to(log):
            if job.setup is not None:
                job.setup(chip)
            sharding = SingleDeviceSharding(device)
            rows = Format(Layout(tuple(range(len(job.pool or ())))), sharding)

            def is_pool(x: Any) -> bool:
                return job.in_rows and x.shape == job.pool

            def placed(x: Any) -> jax.ShapeDtypeStruct:
                where = rows if is_pool(x) else sharding
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

            arguments = jax.tree.map(placed, job.arguments)
            results = jax.tree.map(
                lambda x: rows if is_pool(x) else None,
                jax.eval_shape(job.function, *job.arguments),
            )
            jitted = jax.jit(job.function, donate_argnums=job.donated, out_shardings=results)
            traced = jitted.trace(*arguments)
            compiled = traced.lower().compile()
    except Exception as error:
        return Compiled(name=name, error=f"{type(error).__name__}: {error}"[:3000])
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    new_files = set(dump.iterdir()) - before if dump.exists() else set()
    return Compiled(
        name=name,
        seconds=time.perf_counter() - begin,
        pool_copies=count_copies(text, job.pool) if job.pool else 0,
        host_transfers=count_host_transfers(text),
        temp_bytes=0 if memory is None else memory.temp_size_in_bytes,
        kernels=custom_calls(text),
        scratch=scratch_of(traced.jaxpr.jaxpr),
        ptxas=read_ptxas(log.read_text(errors="replace")),
        bundles=read_bundles(new_files, chip.branch_delay),
    )


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Sends what the compilers print, past Python's own streams, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
    finally:
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)


if __name__ == "__main__":
    main()
