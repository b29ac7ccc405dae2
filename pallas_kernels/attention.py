"""Attention over a paged KV cache: one call for prefill, chunks of prefill and decode."""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.core
import numpy as np
from jax import lax

from paxkv.pallas_kernels.reference import paged_attention_reference

type Implementation = Literal["reference", "tpu", "gpu"]

# What the kernels take; the reference takes any.
KERNEL_HEAD_DIMS = (64, 80, 96, 128, 256)
KERNEL_PAGE_SIZES = (8, 16, 32, 64, 128, 256)
KERNEL_MAX_GROUP = 16  # query heads of a KV head


class PagedAttention(NamedTuple):
    """What `paged_attention` returns."""

    out: jax.Array  # [T, N, H] in the queries' dtype
    key_pages: jax.Array  # [P, K, S, H] with the new tokens in it
    value_pages: jax.Array  # [P, K, S, H]
    log_sum_exp: jax.Array  # f32[T, N] of scores and sinks, -inf where a row sees no key


def paged_attention(
    queries: jax.Array,
    new_keys: jax.Array,
    new_values: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    max_q_len: int | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> PagedAttention:
    """Writes new tokens to their pages, then attends from each over its sequence so far.

    Sequences come packed: the rows `cu_q_lens[b]` to `cu_q_lens[b + 1]` are the last tokens of
    sequence `b`, whose `kv_lens[b]` tokens count them. Query `i` of `q_len` stands at position
    `kv_len - q_len + i` and sees the keys at and before it. Rows past `cu_q_lens[B]` are padding.

    Rows of padding and of sequences with `kv_len` 0 give zeros. What lies in pages outside the
    valid tokens, NaN included, changes nothing. Scores are scaled, then capped, then masked;
    products and sums are accumulated in float32.

    Args:
        queries: `[T, N, H]`.
        new_keys: `[T, K, H]`; N is a multiple of K, and query head `h` reads KV head `h * K // N`.
        new_values: `[T, K, H]`.
        key_pages: `[P, K, S, H]`. Donate it where you jit: the result takes its place.
        value_pages: `[P, K, S, H]`.
        block_tables: `i32[B, M]`, page ids in token order. Page 0 is the null page. Ids that name
            no page are refused if the arrays are concrete; within `jit` they are never read or
            written, and tokens there count as absent.
        kv_lens: `i32[B]`.
        cu_q_lens: `i32[B + 1]`, from 0, not falling.
        scale: What scores are multiplied by; `H ** -0.5` when None.
        window: Tokens a query sees, itself counted. None sees all before it.
        soft_cap: Caps scaled scores at `soft_cap * tanh(score / soft_cap)`.
        sinks: `f32[N]`, a learned logit per head that joins the softmax's denominator only.
        max_q_len: A bound on rows per sequence, if known. 1 selects the decode path.
        implementation: A named one works or raises. None takes the kernel of the platform that
            the program is lowered for, where it has one for the shapes, else the reference.
        interpret: Runs the kernel that `implementation` names on a CPU, slowly; it raises if it
            finds a data race.

    Raises:
        ValueError: Shapes or settings do not fit, or the named implementation does not serve
            them; the message says which and what would.
    """
    _check(
        queries, new_keys, new_values, key_pages, value_pages, block_tables, kv_lens, cu_q_lens,
        window, soft_cap, sinks, max_q_len,
    )  # fmt: skip
    arrays = (
        queries, new_keys, new_values, key_pages, value_pages, block_tables, kv_lens, cu_q_lens,
        sinks,
    )  # fmt: skip
    attend = functools.partial(
        _choose(implementation, queries, key_pages, interpret=interpret),
        scale=queries.shape[-1] ** -0.5 if scale is None else scale,
        window=window, soft_cap=soft_cap, max_q_len=max_q_len,
    )  # fmt: skip
    out, lse, key_pages, value_pages = attend(*arrays)
    return PagedAttention(out, key_pages, value_pages, lse)


def _choose(
    implementation: Implementation | None,
    queries: jax.Array,
    key_pages: jax.Array,
    *,
    interpret: bool,
) -> Callable[..., tuple[jax.Array, ...]]:
    """The implementation that is named, or one that is settled when the program is lowered."""
    if implementation is None:
        served = {
            "tpu" if name == "tpu" else "cuda": name
            for name in ("tpu", "gpu")
            if _refusal(name, queries, key_pages) is None
        }
        if not served:
            return _reference

        def by_platform(*arrays: jax.Array, **settings) -> tuple[jax.Array, ...]:
            branches = {
                platform: functools.partial(_kernel, implementation=name, **settings)
                for platform, name in served.items()
            }
            default = functools.partial(_reference, **settings)
            return lax.platform_dependent(*arrays, default=default, **branches)

        return by_platform
    choices = get_args(Implementation.__value__)
    if implementation not in choices:
        raise ValueError(f"{implementation=} is not one of {', '.join(map(repr, choices))} or None")
    if implementation == "reference":
        return _reference
    if refusal := _refusal(implementation, queries, key_pages):
        raise ValueError(f"{implementation=} does not serve this call: {refusal}")
    is_concrete = not isinstance(queries, jax.core.Tracer)
    if is_concrete and not interpret and (platform := jax.default_backend()) != implementation:
        raise ValueError(
            f"{implementation=} does not run on {platform}: leave the choice to the platform, or "
            "set interpret=True to try a kernel out"
        )
    return functools.partial(_kernel, implementation=implementation, interpret=interpret)


def _refusal(
    implementation: Implementation, queries: jax.Array, key_pages: jax.Array
) -> str | None:
    """Why a kernel does not serve such shapes, or None if it does."""
    _, num_kv_heads, page_size, head_dim = key_pages.shape
    if page_size not in KERNEL_PAGE_SIZES:
        return f"pages hold {page_size} tokens; it takes one of {KERNEL_PAGE_SIZES}"
    if head_dim not in KERNEL_HEAD_DIMS:
        return f"heads have {head_dim} numbers; it takes one of {KERNEL_HEAD_DIMS}"
    group = queries.shape[1] // num_kv_heads
    if group > KERNEL_MAX_GROUP:
        return f"{group} query heads share a KV head; it takes up to {KERNEL_MAX_GROUP}"
    # Pallas takes a second to import, and only shapes that pass need it.
    if implementation == "tpu":
        from paxkv.pallas_kernels.tpu import tpu_refusal as refusal
    else:
        from paxkv.pallas_kernels.gpu import gpu_refusal as refusal
    return refusal(queries, key_pages)


@functools.partial(
    jax.jit,
    static_argnames=("implementation", "scale", "window", "soft_cap", "max_q_len", "interpret"),
)
def _kernel(
    *arrays: jax.Array, implementation: Implementation, interpret: bool = False, **settings
) -> tuple[jax.Array, ...]:
    """Traced once for all layers, also where it is not the branch that is lowered."""
    if implementation == "tpu":
        from paxkv.pallas_kernels.tpu import paged_attention_tpu as attend
    else:
        from paxkv.pallas_kernels.gpu import paged_attention_gpu as attend
    *arrays, sinks = arrays
    return attend(*arrays, sinks=sinks, interpret=interpret, **settings)


def _reference(*arrays: jax.Array, **settings) -> tuple[jax.Array, ...]:
    *arrays, sinks = arrays
    return paged_attention_reference(*arrays, sinks=sinks, **settings)


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raises a ValueError unless every KV head serves a whole number of query heads."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly: the number of "
            "query heads must be a multiple of the number of KV heads"
        )


def _check(
    queries, new_keys, new_values, key_pages, value_pages, block_tables, kv_lens, cu_q_lens,
    window, soft_cap, sinks, max_q_len,
) -> None:  # fmt: skip
    if queries.ndim != 3:
        raise ValueError(f"queries must be [T, N, H], found shape {queries.shape}")
    num_rows, num_heads, head_dim = queries.shape
    if key_pages.ndim != 4 or key_pages.shape != value_pages.shape:
        raise ValueError(
            "key_pages and value_pages must both be [P, K, S, H], "
            f"found {key_pages.shape} and {value_pages.shape}"
        )
    num_kv_heads = key_pages.shape[1]
    check_heads(num_heads, num_kv_heads)
    if key_pages.shape[3] != head_dim:
        raise ValueError(f"pages hold heads of {key_pages.shape[3]} numbers, queries of {head_dim}")
    new_shape = (num_rows, num_kv_heads, head_dim)
    if new_keys.shape != new_shape or new_values.shape != new_shape:
        raise ValueError(
            f"new_keys and new_values must be {new_shape}, the rows of queries and the heads of "
            f"pages; found {new_keys.shape} and {new_values.shape}"
        )
    if block_tables.ndim != 2 or kv_lens.shape != (block_tables.shape[0],):
        raise ValueError(
            f"block_tables must be [B, M] and kv_lens [B], "
            f"found {block_tables.shape} and {kv_lens.shape}"
        )
    if cu_q_lens.shape != (block_tables.shape[0] + 1,):
        raise ValueError(
            f"cu_q_lens must be [B + 1] = [{block_tables.shape[0] + 1}], found {cu_q_lens.shape}"
        )
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(
            f"sinks must hold one logit per query head [{num_heads}], found {sinks.shape}"
        )
    if window is not None and window < 1:
        raise ValueError(f"{window=} must be at least 1, the query itself; None sees everything")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"{soft_cap=} must be above 0; None does not cap")
    if max_q_len is not None and max_q_len < 1:
        raise ValueError(f"{max_q_len=} must be at least 1")
    _check_tables(block_tables, kv_lens, cu_q_lens, num_pages=key_pages.shape[0],
                  page_size=key_pages.shape[2], num_rows=num_rows)  # fmt: skip


def _check_tables(block_tables, kv_lens, cu_q_lens, *, num_pages, page_size, num_rows) -> None:
    """Checks values where they can be read: not under `jit`."""
    if any(isinstance(x, jax.core.Tracer) for x in (block_tables, kv_lens, cu_q_lens)):
        return
    tables, lens, cu = np.asarray(block_tables), np.asarray(kv_lens), np.asarray(cu_q_lens)
    longest = tables.shape[1] * page_size
    if lens.size and (lens.min() < 0 or lens.max() > longest):
        raise ValueError(
            f"kv_lens must be between 0 and {longest} (pages per row x page size), "
            f"found {lens.min()} to {lens.max()}"
        )
    if cu[0] != 0 or np.any(np.diff(cu) < 0) or cu[-1] > num_rows:
        raise ValueError(
            f"cu_q_lens must start at 0, not fall, and end by the {num_rows} rows, found {cu}"
        )
    in_use = np.arange(tables.shape[1])[None] * page_size < lens[:, None]
    bad = in_use & ((tables < 0) | (tables >= num_pages))
    if bad.any():
        slot, column = np.argwhere(bad)[0]
        raise ValueError(
            f"block_tables[{slot}, {column}] is page {tables[slot, column]}, "
            f"but the pool has pages 0 to {num_pages - 1}"
        )
