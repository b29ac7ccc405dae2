"""What the memory warpgroup of the Hopper kernel does: copies, ahead of those that compute."""

import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paxkv.pallas_kernels.gpu_common import Work
from paxkv.pallas_kernels.gpu_hopper_settings import ROWS, Ring, Settings, Shared, Turn
from paxkv.pallas_kernels.gpu_steps import Ref, held_pieces, load_work, page_of

_PAGES_AT_ONCE = 8  # whose ids are read together: more would not fit in registers


def copy_turn(
    turn: Turn, work_ref: Ref, tables_ref: Ref, q_ref: Ref, pools: tuple[Ref, Ref], shared: Shared,
    settings: Settings,
) -> None:  # fmt: skip
    """Copies a turn's queries, keys and values, each as soon as there is room."""
    work = load_work(work_ref, turn.item)

    @pl.when(turn.number >= settings.num_buffers)
    def _wait():
        plgpu.barrier_wait(shared.queries_free.at[turn.buffer])

    for number in range(settings.num_warpgroups):
        first_row = work.first_row * settings.group + number * ROWS
        plgpu.copy_gmem_to_smem(
            q_ref.at[turn.kv_head, pl.ds(first_row, settings.out_rows)],
            shared.queries.at[turn.buffer, number, pl.ds(0, settings.out_rows)],
            shared.queries_full.at[turn.buffer],
        )

    @pl.loop(0, turn.num_tiles)
    def _copy_tile(tile):
        _copy_tile_of(work, turn, tile, tables_ref, pools, shared, settings)


def _copy_tile_of(
    work: Work, turn: Turn, tile: jax.Array, tables_ref: Ref, pools: tuple[Ref, Ref],
    shared: Shared, settings: Settings,
) -> None:  # fmt: skip
    """Copies a tile of keys and one of values to their next stages, once these are free."""
    key_pages_ref, value_pages_ref = pools
    stage = lax.rem(turn.tiles_before + tile, settings.num_stages)
    first = work.begin + tile * settings.tile_tokens

    def wait_until_free(ring: Ring) -> None:
        @pl.when(turn.tiles_before + tile >= settings.num_stages)
        def _wait():
            plgpu.barrier_wait(ring.free.at[stage])

    def copy(pages_ref: Ref, ring: Ring, barrier: Ref) -> None:
        _copy_pages(
            work, first, turn.kv_head, tables_ref, pages_ref, ring.tiles.at[stage], barrier,
            settings,
        )  # fmt: skip

    wait_until_free(shared.keys)
    copy(key_pages_ref, shared.keys, shared.keys.full.at[stage])
    wait_until_free(shared.values)
    is_whole = (first + settings.tile_tokens <= work.end) & (work.has_holes == 0)

    @pl.when(is_whole)
    def _copy():
        copy(value_pages_ref, shared.values, shared.values.full.at[stage])

    @pl.when(jnp.logical_not(is_whole))
    def _copy_and_clear():
        copy(value_pages_ref, shared.values, shared.values_unclear)
        plgpu.barrier_wait(shared.values_unclear)
        _clear(work, first, tables_ref, shared.values.tiles.at[stage], settings)
        for _ in range(settings.tile_tokens // settings.piece):
            plgpu.barrier_arrive(shared.values.full.at[stage])


def _copy_pages(
    work: Work, first: jax.Array, kv_head: jax.Array, tables_ref: Ref, pages_ref: Ref,
    tile_ref: Ref, barrier: Ref, settings: Settings,
) -> None:  # fmt: skip
    """Begins to copy the tile from token `first` on, with one TMA copy for each piece of a page."""
    tile_tokens, piece = settings.tile_tokens, settings.piece
    for group in range(0, tile_tokens, piece * _PAGES_AT_ONCE):
        offsets = range(group, min(group + piece * _PAGES_AT_ONCE, tile_tokens), piece)
        pages = [page_of(work, first + x, tables_ref, settings)[0] for x in offsets]
        for offset, page in zip(offsets, pages, strict=True):
            in_page = 0
            if piece < settings.page_size:
                in_page = lax.rem(first + offset, settings.page_size)
            plgpu.copy_gmem_to_smem(
                pages_ref.at[page, kv_head, pl.ds(in_page, piece)],
                tile_ref.at[pl.ds(offset, piece)],
                barrier,
            )


def _clear(
    work: Work, first: jax.Array, tables_ref: Ref, tile_ref: Ref, settings: Settings
) -> None:
    """Zeroes a tile's rows that hold no token: a NaN there is NaN with a weight of 0 too."""
    tile_tokens, head_dim = tile_ref.shape
    columns = math.gcd(head_dim, 64)  # at a time, to need few registers
    pieces = held_pieces(work, first, tables_ref, settings)

    @pl.loop(0, tile_tokens // ROWS * (head_dim // columns))
    def _clear_part(part):  # a loop: unrolled, the compiler would compute all addresses ahead
        begin = lax.rem(part, tile_tokens // ROWS) * ROWS
        column = lax.div(part, tile_tokens // ROWS) * columns
        layout = plgpu.Layout.WGMMA
        row = begin + plgpu.broadcasted_iota(jnp.int32, (ROWS, columns), 0, layout=layout)
        is_held = (pieces >> lax.div(row, settings.piece)) & 1 == 1
        is_stored = (row < work.end - first) & is_held
        part_ref = tile_ref.at[pl.ds(begin, ROWS), pl.ds(column, columns)]
        values = plgpu.load(part_ref, layout=layout)
        part_ref[...] = jnp.where(is_stored, values, jnp.zeros_like(values))

    plgpu.commit_smem()
