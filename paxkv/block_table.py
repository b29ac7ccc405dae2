"""Which pages hold which sequence: arrays in, arrays out, every operation wholly or not at all.

    table = init_block_table(num_slots=2, max_pages=4, num_pages=6, page_size=16)
    table, copies, fits = reserve(table, jnp.array([20, 5], jnp.int32))  # 2 pages and 1
    table, fits = append(table, jnp.array([20, 5], jnp.int32))  # their tokens are stored
    table, ok = release(table, jnp.array([True, False]))  # slot 0 is free again
    table, ok = fork(table, jnp.array([1, 1], jnp.int32))  # slot 0 goes on where slot 1 stands

Sequences may share pages; a page that is about to be written has one owner, so `reserve` gives a
slot a page of its own in place of a shared one, and says what to copy. Pages reserved for tokens to
come are never shared. A page's reference count is the number of table entries that name it (and of
holds from outside the table, where there are any); a count of 0 means free. Entries at and past
`num_pages` are `NULL_PAGE`, and so are entries whose page was given up because it left a sliding
window.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from paxkv.pallas_kernels.layout import NULL_PAGE

_INT32_MAX = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """Which pages hold which sequence, and how far each sequence has come.

    Pages held past `lengths` are reserved: room for tokens that are still to be written.
    """

    block_tables: jax.Array  # i32[B, M] page ids in token order, then NULL_PAGE
    num_pages: jax.Array  # i32[B] entries in use; given-up pages keep theirs
    lengths: jax.Array  # i32[B] tokens stored
    ref_counts: jax.Array  # i32[P] 0 means free; the null page's is always 1
    page_size: int = dataclasses.field(metadata={"static": True})  # S, tokens per page


def init_block_table(num_slots: int, max_pages: int, num_pages: int, page_size: int) -> BlockTable:
    """An empty table.

    Args:
        num_slots: `B`, sequences at once.
        max_pages: `M`, pages one sequence may hold.
        num_pages: `P`, pages of the pool, the null page counted.
        page_size: `S`, tokens per page.

    Raises:
        ValueError: A size is out of range.
    """
    for name, size, smallest in (
        ("num_slots", num_slots, 1),
        ("max_pages", max_pages, 1),
        ("num_pages", num_pages, 2),
        ("page_size", page_size, 1),
    ):
        if size < smallest:
            raise ValueError(f"{name}={size} must be at least {smallest}")
    if (max_pages + 1) * page_size > _INT32_MAX:
        raise ValueError(
            f"{max_pages=} pages of {page_size=} tokens are more positions than int32 counts "
            f"({_INT32_MAX}); lower max_pages to {_INT32_MAX // page_size - 1}"
        )
    return BlockTable(
        block_tables=jnp.full((num_slots, max_pages), NULL_PAGE, jnp.int32),
        num_pages=jnp.zeros(num_slots, jnp.int32),
        lengths=jnp.zeros(num_slots, jnp.int32),
        ref_counts=jnp.zeros(num_pages, jnp.int32).at[NULL_PAGE].set(1),
        page_size=page_size,
    )


def append(table: BlockTable, new_tokens: jax.Array) -> tuple[BlockTable, jax.Array]:
    """Counts `new_tokens` (`i32[B]`) more tokens as stored, or changes nothing.

    Returns:
        The new table and `bool[]`, whether every slot had reserved the room.
    """
    chex.assert_shape(new_tokens, table.lengths.shape)
    room = table.num_pages * table.page_size - table.lengths
    fits = jnp.all((new_tokens >= 0) & (new_tokens <= room))
    lengths = table.lengths + jnp.where(fits, new_tokens, 0)
    return dataclasses.replace(table, lengths=lengths), fits


def fork(table: BlockTable, parents: jax.Array) -> tuple[BlockTable, jax.Array]:
    """Makes every slot a copy of its parent that shares the parent's pages, or changes nothing.

    All at once, so that beams can be reordered: slots may swap places, and several may go on from
    one. What a slot held itself is given back; pages reserved past the length are not shared.

    Args:
        table: The state.
        parents: `i32[B]`, a slot for each slot. Its own number leaves a slot as it is.

    Returns:
        The new table and `bool[]`; False if a parent is out of range, or if a page would be freed
        twice, so the table is corrupt.
    """
    chex.assert_shape(parents, table.lengths.shape)
    num_slots = parents.shape[0]
    slot = jnp.arange(num_slots, dtype=jnp.int32)
    in_range = jnp.all((parents >= 0) & (parents < num_slots))
    parents = jnp.where(in_range, parents, slot)
    is_changed = parents != slot
    table, ok = jax.lax.cond(
        jnp.any(is_changed), _share, lambda table, *_: (table, jnp.array(True)),
        table, parents, is_changed,
    )  # fmt: skip
    return table, in_range & ok


def release(table: BlockTable, done: jax.Array) -> tuple[BlockTable, jax.Array]:
    """Empties the slots in `done` (`bool[B]`) and gives back their pages, or changes nothing.

    Returns:
        The new table and `bool[]`; False if a page would be freed twice, so the table is corrupt.
    """
    chex.assert_shape(done, table.lengths.shape)
    kept_pages = jnp.where(done, 0, table.num_pages)
    return _shorten(table, jnp.where(done, 0, table.lengths), kept_pages)


def truncate(table: BlockTable, lengths: jax.Array) -> tuple[BlockTable, jax.Array]:
    """Shortens every slot to `lengths` tokens, or changes nothing.

    Every page past them is given back, reserved ones included.

    Args:
        table: The state.
        lengths: `i32[B]`, none above the slot's length now.

    Returns:
        The new table and `bool[]`; False if a length is negative or above the slot's, or if a
        page would be freed twice, so the table is corrupt.
    """
    chex.assert_shape(lengths, table.lengths.shape)
    in_range = jnp.all((lengths >= 0) & (lengths <= table.lengths))
    kept_pages = jnp.where(in_range, held_pages(lengths, table.page_size), table.num_pages)
    table, ok = _shorten(table, jnp.where(in_range, lengths, table.lengths), kept_pages)
    return table, in_range & ok


def held_pages(tokens: jax.Array, page_size: int) -> jax.Array:
    """Pages that hold so many tokens, elementwise."""
    return (tokens + page_size - 1) // page_size


def drop_entries(table: BlockTable, is_dropped: jax.Array) -> tuple[BlockTable, jax.Array]:
    """Has the entries in `is_dropped` (`bool[B, M]`) name the null page, or changes nothing.

    Costs next to nothing when none of them names a page.

    Returns:
        The new table and `bool[]`; False if a page would be freed twice, so the table is corrupt.
    """
    chex.assert_shape(is_dropped, table.block_tables.shape)
    return jax.lax.cond(
        jnp.any(is_dropped & (table.block_tables != NULL_PAGE)),
        _drop,
        lambda table, _: (table, jnp.array(True)),
        table,
        is_dropped,
    )


def _drop(table: BlockTable, is_dropped: jax.Array) -> tuple[BlockTable, jax.Array]:
    num_pages = table.ref_counts.shape[0]
    is_dropped &= table.block_tables != NULL_PAGE
    # Several slots may give back one shared page, so these ids need not be unique.
    dropped = jnp.where(is_dropped, table.block_tables, num_pages)
    ref_counts = table.ref_counts.at[dropped].add(-1, mode="drop")
    ok = jnp.all(ref_counts >= 0)
    return dataclasses.replace(
        table,
        block_tables=jnp.where(is_dropped & ok, NULL_PAGE, table.block_tables),
        ref_counts=jnp.where(ok, ref_counts, table.ref_counts),
    ), ok


def _share(
    table: BlockTable, parents: jax.Array, is_changed: jax.Array
) -> tuple[BlockTable, jax.Array]:
    pool_pages = table.ref_counts.shape[0]
    column = jnp.arange(table.block_tables.shape[1], dtype=jnp.int32)[None]
    num_pages = held_pages(table.lengths, table.page_size)[parents]
    is_shared = is_changed[:, None] & (column < num_pages[:, None])
    shared = jnp.where(is_shared, table.block_tables[parents], NULL_PAGE)
    dropped = jnp.where(is_changed[:, None], table.block_tables, NULL_PAGE)

    def named(pages: jax.Array) -> jax.Array:  # i32[B, M], but for the null page
        return jnp.where(pages == NULL_PAGE, pool_pages, pages)

    ref_counts = table.ref_counts.at[named(shared)].add(1, mode="drop")
    ref_counts = ref_counts.at[named(dropped)].add(-1, mode="drop")
    ok = jnp.all(ref_counts >= 0)
    forked = dataclasses.replace(
        table,
        block_tables=jnp.where(is_changed[:, None], shared, table.block_tables),
        num_pages=jnp.where(is_changed, num_pages, table.num_pages),
        lengths=table.lengths[parents],
        ref_counts=ref_counts,
    )
    return jax.tree.map(lambda new, old: jnp.where(ok, new, old), forked, table), ok


def _shorten(
    table: BlockTable, lengths: jax.Array, kept_pages: jax.Array
) -> tuple[BlockTable, jax.Array]:
    """Keeps each slot's first `kept_pages` (`i32[B]`) entries, or everything if that is corrupt."""
    return jax.lax.cond(
        jnp.any(kept_pages < table.num_pages),
        _give_back,
        _give_back_nothing,
        table,
        lengths,
        kept_pages,
    )


def _give_back(
    table: BlockTable, lengths: jax.Array, kept_pages: jax.Array
) -> tuple[BlockTable, jax.Array]:
    column = jnp.arange(table.block_tables.shape[1], dtype=jnp.int32)[None]
    shorter, ok = _drop(table, column >= kept_pages[:, None])
    shorter = dataclasses.replace(shorter, num_pages=kept_pages, lengths=lengths)
    return jax.tree.map(lambda new, old: jnp.where(ok, new, old), shorter, table), ok


def _give_back_nothing(
    table: BlockTable, lengths: jax.Array, _: jax.Array
) -> tuple[BlockTable, jax.Array]:
    return dataclasses.replace(table, lengths=lengths), jnp.array(True)
