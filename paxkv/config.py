"""How large a cache is: bytes per page, and pages per memory."""

import bisect
import math
import operator
from collections.abc import Sequence

import numpy as np
from jax.typing import DTypeLike

from paxkv.decoder import LayerGroup
from paxkv.pallas_kernels.layout import page_shape


def pages_of(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens of one sequence."""
    return -(-num_tokens // page_size)


def page_bytes(layer_groups: Sequence[LayerGroup], *, page_size: int, dtype: DTypeLike) -> int:
    """Bytes of one page of every layer group: keys and values over all layers."""
    numbers = sum(
        2 * len(group.layers) * math.prod(page_shape(group.num_kv_heads, page_size, group.head_dim))
        for group in layer_groups
    )
    return numbers * np.dtype(dtype).itemsize


def pages_of_groups(
    layer_groups: Sequence[LayerGroup],
    num_pages: int,
    *,
    num_slots: int,
    at_once: int,
    page_size: int,
) -> tuple[int, ...]:
    """Pages of each group's pool, the null page counted: `num_pages`, or all that it can use.

    A sequence holds a window, what is stored with one call, and a page that each of them begins
    in. Beside layers that see everything, more pages of layers that do not would lie idle.

    Args:
        layer_groups: The decoder's.
        num_pages: `P`, pages of a group that sees everything, or of the only one.
        num_slots: Sequences at once.
        at_once: Tokens that one call stores of a sequence.
        page_size: `S`, tokens per page.
    """
    return tuple(
        num_pages
        if group.window is None or len(layer_groups) == 1
        else min(num_pages, 1 + num_slots * (pages_of(group.window + at_once, page_size) + 1))
        for group in layer_groups
    )


def num_pages_for(
    memory_bytes: int,
    layer_groups: Sequence[LayerGroup],
    *,
    page_size: int,
    dtype: DTypeLike,
    num_slots: int | None = None,
    at_once: int = 1,
) -> int:
    """How many pages `P` fit in so much memory, the null page counted.

    Args:
        memory_bytes: For the pools of all groups.
        layer_groups: The decoder's.
        page_size: `S`, tokens per page.
        dtype: Of keys and values.
        num_slots: See `pages_of_groups`; None has all groups have as many pages.
        at_once: Likewise.

    Raises:
        ValueError: Not even the null page and one more fit.
    """
    bytes_each = page_bytes(layer_groups, page_size=page_size, dtype=dtype)
    each = [page_bytes([group], page_size=page_size, dtype=dtype) for group in layer_groups]

    def pool_bytes(num_pages: int) -> int:
        pages = (num_pages,) * len(each)
        if num_slots is not None:
            pages = pages_of_groups(
                layer_groups, num_pages, num_slots=num_slots, at_once=at_once, page_size=page_size
            )
        return sum(map(operator.mul, pages, each))

    most = range(1 + memory_bytes // min(each))
    num_pages = bisect.bisect_right(most, memory_bytes, key=pool_bytes) - 1
    if num_pages < 2:
        layers = " + ".join(
            f"{len(group.layers)} layers x {group.num_kv_heads} KV heads x {group.head_dim}"
            for group in layer_groups
        )
        raise ValueError(
            f"{memory_bytes} bytes hold {num_pages} pages of {bytes_each} bytes, and a cache "
            f"needs 2, the null page and one to use: {2 * bytes_each} bytes. One page is "
            f"2 (K and V) x {page_size} tokens x ({layers}) x {np.dtype(dtype).itemsize} bytes. "
            "Give the cache more memory, or lower the page size"
        )
    return num_pages
