"""How much memory there is, and how much of it the cache takes."""

import re

import jax
import psutil

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def parse_bytes(size: int | str) -> int:
    """Bytes of a size such as 2000000, "512MiB" or "2.5 GB" (powers of 1024, and of 1000).

    Raises:
        ValueError: It is no such size, or is not above 0.
    """
    match = re.fullmatch(r"\s*([0-9]{0,20}\.?[0-9]{1,20})\s*([a-zA-Z]*)\s*", str(size))
    unit = match and _UNITS.get(match[2].upper())
    if not match or unit is None or not float(match[1]) > 0:
        raise ValueError(
            f"{size!r} is not a memory size: write a number above 0 and a unit, "
            "such as 512MiB, 2GB or 2.5GiB"
        )
    return int(float(match[1]) * unit)


def format_bytes(num_bytes: float) -> str:
    """A size for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def free_bytes() -> int:
    """Memory that is free on the default device; of the host where that is a CPU."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return psutil.virtual_memory().available
    stats = device.memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"]
