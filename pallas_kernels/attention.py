"""Attention over a paged KV cache: one call for prefill, chunks of prefill and decode."""

import functools
from typing import Literal, get_args

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from paxkv.pallas_kernels.attention_call import AttentionArrays, AttentionSettings, PagedAttention
from paxkv.pallas_kernels.attention_checks import check_arguments, real_number, whole_number
from paxkv.pallas_kernels.layout import fill_heads, from_stored, to_stored
from paxkv.pallas_kernels.per_platform import Function, per_platform
from paxkv.pallas_kernels.reference import paged_attention_reference

type Implementation = Literal["reference", "tpu", "gpu"]

# What the kernels take; the reference takes any.
KERNEL_HEAD_DIMS = (64, 80, 96, 128, 256)
KERNEL_PAGE_SIZES = (8, 16, 32, 64, 128, 256)
KERNEL_MAX_GROUP = 16  # query heads of a KV head

_MOST_WINDOW = 2**30  # it hides nothing, and sums of it and a position fit in int32


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
    products and sums are accumulated in float32. It is neither differentiated nor vmapped: pack
    sequences, and train through `paxkv.CausalView`.

    Args:
        queries: `[T, N, H]`.
        new_keys: `[T, K, H]`; N is a multiple of K, and query head `h` reads KV head `h * K // N`.
        new_values: `[T, K, H]`.
        key_pages: `[P, K, S, H]`, or with wider heads, whose further numbers are zeros, see
            `layout.page_shape`; in int16 it holds the bits of float16, see
            `layout.stored_dtype`. Donate it where you jit: the result takes its place.
        value_pages: `[P, K, S, H]`.
        block_tables: `i32[B, M]`, page ids in token order. Page 0 is the null page. Ids that name
            no page are refused if the arrays are concrete; within `jit` they are never read or
            written, and tokens there count as absent. Whole numbers of any dtype serve, here and in
            the next two, and become int32.
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
    head_dim, stored_dim = queries.shape[-1], key_pages.shape[-1]
    arrays = AttentionArrays(
        queries, new_keys, new_values, key_pages, value_pages, block_tables, kv_lens, cu_q_lens,
        sinks,
    )  # fmt: skip
    scale, window = real_number("scale", scale), whole_number("window", window)
    settings = AttentionSettings(
        scale=head_dim**-0.5 if scale is None else scale,
        window=None if window is None else min(window, _MOST_WINDOW),
        soft_cap=real_number("soft_cap", soft_cap),
        max_q_len=whole_number("max_q_len", max_q_len),
    )
    check_arguments(arrays, settings)
    arrays = arrays._replace(  # sums of narrower or unsigned numbers would wrap
        block_tables=jnp.asarray(block_tables, jnp.int32),
        kv_lens=jnp.asarray(kv_lens, jnp.int32),
        cu_q_lens=jnp.asarray(cu_q_lens, jnp.int32),
    )
    attend = _choose(implementation, arrays, interpret=interpret)
    if head_dim < stored_dim:
        arrays = arrays._replace(
            queries=fill_heads(queries, stored_dim),
            new_keys=fill_heads(new_keys, stored_dim),
            new_values=fill_heads(new_values, stored_dim),
        )
    result = PagedAttention(*attend(*jax.tree.leaves(arrays), settings=settings))
    return result._replace(out=result.out[..., :head_dim])


def _choose(
    implementation: Implementation | None, arrays: AttentionArrays, *, interpret: bool
) -> Function:
    """The implementation that is named, or one that is settled when the program is lowered."""
    if interpret and implementation not in ("tpu", "gpu"):
        raise ValueError(
            f"interpret=True runs a kernel on the CPU and {implementation=} names none: name 'tpu' "
            "or 'gpu'"
        )
    if implementation is None:
        return _of_platform
    choices = get_args(Implementation.__value__)
    if implementation not in choices:
        raise ValueError(f"{implementation=} is not one of {', '.join(map(repr, choices))} or None")
    if implementation == "reference":
        return _reference
    if refusal := _refusal(implementation, arrays):
        raise ValueError(f"{implementation=} does not serve this call: {refusal}")
    is_concrete = not isinstance(arrays.queries, jax.core.Tracer)
    if is_concrete and not interpret and (platform := jax.default_backend()) != implementation:
        raise ValueError(
            f"{implementation=} does not run on {platform}: leave the choice to the platform, or "
            "set interpret=True to try a kernel out"
        )
    return functools.partial(_kernel, implementation=implementation, interpret=interpret)


def _reference(*arrays: jax.Array, settings: AttentionSettings) -> PagedAttention:
    call = AttentionArrays(*arrays)
    stored = call.key_pages.dtype
    numbers = call._replace(
        key_pages=from_stored(call.key_pages), value_pages=from_stored(call.value_pages)
    )
    result = paged_attention_reference(numbers, settings)
    return result._replace(
        key_pages=to_stored(result.key_pages, stored),
        value_pages=to_stored(result.value_pages, stored),
    )


@functools.partial(jax.jit, static_argnames=("settings", "implementation", "interpret"))
def _kernel(
    *arrays: jax.Array,
    settings: AttentionSettings,
    implementation: Implementation,
    interpret: bool = False,
) -> PagedAttention:
    if implementation == "tpu":
        from paxkv.pallas_kernels.tpu import paged_attention_tpu as attend
    else:
        from paxkv.pallas_kernels.gpu import paged_attention_gpu as attend
    with jax.enable_x64(False):  # else numbers in kernels are int64, which divide no int32
        return attend(AttentionArrays(*arrays), settings, interpret=interpret)


def _kernel_or_reference(
    *arrays: jax.Array, settings: AttentionSettings, implementation: Implementation
) -> PagedAttention:
    if _refusal(implementation, AttentionArrays(*arrays)):
        if implementation == "gpu":
            from paxkv.pallas_kernels.gpu import warn_of_old_gpu

            warn_of_old_gpu()
        return _reference(*arrays, settings=settings)
    return _kernel(*arrays, settings=settings, implementation=implementation)


def _result_avals(
    *arrays: jax.core.ShapedArray, settings: AttentionSettings
) -> tuple[jax.core.ShapedArray, ...]:
    del settings
    queries, _, _, key_pages, value_pages, *_ = arrays
    lse = jax.core.ShapedArray(queries.shape[:2], np.dtype(np.float32))
    return queries, key_pages, value_pages, lse


_of_platform = per_platform(
    "paged_attention",
    _result_avals,
    _reference,
    tpu=functools.partial(_kernel_or_reference, implementation="tpu"),
    cuda=functools.partial(_kernel_or_reference, implementation="gpu"),
)


def _refusal(implementation: Implementation, arrays: AttentionArrays) -> str | None:
    """Why a kernel does not serve such a call, or None if it does."""
    _, num_kv_heads, page_size, head_dim = arrays.key_pages.shape
    if page_size not in KERNEL_PAGE_SIZES:
        return f"pages hold {page_size} tokens; it takes one of {KERNEL_PAGE_SIZES}"
    if head_dim not in KERNEL_HEAD_DIMS:
        return f"heads have {head_dim} numbers; it takes one of {KERNEL_HEAD_DIMS}"
    group = arrays.queries.shape[1] // num_kv_heads
    if group > KERNEL_MAX_GROUP:
        return f"{group} query heads share a KV head; it takes up to {KERNEL_MAX_GROUP}"
    if implementation == "tpu":
        from paxkv.pallas_kernels.tpu import tpu_refusal as refusal
    else:
        from paxkv.pallas_kernels.gpu import gpu_refusal as refusal
    return refusal(arrays)
