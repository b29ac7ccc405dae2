"""How K and V lie in a page. Only this package indexes into one.

Each layer has one array of keys and one of values, `[P, K, S, H]`: `P` pages of `K` KV heads of
`S` tokens of `H` numbers. One head of one page is then one piece of memory, `S` rows of `H`: a
single copy for a kernel, and one row to gather for XLA, which moves no number within it.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

NULL_PAGE = 0  # never handed out, so that an all-zero block table is valid
_TPU_LANES = 128


def page_shape(num_kv_heads: int, page_size: int, head_dim: int) -> tuple[int, int, int]:
    """The shape of one page of one pool array, `[K, S, H]`.

    On TPUs heads are filled up with zeros to a multiple of 128 numbers. There a row takes that much
    memory anyway, and XLA lays narrower ones out across pages, so that a program would copy the
    pool on its way into the kernels' layout, and out.
    """
    if jax.default_backend() == "tpu":
        head_dim = -(-head_dim // _TPU_LANES) * _TPU_LANES
    return num_kv_heads, page_size, head_dim


def stored_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype of pool arrays that hold numbers of some dtype.

    On TPUs float16 is held as its bits, in int16: Mosaic takes no array of float16, and XLA for
    TPU copies what it reinterprets.
    """
    is_bits = jax.default_backend() == "tpu" and dtype == jnp.float16
    return jnp.dtype(jnp.int16 if is_bits else dtype)


def to_stored(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Numbers as pages of some dtype hold them: rounded to it, or the bits of float16 in int16."""
    if x.dtype == dtype:
        return x
    if dtype == jnp.int16:
        return lax.bitcast_convert_type(x.astype(jnp.float16), dtype)
    return x.astype(dtype)


def from_stored(x: jax.Array) -> jax.Array:
    """The numbers that pages hold."""
    return lax.bitcast_convert_type(x, jnp.float16) if x.dtype == jnp.int16 else x


def fill_heads(x: jax.Array, head_dim: int) -> jax.Array:
    """Heads `[..., H]` with zeros behind them, up to `head_dim` numbers."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, head_dim - x.shape[-1])])


def page_size_of(pages: jax.Array) -> int:
    """Tokens per page of a pool array `[P, K, S, H]`."""
    return pages.shape[2]


def gather_pages(
    pages: jax.Array,
    page_ids: jax.Array,
    *,
    start: jax.Array | None = None,
    stop: jax.Array | None = None,
) -> jax.Array:
    """The tokens of some pages, head by head.

    Args:
        pages: A pool array, `[P, K, S, H]`.
        page_ids: `i32[R, m]`, each in `[0, P)`.
        start: `i32[R, m]`, where the wanted tokens of each page begin; None: at once.
        stop: `i32[R, m]`, where they end. Others are zero, whatever the page holds. None: all are
            wanted.

    Returns:
        `[R, K, m * S, H]`.
    """
    num_pages, num_kv_heads, page_size, head_dim = pages.shape
    num_rows, num_columns = page_ids.shape
    head = jnp.arange(num_kv_heads, dtype=page_ids.dtype)[None, :, None]
    rows = (page_ids[:, None, :] * num_kv_heads + head).reshape(-1)  # i32[R * K * m]
    # A CPU copies rows of S * H numbers many at a time if the innermost loop runs over all of them
    # and has nothing else to compute. The two barriers keep XLA from moving the indices into that
    # loop and from splitting it by tokens: without them this takes about twice as long.
    rows = lax.optimization_barrier(rows)
    rows_of_pages = pages.reshape(num_pages * num_kv_heads, page_size * head_dim)
    gathered = rows_of_pages.at[rows].get(mode="promise_in_bounds")
    place = jnp.arange(page_size * head_dim, dtype=page_ids.dtype)[None]
    if stop is not None:
        is_whole = stop == page_size
        is_wanted = place < _of_rows(stop * head_dim, num_kv_heads)
        if start is not None:
            is_whole &= start == 0
            is_wanted &= place >= _of_rows(start * head_dim, num_kv_heads)
        # Asked of whole pages before their loop, which then only copies.
        is_wanted |= _of_rows(is_whole, num_kv_heads)
        gathered = jnp.where(is_wanted, gathered, jnp.zeros((), pages.dtype))
    gathered = lax.optimization_barrier(gathered)
    return gathered.reshape(num_rows, num_kv_heads, num_columns * page_size, head_dim)


def _of_rows(of_pages: jax.Array, num_kv_heads: int) -> jax.Array:
    """What holds for pages `[R, m]`, for each row that is gathered: `[R * K * m, 1]`."""
    num_rows, num_columns = of_pages.shape
    of_heads = jnp.broadcast_to(of_pages[:, None], (num_rows, num_kv_heads, num_columns))
    return lax.optimization_barrier(of_heads.reshape(-1, 1))
