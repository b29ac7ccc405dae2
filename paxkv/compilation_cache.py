"""Keeps compiled programs between runs."""

import os

import jax
import platformdirs


def use_compilation_cache() -> None:
    """Turns on jax's persistent compilation cache in the user's cache folder.

    A folder that was configured already (`JAX_COMPILATION_CACHE_DIR`, or `jax.config`) is left as
    it is. The environment variable `PAXKV_COMPILATION_CACHE=0` turns this off.
    """
    if jax.config.jax_compilation_cache_dir or os.environ.get("PAXKV_COMPILATION_CACHE") == "0":
        return
    folder = platformdirs.user_cache_path("paxkv") / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small programs count too: the first token waits for all of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
