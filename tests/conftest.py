"""Settings that every test runs under."""

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # nothing is written to the user's folders
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

# Examples may compile, and the machine may be busy: no test fails for being slow.
settings.register_profile("paxkv", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paxkv")
