"""How many tokens the TPU kernels take at a time."""

import dataclasses

import jax
from jax.experimental.pallas import tpu as pltpu

LANES = 128

# Bytes of K and V together that make a tile, by chip. While one tile is computed the next is
# copied, so a tile must outlast the latency of a copy: v6e moves 1.6 MB in a microsecond. Longer
# tiles also cost fewer bundles per token and more for sequences that end early in one: in bfloat16
# with heads (32, 8) of 128 and pages of 16, on v6e, 1.88 per token of a sequence of 4,096 at tiles
# of 512 tokens, 1.92 at 1,024, 2.27 at 2,048; of a longer one 1.64, 1.48 and 1.45 per further token
# (`benchmarks/bench_tiles_static.py`).
_TILE_BYTES = {"v5e": 2 * 2**20, "v5p": 4 * 2**20, "v6e": 4 * 2**20, "7x": 4 * 2**20}
# What takes over 3 % fewer bundles for a sequence of 4,096 than that, by chip, head_dim in lanes,
# dtype and page size: all that was found on v5e and v6e with heads of 128 in bfloat16 (pages of 16
# and 64) and float32, and of 256 in bfloat16. v5p and tpu7x are not searched yet.
_BETTER_TILE_BYTES = {("v6e", 256, "bfloat16", 16): 8 * 2**20}
_USUAL_TILE_BYTES = 2 * 2**20
_MOST_TILE_TOKENS = 2048

_PREFILL_TOKENS = 512  # keys of a tile of the mixed kernel
_PREFILL_SOFTMAX_BYTES = 4 * 2**20  # of the unfinished outputs of its tile of queries
_PREFILL_QUERIES = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """What the kernels ask of a chip."""

    name: str  # as in "v6e"; "" if the program is not traced for a TPU
    num_cores: int  # that share one program
    vmem_bytes: int  # of one core

    @property
    def usable_vmem_bytes(self) -> int:
        """What a kernel may take; the rest is the compiler's."""
        return self.vmem_bytes // 4 * 3


def chip_traced_for() -> Chip:
    """The chip of the default device, or of the abstract device where a mesh names one."""
    try:
        info = pltpu.get_tpu_info()
    except (RuntimeError, ValueError):  # traced on another host: what all chips have
        return Chip("", 1, 64 * 2**20)
    return Chip(str(info.chip_version), info.num_cores, info.vmem_capacity_bytes)


def bytes_per_token(key_pages: jax.Array) -> int:
    """Bytes that the K and V of one token take in VMEM."""
    _, num_kv_heads, _, head_dim = key_pages.shape
    return 2 * num_kv_heads * _in_lanes(head_dim) * key_pages.dtype.itemsize


def decode_tile_pages(chip: Chip, key_pages: jax.Array, max_pages: int) -> int:
    """Pages of a tile of the decode kernel, a power of two."""
    tokens = min(_tile_tokens(chip, key_pages), _MOST_TILE_TOKENS)
    return _tile_pages(tokens, key_pages.shape[2], max_pages)


def prefill_tile_pages(chip: Chip, key_pages: jax.Array, max_pages: int) -> int:
    """Pages of a tile of the mixed kernel, a power of two."""
    tokens = min(_tile_tokens(chip, key_pages), _PREFILL_TOKENS)
    return _tile_pages(tokens, key_pages.shape[2], max_pages)


def prefill_tile_queries(num_rows: int, num_kv_heads: int, group: int, head_dim: int) -> int:
    """Queries of a tile of the mixed kernel, a power of two: at least a register's lanes of rows.

    Args:
        num_rows: Packed rows of the call.
        num_kv_heads: K.
        group: Query heads of a KV head, rounded up to a power of two.
        head_dim: H.
    """
    most = _PREFILL_SOFTMAX_BYTES // (4 * num_kv_heads * group * _in_lanes(head_dim))
    wanted = min(_PREFILL_QUERIES, power_of_two_over(num_rows), power_of_two_under(max(1, most)))
    return max(wanted, -(-LANES // group))


def _tile_tokens(chip: Chip, key_pages: jax.Array) -> int:
    _, _, page_size, head_dim = key_pages.shape
    usual = _TILE_BYTES.get(chip.name, _USUAL_TILE_BYTES)
    key = (chip.name, _in_lanes(head_dim), key_pages.dtype.name, page_size)
    return _BETTER_TILE_BYTES.get(key, usual) // bytes_per_token(key_pages)


def _tile_pages(tokens: int, page_size: int, max_pages: int) -> int:
    return min(power_of_two_under(max(1, tokens // page_size)), power_of_two_over(max_pages))


def _in_lanes(head_dim: int) -> int:
    return -(-head_dim // LANES) * LANES


def power_of_two_over(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def power_of_two_under(n: int) -> int:
    """The greatest power of two that is at most `n`."""
    return 1 << (n.bit_length() - 1)
