"""Packed sequences of different lengths: where each row stands, and where its K and V go."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from paxkv.pallas_kernels.attention_call import AttentionArrays
from paxkv.pallas_kernels.layout import NULL_PAGE
from paxkv.pallas_kernels.movers import write_tokens


class Ragged(NamedTuple):
    """Where each packed row stands."""

    slots: jax.Array  # i32[T] the sequence it belongs to
    positions: jax.Array  # i32[T] its place in that sequence, 0 for padding
    is_token: jax.Array  # bool[T] False for padding and for rows of empty sequences


def ragged_rows(num_rows: int, cu_q_lens: jax.Array, kv_lens: jax.Array) -> Ragged:
    """Finds the sequence and the position of every packed row.

    A sequence's queries are its last tokens: query `i` of `q_len` stands at
    `kv_len - q_len + i`.

    Args:
        num_rows: T.
        cu_q_lens: `i32[B + 1]`, the first row of each sequence, then the number of rows used.
        kv_lens: `i32[B]`, the call's new tokens counted.
    """
    num_slots = kv_lens.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    # Rows past the last sequence get its number; they are told apart by `in_use`.
    slots = jnp.searchsorted(cu_q_lens[1:], row, side="right", method="compare_all")
    slots = jnp.minimum(slots.astype(jnp.int32), num_slots - 1)
    in_use = row < cu_q_lens[-1]
    positions = kv_lens[slots] - cu_q_lens[slots + 1] + row
    is_token = in_use & (positions >= 0)
    return Ragged(slots, jnp.where(is_token, positions, 0), is_token)


def write_new_tokens(arrays: AttentionArrays, rows: Ragged) -> AttentionArrays:
    """Writes each row's K and V to the page and offset of its position."""
    block_tables = arrays.block_tables
    num_pages, _, page_size, _ = arrays.key_pages.shape
    row = jnp.arange(rows.slots.shape[0], dtype=jnp.int32)
    column = rows.positions // page_size
    in_table = column < block_tables.shape[1]
    page_ids = block_tables[rows.slots, jnp.where(in_table, column, 0)]
    is_written = rows.is_token & in_table & is_page(page_ids, num_pages)
    # Dropped rows get ids of their own past the pool: the scatter's indices stay unique.
    page_ids = jnp.where(is_written, page_ids, num_pages + row)
    offsets = rows.positions % page_size
    return arrays._replace(
        key_pages=write_tokens(arrays.key_pages, page_ids, offsets, arrays.new_keys),
        value_pages=write_tokens(arrays.value_pages, page_ids, offsets, arrays.new_values),
    )


def is_page(page_ids: jax.Array, num_pages: int) -> jax.Array:
    """Whether ids name a page that can be handed out."""
    return (page_ids > NULL_PAGE) & (page_ids < num_pages)
