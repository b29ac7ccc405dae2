"""Settings that every test runs under."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # nothing is written to the user's folders
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
