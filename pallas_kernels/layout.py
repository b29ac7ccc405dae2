"""How K and V lie in a page, and the only code that indexes into one.

Each layer has one array of keys and one of values, `[P, K, S, H]`: `P` pages of `K` KV heads of
`S` tokens of `H` numbers. One head of one page is then one piece of memory, `S` rows of `H`: a
single copy for a kernel, and one row to gather for XLA, which moves no number within it.
"""

import jax
import jax.numpy as jnp

NULL_PAGE = 0  # never handed out, so that an all-zero block table is valid


def page_shape(num_kv_heads: int, page_size: int, head_dim: int) -> tuple[int, int, int]:
    """The shape of one page of one pool array, `[K, S, H]`."""
    return num_kv_heads, page_size, head_dim


def page_size_of(pages: jax.Array) -> int:
    """Tokens per page of a pool array `[P, K, S, H]`."""
    return pages.shape[2]


def gather_pages(pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """The tokens of some pages, head by head.

    Args:
        pages: A pool array, `[P, K, S, H]`.
        page_ids: `i32[R, m]`, each in `[0, P)`.

    Returns:
        `[R, K, m * S, H]`.
    """
    num_pages, num_kv_heads, page_size, head_dim = pages.shape
    rows = (
        page_ids[:, None, :] * num_kv_heads
        + jnp.arange(num_kv_heads, dtype=page_ids.dtype)[None, :, None]
    )
    heads = pages.reshape(num_pages * num_kv_heads, page_size, head_dim)
    gathered = heads.at[rows].get(mode="promise_in_bounds")  # [R, K, m, S, H]
    return gathered.reshape(page_ids.shape[0], num_kv_heads, -1, head_dim)


def write_tokens(
    pages: jax.Array, page_ids: jax.Array, offsets: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Writes one token's K (or V) to each of some slots of pages.

    Args:
        pages: A pool array, `[P, K, S, H]`.
        page_ids: `i32[T]`. Ids at or past `P` write nothing.
        offsets: `i32[T]`, each in `[0, S)`. No two tokens may name one slot of one page.
        tokens: `[T, K, H]`.

    Returns:
        The pool array, updated in place where it was donated.
    """
    return pages.at[page_ids, :, offsets].set(
        tokens.astype(pages.dtype), mode="drop", unique_indices=True
    )


def copy_pages(pages: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Copies whole pages within a pool array.

    Args:
        pages: A pool array, `[P, K, S, H]`.
        source: `i32[C]`, each in `[0, P)`.
        target: `i32[C]`, no page named twice. Ids at or past `P` copy nothing.
    """
    return pages.at[target].set(pages[source], mode="drop", unique_indices=True)
