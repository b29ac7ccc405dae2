"""Decode steps that can be set side by side on a GPU: ours, and others on the same tokens.

Each step writes a new token to its page and attends, and the pools are carried from step to step:
in a loop that changed no page, XLA would gather the pages once and for all.
"""

import dataclasses
import functools
import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks.aot_attention import IMPLEMENTATIONS
from paxkv.pallas_kernels import paged_attention
from paxkv.pallas_kernels.movers import write_tokens

type Pools = tuple[jax.Array, jax.Array]  # keys and values, as the way lays them out
type Step = Callable[[jax.Array, Pools, "Batch"], tuple[jax.Array, Pools]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences of one length. Their pages come first in the pool, after the null page."""

    block_tables: jax.Array  # i32[B, M]
    kv_lens: jax.Array  # i32[B]
    new: jax.Array  # [B, K, H] the token that is written, as a key and as a value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to attend: how it wants pools `[P, K, S, H]` laid out, and a step on queries."""

    lay_out: Callable[[jax.Array], jax.Array]
    step: Step


def our_settings(interpret: bool) -> dict[str, Any]:
    """What makes `paged_attention` take the GPU's kernel."""
    implementation: Any = IMPLEMENTATIONS["cuda"]
    settings = {"implementation": implementation}
    return settings | {"interpret": True} if interpret and implementation == "gpu" else settings


def ways(*, interpret: bool) -> dict[str, Way]:
    """All ways by name, ours first."""
    return {
        "paxkv": Way(lay_out=_as_it_is, step=functools.partial(_ours, interpret=interpret)),
        "gathered": Way(lay_out=_as_it_is, step=functools.partial(_gathered, implementation="xla")),
        "gathered cuDNN": Way(
            lay_out=_as_it_is, step=functools.partial(_gathered, implementation="cudnn")
        ),
        "Triton": Way(
            lay_out=lambda pages: pages.swapaxes(0, 1),
            step=functools.partial(_triton, interpret=interpret),
        ),
        "cuDNN paged": Way(lay_out=lambda pages: pages[1:], step=_cudnn_paged),
    }


def _as_it_is(pages: jax.Array) -> jax.Array:
    return pages


def _ours(queries, pools, batch: Batch, *, interpret: bool):
    num_slots = queries.shape[0]
    keys, values = pools
    result = paged_attention(
        queries, batch.new, batch.new, keys, values, batch.block_tables, batch.kv_lens,
        jnp.arange(num_slots + 1, dtype=jnp.int32), max_q_len=1, **our_settings(interpret),
    )  # fmt: skip
    return result.out, (result.key_pages, result.value_pages)


def _places(batch: Batch, page_size: int) -> tuple[jax.Array, jax.Array]:
    """The page and the offset of each sequence's new token."""
    last = batch.kv_lens - 1
    column = (last // page_size)[:, None]
    return jnp.take_along_axis(batch.block_tables, column, axis=1)[:, 0], last % page_size


def _gathered(
    queries, pools: Pools, batch: Batch, *, implementation: Literal["xla", "cudnn"]
) -> tuple[jax.Array, Pools]:
    """Dense attention on K and V that are gathered at each step."""
    pools = _written(pools, batch)

    def gather(pages: jax.Array) -> jax.Array:  # [B, M * S, K, H]
        tokens = pages[batch.block_tables].swapaxes(2, 3)
        return tokens.reshape(len(queries), -1, *tokens.shape[3:])

    out = jax.nn.dot_product_attention(
        queries[:, None], *map(gather, pools), key_value_seq_lengths=batch.kv_lens,
        implementation=implementation,
    )  # fmt: skip
    return out[:, 0], pools


def _written(pools: Pools, batch: Batch) -> Pools:
    page_ids, offsets = _places(batch, pools[0].shape[2])
    keys, values = (write_tokens(pages, page_ids, offsets, batch.new) for pages in pools)
    return keys, values


def _triton(queries, pools: Pools, batch: Batch, *, interpret: bool) -> tuple[jax.Array, Pools]:
    """JAX's kernel for Triton, whose pages are `[K, P, S, H]`; it is deprecated, and says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        peer: Any = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
        page_ids, offsets = _places(batch, pools[0].shape[2])
        new = batch.new.swapaxes(0, 1)
        keys, values = (
            pages.at[:, page_ids, offsets].set(new, unique_indices=True) for pages in pools
        )
        num_columns = batch.block_tables.shape[1]
        num_splits = math.gcd(num_columns, 16)  # its defaults, where they divide the table
        scaled = queries * jnp.asarray(queries.shape[-1] ** -0.5, queries.dtype)
        out = peer.paged_attention(
            scaled, keys, values, batch.block_tables, batch.kv_lens, interpret=interpret,
            k_splits=num_splits, pages_per_compute_block=math.gcd(num_columns // num_splits, 8),
        )  # fmt: skip
    return out, (keys, values)


def _cudnn_paged(queries, pools: Pools, batch: Batch) -> tuple[jax.Array, Pools]:
    """CuDNN's attention over pages `[P, K, S, H]`, of which none is null: ids are one less."""
    peer: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    shifted = dataclasses.replace(batch, block_tables=batch.block_tables - 1)
    pools = _written(pools, shifted)
    # It wants tables as wide as makes the pool theirs alone. What is past the length is not read.
    num_columns = len(pools[0]) // len(queries)
    room = num_columns - batch.block_tables.shape[1]
    table = jnp.pad(shifted.block_tables, ((0, 0), (0, room)))[:, None, :, None]
    out = peer.paged_attention(
        queries[:, :, None], *pools, jnp.ones_like(batch.kv_lens), batch.kv_lens, table, table,
        scale=queries.shape[-1] ** -0.5, mask_type=peer.MaskType.PADDING, qkv_layout="BNTH",
    )  # fmt: skip
    return out[:, :, 0], pools
