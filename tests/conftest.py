"""Settings that every test runs under."""

import gc
import itertools
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A program that a test has compiled need not be compiled by the next test or the next run. It is
# kept beside pytest's own notes: nothing is written to the user's folders.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parents[1] / ".pytest_cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

# Processes that share the tests ignore Ctrl-C, and so would the commands that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples may compile, and the machine may be busy: no test fails for being slow.
settings.register_profile("paxkv", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paxkv")


# Files are shared out in order: one that takes long must not be the last to begin.
_LONG_FILES = ("test_aot.py", "test_old_jax.py", "test_smollm2.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in _LONG_FILES)  # a stable sort


_MAPS = Path("/proc/self/maps")  # a line each
_MANY_MAPS = 30_000
_tests_run = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def _each_file_compiles_its_own_programs():
    import jax  # only now: it reads the settings above when it is first imported

    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def _programs_are_dropped_before_memory_maps_run_out():
    """Each compiled program maps memory, of which the kernel grants a process 65,530 pieces.

    The programs of all tests together are more, and those of one file may be: LLVM would crash.
    """
    import jax

    yield
    if next(_tests_run) % 10 == 0 and len(_MAPS.read_text().splitlines()) > _MANY_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A model folder without a chat format."""
    from helpers_cli import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny"), has_chat_format=False)


@pytest.fixture(scope="session")
def tiny_chat_model(tmp_path_factory) -> Path:
    """The same model with one."""
    from helpers_cli import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("chat") / "model", has_chat_format=True)
