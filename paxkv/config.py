"""How large a cache is: bytes per page, and pages per memory."""

import math
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


def num_pages_for(
    memory_bytes: int, layer_groups: Sequence[LayerGroup], *, page_size: int, dtype: DTypeLike
) -> int:
    """How many pages `P` fit in so much memory, the null page counted.

    Raises:
        ValueError: Not even the null page and one more fit.
    """
    bytes_each = page_bytes(layer_groups, page_size=page_size, dtype=dtype)
    num_pages = memory_bytes // bytes_each
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
