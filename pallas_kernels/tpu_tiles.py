"""How many tokens the TPU kernels take at a time."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

LANES = 128

# Bytes of K and V together that are worth a tile, by chip. While one tile is computed the next is
# copied, so a tile must outlast the latency of a copy: v6e moves about 2 MB in a microsecond.
_TILE_BYTES = {"v5e": 2 * 2**20, "v5p": 4 * 2**20, "v6e": 4 * 2**20, "7x": 4 * 2**20}
_USUAL_TILE_BYTES = 2 * 2**20

# Tokens of a decode tile by (chip, head_dim, bytes per number, page size), where counting the
# compiled bundles (benchmarks/bench_kernels_static.py) favours another size than the rule's.
_DECODE_TOKENS: dict[tuple[str, int, int, int], int] = {}
_MOST_TOKENS = 2048


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """What the kernels ask of a chip."""

    name: str  # as in "v6e"; "" if the program is not traced for a TPU
    num_cores: int  # that share one program
    vmem_bytes: int  # of one core


def chip_traced_for() -> Chip:
    """The chip of the default device, or of the abstract device where a mesh names one."""
    try:
        info = pltpu.get_tpu_info()
    except (RuntimeError, ValueError):  # traced on a host for export: the smallest of them all
        return Chip("", 1, 64 * 2**20)
    return Chip(str(info.chip_version), info.num_cores, info.vmem_capacity_bytes)


def decode_tile_pages(
    chip: Chip, num_kv_heads: int, head_dim: int, dtype: DTypeLike, page_size: int, max_pages: int
) -> int:
    """Pages of a tile of the decode kernel, a power of two."""
    itemsize = jnp.dtype(dtype).itemsize
    tokens = _DECODE_TOKENS.get((chip.name, head_dim, itemsize, page_size))
    if tokens is None:
        padded_dim = -(-head_dim // LANES) * LANES
        bytes_per_token = 2 * num_kv_heads * padded_dim * itemsize
        tokens = _TILE_BYTES.get(chip.name, _USUAL_TILE_BYTES) // bytes_per_token
    pages = max(1, min(tokens, _MOST_TOKENS) // page_size)
    return 1 << (min(pages, _power_of_two_over(max_pages)).bit_length() - 1)


def _power_of_two_over(n: int) -> int:
    return 1 << (n - 1).bit_length()
