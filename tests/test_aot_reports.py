"""Reading what compilers write about what they made."""

import jax
import jax.numpy as jnp

from benchmarks.aot_reports import (
    Ptxas,
    count_copies,
    count_host_transfers,
    read_ptxas,
    scratch_of,
)

PTXAS = """
ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function 'attention_kernel' for 'sm_90a'
ptxas info    : Function properties for attention_kernel
    0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 146 registers, used 1 barriers, 1040 bytes smem
"""


def test_registers_spills_and_shared_memory_are_read():
    assert read_ptxas(PTXAS) == (Ptxas("attention_kernel", 146, 20, 1040),)
    assert read_ptxas("nothing was compiled") == ()


def compiled_text(function, *arrays: jax.Array) -> str:
    text = jax.jit(function).lower(*arrays).compile().as_text()
    assert text is not None
    return text


def test_copies_of_one_shape_are_counted():
    pool = jnp.zeros((64, 8))
    text = compiled_text(lambda pool: pool.at[3].set(1), pool)  # which is not donated
    assert count_copies(text, (64, 8)) == 1
    assert count_copies(text, (8, 64)) == 0


def test_call_of_the_host_is_counted():
    x = jnp.zeros(3)
    assert count_host_transfers(compiled_text(lambda x: x + 1, x)) == 0
    call = compiled_text(lambda x: jax.pure_callback(lambda y: y, x, x), x)
    assert count_host_transfers(call) == 1


def test_program_without_kernels_asks_for_no_scratch():
    assert scratch_of(jax.make_jaxpr(jnp.sin)(1.0).jaxpr) == ()
