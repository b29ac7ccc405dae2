"""Inputs of `paged_attention` that are hostile where a kernel could go wrong unseen.

What holds no token is NaN, physical pages are shuffled, block tables hold garbage past each
length, and the newest tokens (and those at the window's far end) carry much of the weight, so
that none can be missed within the tolerance.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypedDict

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from paxkv.pallas_kernels.attention_cases import Case
from paxkv.pallas_kernels.layout import NULL_PAGE, page_shape


class Settings(TypedDict):
    """Static keywords of `paged_attention`."""

    scale: float | None
    window: int | None
    soft_cap: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One call's arguments, and the same tokens dense, in float64."""

    case: Case
    arguments: dict[str, Any]  # the arrays `paged_attention` takes, by name
    queries: list[np.ndarray]  # of each sequence f64[q_len, N, H]
    keys: list[np.ndarray]  # f64[kv_len, K, H]
    values: list[np.ndarray]  # f64[kv_len, K, H]
    tables: np.ndarray  # i32[B, M] with the null page where there is no token
    dtype: np.dtype

    @property
    def settings(self) -> Settings:
        """What `paged_attention` takes as static keywords."""
        return Settings(scale=self.case.scale, window=self.case.window, soft_cap=self.case.soft_cap)


def random_inputs(case: Case, dtype: DTypeLike, seed: int = 0) -> Inputs:
    """Fills a case with random tokens."""
    rng = np.random.default_rng(seed)
    make = _huge_sequence if case.has_huge_scores else _loud_sequence
    sequences = [make(case, q_len, kv_len, rng) for q_len, kv_len in case.lengths]
    queries, keys, values = (list(column) for column in zip(*sequences, strict=True))
    longest = max(kv_len for _, kv_len in case.lengths)
    sinks = rng.normal(math.log(longest + 1) - 1, 1, case.num_heads) if case.has_sinks else None
    return pack_inputs(case, queries, keys, values, dtype, sinks=sinks, seed=seed)


def _loud_sequence(
    case: Case, q_len: int, kv_len: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values whose loud tokens weigh as much as all others together."""
    queries, keys, values = _normal_sequence(case, q_len, kv_len, rng)
    direction = rng.normal(size=(case.num_kv_heads, case.head_dim))
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    seen = min(kv_len, case.window or kv_len)
    strength = math.sqrt(math.log(1 + seen) / scale)  # e ** score is then 1 + seen
    far_end = [] if case.window is None else [kv_len - case.window - 1, kv_len - case.window]
    loud = [place for place in (*far_end, kv_len - 2, kv_len - 1) if 0 <= place < kv_len]
    keys[sorted(set(loud))] += strength * direction
    queries += strength * np.repeat(direction, case.num_heads // case.num_kv_heads, axis=0)
    return queries, keys, values


def _huge_sequence(
    case: Case, q_len: int, kv_len: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries and keys of small whole numbers: scores are huge, and exact in any dtype."""
    queries, keys, values = _normal_sequence(case, q_len, kv_len, rng)
    return np.rint(3 * queries), np.rint(3 * keys), values


def _normal_sequence(
    case: Case, q_len: int, kv_len: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    kv_shape = kv_len, case.num_kv_heads, case.head_dim
    return (
        rng.normal(size=(q_len, case.num_heads, case.head_dim)),
        rng.normal(size=kv_shape),
        rng.normal(size=kv_shape),
    )


def pack_inputs(
    case: Case,
    queries: Sequence[np.ndarray],
    keys: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    dtype: DTypeLike,
    *,
    sinks: np.ndarray | None = None,
    seed: int = 0,
) -> Inputs:
    """Lays sequences out in shuffled pages, all but each one's last `q_len` tokens.

    Pages that lie before every query's window are given up: their entries are the null page.

    Args:
        case: Its lengths are those of the sequences.
        queries: Of each sequence `[q_len, N, H]`.
        keys: Of each sequence `[kv_len, K, H]`, the new tokens' last.
        values: As `keys`.
        dtype: Of queries, keys and values.
        sinks: `[N]`.
        seed: Of the pages' order and of the garbage.
    """
    dtype = jnp.dtype(dtype)
    q_lens, kv_lens = np.array(case.lengths, np.int32).T
    tables, block_tables, num_pages = _shuffled_tables(case, np.random.default_rng(seed))
    queries, keys, values = ([x.astype(dtype) for x in part] for part in (queries, keys, values))
    num_rows = case.num_rows or int(q_lens.sum()) + 3
    shape = num_pages, *page_shape(case.num_kv_heads, case.page_size, case.head_dim)
    old = [(0, max(kv_len - q_len, 0)) for q_len, kv_len in case.lengths]
    arguments = {
        "queries": _packed(case, queries, num_rows),
        "new_keys": _packed(case, keys, num_rows),
        "new_values": _packed(case, values, num_rows),
        "key_pages": filled_pages(np.full(shape, np.nan, dtype), tables, keys, old),
        "value_pages": filled_pages(np.full(shape, np.nan, dtype), tables, values, old),
        "block_tables": block_tables,
        "kv_lens": kv_lens,
        "cu_q_lens": np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32),
    }
    if sinks is not None:
        arguments["sinks"] = sinks.astype(np.float32)
    return Inputs(
        case=case,
        arguments={name: jnp.asarray(x) for name, x in arguments.items()},
        queries=[x.astype(np.float64) for x in queries],
        keys=[x.astype(np.float64) for x in keys],
        values=[x.astype(np.float64) for x in values],
        tables=tables,
        dtype=dtype,
    )


def _shuffled_tables(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    """Block tables `i32[B, M]` without and with garbage past the length, and how many pages."""
    q_lens, kv_lens = np.array(case.lengths).T
    num_held = -(-kv_lens // case.page_size)
    max_pages = case.max_pages or int(num_held.max()) + 2
    num_pages = case.num_pages or int(num_held.sum()) + 4
    column = np.arange(max_pages)[None]
    within_length = column < num_held[:, None]
    is_held = within_length
    if case.window is not None:
        first_seen = np.maximum(kv_lens - np.maximum(q_lens, 1) - case.window + 1, 0)
        is_held = is_held & (column >= (first_seen // case.page_size)[:, None])
    tables = np.full(is_held.shape, NULL_PAGE, np.int32)
    tables[is_held] = rng.permutation(np.arange(1, num_pages))[: is_held.sum()]
    anything = rng.integers(-(2**31), 2**31, tables.shape).astype(np.int32)
    garbage = np.where(rng.random(tables.shape) < 0.5, anything, anything % num_pages)
    return tables, np.where(within_length, tables, garbage), num_pages


def _packed(case: Case, sequences: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
    """The last `q_len` of each sequence in rows; NaN in rows that are no token's."""
    rows = np.full((num_rows, *sequences[0].shape[1:]), np.nan, sequences[0].dtype)
    end = 0
    for (q_len, kv_len), tokens in zip(case.lengths, sequences, strict=True):
        end += q_len
        if q_len and kv_len:
            rows[end - q_len : end] = tokens[-q_len:]
    return rows


def filled_pages(
    pages: np.ndarray,
    tables: np.ndarray,
    sequences: Sequence[np.ndarray],
    spans: Sequence[tuple[int, int]],
) -> np.ndarray:
    """Pages `[P, K, S, H]` with some tokens of each sequence, `[first, end)`, in their places."""
    pages = pages.copy()
    page_size = pages.shape[2]
    for table, tokens, span in zip(tables, sequences, spans, strict=True):
        position = np.arange(*span)
        position = position[table[position // page_size] != NULL_PAGE]
        pages[table[position // page_size], :, position % page_size] = tokens[position]
    return pages
