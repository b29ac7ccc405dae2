"""Calls of `paged_attention` on test inputs, compiled once per shape for all test files."""

import jax
import jax.numpy as jnp

from paxkv.pallas_kernels import PagedAttention, paged_attention
from paxkv.pallas_kernels.attention_inputs import Inputs

IMPLEMENTATIONS = ("reference",)
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
SETTINGS = ("scale", "window", "soft_cap", "max_q_len", "implementation")

paged_attention_jit = jax.jit(paged_attention, static_argnames=SETTINGS)
# Compiling is nearly all that these tests do: 16-bit types, whose tolerance is wide, leave LLVM's
# optimisations out.
paged_attention_quick_jit = jax.jit(
    paged_attention,
    static_argnames=SETTINGS,
    compiler_options={"xla_backend_optimization_level": 0},
)


def attend(implementation: str, inputs: Inputs, **changes) -> PagedAttention:
    """The call on `inputs`, with some arguments or settings changed."""
    arguments = {**inputs.arguments, **inputs.settings, **changes}
    call = paged_attention_jit if inputs.dtype == jnp.float32 else paged_attention_quick_jit
    return call(**arguments, implementation=implementation)
