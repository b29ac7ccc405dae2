"""What the pools are used for, step by step, noted within the decode loop.

A step is measured once its newest tokens are stored, and before what ended in it is given back: a
request of `p` prompt tokens holds `p + t` at its step `t`, as the simulations of `paxkv.diagnose`
have it.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from paxkv.cache import PagedCache
from paxkv.decoder import LayerGroup
from paxkv.waste import PoolAccount, account_pool

KINDS = tuple(field.name for field in dataclasses.fields(PoolAccount))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeries:
    """Accounts of up to `W` decode steps, in as few arrays as can be: they are fetched at once."""

    tokens: jax.Array  # i32[W, G, kinds] of each layer group's pool, in the order of `KINDS`
    running: jax.Array  # i32[W] requests that made a token


def init_series(num_groups: int, max_steps: int) -> MemorySeries:
    """Room for so many steps, all zeros."""
    return MemorySeries(
        tokens=jnp.zeros((max_steps, num_groups, len(KINDS)), jnp.int32),
        running=jnp.zeros(max_steps, jnp.int32),
    )


def note_step(
    series: MemorySeries,
    cache: PagedCache,
    step: jax.Array,
    *,
    layer_groups: Sequence[LayerGroup],
    is_live: jax.Array,
    num_running: jax.Array,
    is_waiting: jax.Array | bool,
) -> MemorySeries:
    """Adds the account of a step.

    Args:
        series: Those of the steps before.
        cache: With the step's tokens stored, and nothing given back yet.
        step: `i32[]`, where to put it; from `W` on it is dropped.
        layer_groups: The decoder's.
        is_live: `bool[B]`, slots that had a request when the step began.
        num_running: `i32[]`, how many of them made a token.
        is_waiting: `bool[]`, whether a request waits for memory.
    """
    accounts = [
        account_pool(table, is_live=is_live, is_waiting=is_waiting, window=group.window)
        for group, (_, table) in zip(layer_groups, cache, strict=True)
    ]
    tokens = jnp.stack([jnp.stack(jax.tree.leaves(account)) for account in accounts])
    return MemorySeries(
        tokens=series.tokens.at[step].set(tokens, mode="drop"),
        running=series.running.at[step].set(num_running, mode="drop"),
    )
