"""The chips that kernels are compiled for ahead of time, and the figures they are judged by."""

import dataclasses
from typing import Any

_GPU_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory_per_core}
  shared_memory_per_block_optin: {shared_memory_per_block}
  threads_per_core_limit: {threads_per_core}
  core_count: {num_cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f}
  l2_cache_size: {l2_bytes}
  clock_rate_ghz: {clock}
  device_memory_size: {memory_bytes}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{device}"
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One target of compilation. Of a chip with two cores, the figures are one core's."""

    name: str
    platform: str  # "tpu" or "cuda"
    clock_ghz: float  # TPU: VLIW bundles per nanosecond; GPU: the boost clock
    bandwidth: float  # bytes per second between HBM and what runs one kernel
    source: str  # of clock and bandwidth
    topology: str = ""  # a TPU's, by the name that libtpu knows
    branch_delay: int = 0  # bundles of a TPU that run after a branch whether or not it is taken
    target_config: str = ""  # a GPU's, as a text-format GpuTargetConfigProto
    num_cores: int = 1  # multiprocessors of a GPU
    shared_memory_bytes: int = 0  # that one block of a GPU may have

    def describe(self) -> dict[str, Any]:
        """What belongs beside figures in a record."""
        return {
            "chip": self.name,
            "clock_ghz": self.clock_ghz,
            "bandwidth": self.bandwidth,
            "source": self.source,
        }


def _tpu(
    name: str, topology: str, clock_ghz: float, bandwidth: float, source: str, branch_delay: int = 4
) -> Chip:
    return Chip(
        name=name, platform="tpu", topology=topology, clock_ghz=clock_ghz, bandwidth=bandwidth,
        source=source, branch_delay=branch_delay,
    )  # fmt: skip


def _gpu(
    name: str,
    device: str,
    capability: tuple[int, int],
    *,
    clock_ghz: float,
    bandwidth: float,
    num_cores: int,
    shared_memory_kib: int,  # per multiprocessor; a block may have 1 KiB less
    threads_per_core: int,
    l2_mib: int,
    memory_gib: int,
    source: str,
) -> Chip:
    major, minor = capability
    block_bytes = (shared_memory_kib - 1) * 1024
    config = _GPU_CONFIG.format(
        shared_memory_per_core=shared_memory_kib * 1024, shared_memory_per_block=block_bytes,
        threads_per_core=threads_per_core, num_cores=num_cores, bandwidth=bandwidth,
        l2_bytes=l2_mib << 20, clock=clock_ghz, memory_bytes=memory_gib << 30,
        major=major, minor=minor, device=device,
        features="feature_extension: ACCELERATED_FEATURES" if major >= 9 else "",
    )  # fmt: skip
    return Chip(
        name=name, platform="cuda", target_config=config, clock_ghz=clock_ghz,
        bandwidth=bandwidth, num_cores=num_cores, shared_memory_bytes=block_bytes, source=source,
    )  # fmt: skip


# Bandwidth: the chip's in Google's specifications; where a chip has two cores, which each run their
# part of a kernel's grid, half of it. Clock: of v5e as stated in "How to Scale Your Model". Others
# are derived: peak bf16 flops / (2 x products of a cycle), which for v5e gives the stated 1.5.
#
#     v5e     197e12 / (2 x 4 units of 128 x 128)         = 1.50 GHz
#     v5p     459e12 / (2 cores x 2 x 4 units of 128^2)   = 1.75 GHz
#     v6e     918e12 / (2 x 4 x 256^2)                    = 1.75 GHz
#     tpu7x  2307e12 / (2 cores x 2 x 4 x 256^2)          = 2.20 GHz
#
# jax's `TpuInfo` has 4 units of v5e and v5p, but 2 of v6e and tpu7x, of 256 x 256; Google's page of
# v6e has 2 or 4, by its version. Two would need 3.5 and 4.4 GHz, so work as of 4 is taken; a slower
# clock makes the harder bar. A GPU's clock is only part of its target configuration.
_SPECIFICATIONS = "docs.cloud.google.com/tpu/docs/tpu7x, table of v5p, v6e and TPU7x"
_DERIVED = "derived from its peak bf16 flops and matrix units"
_CHIPS = (
    _tpu(
        "v5e", "v5e:2x2", 1.5, 819e9,
        "bandwidth: cloud.google.com/tpu/docs/v6e, table of v5e and v6e; "
        "clock: jax-ml.github.io/scaling-book/tpus",
    ),
    _tpu(
        "v5p", "v5p:2x2x1", 1.75, 2765e9 / 2,
        f"bandwidth: half of {_SPECIFICATIONS}; clock: {_DERIVED}",
    ),
    _tpu("v6e", "v6e:2x2", 1.75, 1638e9, f"bandwidth: {_SPECIFICATIONS}; clock: {_DERIVED}"),
    _tpu(
        "tpu7x", "tpu7x:2x2x1", 2.2, 7380e9 / 2,
        f"bandwidth: half of {_SPECIFICATIONS}; clock: {_DERIVED}", branch_delay=6,
    ),
    _gpu(
        "sm_80", "NVIDIA A100-SXM4-80GB", (8, 0), clock_ghz=1.41, bandwidth=2039e9, num_cores=108,
        shared_memory_kib=164, threads_per_core=2048, l2_mib=40, memory_gib=80,
        source="NVIDIA A100 data sheet, 80 GB SXM; CUDA programming guide, compute capabilities",
    ),
    _gpu(
        "sm_86", "NVIDIA A40", (8, 6), clock_ghz=1.74, bandwidth=696e9, num_cores=84,
        shared_memory_kib=100, threads_per_core=1536, l2_mib=6, memory_gib=48,
        source="NVIDIA A40 data sheet; CUDA programming guide, compute capabilities",
    ),
    _gpu(
        "sm_89", "NVIDIA L4", (8, 9), clock_ghz=2.04, bandwidth=300e9, num_cores=58,
        shared_memory_kib=100, threads_per_core=1536, l2_mib=48, memory_gib=24,
        source="NVIDIA L4 data sheet; CUDA programming guide, compute capabilities",
    ),
    _gpu(
        "sm_90a", "NVIDIA H200", (9, 0), clock_ghz=1.98, bandwidth=4.8e12, num_cores=132,
        shared_memory_kib=228, threads_per_core=2048, l2_mib=50, memory_gib=141,
        source="NVIDIA H200 data sheet; CUDA programming guide, compute capabilities",
    ),
    _gpu(
        "sm_100a", "NVIDIA B200", (10, 0), clock_ghz=1.965, bandwidth=8e12, num_cores=148,
        shared_memory_kib=228, threads_per_core=2048, l2_mib=126, memory_gib=180,
        source="NVIDIA B200 data sheet; CUDA programming guide, compute capabilities",
    ),
)  # fmt: skip
CHIPS = {chip.name: chip for chip in _CHIPS}
