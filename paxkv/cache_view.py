"""The paged cache as a decoder meets it during one call."""

import dataclasses
from typing import Self

import jax

from paxkv.block_table import BlockTable
from paxkv.decoder import LayerGroup, group_of
from paxkv.page_pool import PagePool
from paxkv.pallas_kernels.attention import paged_attention
from paxkv.pallas_kernels.ragged import Ragged, ragged_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheView:
    """Pools and tables of every layer group, and which tokens this call is about."""

    pools: tuple[PagePool, ...]
    tables: tuple[BlockTable, ...]
    cu_q_lens: jax.Array  # i32[B + 1] first row of each slot's tokens
    kv_lens: jax.Array  # i32[B] tokens each slot holds after this call
    groups: tuple[LayerGroup, ...] = dataclasses.field(metadata={"static": True})
    max_q_len: int | None = dataclasses.field(metadata={"static": True})

    def attend(
        self,
        layer: int,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Self]:
        """See `paxkv.decoder.Cache.attend`. The layer's group says how far a query sees."""
        index, place = group_of(self.groups, layer)
        pool = self.pools[index]
        result = paged_attention(
            queries, keys, values, pool.k_pages[place], pool.v_pages[place],
            self.tables[index].block_tables, self.kv_lens, self.cu_q_lens,
            scale=scale, window=self.groups[index].window, soft_cap=soft_cap, sinks=sinks,
            max_q_len=self.max_q_len,
        )  # fmt: skip
        pool = dataclasses.replace(
            pool,
            k_pages=_replaced(pool.k_pages, place, result.key_pages),
            v_pages=_replaced(pool.v_pages, place, result.value_pages),
        )
        return result.out, dataclasses.replace(self, pools=_replaced(self.pools, index, pool))

    def rows(self, num_rows: int) -> Ragged:
        """The slot and position of each of the call's packed rows."""
        return ragged_rows(num_rows, self.cu_q_lens, self.kv_lens)


def _replaced[T](items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])
