"""One program's work: a unit of queries against its item of keys, tile by tile.

Rows of a product are pairs of a query and a head of its group, so that the keys of a KV head are
read once for all heads that share them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paxkv.pallas_kernels.gpu_ampere_steps import (
    Warps,
    add_product,
    copy_columns,
    start_copy,
    store,
    wait_for_copies,
)
from paxkv.pallas_kernels.gpu_common import Work
from paxkv.pallas_kernels.gpu_device import Gpu
from paxkv.pallas_kernels.gpu_steps import (
    LOG2_E,
    Ref,
    full,
    held_pieces,
    in_powers_of_two,
    load_work,
    page_of,
    piece_of,
)
from paxkv.pallas_kernels.online_softmax import MASKED

_DEPTH = 16  # of one instruction: columns of the left operand, rows of the right one


class Settings(NamedTuple):
    """What a kernel is compiled for."""

    group: int  # query heads per KV head
    warps: Warps
    num_stages: int  # of the ring
    tile_tokens: int
    page_size: int
    num_pages: int
    scale: float
    window: int | None
    soft_cap: float | None
    has_splits: bool
    gpu: Gpu

    @property
    def piece(self) -> int:
        """Tokens of one copy."""
        return piece_of(self)


def attend(
    work: Work,
    block_tables: jax.Array,
    queries: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Attention of every item of work.

    Args:
        work: W items.
        block_tables: `i32[B, M]`, as given.
        queries: `[K, T * G + padding, H]`, padded by the rows of a product.
        key_pages: `[P, K, S, H]`.
        value_pages: `[P, K, S, H]`.
        settings: What to compile.

    Returns:
        Outputs `[W, K, R, H]`, in float32 if items are to be merged, and log-sum-exp
        `f32[W, K, R]`, -inf where a row saw no key. Those of items without keys are not set.
    """
    num_kv_heads, _, head_dim = queries.shape
    warps, dtype = settings.warps, queries.dtype
    results = work.slot.shape[0], num_kv_heads, warps.rows
    ring = settings.num_stages, settings.tile_tokens, head_dim
    columns = copy_columns(settings.piece, head_dim, settings.gpu)
    is_full = plgpu.Barrier(
        num_arrivals=2 * settings.tile_tokens // settings.piece, num_barriers=settings.num_stages
    )
    kernel = plgpu.kernel(
        functools.partial(_attention_kernel, settings=settings),
        out_type=(
            jax.ShapeDtypeStruct(
                (*results, head_dim), jnp.float32 if settings.has_splits else dtype
            ),
            jax.ShapeDtypeStruct(results, jnp.float32),
        ),
        scratch_types=(
            _shared((warps.rows, head_dim), dtype, columns),
            _shared(ring, dtype, columns),
            _shared(ring, dtype, columns),
            _shared((warps.rows, settings.tile_tokens), dtype, _DEPTH),
            is_full if settings.gpu.has_tma else None,
        ),
        grid=(num_kv_heads, work.slot.shape[0]),
        grid_names=("head", "item"),
        kernel_name="paged_attention_ampere",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if settings.gpu.interpret else None,
    )
    return kernel(jnp.stack(work, axis=1), block_tables, queries, key_pages, value_pages)


def _shared(shape: tuple[int, ...], dtype: jnp.dtype, columns: int) -> Any:
    """Shared memory in tiles of 8 rows, swizzled so that neither copies nor products conflict."""
    tiles = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(2 * columns)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiles, swizzle))


def _attention_kernel(
    work_ref: Ref,  # i32[W, 8], the fields of Work
    tables_ref: Ref,  # i32[B, M]
    q_ref: Ref,  # [K, T * G + padding, H]
    k_ref: Ref,  # [P, K, S, H]
    v_ref: Ref,  # [P, K, S, H]
    out_ref: Ref,  # [W, K, R, H]
    lse_ref: Ref,  # f32[W, K, R]
    q_smem: Ref,  # [R, H]
    k_smem: Ref,  # [stages, t, H]
    v_smem: Ref,  # [stages, t, H]
    p_smem: Ref,  # [R, t]
    is_full: Ref | None,  # a barrier per stage
    *,
    settings: Settings,
):
    kv_head = lax.axis_index("head")
    # The longest units of a causal prefill are the last; they go first.
    item = work_ref.shape[0] - 1 - lax.axis_index("item")
    work = load_work(work_ref, item)
    warps = settings.warps

    @pl.when(work.end > work.begin)
    def _attend_item():
        rows = pl.ds(work.first_row * settings.group, warps.rows)
        store(q_smem, plgpu.load(q_ref.at[kv_head, rows], layout=warps.left, optimized=False))
        begin_copies = functools.partial(
            _begin_copies, work, kv_head, tables_ref, (k_ref, k_smem), (v_ref, v_smem), is_full,
            settings=settings,
        )  # fmt: skip
        top, total, values = _attend_tiles(
            work, tables_ref, q_smem, k_smem, v_smem, p_smem, is_full, begin_copies, settings
        )
        # A NaN must show, if only in the total.
        saw_nothing = (top <= MASKED / 2) & (total == total)
        total = jnp.where(saw_nothing, 1.0, total)
        share = jnp.where(saw_nothing, 0.0, 1 / total)
        store(
            out_ref.at[item, kv_head],
            (values * _over_rows(share, values.shape, warps)).astype(out_ref.dtype),
            optimized=False,
        )
        lse = jnp.where(saw_nothing, -jnp.inf, (top + jnp.log2(total)) / LOG2_E)
        store(lse_ref.at[item, kv_head], lse, optimized=False)


def _begin_copies(work: Work, kv_head, tables_ref, keys, values, is_full, tile, *, settings):
    """Begins to copy a tile's pages to its stage."""
    stage = lax.rem(tile, settings.num_stages)
    first = work.begin + tile * settings.tile_tokens
    tokens = [first + place for place in range(0, settings.tile_tokens, settings.piece)]
    pages = [page_of(work, token, tables_ref, settings)[0] for token in tokens]
    for number, (token, page) in enumerate(zip(tokens, pages, strict=True)):
        in_page = lax.rem(token, settings.page_size)
        if settings.piece == settings.page_size:
            in_page = 0
        for pool_ref, smem in (keys, values):
            start_copy(
                pool_ref.at[page, kv_head, pl.ds(in_page, settings.piece)],
                smem.at[stage, pl.ds(number * settings.piece, settings.piece)],
                None if is_full is None else is_full.at[stage],
                settings.gpu,
            )


def _attend_tiles(
    work, tables_ref, q_smem, k_smem, v_smem, p_smem, is_full, begin_copies, settings: Settings
):
    """Softmax of the unit's rows over all tiles: top and total `f32[R]`, values `f32[R, H]`.

    Scores and `top` are in powers of two.
    """
    warps, tile_tokens, num_stages = settings.warps, settings.tile_tokens, settings.num_stages
    num_tiles = lax.div(work.end - work.begin + tile_tokens - 1, tile_tokens)
    scores_shape, values_shape = (warps.rows, tile_tokens), q_smem.shape
    copies_per_tile = 2 * tile_tokens // settings.piece
    depth = copy_columns(settings.piece, q_smem.shape[1], settings.gpu)

    def attend_tile(tile, carry):
        top, total, values = carry
        stage = lax.rem(tile, num_stages)
        first = work.begin + tile * tile_tokens
        wait_for_copies(
            None if is_full is None else is_full.at[stage],
            are_later_begun=tile + num_stages - 2 < num_tiles,
            num_later=(num_stages - 2) * copies_per_tile,
        )

        @pl.when(tile + num_stages - 1 < num_tiles)
        def _begin_next():
            if settings.gpu.has_tma:
                plgpu.commit_smem()  # all warps are done with the last tile, whose stage this fills
            begin_copies(tile + num_stages - 1)

        @pl.when((first + tile_tokens > work.end) | (work.has_holes == 1))
        def _clear():
            _clear_values(work, first, tables_ref, v_smem.at[stage], settings)

        scores = add_product(
            full(scores_shape, 0, warps.sums), q_smem, k_smem.at[stage].transpose((1, 0)),
            depth=depth, warps=warps, interpret=settings.gpu.interpret,
        )  # fmt: skip
        scores = in_powers_of_two(scores, settings.scale, settings.soft_cap)
        sees_all = (first >= work.full_begin) & (first + tile_tokens <= work.full_end)
        scores = lax.cond(
            sees_all,
            lambda scores: scores,
            lambda scores: _mask(scores, work, first, tables_ref, settings),
            scores,
        )
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        keep = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - _over_rows(new_top, scores_shape, warps))
        store(p_smem, weights.astype(p_smem.dtype))
        values = add_product(
            values * _over_rows(keep, values_shape, warps), p_smem, v_smem.at[stage],
            depth=_DEPTH, warps=warps, interpret=settings.gpu.interpret,
        )  # fmt: skip
        return new_top, total * keep + jnp.sum(weights, axis=1), values

    for ahead in range(num_stages - 1):
        pl.when(ahead < num_tiles)(functools.partial(begin_copies, ahead))
    per_row = warps.sums.reduce(1)
    return lax.fori_loop(
        0,
        num_tiles,
        attend_tile,
        (
            full((warps.rows,), MASKED, per_row),
            full((warps.rows,), 0, per_row),
            full(values_shape, 0, warps.sums),
        ),
    )


def _over_rows(per_row, shape: tuple[int, int], warps: Warps):
    return plgpu.layout_cast(lax.broadcast_in_dim(per_row, shape, (0,)), warps.sums)


def _mask(scores, work: Work, first, tables_ref, settings: Settings):
    """Hides what a query does not see in a tile at an edge."""
    layout = settings.warps.sums
    row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=layout)
    position = work.first_row + work.shift + lax.div(row, jnp.int32(settings.group))
    place = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
    visible = _is_stored(place, work, first, tables_ref, settings) & (first + place <= position)
    if settings.window is not None:
        visible &= first + place > position - settings.window
    return jnp.where(visible, scores, MASKED)


def _clear_values(work: Work, first, tables_ref, v_smem, settings: Settings):
    """Zeroes the rows of a tile that hold no token: a NaN there is NaN with a weight of 0 too."""
    columns = copy_columns(settings.piece, v_smem.shape[1], settings.gpu)
    layout = plgpu.Layout.SMEM_GMEM_COPY(v_smem.shape, v_smem.dtype, 2 * columns)
    place = plgpu.broadcasted_iota(jnp.int32, v_smem.shape, 0, layout=layout)
    values = plgpu.load(v_smem, layout=layout)
    is_stored = _is_stored(place, work, first, tables_ref, settings)
    store(v_smem, jnp.where(is_stored, values, jnp.zeros_like(values)))


def _is_stored(place, work: Work, first, tables_ref, settings: Settings):
    """Which tokens of a tile, by their places there, come before the end and have a page."""
    held = held_pieces(work, first, tables_ref, settings)
    piece = lax.div(place, jnp.int32(settings.piece))
    has_page = (lax.shift_right_logical(jnp.broadcast_to(held, piece.shape), piece) & 1) == 1
    return has_page & (first + place < work.end)
