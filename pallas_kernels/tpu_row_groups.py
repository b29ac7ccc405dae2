"""New tokens to their pages, where a sequence may have many: by aligned groups of rows.

A copy can only begin at a whole register of rows: as many are fetched from the page, merged with
the new ones and sent back, several groups at a time.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from paxkv.pallas_kernels.layout import NULL_PAGE
from paxkv.pallas_kernels.ragged import is_page

RING = 8  # groups on their way at a time


def group_rows(page_size: int, dtype: jnp.dtype) -> int:
    """Rows of a group."""
    return min(page_size, 32 // dtype.itemsize)


def find_groups(
    block_tables, first, end, num_pages: int, page_size: int, rows: int, most_groups: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The groups of `rows` rows that hold the new tokens `[first, end)` (`i32[B]`) of each slot.

    Returns:
        Of each group its page (NULL_PAGE if it has none), first position and slot, `i32[W]` each,
        and how many there are, `i32[1]`.
    """
    num_slots, max_pages = block_tables.shape
    first_group = first // rows
    num_groups = jnp.maximum(-(-end // rows) - first_group, 0)
    until = jnp.cumsum(num_groups, dtype=jnp.int32)
    number = jnp.arange(most_groups, dtype=jnp.int32)
    slots = jnp.searchsorted(until, number, side="right", method="compare_all")
    slots = jnp.minimum(slots.astype(jnp.int32), num_slots - 1)
    starts = (first_group[slots] + number - (until - num_groups)[slots]) * rows
    columns = starts // page_size
    in_table = (columns >= 0) & (columns < max_pages)
    page_ids = block_tables[slots, jnp.where(in_table, columns, 0)]
    page_ids = jnp.where(in_table & is_page(page_ids, num_pages), page_ids, NULL_PAGE)
    return page_ids, starts, slots, until[-1:]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowGroups:
    """The groups to write and a ring of buffers for them, in a kernel's memory."""

    pages: Any  # SMEM i32[W] the page of each group, NULL_PAGE for none
    starts: Any  # SMEM i32[W] its first position
    slots: Any  # SMEM i32[W]
    count: Any  # SMEM i32[1]
    cu_q_lens: Any  # SMEM i32[B + 1]
    kv_lens: Any  # SMEM i32[B]
    new: Any  # [2, K, T', H] keys and values in words of 32 bits, `rows` of nothing before them
    pools: tuple[Any, Any]  # keys and values [P, K, S, H] in HBM
    new_buf: Any  # [RING, 2, K, L, 2 * rows, H / L], in parts of at most 128 lanes
    rows_buf: Any  # [RING, 2, K, rows, H]
    read_sems: Any
    write_sems: Any

    @property
    def rows(self) -> int:
        """Of a group."""
        return self.rows_buf.shape[3]

    def write_all(self) -> None:
        """Writes every group, each fetched while those before it are merged."""
        count, lead = self.count[0], RING // 2

        def write_one(i, _):
            self._merge(i)
            ahead = i + lead

            @pl.when(ahead < count)
            def _():
                pl.when(ahead >= RING)(lambda: self._wait_write(ahead - RING))
                self._start_read(ahead)

        lax.fori_loop(0, jnp.minimum(lead, count), lambda i, _: self._start_read(i), None)
        lax.fori_loop(0, count, write_one, None)
        first_open = jnp.maximum(count - RING, 0)
        lax.fori_loop(first_open, count, lambda i, _: self._wait_write(i), None)

    def _if_written(self, i):
        return pl.when(is_page(self.pages[i], self.pools[0].shape[0]))

    def _first_new(self, i):
        """The position of the first new token of a group's slot."""
        slot = self.slots[i]
        return self.kv_lens[slot] - (self.cu_q_lens[slot + 1] - self.cu_q_lens[slot])

    def _source(self, i):
        """The row of `new` of a group's first position."""
        slot = self.slots[i]
        start = self.kv_lens[slot] - self.cu_q_lens[slot + 1]
        return self.starts[i] - start + self.rows

    def _read_copies(self, i) -> Iterator[Any]:
        ring, num_parts, lanes = i % RING, self.new_buf.shape[3], self.new_buf.shape[5]
        first = pl.multiple_of(self._source(i) // self.rows * self.rows, self.rows)
        for part in range(num_parts):
            new = self.new.at[:, :, pl.ds(first, 2 * self.rows), pl.ds(part * lanes, lanes)]
            here = self.new_buf.at[ring, :, :, part]
            yield pltpu.make_async_copy(new, here, self.read_sems.at[ring])
        for rows, here in self._page_rows(i):
            yield pltpu.make_async_copy(rows, here, self.read_sems.at[ring])

    def _write_copies(self, i) -> Iterator[Any]:
        for rows, here in self._page_rows(i):
            yield pltpu.make_async_copy(here, rows, self.write_sems.at[i % RING])

    def _page_rows(self, i) -> Iterator[tuple[Any, Any]]:
        """A group's rows of keys and of values, in the pool and in the ring."""
        offset = pl.multiple_of(self.starts[i] % self.pools[0].shape[2], self.rows)
        for which, pool in enumerate(self.pools):
            rows = pool.at[self.pages[i], :, pl.ds(offset, self.rows)]
            yield rows, self.rows_buf.at[i % RING, which]

    def _start_read(self, i) -> None:
        @self._if_written(i)
        def _():
            for copy in self._read_copies(i):
                copy.start()

    def _wait_write(self, i) -> None:
        @self._if_written(i)
        def _():
            for copy in self._write_copies(i):
                copy.wait()

    def _merge(self, i) -> None:
        """Puts the new tokens into a group that was fetched, and sends it back."""

        @self._if_written(i)
        def _():
            for copy in self._read_copies(i):
                copy.wait()
            ring = i % RING
            shift = self._source(i) % self.rows
            shape = self.rows_buf.shape[2:]
            position = self.starts[i] + lax.broadcasted_iota(jnp.int32, shape, 1)
            is_new = (position >= self._first_new(i)) & (position < self.kv_lens[self.slots[i]])
            for which in range(2):
                # A load may begin at any row only if it is no wider than a register.
                new = [
                    self.new_buf[ring, which, :, part, pl.ds(shift, self.rows)]
                    for part in range(self.new_buf.shape[3])
                ]
                new = jnp.concatenate(new, axis=-1)
                rows = self.rows_buf.at[ring, which]
                rows[...] = jnp.where(is_new, new.astype(rows.dtype), rows[...])
            for copy in self._write_copies(i):
                copy.start()
