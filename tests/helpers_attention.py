"""Calls of `paged_attention` on test inputs, compiled once per shape for all test files.

Kernels run interpreted, where a data race raises an error, in tiles so small and on so few
multiprocessors that even short sequences fill rings more than once and are split among programs.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from paxkv.pallas_kernels import PagedAttention, layout, paged_attention, tpu_decode, tpu_mixed
from paxkv.pallas_kernels.attention_call import AttentionArrays, AttentionSettings
from paxkv.pallas_kernels.attention_inputs import Inputs
from paxkv.pallas_kernels.gpu_ampere import paged_attention_ampere
from paxkv.pallas_kernels.gpu_hopper import paged_attention_hopper
from paxkv.pallas_kernels.tpu import paged_attention_tpu
from paxkv.pallas_kernels.tpu_tiles import Chip

KERNELS = ("tpu", "hopper", "ampere")
IMPLEMENTATIONS = ("reference", *KERNELS)
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
type Implementation = Callable[..., PagedAttention]  # of arrays and settings

SETTINGS = ("scale", "window", "soft_cap", "max_q_len", "implementation")
# Compiling is nearly all that these tests do: what is not float32, whose tolerance is narrow, or
# is interpreted leaves LLVM's optimisations out.
QUICK = {"xla_backend_optimization_level": 0}

paged_attention_jit = jax.jit(paged_attention, static_argnames=SETTINGS)
paged_attention_quick_jit = jax.jit(
    paged_attention, static_argnames=SETTINGS, compiler_options=QUICK
)


def interpreted(kernel: Implementation, **options) -> Implementation:
    """A kernel compiled for the interpreter, with some options of its own."""
    return jax.jit(
        functools.partial(kernel, interpret=True, **options),
        static_argnums=1,
        compiler_options=QUICK,
    )


def attend_tpu(arrays: AttentionArrays, settings: AttentionSettings, **options) -> PagedAttention:
    """The kernel for TPU, on pages of float16 as a TPU stores them."""
    stored = jnp.int16 if arrays.key_pages.dtype == jnp.float16 else arrays.key_pages.dtype
    pools = (layout.to_stored(x, stored) for x in (arrays.key_pages, arrays.value_pages))
    arrays = arrays._replace(**dict(zip(("key_pages", "value_pages"), pools, strict=True)))
    result = paged_attention_tpu(arrays, settings, **options)
    return result._replace(
        key_pages=layout.from_stored(result.key_pages),
        value_pages=layout.from_stored(result.value_pages),
    )


def exact_dtype(implementation: str) -> str:
    """The most exact dtype that an implementation takes: GPU kernels take 16 bit only."""
    return "float32" if implementation in ("reference", "tpu") else "bfloat16"


@contextlib.contextmanager
def small_tpu_tiles() -> Iterator[None]:
    """Has TPU kernels traced for two cores, in tiles of 32 tokens and 128 rows of queries."""

    def tile_pages(_chip, key_pages, _max_pages):
        return max(1, 32 // key_pages.shape[2])

    def tile_queries(_num_rows, _num_kv_heads, group, _head_dim):
        return max(1, 128 // group)

    with (
        mock.patch.multiple(
            tpu_decode,
            chip_traced_for=lambda: Chip("", 2, 64 * 2**20),
            decode_tile_pages=tile_pages,
        ),
        mock.patch.multiple(
            tpu_mixed, prefill_tile_pages=tile_pages, prefill_tile_queries=tile_queries
        ),
    ):
        yield


INTERPRETED = {
    "tpu": small_tpu_tiles()(interpreted(attend_tpu)),
    "hopper": interpreted(paged_attention_hopper, num_multiprocessors=3),
    "ampere": interpreted(paged_attention_ampere),  # it takes 4 multiprocessors where interpreted
}


class WithoutWait:
    """Pallas for GPUs with one wait for a barrier left out of the kernels that are traced next.

    Args:
        number: Which, in the order in which they are traced.
        of: How many there are; a kernel may be traced more than once.
    """

    def __init__(self, number: int, of: int) -> None:
        self._left_out = number
        self._numbers = itertools.cycle(range(of))

    def __getattr__(self, name: str) -> Any:
        return getattr(plgpu, name)

    def barrier_wait(self, barrier: Any) -> None:
        if next(self._numbers) != self._left_out:
            plgpu.barrier_wait(barrier)


def attend(implementation: str, inputs: Inputs, **changes) -> PagedAttention:
    """The call on `inputs`, with some arguments or settings changed."""
    arguments = {**inputs.arguments, **inputs.settings, **changes}
    if implementation == "reference":
        call = paged_attention_jit if inputs.dtype == jnp.float32 else paged_attention_quick_jit
        return call(**arguments, implementation=implementation)
    return attend_interpreted(INTERPRETED[implementation], inputs, **changes)


def attend_interpreted(call: Implementation, inputs: Inputs, **changes) -> PagedAttention:
    """What `attend` does with a kernel of the caller's making, see `interpreted`."""
    given = {**inputs.arguments, **inputs.settings, **changes}
    if given["scale"] is None:
        given["scale"] = inputs.case.head_dim**-0.5
    arrays = AttentionArrays(**{k: v for k, v in given.items() if k in AttentionArrays._fields})
    settings = {k: v for k, v in given.items() if k in AttentionSettings._fields}
    return call(arrays, AttentionSettings(**settings))
