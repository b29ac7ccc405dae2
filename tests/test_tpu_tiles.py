"""Tile sizes of the TPU kernels: what the table holds, and the rule for the rest."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from paxkv.pallas_kernels import tpu_tiles
from paxkv.pallas_kernels.tpu_tiles import Chip, bytes_per_token, decode_tile_pages

V6E = Chip("v6e", 1, 128 * 2**20)
SMALLEST_VMEM = 64 * 2**20  # of the chips in the table


def pool(head_dim: int, dtype, page_size: int, num_kv_heads: int = 8) -> Any:
    return jax.ShapeDtypeStruct((2, num_kv_heads, page_size, head_dim), dtype)


@pytest.mark.parametrize(
    ("chip", "pages", "max_pages", "tokens"),
    [
        (V6E, pool(128, jnp.bfloat16, 16), 999, 1024),  # 4 MB by the rule
        (V6E, pool(80, jnp.bfloat16, 16), 999, 1024),  # rows take 128 numbers
        (V6E, pool(256, jnp.bfloat16, 16), 999, 1024),  # 8 MB by the table
        (V6E, pool(256, jnp.bfloat16, 16, 4), 999, 2048),  # the same for fewer heads
        (V6E, pool(128, jnp.float32, 64), 999, 512),
        (V6E, pool(128, jnp.bfloat16, 16), 9, 256),  # no longer than a sequence can be
        (V6E, pool(128, jnp.bfloat16, 16, 1), 999, 2048),  # the most
        (Chip("v9", 1, 2**26), pool(128, jnp.bfloat16, 16), 999, 512),  # not in the table
    ],
)
def test_tile_is_of_the_table_or_the_rule(chip, pages, max_pages, tokens):
    assert decode_tile_pages(chip, pages, max_pages) * pages.shape[2] == tokens


def test_two_tiles_of_the_table_fit_in_half_of_vmem():
    for size in (*tpu_tiles._TILE_BYTES.values(), *tpu_tiles._BETTER_TILE_BYTES.values()):
        assert 2 * size <= SMALLEST_VMEM // 4 * 3 // 2


def test_token_takes_whole_registers():
    assert bytes_per_token(pool(64, jnp.bfloat16, 16)) == 2 * 8 * 128 * 2
