"""Movers to be compiled ahead of time: in a loop that carries the pool, and under a condition."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.aot import Job
from paxkv.pallas_kernels import movers

# Pools [P, K, S, H] larger than a TPU's VMEM, where XLA would put a small one, and how many pages
# or tokens are moved.
_MOVER_SHAPES = {
    "bf16": ((2**16, 8, 16, 128), jnp.bfloat16, 64),
    "f32": ((2**16, 2, 32, 64), jnp.float32, 64),
    "f16": ((2**16, 5, 8, 128), jnp.int16, 7),
    "head_dim_80": ((2**16, 5, 8, 80), jnp.bfloat16, 7),
    "one_head": ((2**12, 1, 256, 256), jnp.bfloat16, 64),
    "many_heads": ((2**12, 32, 64, 128), jnp.bfloat16, 1000),
    "past_2_31_elements": ((2**18, 8, 16, 128), jnp.bfloat16, 64),
}


def mover_names() -> list[str]:
    """The names of `mover_jobs`: mover, where it is called, pool."""
    return [
        f"{mover}:{how}:{shape}"
        for mover in ("write", "copy", "put", "take")
        for how in (("once",) if mover == "take" else ("loop", "cond"))
        for shape in _MOVER_SHAPES
    ]


def mover_jobs() -> dict[str, Job]:
    """Moves in pools of each kind."""
    return {name: _mover_job(*name.split(":")) for name in mover_names()}


def _mover_job(mover: str, how: str, shape_name: str) -> Job:
    pool_shape, dtype, count = _MOVER_SHAPES[shape_name]
    shape = jax.ShapeDtypeStruct
    ids = shape((count,), jnp.int32)
    tokens = shape((count, pool_shape[1], pool_shape[3]), dtype)
    contents = shape((count, *pool_shape[1:]), dtype)

    def take(pages, ids):
        return movers.take_pages(pages, ids)

    if mover == "take":
        return Job(function=take, arguments=(shape(pool_shape, dtype), ids), pool=pool_shape)

    def call(pages, ids, offsets, tokens, contents):
        move = _mover_calls(pages, ids, offsets, tokens, contents)[mover]
        if how == "cond":
            return jax.lax.cond(ids[0] > 3, move, lambda pages: pages, pages)
        return jax.lax.fori_loop(0, ids[0], lambda _, pages: move(pages), pages)

    arguments = (shape(pool_shape, dtype), ids, ids, tokens, contents)
    return Job(function=call, arguments=arguments, donated=(0,), pool=pool_shape)


def _mover_calls(pages, ids, offsets, tokens, contents) -> dict[str, Callable[..., Any]]:
    return {
        "write": lambda pages: movers.write_tokens(pages, ids, offsets, tokens),
        "copy": lambda pages: movers.copy_pages(pages, ids, ids[::-1]),
        "put": lambda pages: movers.put_pages(pages, ids, contents),
    }
