"""Holds an implementation of `paged_attention` to attention over dense arrays in float64.

case = CASES["mixed_list"]  # of paxkv.pallas_kernels.attention_cases
inputs = random_inputs(case, jnp.bfloat16)  # of paxkv.pallas_kernels.attention_inputs
assert_right(inputs, paged_attention(**inputs.arguments, **inputs.settings))
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from paxkv.pallas_kernels.attention_call import PagedAttention
from paxkv.pallas_kernels.attention_inputs import Inputs, filled_pages


def tolerance(dtype: DTypeLike) -> float:
    """How far a result may be off, as a share of `max(1, |right|)`."""
    return 1e-5 if jnp.dtype(dtype) == jnp.float32 else 1e-2


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
    new = [(max(kv_len - q_len, 0), kv_len) for q_len, kv_len in inputs.case.lengths]
    key_pages, value_pages = (
        filled_pages(np.asarray(inputs.arguments[name]), inputs.tables, tokens, new)
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
