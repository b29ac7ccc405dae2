"""Paged attention on TPU: which kernel a call gets, and which calls get none."""

import jax.numpy as jnp

from paxkv.pallas_kernels.attention_call import AttentionArrays, AttentionSettings, PagedAttention
from paxkv.pallas_kernels.ragged import ragged_rows
from paxkv.pallas_kernels.tpu_decode import paged_decode_tpu
from paxkv.pallas_kernels.tpu_float16 import BITS, float16_from_bits, float16_to_bits
from paxkv.pallas_kernels.tpu_mixed import paged_mixed_tpu
from paxkv.pallas_kernels.tpu_tiles import bytes_per_token, chip_traced_for


def paged_attention_tpu(
    arrays: AttentionArrays, settings: AttentionSettings, *, interpret: bool = False
) -> PagedAttention:
    """`paged_attention` by a kernel for TPU, of what `tpu_refusal` lets pass.

    The pool arrays are updated in place: the results are the arguments' memory. `interpret` runs
    the kernel on the CPU, where a data race raises an error.
    """
    attend = paged_decode_tpu if settings.is_decode else paged_mixed_tpu
    if arrays.key_pages.dtype == BITS:
        bits = float16_to_bits(arrays)
        result = float16_from_bits(attend(bits, settings, interpret=interpret))
    else:
        result = attend(arrays, settings, interpret=interpret)
    # Rows that see nothing were perhaps never written: whatever lies there is not a result. That of
    # a token is its sink.
    rows = ragged_rows(arrays.queries.shape[0], arrays.cu_q_lens, arrays.kv_lens)
    first_seen = 0 if settings.window is None else rows.positions - settings.window + 1
    longest = arrays.block_tables.shape[1] * arrays.key_pages.shape[2]
    is_token = rows.is_token[:, None]
    is_set = (rows.is_token & (first_seen < longest))[:, None]
    unseen = -jnp.inf
    if arrays.sinks is not None:
        unseen = jnp.where(is_token, arrays.sinks.astype(jnp.float32), -jnp.inf)
    return result._replace(
        out=jnp.where(is_set[..., None], result.out, jnp.zeros((), result.out.dtype)),
        log_sum_exp=jnp.where(is_set, result.log_sum_exp, unseen),
    )


def tpu_refusal(arrays: AttentionArrays) -> str | None:
    """Why no kernel for TPU serves such dtypes or such large pages, or None if one does."""
    queries, key_pages = arrays.queries, arrays.key_pages
    if key_pages.dtype == jnp.float16:
        return "Mosaic takes no array of float16: keep the pool as its bits, in int16"
    numbers = jnp.float16 if key_pages.dtype == BITS else key_pages.dtype
    if numbers not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"pages are {key_pages.dtype}: keep the pool in bfloat16, float32 or float16's bits"
    if queries.dtype != numbers:
        return f"queries are {queries.dtype} and pages {key_pages.dtype}: cast one to the other"
    page_bytes = key_pages.shape[2] * bytes_per_token(key_pages)
    vmem_bytes = chip_traced_for().usable_vmem_bytes
    if 2 * page_bytes > vmem_bytes // 2:
        return (
            f"two pages of {page_bytes:,} bytes of K and V leave no room in {vmem_bytes:,} bytes "
            "of VMEM: take smaller pages or spread the KV heads over more chips"
        )
    return None
