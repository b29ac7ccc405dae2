"""Paged attention on NVIDIA GPUs: which kernel serves which chip."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from paxkv.pallas_kernels.attention_call import AttentionArrays, AttentionSettings, PagedAttention
from paxkv.pallas_kernels.gpu_hopper import paged_attention_hopper
from paxkv.pallas_kernels.reference import paged_attention_reference

_HOPPER = (9, 0)


def gpu_refusal(arrays: AttentionArrays) -> str | None:
    """Why no GPU kernel takes queries and pages of such dtypes; None: one does."""
    queries, key_pages = arrays.queries, arrays.key_pages
    if queries.dtype == jnp.float32 or key_pages.dtype == jnp.float32:
        return (
            "GPU kernels take bfloat16 and float16, found float32, which tensor cores would round "
            "to TF32: use implementation='reference'"
        )
    if queries.dtype != key_pages.dtype or queries.dtype not in (jnp.bfloat16, jnp.float16):
        return (
            "GPU kernels take queries and pages both in bfloat16 or both in float16, "
            f"found {queries.dtype} and {key_pages.dtype}"
        )
    return None


def paged_attention_gpu(
    arrays: AttentionArrays, settings: AttentionSettings, *, interpret: bool = False
) -> PagedAttention:
    """`paged_attention` by the kernel of the GPU that it is traced for.

    The GPU is the default device (`jax.default_device`) or else the first of this machine; where
    there is none, as when exporting, the program is for Hopper. What no kernel takes, and GPUs
    before Ampere, take the reference.

    `interpret` runs the kernel on the CPU, which raises where two threads race.
    """
    major, minor = compute_capability()
    if major < 8:
        _warn_of_old_gpu(major, minor)
    if major < 8 or gpu_refusal(arrays) is not None:
        return paged_attention_reference(arrays, settings)
    if major == 9:
        return paged_attention_hopper(
            arrays, settings, interpret=interpret,
            # An interpreter takes turns for all: few.
            num_multiprocessors=4 if interpret else getattr(_gpu(), "core_count", 132),
        )  # fmt: skip
    from paxkv.pallas_kernels.gpu_ampere import paged_attention_ampere

    return paged_attention_ampere(arrays, settings, interpret=interpret)


def compute_capability() -> tuple[int, int]:
    """Of the GPU that programs are traced for: (9, 0) for Hopper, and where there is none."""
    gpu = _gpu()
    if gpu is None:
        return _HOPPER
    major, minor = str(gpu.compute_capability).split(".")
    return int(major), int(minor)


def _gpu() -> Any:
    """The default device if that is a GPU, else this machine's first one, else None."""
    device = jax.config.jax_default_device
    if device is not None and not isinstance(device, str) and device.platform in ("gpu", "cuda"):
        return device
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:  # no such backend
        return None


@functools.cache  # once, not once a layer
def _warn_of_old_gpu(major: int, minor: int) -> None:
    warnings.warn(
        f"paxkv has no attention kernel for GPUs of compute capability {major}.{minor}, only from "
        "8.0 on: it runs in plain JAX, which is slower",
        stacklevel=3,
    )
