"""What a compute warpgroup of the Hopper kernel does: an online softmax over tiles of the rings."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paxkv.pallas_kernels.gpu_common import Work
from paxkv.pallas_kernels.gpu_hopper_settings import ROWS, Settings, Shared, Turn
from paxkv.pallas_kernels.gpu_steps import (
    LOG2_E,
    Ref,
    full,
    held_pieces,
    in_powers_of_two,
    load_work,
)
from paxkv.pallas_kernels.online_softmax import MASKED


def compute_turn(
    turn: Turn, work_ref: Ref, tables_ref: Ref, out_ref: Ref, lse_ref: Ref, shared: Shared,
    settings: Settings,
) -> None:  # fmt: skip
    """Attention of a warpgroup's rows of queries, from shared memory to the kernel's results."""
    warpgroup = lax.axis_index("warpgroup")
    plgpu.barrier_wait(shared.queries_full.at[turn.buffer])
    top, total, values = _attend_tiles(turn, work_ref, tables_ref, warpgroup, shared, settings)
    rows = pl.ds(warpgroup * ROWS, settings.out_rows)
    store_results(
        top, total, values, 0,
        shared.queries.at[turn.buffer, warpgroup],
        shared.log_sum_exp.at[warpgroup],
        out_ref.at[turn.item, :, turn.kv_head, rows],
        lse_ref.at[turn.item, turn.kv_head, rows],
        settings,
    )  # fmt: skip
    plgpu.barrier_arrive(shared.queries_free.at[turn.buffer])


def _attend_tiles(
    turn: Turn, work_ref: Ref, tables_ref: Ref, warpgroup: jax.Array, shared: Shared,
    settings: Settings,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Softmax of a warpgroup's rows over all tiles: top and total f32[64], values f32[64, H].

    Scores and `top` are in powers of two.
    """
    queries = shared.queries.at[turn.buffer, warpgroup]
    p_smem = None if shared.weights is None else shared.weights.at[warpgroup]
    tile_tokens, head_dim = settings.tile_tokens, queries.shape[-1]
    work = load_work(work_ref, turn.item)

    def attend_tile(tile, carry):
        top, total, values = carry
        stage = lax.rem(turn.tiles_before + tile, settings.num_stages)
        first = work.begin + tile * tile_tokens
        plgpu.barrier_wait(shared.keys.full.at[stage])
        scores = multiply(queries, shared.keys.tiles.at[stage].transpose((1, 0)))
        plgpu.barrier_arrive(shared.keys.free.at[stage])
        scores = in_powers_of_two(scores, settings.scale, settings.soft_cap)
        is_full = (first >= work.full_begin) & (first + tile_tokens <= work.full_end)
        scores = lax.cond(
            is_full,
            lambda scores: scores,
            # What only an edge needs is loaded there: it would hold registers through the loop.
            lambda scores: _mask(
                scores, load_work(work_ref, turn.item), first, warpgroup, tables_ref, settings
            ),
            scores,
        )
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        keep = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        total = total * keep + jnp.sum(weights, axis=1)
        weights = weights.astype(queries.dtype)
        plgpu.barrier_wait(shared.values.full.at[stage])
        values *= lax.broadcast_in_dim(keep, values.shape, [0])
        values = _add_weighted(values, weights, shared.values.tiles.at[stage], p_smem)
        plgpu.barrier_arrive(shared.values.free.at[stage])
        return new_top, total, values

    per_row = plgpu.Layout.WGMMA.reduce(1)
    nothing = (
        full((ROWS,), MASKED, per_row),
        full((ROWS,), 0.0, per_row),
        full((ROWS, head_dim), 0.0, plgpu.Layout.WGMMA),
    )
    return lax.fori_loop(0, turn.num_tiles, attend_tile, nothing)


def _mask(
    scores: jax.Array, work: Work, first: jax.Array, warpgroup: jax.Array, tables_ref: Ref,
    settings: Settings,
) -> jax.Array:  # fmt: skip
    """Hides what a query does not see in a tile at an edge."""
    column, row = (
        plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=plgpu.Layout.WGMMA)
        for axis in (1, 0)
    )
    position = work.first_row + work.shift
    if settings.unit_queries > 1:
        position = position + lax.div(warpgroup * ROWS + row, settings.group)
    # Of a column 8 a + b, a is known when the kernel is compiled. Compared so, no register is
    # needed for the columns.
    in_eight = column & 7
    eights = column - in_eight
    visible = eights < jnp.minimum(position + 1, work.end) - first - in_eight
    if settings.window is not None:
        visible &= eights > position - settings.window - first - in_eight
    pieces = held_pieces(work, first, tables_ref, settings)
    visible &= (pieces >> lax.div(eights, settings.piece)) & 1 == 1
    return jnp.where(visible, scores, MASKED)


def multiply(left: Ref, right: Ref) -> jax.Array:
    """The product of two matrices in shared memory."""

    def set_product(product_ref):
        plgpu.wgmma(product_ref, left, right)
        return product_ref[...]

    shape = left.shape[0], right.shape[1]
    return pl.run_scoped(set_product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def add_product(values: jax.Array, left: jax.Array | Ref, right: Ref) -> Any:
    """`values + left @ right`, added up where `values` are; not for the interpreter."""

    def add(values_ref):
        plgpu.wgmma(values_ref, left, right)

    return pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(values))


def _add_weighted(
    values: jax.Array, weights: jax.Array, tile_ref: Ref, p_smem: Ref | None
) -> jax.Array:
    """`values + weights @ tile`, with weights in registers or, interpreted, in shared memory."""
    if p_smem is None:
        return add_product(values, weights, tile_ref)
    p_smem[...] = weights
    plgpu.commit_smem()
    return values + multiply(p_smem, tile_ref)


def store_results(
    top: jax.Array, total: jax.Array, values: jax.Array, axis: int, o_smem: Ref,
    lse_smem: Ref, out_ref: Ref, lse_ref: Ref, settings: Settings,
) -> None:  # fmt: skip
    """Writes a warpgroup's outputs and log-sum-exp by way of shared memory.

    Queries lie along `axis` of `values`, and along the first of `o_smem`.
    """
    saw_nothing = (top <= MASKED / 2) & (total == total)  # a NaN must show, if only in the total
    total = jnp.where(saw_nothing, jnp.ones_like(total), total)
    lse_smem[...] = jnp.where(
        saw_nothing, jnp.full_like(top, -jnp.inf), (top + jnp.log2(total)) / LOG2_E
    )
    share = jnp.where(saw_nothing, jnp.zeros_like(total), 1 / total)
    values *= lax.broadcast_in_dim(share, values.shape, [axis])
    o_smem_as_values = o_smem.transpose((1, 0)) if axis == 1 else o_smem
    out_rows = pl.ds(0, settings.out_rows)
    for part in range(settings.num_parts):
        rounded = values.astype(o_smem.dtype)
        o_smem_as_values[...] = rounded
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem.at[out_rows], out_ref.at[part])
        if part == 0:
            plgpu.copy_smem_to_gmem(lse_smem.at[out_rows], lse_ref)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        values -= rounded.astype(jnp.float32)
