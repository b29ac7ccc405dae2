"""Kernels compile for chips that are not here: TPUs by libtpu, GPUs by ptxas.

The compilers belong to an interpreter of their own, which PAXKV_AOT_PYTHON names: jax of the same
version, flax, libtpu, jax-cuda13-plugin with jax-cuda13-pjrt, and nvidia-cuda-nvcc for ptxas.
"""

import pytest

from benchmarks.aot import PYTHON_VARIABLE, Compiled, aot_python, compile_all
from benchmarks.aot_cases import (
    IMPLEMENTATIONS,
    LOOP_NAMES,
    attention_names,
    mover_names,
)
from benchmarks.chips import CHIPS

TARGETS = ("v5e", "v5p", "v6e", "tpu7x", "sm_80", "sm_90a", "sm_100a")
# Targets that share their kernels with another one compile the ends of each range only.
EVERY_CASE = ("v6e", "sm_90a")
KERNEL_CALLS = {"tpu": "tpu_custom_call", "cuda": "mosaic_gpu_v2"}

pytestmark = pytest.mark.skipif(
    aot_python() is None, reason=f"{PYTHON_VARIABLE} names no interpreter that has the compilers"
)


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return request.param


def failures(results: dict[str, Compiled]) -> dict[str, str]:
    """What went wrong, by name: did not compile, copies the pool or moves data to the host."""
    wrong = {}
    for name, result in results.items():
        if result.error is not None:
            wrong[name] = result.error
        elif result.pool_copies or result.host_transfers:
            wrong[name] = f"{result.pool_copies=}, {result.host_transfers=}"
    return wrong


def test_attention_compiles_and_leaves_the_pool_in_place(target):
    platform = CHIPS[target].platform
    names = attention_names(platform, every_case=target in EVERY_CASE)
    results = compile_all(target, "benchmarks.aot_cases:attention_jobs", names)
    assert set(results) == set(names)
    assert not failures(results)
    if IMPLEMENTATIONS[platform] != "reference":
        for name, result in results.items():
            assert KERNEL_CALLS[platform] in result.kernels, f"{name} has no kernel"


def test_movers_compile_to_nothing_but_the_moves(target):
    names = mover_names()
    results = compile_all(target, "benchmarks.aot_cases:mover_jobs", names)
    assert set(results) == set(names)
    assert not failures(results)


def test_decode_loop_compiles_without_copy_of_the_pool_or_word_to_the_host(target):
    # Only a TPU fills narrow heads up.
    names = LOOP_NAMES if CHIPS[target].platform == "tpu" else LOOP_NAMES[:1]
    results = compile_all(target, "benchmarks.aot_cases:loop_jobs", names)
    assert set(results) == set(names)
    assert not failures(results)
    for result in results.values():
        assert KERNEL_CALLS[CHIPS[target].platform] in result.kernels


def test_case_that_ends_the_process_is_told_and_the_rest_goes_on():
    names = ["good", "abort", "raise", "last"]
    results = compile_all("sm_80", "benchmarks.aot_cases:broken_jobs", names)
    assert results["good"].error is None and results["last"].error is None
    assert "the process ended with" in str(results["abort"].error)
    assert "ZeroDivisionError" in str(results["raise"].error)


def test_copy_of_the_pool_is_seen():
    results = compile_all("sm_80", "benchmarks.aot_cases:broken_jobs", ["copies"])
    assert results["copies"].pool_copies == 1
