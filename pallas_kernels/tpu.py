"""Paged attention on TPU: which kernel a call gets, and which calls get none."""

import jax
import jax.numpy as jnp

from paxkv.pallas_kernels.ragged import ragged_rows
from paxkv.pallas_kernels.tpu_decode import paged_decode_tpu
from paxkv.pallas_kernels.tpu_mixed import paged_mixed_tpu
from paxkv.pallas_kernels.tpu_tiles import bytes_per_token, chip_traced_for


def paged_attention_tpu(
    queries: jax.Array,
    new_keys: jax.Array,
    new_values: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    max_q_len: int | None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`paged_attention` by a kernel for TPU; see there for the arguments.

    The pool arrays are updated in place: the results are the arguments' memory.

    Args:
        queries: `[T, N, H]`, as the others of a shape and dtype that `tpu_refusal` lets pass.
        new_keys: `[T, K, H]`.
        new_values: `[T, K, H]`.
        key_pages: `[P, K, S, H]`.
        value_pages: `[P, K, S, H]`.
        block_tables: `i32[B, M]`.
        kv_lens: `i32[B]`.
        cu_q_lens: `i32[B + 1]`.
        scale: What scores are multiplied by.
        window: Tokens a query sees, itself counted.
        soft_cap: What scaled scores are capped at.
        sinks: `f32[N]`.
        max_q_len: A bound on rows per sequence. 1 selects the decode kernel.
        interpret: Runs the kernel on the CPU, where a data race raises an error.

    Returns:
        Outputs `[T, N, H]`, log-sum-exp `f32[T, N]`, and the two pool arrays.
    """
    attend = paged_decode_tpu if max_q_len == 1 else paged_mixed_tpu
    out, lse, key_pages, value_pages = attend(
        queries, new_keys, new_values, key_pages, value_pages, block_tables, kv_lens, cu_q_lens,
        scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, interpret=interpret,
    )  # fmt: skip
    # Rows that see nothing were perhaps never written: whatever lies there is not a result.
    rows = ragged_rows(queries.shape[0], cu_q_lens, kv_lens)
    first_seen = 0 if window is None else rows.positions - window + 1
    longest = block_tables.shape[1] * key_pages.shape[2]
    is_set = (rows.is_token & (first_seen < longest))[:, None]
    out = jnp.where(is_set[..., None], out, jnp.zeros((), out.dtype))
    return out, jnp.where(is_set, lse, -jnp.inf), key_pages, value_pages


def tpu_refusal(queries: jax.Array, key_pages: jax.Array) -> str | None:
    """Why no kernel for TPU serves such dtypes or such large pages, or None if one does."""
    if queries.dtype != key_pages.dtype:
        return f"queries are {queries.dtype} and pages {key_pages.dtype}: cast one to the other"
    if key_pages.dtype not in (jnp.bfloat16, jnp.float32):
        return f"TPUs have no {key_pages.dtype} registers: keep the pool in bfloat16 or float32"
    page_bytes = key_pages.shape[2] * bytes_per_token(key_pages)
    vmem_bytes = chip_traced_for().usable_vmem_bytes
    if 2 * page_bytes > vmem_bytes // 2:
        return (
            f"two pages of {page_bytes:,} bytes of K and V leave no room in {vmem_bytes:,} bytes "
            "of VMEM: take smaller pages or spread the KV heads over more chips"
        )
    return None
