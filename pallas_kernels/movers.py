"""Moving tokens and pages into, out of and about a pool array `[P, K, S, H]`, in place.

Jit them with the pool donated, or call them in a loop that carries it: no copy of the pool is made.
On CPU and GPU that is XLA's own scatter, which compiles to nothing but the writes (the tests read
the compiled text, for GPUs too): for sm_90a the write of a decode step is one fusion for K and one
for V, each from the tokens and the tables into the aliased pool with no temporary memory, so that
8 heads of 128 in bfloat16 cost 2 KB read and 2 KB written a token in each, which is what a kernel
would move. XLA for TPU lays the pool out anew for a scatter, which copies it whole: there kernels
copy page by page.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from paxkv.pallas_kernels.layout import to_stored
from paxkv.pallas_kernels.per_platform import Function, per_platform

type MoverImplementation = Literal["reference", "tpu", "gpu"]


def write_tokens(
    pages: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    tokens: jax.Array,
    *,
    implementation: MoverImplementation | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Writes one token's K (or V) to each of some slots of pages.

    Args:
        pages: A pool array, `[P, K, S, H]`; in int16 it holds the bits of float16.
        page_ids: `i32[T]`. Ids outside `[0, P)` write nothing.
        offsets: `i32[T]`, each in `[0, S)`. No two tokens may name one slot of one page.
        tokens: `[T, K, H]`.
        implementation: A named one works or raises. None chooses for the platform.
        interpret: Runs a TPU kernel on a CPU, which raises if it finds a race.

    Returns:
        The pool array, updated in place where it was donated.

    Raises:
        ValueError: Shapes do not fit, or the named implementation does not serve such a pool.
    """
    _check_shape("tokens", tokens, (len(page_ids), pages.shape[1], pages.shape[3]))
    return _move(
        _WRITE, implementation, interpret, pages, page_ids, offsets, to_stored(tokens, pages.dtype)
    )


def copy_pages(
    pages: jax.Array,
    source: jax.Array,
    target: jax.Array,
    *,
    implementation: MoverImplementation | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Copies whole pages within a pool array.

    Args:
        pages: A pool array, `[P, K, S, H]`.
        source: `i32[C]`, each in `[0, P)`. Read before anything is written.
        target: `i32[C]`, no page named twice. Ids outside `[0, P)` copy nothing.
        implementation: As for `write_tokens`.
        interpret: As for `write_tokens`.

    Returns:
        The pool array, updated in place where it was donated.
    """
    return _move(_COPY, implementation, interpret, pages, source, target)


def take_pages(
    pages: jax.Array,
    page_ids: jax.Array,
    *,
    implementation: MoverImplementation | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The contents of some pages, to be kept elsewhere until `put_pages`.

    Args:
        pages: A pool array, `[P, K, S, H]`.
        page_ids: `i32[C]`. Ids outside `[0, P)` give zeros.
        implementation: As for `write_tokens`.
        interpret: As for `write_tokens`.

    Returns:
        `[C, K, S, H]`.
    """
    return _move(_TAKE, implementation, interpret, pages, page_ids)


def put_pages(
    pages: jax.Array,
    page_ids: jax.Array,
    contents: jax.Array,
    *,
    implementation: MoverImplementation | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Overwrites some pages, as with what `take_pages` gave.

    Args:
        pages: A pool array, `[P, K, S, H]`.
        page_ids: `i32[C]`, no page named twice. Ids outside `[0, P)` write nothing.
        contents: `[C, K, S, H]`.
        implementation: As for `write_tokens`.
        interpret: As for `write_tokens`.

    Returns:
        The pool array, updated in place where it was donated.

    Raises:
        ValueError: Shapes do not fit, or the named implementation does not serve such a pool.
    """
    _check_shape("contents", contents, (len(page_ids), *pages.shape[1:]))
    contents = to_stored(contents, pages.dtype)
    return _move(_PUT, implementation, interpret, pages, page_ids, contents)


def _check_shape(name: str, x: jax.Array, shape: tuple[int, ...]) -> None:
    if x.shape != shape:  # XLA would repeat what is too little
        raise ValueError(f"{name} must be {shape} for such ids and pages, found {x.shape}")


# How a scatter leaves out what names no page.
_ONLY_PAGES: Any = {"mode": "drop", "unique_indices": True, "wrap_negative_indices": False}


def _write_tokens(pages, page_ids, offsets, tokens):
    return pages.at[page_ids, :, offsets].set(tokens, **_ONLY_PAGES)


def _copy_pages(pages, source, target):
    return pages.at[target].set(pages[source], **_ONLY_PAGES)


def _take_pages(pages, page_ids):
    return pages.at[page_ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _put_pages(pages, page_ids, contents):
    return pages.at[page_ids].set(contents, **_ONLY_PAGES)


@functools.partial(jax.jit, static_argnames=("name", "interpret"))
def _on_tpu(*arrays: jax.Array, name: str, interpret: bool = False) -> jax.Array:
    from paxkv.pallas_kernels import tpu_movers  # Pallas takes half a second to import

    if name == "write_tokens" and (refusal := tpu_movers.write_refusal(arrays[0])):
        raise ValueError(f"implementation='tpu' does not serve this pool: {refusal}")
    dtype = arrays[0].dtype
    # A TPU kernel takes no float16, and XLA copies what it reinterprets: see `layout.stored_dtype`.
    if dtype == jnp.float16:
        arrays = tuple(
            lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == dtype else x for x in arrays
        )
    moved = getattr(tpu_movers, name)(*arrays, interpret=interpret)
    return lax.bitcast_convert_type(moved, dtype)


def _has_kernel(name: str, pages: jax.Array) -> bool:
    from paxkv.pallas_kernels import tpu_movers

    return name != "write_tokens" or tpu_movers.write_refusal(pages) is None


class _Mover(NamedTuple):
    reference: Callable[..., jax.Array]
    on_tpu: Callable[..., jax.Array]
    of_platform: Function


def _mover(reference: Callable[..., jax.Array], shape: Callable[..., Sequence[int]]) -> _Mover:
    name = reference.__name__.removeprefix("_")
    on_tpu = functools.partial(_on_tpu, name=name)
    return _Mover(
        reference,
        on_tpu,
        per_platform(
            name,
            lambda *avals: [jax.core.ShapedArray(shape(*avals), avals[0].dtype)],
            lambda *arrays: [reference(*arrays)],
            tpu=lambda *arrays: [(on_tpu if _has_kernel(name, arrays[0]) else reference)(*arrays)],
        ),
    )


_WRITE = _mover(_write_tokens, lambda pages, *_: pages.shape)
_COPY = _mover(_copy_pages, lambda pages, *_: pages.shape)
_TAKE = _mover(_take_pages, lambda pages, page_ids: (*page_ids.shape, *pages.shape[1:]))
_PUT = _mover(_put_pages, lambda pages, *_: pages.shape)


def _move(
    mover: _Mover, implementation: MoverImplementation | None, interpret: bool, *arrays: jax.Array
) -> jax.Array:
    if len(arrays[1]) == 0 and implementation in (None, "tpu"):
        return mover.reference(*arrays)  # a kernel cannot be called for nothing
    match implementation:
        case None:
            return mover.of_platform(*arrays)[0]
        case "reference" | "gpu":
            return mover.reference(*arrays)
        case "tpu":
            return mover.on_tpu(*arrays, interpret=interpret)
    raise ValueError(f"{implementation=} is not one of 'reference', 'tpu', 'gpu' or None")
