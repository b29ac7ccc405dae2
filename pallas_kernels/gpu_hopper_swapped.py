"""Decode on Hopper with swapped operands: a compute warpgroup's online softmax over tokens in rows.

wgmma's 64 rows are 64 tokens of a tile, and then 64 numbers of a head; its 8 or 16 columns are the
query heads of a group. Against a group padded to 64 rows (`gpu_hopper_softmax`), a tile takes half
as many instructions and cycles of tensor cores; for it, weights go through shared memory, and the
largest score of a column is found across warps.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paxkv.pallas_kernels.gpu_common import Work
from paxkv.pallas_kernels.gpu_hopper_settings import Settings, Shared, Turn
from paxkv.pallas_kernels.gpu_hopper_softmax import add_product, multiply, store_results
from paxkv.pallas_kernels.gpu_steps import Ref, full, held_pieces, in_powers_of_two, load_work
from paxkv.pallas_kernels.online_softmax import MASKED


def compute_swapped_turn(
    turn: Turn, work_ref: Ref, tables_ref: Ref, out_ref: Ref, lse_ref: Ref, shared: Shared,
    settings: Settings,
) -> None:  # fmt: skip
    """Attention of one query's heads, from shared memory to the kernel's results."""
    plgpu.barrier_wait(shared.queries_full.at[turn.buffer])
    top, total, values = _attend_tiles(turn, work_ref, tables_ref, shared, settings)
    store_results(
        top, total, values, 1,
        shared.queries.at[turn.buffer, 0],
        shared.log_sum_exp.at[0],
        out_ref.at[turn.item, :, turn.kv_head],
        lse_ref.at[turn.item, turn.kv_head],
        settings,
    )  # fmt: skip
    plgpu.barrier_arrive(shared.queries_free.at[turn.buffer])


def _attend_tiles(
    turn: Turn, work_ref: Ref, tables_ref: Ref, shared: Shared, settings: Settings
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Softmax of N query heads over all tiles: top and total f32[N], values f32[H, N].

    Scores and `top` are in powers of two.
    """
    assert shared.weights is not None
    queries, weights_smem = shared.queries.at[turn.buffer, 0], shared.weights.at[0]
    tile_tokens, (num_heads, head_dim) = settings.tile_tokens, queries.shape
    work = load_work(work_ref, turn.item)

    def attend_tile(number, carry):
        top, totals, values = carry
        stage = lax.rem(turn.tiles_before + number, settings.num_stages)
        first = work.begin + number * tile_tokens
        plgpu.barrier_wait(shared.keys.full.at[stage])
        scores = multiply(shared.keys.tiles.at[stage], queries.transpose((1, 0)))
        plgpu.barrier_arrive(shared.keys.free.at[stage])
        scores = in_powers_of_two(scores, settings.scale, settings.soft_cap)
        is_full = (first >= work.full_begin) & (first + tile_tokens <= work.full_end)
        scores = lax.cond(
            is_full,
            lambda scores: scores,
            # As for padded operands: what only an edge needs is loaded there.
            lambda scores: _mask(
                scores, load_work(work_ref, turn.item), first, tables_ref, settings
            ),
            scores,
        )
        new_top = jnp.maximum(top, jnp.max(scores, axis=0))
        keep = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - _over_columns(new_top, scores.shape))
        totals = totals * _over_columns(keep, totals.shape) + weights
        weights_smem.transpose((1, 0))[...] = weights.astype(queries.dtype)
        plgpu.commit_smem()
        plgpu.barrier_wait(shared.values.full.at[stage])
        values *= _over_columns(keep, values.shape)
        tile = shared.values.tiles.at[stage].transpose((1, 0))
        if settings.interpret:
            values += multiply(tile, weights_smem.transpose((1, 0)))
        else:
            values = add_product(values, tile, weights_smem.transpose((1, 0)))
        plgpu.barrier_arrive(shared.values.free.at[stage])
        return new_top, totals, values

    nothing = (
        full((num_heads,), MASKED, plgpu.Layout.WGMMA.reduce(0)),
        full((tile_tokens, num_heads), 0.0, plgpu.Layout.WGMMA),  # summed at the end, across warps
        full((head_dim, num_heads), 0.0, plgpu.Layout.WGMMA),
    )
    top, totals, values = lax.fori_loop(0, turn.num_tiles, attend_tile, nothing)
    return top, jnp.sum(totals, axis=0), values


def _over_columns(per_column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(per_column, shape, [1])


def _mask(
    scores: jax.Array, work: Work, first: jax.Array, tables_ref: Ref, settings: Settings
) -> jax.Array:
    """Hides what the query does not see in a tile at an edge."""
    token = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
    position = work.first_row + work.shift
    visible = token < jnp.minimum(position + 1, work.end) - first
    if settings.window is not None:
        visible &= token > position - settings.window - first
    pieces = held_pieces(work, first, tables_ref, settings)
    visible &= (pieces >> lax.div(token, settings.piece)) & 1 == 1
    return jnp.where(visible, scores, MASKED)
