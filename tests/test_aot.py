"""Kernels compile for chips that are not here: TPUs by libtpu, GPUs by ptxas.

The compilers belong to an interpreter of their own, which PAXKV_AOT_PYTHON names: jax of the same
version, flax, libtpu, jax-cuda13-plugin with jax-cuda13-pjrt, and nvidia-cuda-nvcc for ptxas.
PAXKV_AOT_ALL=1 compiles every case for every chip.
"""

import os
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from benchmarks import aot_cases
from benchmarks.aot import PYTHON_VARIABLE, Compiled, aot_python, compile_all
from benchmarks.aot_loops import loop_names
from benchmarks.aot_movers import mover_names
from benchmarks.chips import CHIPS, Chip

TARGETS = ("v5e", "v5p", "v6e", "tpu7x", "sm_80", "sm_90a", "sm_100a")
EVERY_CASE = os.environ.get("PAXKV_AOT_ALL") == "1"
KERNEL_CALLS = {"tpu": "tpu_custom_call", "cuda": "mosaic_gpu_v2"}

pytestmark = pytest.mark.skipif(
    aot_python() is None, reason=f"{PYTHON_VARIABLE} names no interpreter that has the compilers"
)


class Target(NamedTuple):
    """A chip, and all that was compiled for it."""

    chip: Chip
    results: dict[str, Compiled]

    def failures(self, names: Iterable[str]) -> dict[str, str]:
        """What went wrong: did not compile, copies the pool or moves data to the host."""
        wrong = {}
        for name in names:
            result = self.results[name]
            if result.error is not None:
                wrong[name] = result.error
            elif result.pool_copies or result.host_transfers:
                wrong[name] = f"{result.pool_copies=}, {result.host_transfers=}"
        return wrong

    def without_kernel(self, names: Iterable[str]) -> list[str]:
        call = KERNEL_CALLS[self.chip.platform]
        return [name for name in names if call not in self.results[name].kernels]


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    chip = CHIPS[request.param]
    names = aot_cases.names(chip, every_case=EVERY_CASE)
    return Target(chip, compile_all(chip.name, "benchmarks.aot_cases:jobs", names))


def test_attention_compiles_to_kernels_that_leave_the_pool_in_place(target):
    names = aot_cases.attention_names(target.chip, every_case=EVERY_CASE)
    assert not target.failures(names)
    assert not target.without_kernel(names)


def test_movers_compile_to_nothing_but_the_moves(target):
    assert not target.failures(mover_names())


def test_decode_loop_compiles_without_copy_of_the_pool_or_word_to_the_host(target):
    names = loop_names(target.chip.platform)
    assert not target.failures(names)
    assert not target.without_kernel(names)


def test_case_that_ends_the_process_is_told_and_the_rest_goes_on():
    names = ["good", "abort", "raise", "last"]
    results = compile_all("sm_80", "benchmarks.aot_cases:broken_jobs", names)
    assert results["good"].error is None and results["last"].error is None
    assert "the process ended with" in str(results["abort"].error)
    assert "ZeroDivisionError" in str(results["raise"].error)


def test_copy_of_the_pool_is_seen():
    results = compile_all("sm_80", "benchmarks.aot_cases:broken_jobs", ["copies"])
    assert results["copies"].pool_copies == 1
