"""The movers on TPU: copies page by page within HBM, several in flight, the pool aliased.

See `paxkv.pallas_kernels.movers` for what each does.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from paxkv.pallas_kernels.tpu_steps import interpreter

type _Copy = Any  # what pltpu.make_async_copy returns, which has no public name

_COPIES = 16  # in flight; one page of one array is too little to keep the memory busy
_WAVE = 8  # tokens whose rows are in flight together
_MAX_BLOCK_TOKENS = 256
_BLOCK_BYTES = 1 << 20  # of tokens in VMEM, for one of two buffers
_TILE_ROWS = 8  # of 32-bit words: the smallest piece of a page that a copy may start at


def take_pages(pages: jax.Array, page_ids: jax.Array, *, interpret: bool = False) -> jax.Array:
    """See `movers.take_pages`."""
    return _take(pages, page_ids, jnp.zeros((len(page_ids), *pages.shape[1:]), pages.dtype),
                 interpret=interpret)  # fmt: skip


def put_pages(
    pages: jax.Array, page_ids: jax.Array, contents: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """See `movers.put_pages`."""
    return pl.pallas_call(
        functools.partial(_put_kernel, num_pages=len(pages)),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SemaphoreType.DMA((_COPIES,))],
        ),
        input_output_aliases={2: 0},
        interpret=interpreter(interpret),
        name="put_pages",
    )(page_ids, contents, pages)


def copy_pages(
    pages: jax.Array, source: jax.Array, target: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """See `movers.copy_pages`.

    Through memory of its own, since a page may be the source of one copy and the target of another.
    """
    is_copied = (target >= 0) & (target < len(pages))
    source = jnp.where(is_copied, source, len(pages))
    room = lax.empty((len(source), *pages.shape[1:]), pages.dtype)
    return put_pages(pages, target, _take(pages, source, room, interpret=interpret),
                     interpret=interpret)  # fmt: skip


def _take(
    pages: jax.Array, page_ids: jax.Array, contents: jax.Array, *, interpret: bool
) -> jax.Array:
    """`contents` `[C, K, S, H]` with the pages whose ids name one in their places."""
    return pl.pallas_call(
        functools.partial(_take_kernel, num_pages=len(pages)),
        out_shape=jax.ShapeDtypeStruct(contents.shape, contents.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SemaphoreType.DMA((_COPIES,))],
        ),
        input_output_aliases={2: 0},
        interpret=interpreter(interpret),
        name="take_pages",
    )(page_ids, pages, contents)


def _take_kernel(page_ids_ref, pages_ref, _, contents_ref, semaphores, *, num_pages):
    def copy(i, semaphore):
        return pltpu.make_async_copy(pages_ref.at[page_ids_ref[i]], contents_ref.at[i], semaphore)

    _copy_each(page_ids_ref, copy, semaphores, num_pages)


def _put_kernel(page_ids_ref, contents_ref, _, pages_ref, semaphores, *, num_pages):
    def copy(i, semaphore):
        return pltpu.make_async_copy(contents_ref.at[i], pages_ref.at[page_ids_ref[i]], semaphore)

    _copy_each(page_ids_ref, copy, semaphores, num_pages)


def _copy_each(
    page_ids_ref,
    copy: Callable[[jax.Array, jax.Array], _Copy],
    semaphores,
    num_pages: int,
) -> None:
    """Makes the copy of each id that names a page, as many at once as there are semaphores."""
    count, at_once = page_ids_ref.shape[0], semaphores.shape[0]

    def act(i, do: Callable[[_Copy], None]) -> None:
        @pl.when(_is_page(page_ids_ref[i], num_pages))
        def _():
            do(copy(i, semaphores.at[lax.rem(i, at_once)]))

    @pl.loop(0, count)
    def _(i):
        @pl.when(i >= at_once)
        def _():
            act(i - at_once, lambda made: made.wait())

        act(i, lambda made: made.start())

    @pl.loop(max(count - at_once, 0), count)
    def _(i):
        act(i, lambda made: made.wait())


def write_refusal(pages: jax.Array) -> str | None:
    """Why `write_tokens` does not serve such a pool, or None if it does."""
    page_size, itemsize = pages.shape[2], pages.dtype.itemsize
    if itemsize not in (2, 4):
        return f"its numbers are {pages.dtype}; those of 16 and 32 bits have a kernel"
    rows = _TILE_ROWS * 4 // itemsize
    if page_size % _TILE_ROWS or page_size % min(rows, page_size):
        return f"its pages hold {page_size} tokens; take a multiple of {rows}, or {_TILE_ROWS}"
    return None


def write_tokens(
    pages: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    tokens: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """See `movers.write_tokens`.

    A copy cannot begin within a tile, whose rows are packed in pairs where numbers have 16 bits:
    the tile's rows of all heads are read, changed and written back. Tokens go in waves, whose
    copies are in flight together; tokens of one wave that share a tile change it in turn.
    """
    num_pages, num_kv_heads, page_size, head_dim = pages.shape
    packing = 4 // pages.dtype.itemsize
    rows = min(_TILE_ROWS * packing, page_size)
    block = _block_tokens(len(tokens), num_kv_heads, head_dim)
    num_blocks = pl.cdiv(len(tokens), block)
    padding = num_blocks * block - len(tokens)
    places = jnp.stack([
        jnp.pad(page_ids, (0, padding), constant_values=num_pages),
        jnp.pad(offsets, (0, padding)),
    ])  # fmt: skip
    places = places.reshape(2, num_blocks, block).swapaxes(0, 1)
    unsigned = jnp.uint16 if packing == 2 else jnp.uint32
    words = lax.bitcast_convert_type(tokens, unsigned).astype(jnp.uint32)
    words = jnp.pad(words, ((0, padding), (0, 0), (0, 0)))
    return pl.pallas_call(
        functools.partial(_write_kernel, num_pages=num_pages, packing=packing),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        grid=(num_blocks,),
        in_specs=[
            pl.BlockSpec((1, 2, block), lambda i: (i, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((block, num_kv_heads, head_dim), lambda i: (i, 0, 0)),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[
            pltpu.VMEM((_WAVE, num_kv_heads, rows, head_dim), pages.dtype),
            pltpu.SemaphoreType.DMA((2, _WAVE)),
        ],
        input_output_aliases={2: 0},
        interpret=interpreter(interpret),
        name="write_tokens",
    )(places, words, pages)


def _block_tokens(num_tokens: int, num_kv_heads: int, head_dim: int) -> int:
    """Tokens of one step of the grid: a multiple of a wave that fits in VMEM."""
    token_bytes = 4 * pl.cdiv(num_kv_heads, 8) * 8 * pl.cdiv(head_dim, 128) * 128
    most = min(_MAX_BLOCK_TOKENS, _BLOCK_BYTES // token_bytes, num_tokens)
    return max(pl.cdiv(most, _WAVE), 1) * _WAVE


def _write_kernel(
    places_ref, words_ref, _, pages_ref, tiles_ref, semaphores, *, num_pages, packing
):
    _, num_kv_heads, rows, head_dim = tiles_ref.shape
    row_of_word = lax.broadcasted_iota(jnp.int32, (num_kv_heads, rows // packing, head_dim), 1)

    @pl.loop(0, places_ref.shape[2] // _WAVE)
    def _(wave):
        token = [wave * _WAVE + i for i in range(_WAVE)]
        page = [places_ref[0, 0, t] for t in token]
        offset = [places_ref[0, 1, t] for t in token]
        is_written = [_is_page(p, num_pages) for p in page]
        tile = [o // rows for o in offset]
        # The first token of the wave that has the tile reads and writes it for all.
        owner = [jnp.int32(i) for i in range(_WAVE)]
        for i in range(_WAVE):
            for j in reversed(range(i)):
                is_same = (page[i] == page[j]) & (tile[i] == tile[j])
                owner[i] = jnp.where(is_same, j, owner[i])

        def copy(i: int, is_read: bool) -> _Copy:
            first = pl.multiple_of(tile[i] * rows, rows)
            in_page = pages_ref.at[page[i], :, pl.ds(first, rows)]
            ends = (in_page, tiles_ref.at[i]) if is_read else (tiles_ref.at[i], in_page)
            return pltpu.make_async_copy(*ends, semaphores.at[int(is_read), i])

        def copy_all(is_read: bool, do: Callable[[_Copy], None]) -> None:
            for i in range(_WAVE):
                pl.when(is_written[i] & (owner[i] == i))(lambda i=i: do(copy(i, is_read)))

        copy_all(True, lambda made: made.start())
        copy_all(True, lambda made: made.wait())
        for i in range(_WAVE):

            @pl.when(is_written[i])
            def _(i=i):
                row = offset[i] - tile[i] * rows
                new = words_ref[token[i]][:, None, :]
                old = pltpu.bitcast(tiles_ref[owner[i]], jnp.uint32)
                is_row = row_of_word == row // packing
                if packing == 2:
                    shift = ((row % 2) * 16).astype(jnp.uint32)
                    new = (new << shift) | (old & ~(jnp.uint32(0xFFFF) << shift))
                words = jnp.where(is_row, new, old)
                tiles_ref[owner[i]] = pltpu.bitcast(words, tiles_ref.dtype)

        copy_all(False, lambda made: made.start())
        copy_all(False, lambda made: made.wait())


def _is_page(page_id: jax.Array, num_pages: int) -> jax.Array:
    return (page_id >= 0) & (page_id < num_pages)
