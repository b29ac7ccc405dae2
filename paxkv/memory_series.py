"""What the pools are used for, step by step, noted within the decode loop.

A step is measured once its newest tokens are stored, and before what ended in it is given back: a
request of `p` prompt tokens holds `p + t` at its step `t`, as the simulations of `paxkv.diagnose`
have it.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from paxkv.cache import PagedCache
from paxkv.decoder import LayerGroup
from paxkv.waste import PoolAccount, account_pool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeries:
    """Accounts of up to `W` decode steps."""

    accounts: tuple[PoolAccount, ...]  # of each layer group's pool, `i32[W]` each
    running: jax.Array  # i32[W] requests


def init_series(cache: PagedCache, max_steps: int) -> MemorySeries:
    """Room for so many steps, all zeros."""
    zeros = jnp.zeros(max_steps, jnp.int32)
    kinds = {field.name: zeros for field in dataclasses.fields(PoolAccount)}
    return MemorySeries(accounts=tuple(PoolAccount(**kinds) for _ in cache), running=zeros)


def note_step(
    series: MemorySeries,
    cache: PagedCache,
    step: jax.Array,
    *,
    layer_groups: Sequence[LayerGroup],
    is_live: jax.Array,
    is_waiting: jax.Array,
) -> MemorySeries:
    """Adds the account of a step.

    Args:
        series: Those of the steps before.
        cache: With the step's tokens stored, and nothing given back yet.
        step: `i32[]`, where to put it; one that is not made is `W`, and dropped.
        layer_groups: The decoder's.
        is_live: `bool[B]`, slots that had a request at the step's begin.
        is_waiting: `bool[]`, whether a request waits for memory.
    """

    def put(before: jax.Array, now: jax.Array) -> jax.Array:
        return before.at[step].set(now, mode="drop")

    account = partial(account_pool, is_live=is_live, is_waiting=is_waiting)
    now = MemorySeries(
        accounts=tuple(
            account(table, window=group.window)
            for group, (_, table) in zip(layer_groups, cache, strict=True)
        ),
        running=jnp.sum(is_live, dtype=jnp.int32),
    )
    return jax.tree.map(put, series, now)
