"""Paged attention on NVIDIA GPUs: which kernel serves which chip, and what none serves."""

import functools
import warnings

import jax.numpy as jnp

from paxkv.pallas_kernels.attention_call import AttentionArrays, AttentionSettings, PagedAttention
from paxkv.pallas_kernels.gpu_ampere import paged_attention_ampere
from paxkv.pallas_kernels.gpu_device import gpu_traced_for
from paxkv.pallas_kernels.gpu_hopper import paged_attention_hopper


def gpu_refusal(arrays: AttentionArrays) -> str | None:
    """Why no kernel of the GPU that is traced for takes such arrays; None: one does."""
    queries, key_pages = arrays.queries, arrays.key_pages
    if refusal := _chip_refusal():
        return refusal
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


def _chip_refusal() -> str | None:
    major, minor = gpu_traced_for().compute_capability
    if major >= 8:
        return None
    return (
        f"GPU kernels take compute capability 8.0 and later, found {major}.{minor}: use "
        "implementation='reference', plain JAX, which is slower"
    )


def warn_of_old_gpu() -> None:
    """Warns if no kernel serves the GPU that is traced for, whatever the arrays."""
    if refusal := _chip_refusal():
        _warn(f"paged attention runs without a kernel: {refusal}")


@functools.cache  # once, not once a layer
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def paged_attention_gpu(
    arrays: AttentionArrays, settings: AttentionSettings, *, interpret: bool = False
) -> PagedAttention:
    """`paged_attention` by the kernel of the GPU that it is traced for, see `gpu_traced_for`.

    It takes what `gpu_refusal` does not refuse. `interpret` runs it on the CPU, which raises where
    two threads race.
    """
    major, _ = gpu_traced_for(interpret=interpret).compute_capability
    attend = paged_attention_hopper if major == 9 else paged_attention_ampere
    return attend(arrays, settings, interpret=interpret)
