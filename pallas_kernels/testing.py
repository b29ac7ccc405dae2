"""Holds an implementation of `paged_attention` to attention over dense arrays in float64.

    case = CASES["mixed_list"]  # of paxkv.pallas_kernels.attention_cases
    inputs = random_inputs(case, jnp.bfloat16)
    assert_right(inputs, paged_attention(**inputs.arguments, **inputs.settings))

Inputs are hostile where a kernel could go wrong unseen: what holds no token is NaN, physical
pages are shuffled, block tables hold garbage past each length, and the newest tokens (and those
at the window's far end) carry much of the weight, so that none can be missed within the tolerance.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from paxkv.pallas_kernels.attention import PagedAttention
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
    dtype: DTypeLike

    @property
    def settings(self) -> Settings:
        """What `paged_attention` takes as static keywords."""
        return Settings(scale=self.case.scale, window=self.case.window, soft_cap=self.case.soft_cap)


def tolerance(dtype: DTypeLike) -> float:
    """How far a result may be off, as a share of `max(1, |right|)`."""
    return 1e-5 if jnp.dtype(dtype) == jnp.float32 else 1e-2


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
    rng = np.random.default_rng(seed)
    size = case.page_size
    kv_lens = np.array([kv_len for _, kv_len in case.lengths])
    q_lens = np.array([q_len for q_len, _ in case.lengths])
    held = -(-kv_lens // size)
    max_pages = case.max_pages or int(held.max()) + 2
    num_pages = case.num_pages or int(held.sum()) + 4
    num_rows = case.num_rows or int(q_lens.sum()) + 3

    column = np.arange(max_pages)[None]
    is_held = column < held[:, None]
    if case.window is not None:
        first_seen = np.maximum(kv_lens - np.maximum(q_lens, 1) - case.window + 1, 0)
        is_held &= column >= (first_seen // size)[:, None]
    tables = np.full(is_held.shape, NULL_PAGE, np.int32)
    tables[is_held] = rng.permutation(np.arange(1, num_pages, dtype=np.int32))[: is_held.sum()]
    garbage = rng.integers(-(2**31), 2**31, tables.shape).astype(np.int32)
    plausible = rng.integers(0, num_pages, tables.shape).astype(np.int32)
    garbage = np.where(rng.random(tables.shape) < 0.5, plausible, garbage)
    block_tables = np.where(column < held[:, None], tables, garbage)

    def rounded(sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(x).astype(jnp.dtype(dtype)) for x in sequences]

    queries, keys, values = rounded(queries), rounded(keys), rounded(values)
    old = [(kv_len - q_len) * (kv_len > 0) for q_len, kv_len in case.lengths]
    shape = num_pages, *page_shape(case.num_kv_heads, size, case.head_dim)
    key_pages, value_pages = (
        _filled(np.full(shape, np.nan, jnp.dtype(dtype)), tables, tokens, [0] * len(old), old)
        for tokens in (keys, values)
    )

    def packed(sequences: Sequence[np.ndarray], num_heads: int) -> jax.Array:
        """The last `q_len` of each; NaN in padding and where an empty sequence has rows."""
        rows = np.full((num_rows, num_heads, case.head_dim), np.nan, jnp.dtype(dtype))
        for end, q_len, x in zip(np.cumsum(q_lens), q_lens, sequences, strict=True):
            tail = x[len(x) - min(q_len, len(x)) :]
            rows[end - len(tail) : end] = tail
        return jnp.asarray(rows)

    arguments = {
        "queries": packed(queries, case.num_heads),
        "new_keys": packed(keys, case.num_kv_heads),
        "new_values": packed(values, case.num_kv_heads),
        "key_pages": jnp.asarray(key_pages),
        "value_pages": jnp.asarray(value_pages),
        "block_tables": jnp.asarray(block_tables),
        "kv_lens": jnp.asarray(kv_lens, jnp.int32),
        "cu_q_lens": jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32),
    }
    if sinks is not None:
        arguments["sinks"] = jnp.asarray(sinks, jnp.float32)
    return Inputs(
        case=case,
        arguments=arguments,
        queries=[x.astype(np.float64) for x in queries],
        keys=[x.astype(np.float64) for x in keys],
        values=[x.astype(np.float64) for x in values],
        tables=tables,
        dtype=dtype,
    )


def _filled(
    pages: np.ndarray,
    tables: np.ndarray,
    sequences: Sequence[np.ndarray],
    first: Sequence[int],
    end: Sequence[int],
) -> np.ndarray:
    """Pages `[P, K, S, H]` with the tokens `first` to `end` of each sequence in their places."""
    pages = pages.copy()
    page_size = pages.shape[2]
    for slot, tokens in enumerate(sequences):
        position = np.arange(first[slot], end[slot])
        page_ids = tables[slot, position // page_size]
        position, page_ids = position[page_ids != NULL_PAGE], page_ids[page_ids != NULL_PAGE]
        pages[page_ids, :, position % page_size] = tokens[position]
    return pages


def dense_attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    is_stored: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of one sequence's last tokens over all of it, in float64 and in one piece.

    Args:
        queries: `[q, N, H]`.
        keys: `[n, K, H]`.
        values: `[n, K, H]`.
        scale: As for `paged_attention`, like the following three.
        window: See `scale`.
        soft_cap: See `scale`.
        sinks: `[N]`.
        is_stored: `bool[n]`, False for tokens that count as absent.

    Returns:
        Outputs `f64[q, N, H]` and log-sum-exp `f64[q, N]`, 0 and -inf where nothing is seen.
    """
    num_queries, num_heads, head_dim = queries.shape
    num_tokens, num_kv_heads, _ = keys.shape
    head = np.arange(num_heads) * num_kv_heads // num_heads
    scores = np.einsum("qnh,tnh->qnt", queries, keys[:, head], optimize=True)
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    token = np.arange(num_tokens)[None]
    position = np.arange(num_tokens - num_queries, num_tokens)[:, None]
    visible = token <= position
    if window is not None:
        visible &= token > position - window
    if is_stored is not None:
        visible &= is_stored[None]
    scores = np.where(visible[:, None], scores, -np.inf)
    if sinks is not None:
        extra = np.broadcast_to(np.asarray(sinks, np.float64)[:, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, extra], axis=-1)
    top = np.max(scores, axis=-1, initial=-1e300, keepdims=True)  # finite where nothing is seen
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1)
    weights = weights[..., :num_tokens] / np.where(total > 0, total, 1)[..., None]
    out = np.einsum("qnt,tnh->qnh", weights, values[:, head], optimize=True)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, top[..., 0] + np.log(total), -np.inf)
    return out, lse


def right_result(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """What `paged_attention` should return: outputs `f64[T, N, H]`, log-sum-exp `f64[T, N]`."""
    sinks = inputs.arguments.get("sinks")
    shape = inputs.arguments["queries"].shape
    out, lse = np.zeros(shape), np.full(shape[:2], -np.inf)
    ends = np.asarray(inputs.arguments["cu_q_lens"])[1:]
    for end, queries, keys, values in zip(
        ends, inputs.queries, inputs.keys, inputs.values, strict=True
    ):
        if len(keys):
            rows = slice(end - len(queries), end)
            out[rows], lse[rows] = dense_attention(
                queries, keys, values, sinks=None if sinks is None else np.asarray(sinks),
                **inputs.settings,
            )  # fmt: skip
    return out, lse


def right_pages(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """The pool arrays after the call: each new token in its slot, all else as it was."""
    lengths = [kv_len for _, kv_len in inputs.case.lengths]
    first = [max(kv_len - q_len, 0) for q_len, kv_len in inputs.case.lengths]
    key_pages, value_pages = (
        _filled(np.asarray(inputs.arguments[name]), inputs.tables, tokens, first, lengths)
        for name, tokens in (("key_pages", inputs.keys), ("value_pages", inputs.values))
    )
    return key_pages, value_pages


def assert_close(found: ArrayLike, right: np.ndarray, dtype: DTypeLike, what: str = "out") -> None:
    """Raises an AssertionError where `found` is off by more than the dtype's tolerance."""
    numbers = np.asarray(found).astype(np.float64)
    assert numbers.shape == right.shape, f"{what} has shape {numbers.shape}, not {right.shape}"
    with np.errstate(invalid="ignore"):  # -inf - -inf, where both see nothing
        error = np.abs(numbers - right) / np.maximum(1, np.abs(right))
    is_right = (error <= tolerance(dtype)) | (numbers == right)
    if not is_right.all():
        place = tuple(int(i) for i in np.argwhere(~is_right)[0])
        raise AssertionError(
            f"{what}{list(place)} is {numbers[place]}, not {right[place]}; "
            f"{(~is_right).mean():.1%} are off by more than {tolerance(dtype)}"
        )


def assert_right(inputs: Inputs, result: PagedAttention) -> None:
    """Raises an AssertionError unless a call on `inputs` returned what it should.

    Outputs and log-sum-exp may differ by the dtype's tolerance, the pool by not one bit.
    """
    assert result.out.dtype == jnp.dtype(inputs.dtype), f"out is {result.out.dtype}"
    out, lse = right_result(inputs)
    assert_close(result.out, out, inputs.dtype)
    assert_close(result.log_sum_exp, lse, inputs.dtype, "log_sum_exp")
    assert not np.asarray(result.out)[np.isneginf(lse)].any(), "rows that see nothing are not 0"
    for name, right in zip(("key_pages", "value_pages"), right_pages(inputs), strict=True):
        assert_same_bits(getattr(result, name), right, name)


def assert_same_bits(
    found: jax.Array | np.ndarray, right: jax.Array | np.ndarray, what: str = "out"
) -> None:
    """Raises an AssertionError unless two arrays are equal, a NaN to itself."""
    found_bits, right_bits = (np.asarray(x).view(f"u{x.dtype.itemsize}") for x in (found, right))
    differs = np.argwhere(found_bits != right_bits)
    assert not differs.size, f"{what} differ first at {differs[0]}, {len(differs)} in all"
