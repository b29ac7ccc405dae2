"""What the GPU kernels share: cutting a ragged call into pieces of work, and putting it together.

A *unit* is a tile of one sequence's queries, for each KV head. Where units are too few to fill the
GPU, each is cut along its keys into *items* of about equal length, whose partial softmaxes are
merged after the kernel (flash-decoding). A kernel's program does one item for one KV head.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from paxkv.pallas_kernels.attention_call import AttentionArrays, AttentionSettings
from paxkv.pallas_kernels.layout import page_size_of
from paxkv.pallas_kernels.online_softmax import MASKED, PartialSoftmax, normalise
from paxkv.pallas_kernels.ragged import Ragged, is_page


class Work(NamedTuple):
    """The items of one call, W of them; those past the last have no keys."""

    slot: jax.Array  # i32[W] the sequence
    first_row: jax.Array  # i32[W] the first packed row of the unit's queries
    shift: jax.Array  # i32[W] a query in packed row r stands at position r + shift
    begin: jax.Array  # i32[W] the first key to read: where a page, or a tile of one, begins
    end: jax.Array  # i32[W] keys at and past it are not read; begin or less: nothing to do
    full_begin: jax.Array  # i32[W] all queries of the unit see all keys from here
    full_end: jax.Array  # i32[W] to here; no key where a page is missing
    has_holes: jax.Array  # i32[W] 1 where the sequence lacks a page that it should have


class Plan(NamedTuple):
    """How a call is cut into work."""

    work: Work
    unit_of_item: jax.Array | None  # i32[W], U for items that are none; None: items are units
    unit_of_row: jax.Array  # i32[T]
    query_of_row: jax.Array  # i32[T] which of the unit's queries it is
    num_units: int  # U


def plan_work(
    arrays: AttentionArrays,
    settings: AttentionSettings,
    rows: Ragged,
    *,
    unit_queries: int,
    tile_tokens: int,
    num_programs: int,
    num_rounds: int = 1,
) -> Plan:
    """Cuts a call into units, and those into items if they do not fill the GPU evenly.

    All of it is the same for every layer of a model, so XLA does it once per step.

    Args:
        arrays: Of the call.
        settings: Of the call.
        rows: Where each packed row stands.
        unit_queries: Queries of a unit, at most.
        tile_tokens: Keys that a kernel takes at a time.
        num_programs: How many fill the GPU.
        num_rounds: Units for fewer rounds of programs than that are cut into items for so many:
            with a round and a bit, most of the GPU would idle in the last one.
    """
    _, _, _, pages, _, block_tables, kv_lens, cu_q_lens, _ = arrays
    window, max_q_len = settings.window, settings.max_q_len
    num_rows, num_slots, num_kv_heads = rows.slots.shape[0], kv_lens.shape[0], pages.shape[1]
    longest = num_rows if max_q_len is None else min(max_q_len, num_rows)
    page_size = page_size_of(pages)
    piece = min(page_size, tile_tokens)
    stored = jnp.minimum(kv_lens, block_tables.shape[1] * page_size)

    # Every sequence but for its last unit fills its units.
    num_units = min(
        num_rows // unit_queries + min(num_slots, num_rows), num_slots * -(-longest // unit_queries)
    )
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    units_until = jnp.cumsum(-(-q_lens // unit_queries), dtype=jnp.int32)
    units_before = units_until - -(-q_lens // unit_queries)
    unit = jnp.arange(num_units, dtype=jnp.int32)
    slot = _owner(units_until, unit)
    first_row = cu_q_lens[slot] + (unit - units_before[slot]) * unit_queries
    end_row = jnp.minimum(first_row + unit_queries, cu_q_lens[slot + 1])
    shift = kv_lens[slot] - cu_q_lens[slot + 1]
    end = jnp.clip(end_row + shift, 0, stored[slot])
    first_seen = jnp.zeros_like(slot)
    full_begin = first_seen
    if window is not None:
        first_seen = jnp.maximum(first_row + shift - window + 1, 0)
        full_begin = jnp.maximum(end_row + shift - window, 0)
    begin = first_seen // piece * piece
    end = jnp.where((unit < units_until[-1]) & (end_row > first_row), end, 0)

    seen_of_slot = jnp.zeros_like(kv_lens)
    if window is not None:
        seen_of_slot = jnp.maximum(kv_lens - q_lens - window + 1, 0)
    first_token = jnp.arange(block_tables.shape[1], dtype=jnp.int32)[None] * page_size
    is_needed = (first_token < stored[:, None]) & (first_token + page_size > seen_of_slot[:, None])
    has_holes = jnp.any(is_needed & ~is_page(block_tables, pages.shape[0]), axis=1)[slot]
    work = Work(
        slot=slot,
        first_row=first_row,
        shift=shift,
        begin=begin,
        end=end,
        full_begin=full_begin,
        full_end=jnp.where(has_holes, 0, jnp.minimum(first_row + shift + 1, end)),
        has_holes=has_holes.astype(jnp.int32),
    )
    unit_of_item = None
    num_pieces = num_units * num_kv_heads
    if num_pieces < num_rounds * num_programs:
        if 2 * num_pieces <= num_programs:
            num_rounds = 1
        num_parts = max(num_rounds * num_programs // num_kv_heads, 1)
        work, unit_of_item = _split(work, tile_tokens, num_parts)
    row = jnp.arange(num_rows, dtype=jnp.int32) - cu_q_lens[rows.slots]
    return Plan(
        work=work,
        unit_of_item=unit_of_item,
        unit_of_row=jnp.minimum(units_before[rows.slots] + row // unit_queries, num_units - 1),
        query_of_row=row % unit_queries,
        num_units=num_units,
    )


def _split(work: Work, tile_tokens: int, num_parts: int) -> tuple[Work, jax.Array]:
    """Cuts each unit into items of about equal length, so many that about `num_parts` come out.

    Of units with `t` tiles in all, each `t / num_parts` of them to an item, at most
    `num_units + num_parts` items come out: a unit leaves less than one item over.
    """
    num_units = work.slot.shape[0]
    tiles = jnp.maximum(-(-(work.end - work.begin) // tile_tokens), 0)
    most_tiles = jnp.maximum(-(-jnp.sum(tiles, dtype=jnp.int32) // num_parts), 1)
    num_items = -(-tiles // most_tiles)  # of each unit
    item_tokens = -(-tiles // jnp.maximum(num_items, 1)) * tile_tokens
    items_until = jnp.cumsum(num_items, dtype=jnp.int32)
    item = jnp.arange(num_units + num_parts, dtype=jnp.int32)
    unit = _owner(items_until, item)
    of_item = Work(*(x[unit] for x in work))
    begin = of_item.begin + (item - (items_until - num_items)[unit]) * item_tokens[unit]
    is_item = item < items_until[-1]
    end = jnp.where(is_item, jnp.minimum(of_item.end, begin + item_tokens[unit]), 0)
    return of_item._replace(begin=begin, end=end), jnp.where(is_item, unit, num_units)


def _owner(until: jax.Array, number: jax.Array) -> jax.Array:
    """Whose each number is: owner `i` has those from `until[i - 1]` to `until[i]`."""
    owner = jnp.searchsorted(until, number, side="right", method="compare_all")
    return jnp.minimum(owner.astype(jnp.int32), until.shape[0] - 1)


def rows_by_kv_head(queries: jax.Array, num_kv_heads: int, *, padding: int) -> jax.Array:
    """Queries `[T, N, H]` as `[K, T * G + padding, H]`: all that read one KV head in one piece.

    There is a little more padding than that: the rows are a multiple of 8.
    """
    num_rows, num_heads, head_dim = queries.shape
    group = num_heads // num_kv_heads
    by_head = queries.reshape(num_rows, num_kv_heads, group, head_dim).swapaxes(0, 1)
    by_head = by_head.reshape(num_kv_heads, num_rows * group, head_dim)
    padding += -(num_rows * group + padding) % 8
    return jnp.pad(by_head, ((0, 0), (0, padding), (0, 0)))


def unite(
    values: jax.Array,
    log_sum_exp: jax.Array,
    plan: Plan,
    rows: Ragged,
    sinks: jax.Array | None,
    *,
    unit_queries: int,
    group: int,
) -> tuple[jax.Array, jax.Array]:
    """The call's result from what the kernel's programs found.

    Args:
        values: `[W, K, R, H]`, each item's outputs. Rows are queries, then heads of the group;
            what is past `unit_queries * group` is left out.
        log_sum_exp: `f32[W, K, R]`, -inf where a row saw no key. Of items without keys, neither
            outputs nor these are set.
        plan: How work was cut.
        rows: Where each packed row stands.
        sinks: `f32[N]` or None.
        unit_queries: Queries of a unit.
        group: Query heads per KV head.

    Returns:
        Outputs `f32[T, N, H]` and log-sum-exp `f32[T, N]`.
    """
    num_items, num_kv_heads, _, head_dim = values.shape
    used = unit_queries * group
    shape = num_items, num_kv_heads, unit_queries, group
    values = values[:, :, :used].reshape(*shape, head_dim)
    top = log_sum_exp[:, :, :used].reshape(shape)
    has_keys = (plan.work.end > plan.work.begin)[:, None, None, None]
    top = jnp.where(has_keys, top, -jnp.inf)
    if plan.unit_of_item is not None:
        values, top = _merge_items(values, top, plan.unit_of_item, plan.num_units)
    unit, query = plan.unit_of_row, plan.query_of_row
    values, top = values[unit, :, query], top[unit, :, query]  # [T, K, G, H] and [T, K, G]
    is_seen = ~(top <= MASKED / 2)  # NaN is not hidden
    num_heads = num_kv_heads * group
    softmax = PartialSoftmax(
        top=jnp.where(is_seen, top, MASKED).reshape(-1, num_heads),
        total=is_seen.astype(jnp.float32).reshape(-1, num_heads),
        values=jnp.where(is_seen[..., None], values, 0)
        .astype(jnp.float32)
        .reshape(-1, num_heads, head_dim),
    )
    out, lse = normalise(softmax, sinks)
    out = jnp.where(rows.is_token[:, None, None], out, 0.0)
    return out, jnp.where(rows.is_token[:, None], lse, -jnp.inf)


def _merge_items(
    values: jax.Array, top: jax.Array, unit_of_item: jax.Array, num_units: int
) -> tuple[jax.Array, jax.Array]:
    """Items' outputs and log-sum-exp, `[W, K, Q, G, ...]`, merged into those of units."""
    num_items, num_kv_heads, unit_queries, group, head_dim = values.shape
    owner = unit_of_item[None] == jnp.arange(num_units, dtype=jnp.int32)[:, None]
    shape = num_items, num_kv_heads, unit_queries * group
    top = top.reshape(shape)
    is_seen = ~(top <= MASKED / 2)  # NaN is not hidden
    part = PartialSoftmax(
        top=jnp.where(is_seen, top, MASKED),
        total=is_seen.astype(jnp.float32),
        values=jnp.where(is_seen[..., None], values.reshape(*shape, head_dim), 0),
    )
    tops = jnp.where(owner[:, :, None, None], part.top[None], MASKED)
    top = jnp.max(tops, axis=1)
    # Items of no unit would be scaled up without the bound.
    share = jnp.exp(jnp.minimum(part.top - top[jnp.minimum(unit_of_item, num_units - 1)], 0.0))
    total = _sum_by_owner(part.total * share, owner)
    values = _sum_by_owner(part.values * share[..., None], owner)
    out, lse = normalise(PartialSoftmax(top, total, values), None)
    unit_shape = num_units, num_kv_heads, unit_queries, group
    return out.reshape(*unit_shape, head_dim), lse.reshape(unit_shape)


def _sum_by_owner(x: jax.Array, owner: jax.Array) -> jax.Array:
    """Sums of `[W, ...]` over what each of U owns: a product, in which 0 x NaN must not be NaN.

    A scatter would sum in another order each time.
    """

    def summed(x: jax.Array) -> jax.Array:
        return jnp.einsum("uw,w...->u...", owner.astype(jnp.float32), x, precision="highest")

    is_finite = jnp.isfinite(x)
    is_lost = summed((~is_finite).astype(jnp.float32)) > 0
    return jnp.where(is_lost, jnp.nan, summed(jnp.where(is_finite, x, 0.0)))
