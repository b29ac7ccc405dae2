"""What `paged_attention` refuses, and why."""

import math
import operator
from collections.abc import Callable
from typing import Any, SupportsFloat, SupportsIndex

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from paxkv.pallas_kernels.attention_call import AttentionArrays, AttentionSettings


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raises a ValueError unless every KV head serves a whole number of query heads."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly: the number of "
            "query heads must be a multiple of the number of KV heads"
        )


def whole_number(name: str, number: SupportsIndex | None) -> int | None:
    """A setting as an `int`; None stays None.

    Raises:
        ValueError: It is no whole number, or not known before the call runs.
    """
    return None if number is None else _known(name, number, operator.index, "a whole number")


def real_number(name: str, number: SupportsFloat | None) -> float | None:
    """A setting as a `float`; None stays None.

    Raises:
        ValueError: It is no number, or not known before the call runs.
    """
    return None if number is None else _known(name, number, float, "a number")


def _known[N](name: str, number: Any, convert: Callable[[Any], N], what: str) -> N:
    try:
        return convert(number)
    except TypeError:
        raise ValueError(
            f"{name}={number!r} must be {what} that is known when the call is compiled"
        ) from None


def check_arguments(arrays: AttentionArrays, settings: AttentionSettings) -> None:
    """Raises a ValueError unless the arguments of `paged_attention` fit together."""
    (
        queries, new_keys, new_values, key_pages, value_pages, block_tables, kv_lens, cu_q_lens,
        sinks,
    ) = arrays  # fmt: skip
    scale, window, soft_cap, max_q_len = settings
    if queries.ndim != 3:
        raise ValueError(f"queries must be [T, N, H], found shape {queries.shape}")
    num_rows, num_heads, head_dim = queries.shape
    if not (num_rows and block_tables.size):
        raise ValueError(
            f"there must be at least one row, one sequence and one page for each, found queries "
            f"{queries.shape} and block_tables {block_tables.shape}"
        )
    if key_pages.ndim != 4 or key_pages.shape != value_pages.shape:
        raise ValueError(
            "key_pages and value_pages must both be [P, K, S, H], "
            f"found {key_pages.shape} and {value_pages.shape}"
        )
    if key_pages.dtype != value_pages.dtype:
        raise ValueError(
            f"key_pages and value_pages must be of one dtype, found {key_pages.dtype} and "
            f"{value_pages.dtype}"
        )
    num_kv_heads = key_pages.shape[1]
    check_heads(num_heads, num_kv_heads)
    if key_pages.shape[3] < head_dim:
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
    for name, x in zip(arrays._fields[5:8], (block_tables, kv_lens, cu_q_lens), strict=True):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} must hold whole numbers, found {x.dtype}: give int32")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(
            f"sinks must hold one logit per query head [{num_heads}], found {sinks.shape}"
        )
    if window is not None and window < 1:
        raise ValueError(f"{window=} must be at least 1, the query itself; None sees everything")
    if not math.isfinite(scale):
        raise ValueError(f"{scale=} must be finite; None is H ** -0.5")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"{soft_cap=} must be above 0 and finite; None does not cap")
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
