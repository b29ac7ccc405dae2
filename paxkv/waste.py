"""Where a pool's memory goes: accounts of a block table, in tokens, as pure functions.

    account = account_pool(table, is_waiting=False)  # inside jit: seven numbers
    in_bytes(jax.device_get(account), bytes_per_token=819_200)["tail"]

Every slot of one token is of exactly one kind (the definitions are those of the PagedAttention
paper, SOSP 2023, sections 3.1 and 6), so the kinds of a `PoolAccount` add up to the pool:

- used: holds a token of a live sequence; a shared one counts once;
- tail: in a live sequence's page, behind its tokens. Reserved (still to be filled) and internal
  waste (never filled) together: which it is shows when the sequence ends;
- reusable: in a page that no sequence names, kept for its prefix;
- free: in a page that nobody holds, while no request waits;
- external: the same while one waits, which the free pages then evidently cannot serve;
- null: in the null page, which is never handed out.

Duplicates, slots of used ones whose content stands elsewhere too, are found on the host, which
knows what stands in a page: `duplicate_tokens`.
"""

import collections
import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from paxkv.block_table import BlockTable
from paxkv.config import page_bytes
from paxkv.decoder import LayerGroup
from paxkv.pallas_kernels.layout import NULL_PAGE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolAccount:
    """Tokens of a pool by what they are for, `i32[]` each; they add up to the pool."""

    used: jax.Array
    tail: jax.Array
    reusable: jax.Array
    free: jax.Array
    external: jax.Array
    null: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlotAccounts:
    """Tokens of each slot's pages, `i32[B]` each. A shared page counts for all who share it."""

    used: jax.Array
    tail: jax.Array
    shared: jax.Array  # of used: in pages that somebody else holds too


class GroupPages(NamedTuple):
    """Pages of groups of slots."""

    alone: jax.Array  # i32[G] did every slot hold its own
    shared: jax.Array  # i32[G] as it is: a page of several slots counts once


def account_pool(
    table: BlockTable,
    *,
    is_waiting: ArrayLike = False,
    is_live: jax.Array | None = None,
    window: int | None = None,
) -> PoolAccount:
    """Sorts every token slot of the pool by kind.

    Args:
        table: The state.
        is_waiting: `bool[]`, whether a request waits for memory.
        is_live: `bool[B]`, slots whose sequence has not ended; None for all. Pages that only ended
            ones name count as reusable until they are given back.
        window: Tokens that a query sees in these layers, None for all. Those that no query to come
            sees, but whose page holds others, count as tail.
    """
    page_size = table.page_size
    fill = _marked_fill(table, is_live, window)
    num_live = jnp.sum(fill > 0, dtype=jnp.int32)
    is_free = table.ref_counts == 0
    num_free = jnp.sum(is_free, dtype=jnp.int32)
    used = jnp.sum(fill, dtype=jnp.int32) - num_live
    waiting_free = jnp.where(is_waiting, num_free, 0)
    num_reusable = table.ref_counts.shape[0] - 1 - num_live - num_free
    return PoolAccount(
        used=used,
        tail=num_live * page_size - used,
        reusable=num_reusable * page_size,
        free=(num_free - waiting_free) * page_size,
        external=waiting_free * page_size,
        null=jnp.int32(page_size),
    )


def account_slots(table: BlockTable, *, window: int | None = None) -> SlotAccounts:
    """Sorts the tokens of every slot's pages by kind; see `account_pool` for the window."""
    fill = _entry_fill(table, window)
    is_held = _is_held(table)
    is_shared = is_held & (table.ref_counts[table.block_tables] > 1)
    used = jnp.sum(fill, axis=1, dtype=jnp.int32)
    held = jnp.sum(is_held, axis=1, dtype=jnp.int32) * table.page_size
    shared = jnp.sum(jnp.where(is_shared, fill, 0), axis=1, dtype=jnp.int32)
    return SlotAccounts(used=used, tail=held - used, shared=shared)


def page_fill(table: BlockTable) -> jax.Array:
    """Tokens of live sequences that each page holds, `i32[P]`.

    Sequences that share a page may stand at different places in it: the furthest counts.
    """
    return jnp.maximum(_marked_fill(table) - 1, 0)


def pages_of_slot_groups(table: BlockTable, group_size: int) -> GroupPages:
    """What sharing saves groups of slots, such as the beams of a prompt.

    Args:
        table: The state.
        group_size: Slots in a row that are a group; those that make up no whole group at the end
            are left out.
    """
    num_groups = table.lengths.shape[0] // group_size
    groups = table.block_tables[: num_groups * group_size].reshape(num_groups, -1)

    def distinct(pages: jax.Array) -> jax.Array:
        is_named = jnp.zeros(table.ref_counts.shape[0], bool).at[pages].set(True)
        return jnp.sum(is_named.at[NULL_PAGE].set(False), dtype=jnp.int32)

    return GroupPages(
        alone=jnp.sum(groups != NULL_PAGE, axis=1, dtype=jnp.int32),
        shared=jax.vmap(distinct)(groups),
    )


def in_bytes(account: PoolAccount, *, bytes_per_token: int) -> dict[str, int]:
    """An account in bytes, by kind, on the host: int32 does not count that far."""
    tokens = jax.device_get(account)
    return {
        field.name: int(getattr(tokens, field.name)) * bytes_per_token
        for field in dataclasses.fields(tokens)
    }


def padding_bytes(layer_groups: Sequence[LayerGroup], *, page_size: int, dtype: DTypeLike) -> int:
    """Bytes of one page that the layout adds to what keys and values need.

    On TPUs heads are filled up to a multiple of 128 numbers, so a page of heads of 64 numbers is
    half padding. Elsewhere there is none.
    """
    numbers = sum(
        2 * len(group.layers) * group.num_kv_heads * page_size * group.head_dim
        for group in layer_groups
    )
    stored = page_bytes(layer_groups, page_size=page_size, dtype=dtype)
    return stored - numbers * np.dtype(dtype).itemsize


def duplicate_tokens(contents: Sequence[Hashable], fill: Sequence[int] | np.ndarray) -> int:
    """Used tokens that stand elsewhere too, all copies but one: what sharing would give back.

    Args:
        contents: What stands in each page (with all that stands before it), such as a hash; None
            where that is not known or the page is not in use.
        fill: Tokens in each page, as `page_fill` says.
    """
    copies: dict[Hashable, list[int]] = collections.defaultdict(list)
    for content, tokens in zip(contents, fill, strict=True):
        if content is not None:
            copies[content].append(int(tokens))
    return sum(sum(tokens) - max(tokens) for tokens in copies.values())


def _is_held(table: BlockTable) -> jax.Array:
    """Which entries `bool[B, M]` name a page; those that left a window do not."""
    return table.block_tables != NULL_PAGE


def _entry_fill(table: BlockTable, window: int | None = None) -> jax.Array:
    """Tokens that stand in the page of each entry and may still be seen, `i32[B, M]`."""
    begin = jnp.arange(table.block_tables.shape[1], dtype=jnp.int32)[None] * table.page_size

    def up_to(tokens: jax.Array) -> jax.Array:
        return jnp.clip(tokens[:, None] - begin, 0, table.page_size)

    fill = up_to(table.lengths)
    if window is not None:
        fill -= up_to(table.lengths - (window - 1))
    return jnp.where(_is_held(table), fill, 0)


def _marked_fill(
    table: BlockTable, is_live: jax.Array | None = None, window: int | None = None
) -> jax.Array:
    """Tokens that each page holds and one more, `i32[P]`; 0 where no live slot names it.

    So that one scatter tells which pages are named, even without a token yet, and how full.
    """
    pool_pages = table.ref_counts.shape[0]
    is_named = _is_held(table) if is_live is None else _is_held(table) & is_live[:, None]
    pages = jnp.where(is_named, table.block_tables, pool_pages)
    marks = _entry_fill(table, window) + 1
    return jnp.zeros(pool_pages, jnp.int32).at[pages].max(marks, mode="drop")
