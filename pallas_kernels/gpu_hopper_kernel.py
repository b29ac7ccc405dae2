"""The Hopper kernel: who does what, and in which turns.

A program is one warpgroup that copies and one or two that compute. It takes turns at items of work
for one KV head, in which the same rings and buffers go on.
"""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from paxkv.pallas_kernels.gpu_common import Work
from paxkv.pallas_kernels.gpu_hopper_copies import copy_turn
from paxkv.pallas_kernels.gpu_hopper_settings import ROWS, Settings, Shared, Turn, shared_memory
from paxkv.pallas_kernels.gpu_hopper_softmax import compute_turn
from paxkv.pallas_kernels.gpu_hopper_swapped import compute_swapped_turn
from paxkv.pallas_kernels.gpu_steps import Ref, load_work


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
        queries: `[K, T * G + padding, H]`, padded by the rows that a program copies.
        key_pages: `[P, K, S, H]`.
        value_pages: `[P, K, S, H]`.
        settings: What to compile.

    Returns:
        Outputs `[W, K, R, H]` and log-sum-exp `f32[W, K, R]`, -inf where a row saw no key. Those of
        items without keys are not set.
    """
    num_items = work.slot.shape[0]
    _, num_kv_heads, _, head_dim = key_pages.shape
    out_rows = settings.out_rows * settings.num_warpgroups
    out_shape = num_items, settings.num_parts, num_kv_heads, out_rows, head_dim
    values, lse = plgpu.kernel(
        functools.partial(_attention_kernel, settings=settings),
        out_type=(
            jax.ShapeDtypeStruct(out_shape, key_pages.dtype),
            jax.ShapeDtypeStruct((num_items, num_kv_heads, out_rows), jnp.float32),
        ),
        scratch_types=[shared_memory(settings, head_dim, key_pages.dtype)],
        grid=(min(settings.num_programs, num_items * num_kv_heads),),
        grid_names=("program",),
        num_threads=settings.num_warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention_hopper",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=2048 if settings.is_swapped else 0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if settings.interpret else None,
    )(jnp.stack(work, axis=-1), block_tables, queries, key_pages, value_pages)
    if settings.num_parts > 1:
        return jnp.sum(values, axis=1, dtype=jnp.float32), lse
    return values[:, 0], lse


def _attention_kernel(
    work_ref: Ref,  # i32[W, 8], the fields of Work
    tables_ref: Ref,  # i32[B, M]
    q_ref: Ref,  # [K, T * G + padding, H]
    k_ref: Ref,  # [P, K, S, H]
    v_ref: Ref,  # [P, K, S, H]
    out_ref: Ref,  # [W, parts, K, R, H]
    lse_ref: Ref,  # f32[W, K, R]
    shared: Shared,
    *,
    settings: Settings,
):
    # Three warpgroups have 168 registers a thread each; two that compute need more, a memory
    # warpgroup that clears long tiles no less than 80.
    memory_registers = 80 if settings.tile_tokens > ROWS else 56
    warpgroup = lax.axis_index("warpgroup")
    take_turns = functools.partial(_take_turns, work_ref, q_ref.shape[0], settings)

    @pl.when(warpgroup == settings.num_warpgroups)
    def _copy():
        if settings.num_warpgroups > 1:
            plgpu.set_max_registers(memory_registers, action="decrease")
        pools = k_ref, v_ref
        take_turns(lambda x: copy_turn(x, work_ref, tables_ref, q_ref, pools, shared, settings))

    @pl.when(warpgroup < settings.num_warpgroups)
    def _compute():
        if settings.num_warpgroups > 1:
            plgpu.set_max_registers((504 - memory_registers) // 16 * 8, action="increase")
        compute = compute_swapped_turn if settings.is_swapped else compute_turn
        take_turns(lambda x: compute(x, work_ref, tables_ref, out_ref, lse_ref, shared, settings))


def _take_turns(
    work_ref: Ref, num_kv_heads: int, settings: Settings, do: Callable[[Turn], None]
) -> None:
    """Does what a program has to do: pairs of an item that has keys and a KV head."""
    program, num_programs = lax.axis_index("program"), lax.axis_size("program")
    num_pairs = work_ref.shape[0] * num_kv_heads

    def take_turn(number, before):
        turns_before, tiles_before = before
        # The longest units of a causal prefill are the last; they go first.
        pair = num_pairs - 1 - (program + number * num_programs)
        item, kv_head = lax.div(pair, num_kv_heads), lax.rem(pair, num_kv_heads)
        work = load_work(work_ref, item)
        num_keys = jnp.maximum(work.end - work.begin, 0)
        num_tiles = lax.div(num_keys + settings.tile_tokens - 1, settings.tile_tokens)
        buffer = lax.rem(turns_before, settings.num_buffers)

        @pl.when(num_tiles > 0)
        def _do():
            do(Turn(item, kv_head, num_tiles, tiles_before, turns_before, buffer))

        return turns_before + jnp.where(num_tiles > 0, 1, 0), tiles_before + num_tiles

    none = jnp.int32(0), jnp.int32(0)
    if num_pairs <= settings.num_programs:  # one each
        take_turn(0, none)
    else:
        num_turns = lax.div(num_pairs - 1 - program, num_programs) + 1
        lax.fori_loop(0, num_turns, take_turn, none)
