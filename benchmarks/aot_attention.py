"""Attention to be compiled ahead of time: the test cases, and shapes that no test can interpret."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from benchmarks.aot import Job
from paxkv.pallas_kernels import paged_attention
from paxkv.pallas_kernels.attention_cases import CASES, HEADS, Case

# Whose kernels are compiled for which platform.
IMPLEMENTATIONS = {"tpu": "tpu", "cuda": "gpu"}

_LONG = Case(lengths=((1, 131_072),) * 4, num_heads=32, num_kv_heads=8, head_dim=128)
BIG_CASES = {
    "big_decode_131072_tokens": _LONG,
    "big_decode_1024_sequences": Case(
        lengths=((1, 2048),) * 1024, num_heads=32, num_kv_heads=8, head_dim=128
    ),
    "big_prefill_4096_rows": Case(
        lengths=((4096, 4096),), num_heads=32, num_kv_heads=8, head_dim=128
    ),
    "big_prefill_131072_tokens": Case(
        lengths=((512, 131_072), (1, 100)), num_heads=32, num_kv_heads=8, head_dim=128
    ),
    "big_pool": Case(  # more than 2^31 elements in each of its arrays, and yet room on a v5e
        lengths=((1, 4096),) * 8, num_heads=32, num_kv_heads=8, head_dim=128, num_pages=2**17 + 64
    ),
    "big_pool_prefill": Case(
        lengths=((64, 4096),) * 2, num_heads=32, num_kv_heads=8, head_dim=128, num_pages=2**17 + 64
    ),
}
_SHAPES = {
    **{
        f"shape_page_{page_size}": Case(
            lengths=((1, 700),) * 8, num_heads=32, num_kv_heads=8, head_dim=128,
            page_size=page_size,
        )
        for page_size in (8, 16, 32, 64, 128, 256)
    },
    **{
        f"shape_head_dim_{head_dim}": Case(
            lengths=((1, 700),) * 8, num_heads=8, num_kv_heads=2, head_dim=head_dim
        )
        for head_dim in (64, 80, 96, 128, 256)
    },
    **{
        f"shape_group_{num_heads}_{num_kv_heads}": Case(
            lengths=((1, 700),) * 8, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=128
        )
        for num_heads, num_kv_heads in (*HEADS, (16, 1), (16, 16))
    },
}  # fmt: skip
ATTENTION_CASES = {
    name: case for name, case in (CASES | _SHAPES | BIG_CASES).items() if case.page_size >= 8
}


def attention_job(
    case: Case, *, max_q_len: int | None, implementation: Any, dtype: DTypeLike = jnp.bfloat16
) -> Job:
    """Attention on one case's shapes, the pool donated."""
    arguments = attention_shapes(case, dtype)
    if implementation == "tpu" and dtype == "float16":  # see `layout.stored_dtype`
        for name in ("key_pages", "value_pages"):
            arguments[name] = arguments[name].update(dtype=jnp.int16)

    def attend(arguments: dict[str, Any], key_pages: jax.Array, value_pages: jax.Array):
        return paged_attention(
            **arguments, key_pages=key_pages, value_pages=value_pages, scale=case.scale,
            window=case.window, soft_cap=case.soft_cap, max_q_len=max_q_len,
            implementation=implementation,
        )  # fmt: skip

    pools = [arguments.pop(name) for name in ("key_pages", "value_pages")]
    return Job(function=attend, arguments=(arguments, *pools), donated=(1, 2), pool=pools[0].shape)


def attention_shapes(case: Case, dtype: DTypeLike) -> dict[str, jax.ShapeDtypeStruct]:
    """The arguments of `paged_attention` for a case, without memory."""
    shape = jax.ShapeDtypeStruct
    num_held = [-(-kv_len // case.page_size) for _, kv_len in case.lengths]
    num_rows = case.num_rows or sum(q_len for q_len, _ in case.lengths) + 3
    num_slots = len(case.lengths)
    max_pages = case.max_pages or max(num_held) + 2
    num_pages = case.num_pages or sum(num_held) + 4
    new = shape((num_rows, case.num_kv_heads, case.head_dim), dtype)
    pages = shape((num_pages, case.num_kv_heads, case.page_size, case.head_dim), dtype)
    arguments = {
        "queries": shape((num_rows, case.num_heads, case.head_dim), dtype),
        "new_keys": new,
        "new_values": new,
        "key_pages": pages,
        "value_pages": pages,
        "block_tables": shape((num_slots, max_pages), jnp.int32),
        "kv_lens": shape((num_slots,), jnp.int32),
        "cu_q_lens": shape((num_slots + 1,), jnp.int32),
    }
    if case.has_sinks:
        arguments["sinks"] = shape((case.num_heads,), jnp.float32)
    return arguments
