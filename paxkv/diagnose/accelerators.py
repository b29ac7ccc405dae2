"""How much memory accelerators have, and how fast it is, by name."""

import dataclasses

from paxkv.memory import parse_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Accelerator:
    """One chip as its maker describes it."""

    memory_gb: float  # powers of 1000, the careful reading: drivers report a little more or less
    bandwidth_gb_per_second: float
    source: str

    @property
    def memory_bytes(self) -> int:
        """What is there to share out."""
        return int(self.memory_gb * 1e9)


_NVIDIA = "nvidia.com, data sheet"
_GOOGLE = "docs.cloud.google.com/tpu/docs"
_AMD = "amd.com, data sheet"

ACCELERATORS = {
    "t4": Accelerator(16, 320, f"{_NVIDIA} of the T4"),
    "v100-16gb": Accelerator(16, 900, f"{_NVIDIA} of the V100 SXM2"),
    "v100-32gb": Accelerator(32, 900, f"{_NVIDIA} of the V100 SXM2"),
    "a10": Accelerator(24, 600, f"{_NVIDIA} of the A10"),
    "a40": Accelerator(48, 696, f"{_NVIDIA} of the A40"),
    "l4": Accelerator(24, 300, f"{_NVIDIA} of the L4"),
    "l40s": Accelerator(48, 864, f"{_NVIDIA} of the L40S"),
    "rtx-3090": Accelerator(24, 936, "nvidia.com, GeForce RTX 3090"),
    "rtx-4090": Accelerator(24, 1008, "nvidia.com, GeForce RTX 4090"),
    "a100-40gb": Accelerator(40, 1555, f"{_NVIDIA} of the A100"),
    "a100-80gb": Accelerator(80, 2039, f"{_NVIDIA} of the A100 SXM"),
    "h100": Accelerator(80, 3350, f"{_NVIDIA} of the H100 SXM"),
    "h200": Accelerator(141, 4800, f"{_NVIDIA} of the H200"),
    "b200": Accelerator(180, 8000, f"{_NVIDIA} of the DGX B200: 1,440 GB and 64 TB/s in 8"),
    "mi250x": Accelerator(128, 3277, f"{_AMD} of the MI250X"),
    "mi300x": Accelerator(192, 5300, f"{_AMD} of the MI300X"),
    "tpu-v4": Accelerator(32, 1200, f"{_GOOGLE}/v4"),
    "tpu-v5e": Accelerator(16, 819, f"{_GOOGLE}/v5e"),
    "tpu-v5p": Accelerator(95, 2765, f"{_GOOGLE}/v5p"),
    "tpu-v6e": Accelerator(32, 1640, f"{_GOOGLE}/v6e"),
    "tpu7x": Accelerator(192, 7370, f"{_GOOGLE}/tpu7x"),
}


def find_memory(name_or_size: str) -> tuple[int, Accelerator | None]:
    """Bytes of a memory size such as "40GB", or of a chip by name, and the chip.

    Raises:
        ValueError: It is neither.
    """
    name = name_or_size.strip().lower().replace("_", "-").replace(" ", "-")
    if name in ACCELERATORS:
        return ACCELERATORS[name].memory_bytes, ACCELERATORS[name]
    if name[:1].isdigit():
        return parse_bytes(name_or_size), None
    raise ValueError(
        f"{name_or_size!r} is neither a memory size, such as 40GB or 24GiB, nor one of the known "
        f"accelerators: {', '.join(ACCELERATORS)}"
    )
