"""Tiles of pages on their way from HBM to VMEM, for kernels that compute one while the next comes.

A tile lands head by head, `[K, C, S, H]` of C pages, so that one head's keys are one matrix. Only
pages with tokens that are seen are copied; a tile's other places hold what was there before.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from paxkv.pallas_kernels.online_softmax import MASKED
from paxkv.pallas_kernels.ragged import is_page


def are_whole(block_tables, seen_from, seen_to, num_pages: int, page_size: int) -> jax.Array:
    """Whether all pages of each slot with tokens of `[seen_from, seen_to)` exist, `bool[B]`."""
    start = jnp.arange(block_tables.shape[1], dtype=jnp.int32)[None] * page_size
    is_needed = (start + page_size > seen_from[:, None]) & (start < seen_to[:, None])
    return jnp.all(is_page(block_tables, num_pages) | ~is_needed, axis=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageTiles:
    """The pool, two halves of a buffer for it, and two rows of the block table.

    Ids that name no page of the pool are never copied from: their tokens count as absent.
    """

    pools: tuple[Any, Any]  # keys and values [P, K, S, H] in HBM
    bufs: tuple[Any, Any]  # [2, K, C, S, H]
    tables: Any  # i32[B, 1, M] in HBM
    ids: Any  # SMEM i32[2, 1, M]
    copied: Any  # SMEM i32[2] pages on their way into each half of bufs
    ids_sems: Any
    page_sems: Any
    max_pages: int  # columns of the table; those of `ids` after them are padding

    @property
    def num_pages(self) -> int:
        """Of the pool."""
        return self.pools[0].shape[0]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.pools[0].shape[2]

    @property
    def tile_pages(self) -> int:
        """Pages of a tile."""
        return self.bufs[0].shape[2]

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return self.tile_pages * self.page_size

    def ids_copy(self, slot, half):
        """The copy of a slot's row of the table."""
        return pltpu.make_async_copy(
            self.tables.at[slot], self.ids.at[half], self.ids_sems.at[half]
        )

    def start_page(self, page_id, place, buf) -> None:
        """Starts the copies of a page's keys and values to one of a tile's places."""
        for pages, pages_buf in zip(self.pools, self.bufs, strict=True):
            pltpu.make_async_copy(
                pages.at[page_id], pages_buf.at[buf, :, place], self.page_sems.at[buf]
            ).start()

    def start(self, tile, first, end, half, buf) -> None:
        """Starts the copies of a tile's pages that hold tokens of `[first, end)`."""
        start = tile * self.tile_pages

        def start_if_page(column, count):
            page_id = self.ids[half, 0, column]
            exists = is_page(page_id, self.num_pages)
            pl.when(exists)(lambda: self.start_page(page_id, column - start, buf))
            return count + exists.astype(jnp.int32)

        self.copied[buf] = lax.fori_loop(
            jnp.maximum(start, first // self.page_size),
            jnp.minimum(start + self.tile_pages, pl.cdiv(end, self.page_size)),
            start_if_page,
            jnp.int32(0),
        )

    def wait(self, buf) -> None:
        """Waits for as many bytes as there are pages on their way, by powers of two."""
        count = self.copied[buf]
        power = 1
        while power <= self.tile_pages:
            pl.when(count & power != 0)(lambda power=power: self.wait_pages(buf, power))
            power *= 2

    def wait_pages(self, buf, count: int) -> None:
        """Waits for the bytes of so many pages."""
        for pages_buf in self.bufs:
            part = pages_buf.at[buf, :, pl.ds(0, count)]
            pltpu.make_async_copy(part, part, self.page_sems.at[buf]).wait()

    def hide_unseen(self, bias, first_page, first, end, is_whole, half, buf) -> None:
        """Clears values outside `[first, end)` and of pages that do not exist.

        Args:
            bias: Set to 0 for tokens to be seen and to MASKED for others, `f32[8, t]`, of the
                tokens from the start of `first_page` on, which lie in one tile.
            first_page: Column of the table.
            first: First token to be seen.
            end: Where the tokens to be seen end.
            is_whole: Whether all pages between exist.
            half: Which half of `ids`.
            buf: Which half of `bufs`.
        """
        num_tokens = bias.shape[1]
        start = first_page * self.page_size
        token = start + lax.broadcasted_iota(jnp.int32, bias.shape, 1)
        bias[...] = jnp.where((token >= first) & (token < end), 0.0, MASKED)
        values_buf = self.bufs[1]
        _, num_kv_heads, _, page_size, head_dim = values_buf.shape
        page_shape = (num_kv_heads, page_size, head_dim)

        def clear_page(place, _):
            column = first_page + place
            page_id = self.ids[half, 0, jnp.minimum(column, self.max_pages - 1)]
            exists = is_page(page_id, self.num_pages)
            page_start = column * page_size

            @pl.when(~exists | (page_start < first) | (page_start + page_size > end))
            def _():
                page_token = page_start + lax.broadcasted_iota(jnp.int32, page_shape, 1)
                is_kept = (page_token >= first) & (page_token < jnp.where(exists, end, 0))
                values = values_buf.at[buf, :, column % self.tile_pages]
                values[...] = jnp.where(is_kept, values[...], jnp.zeros(page_shape, values.dtype))

            @pl.when(~exists)
            def _():
                is_here = (token - start) // page_size == place
                bias[...] = jnp.where(is_here, MASKED, bias[...])

        @pl.when((first > start) | (end < start + num_tokens) | ~is_whole)
        def _():
            lax.fori_loop(0, num_tokens // page_size, clear_page, None)
