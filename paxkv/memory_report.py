"""What an engine's memory is used for at one moment: by layer group, by request, in bytes."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from paxkv.block_table import BlockTable
from paxkv.cache import PagedCache
from paxkv.config import page_bytes
from paxkv.content_keys import content_keys
from paxkv.decoder import LayerGroup
from paxkv.request_state import Request
from paxkv.waste import account_pool, account_slots, duplicate_tokens, padding_bytes, page_fill


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """The pool of one layer group."""

    num_layers: int
    window: int | None  # tokens that a query sees; None for all
    bytes_per_token: int  # of keys and values, the layout's padding counted
    padding_bytes: int  # of these
    tokens: dict[str, int]  # by kind, see `paxkv.waste`; they add up to the pool
    duplicate: int  # tokens, of the used ones, that stand elsewhere too

    @property
    def bytes(self) -> dict[str, int]:
        """The same in bytes, duplicates and padding among them, which are part of the others."""
        tokens = self.tokens | {"duplicate": self.duplicate}
        sizes = {kind: number * self.bytes_per_token for kind, number in tokens.items()}
        return sizes | {"padding": sum(self.tokens.values()) * self.padding_bytes}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestMemory:
    """What one running request holds, in tokens of each layer group."""

    id: int
    used: tuple[int, ...]
    tail: tuple[int, ...]  # held, and without a token: reserved, or never to be filled
    shared: tuple[int, ...]  # of used: in pages that others hold too


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What is held now, which is not what could be reused over time: see the prefix statistics."""

    pools: tuple[PoolReport, ...]
    requests: tuple[RequestMemory, ...]

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes by kind, over all pools."""
        pools = [pool.bytes for pool in self.pools]
        return {kind: sum(pool[kind] for pool in pools) for kind in pools[0]}


def report_memory(
    cache: PagedCache,
    layer_groups: Sequence[LayerGroup],
    running: Mapping[int, Request],
    *,
    is_waiting: bool,
) -> MemoryReport:
    """Sorts the memory by kind, and finds what stands in it twice.

    Args:
        cache: The state.
        layer_groups: The decoder's.
        running: Requests by slot.
        is_waiting: Whether a request waits for memory.
    """
    pools, slots = [], []
    for group, (pool, table) in zip(layer_groups, cache, strict=True):
        accounts = jax.device_get((
            account_pool(table, is_waiting=is_waiting, window=group.window),
            account_slots(table, window=group.window),
            page_fill(table),
            table,
        ))  # fmt: skip
        account, slot_accounts, fill, on_host = accounts
        page_size, dtype = table.page_size, pool.k_pages[0].dtype
        pools.append(
            PoolReport(
                num_layers=len(group.layers),
                window=group.window,
                bytes_per_token=page_bytes([group], page_size=page_size, dtype=dtype) // page_size,
                padding_bytes=padding_bytes([group], page_size=page_size, dtype=dtype) // page_size,
                tokens={name: int(number) for name, number in dataclasses.asdict(account).items()},
                duplicate=duplicate_tokens(_contents(on_host, running), fill),
            )
        )
        slots.append(slot_accounts)
    return MemoryReport(
        pools=tuple(pools),
        requests=tuple(
            RequestMemory(
                id=request.id,
                used=tuple(int(group.used[slot]) for group in slots),
                tail=tuple(int(group.tail[slot]) for group in slots),
                shared=tuple(int(group.shared[slot]) for group in slots),
            )
            for slot, request in running.items()
        ),
    )


def _contents(table: BlockTable, running: Mapping[int, Request]) -> list[bytes | None]:
    """What stands in each page; None where no running request has one."""
    contents: list[bytes | None] = [None] * table.ref_counts.shape[0]
    lengths, rows = np.asarray(table.lengths), np.asarray(table.block_tables)
    for slot, request in running.items():
        tokens = request.tokens[: int(lengths[slot])]
        keys = content_keys(tokens, table.page_size, request.prefix_key)
        for page, key in zip(rows[slot].tolist(), keys, strict=False):
            if page:  # the null page stands for what has left a window
                contents[page] = key
    return contents
