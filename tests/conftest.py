"""Settings that every test runs under."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # nothing is written to the user's folders
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

# Examples may compile, and the machine may be busy: no test fails for being slow.
settings.register_profile("paxkv", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paxkv")


@pytest.fixture(scope="module", autouse=True)
def _programs_are_dropped_after_each_file():
    """Each compiled program maps memory, of which the kernel grants a process 65,530 pieces.

    The programs of all test files together are more: without this, LLVM crashes near the end.
    """
    import jax  # only now: it reads the settings above when it is first imported

    yield
    jax.clear_caches()
    gc.collect()
