"""What paged attention compiles to: the pool in place, cost by tokens stored, wide addresses."""

import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.extend import core as jex_core
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from helpers_attention import SETTINGS
from paxkv.pallas_kernels import layout, paged_attention, reference, testing
from paxkv.pallas_kernels.attention_cases import Case
from paxkv.pallas_kernels.attention_inputs import Inputs, random_inputs

POOL = ("key_pages", "value_pages")
MIXED = Case(lengths=((3, 30), (9, 9)), num_pages=211)  # a pool larger than all that is computed
DECODE = Case(lengths=((1, 30), (1, 9)), num_pages=211)


def shapes_of(inputs: Inputs) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in inputs.arguments.items()}


def assert_in_place(compiled: jax.stages.Compiled, pool: jax.Array) -> None:
    """Neither a copy nor a temporary is as large as the pool, and both pools are aliased."""
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    for shape in re.findall(r"= \(?\w+\[([\d,]*)\]\S* copy(?:-start)?\(", text):
        assert math.prod(int(size) for size in shape.split(",") if size) < pool.size
    assert memory.alias_size_in_bytes >= 2 * pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes


@pytest.mark.parametrize(("case", "max_q_len"), [(MIXED, None), (DECODE, 1)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_donated_pool_is_updated_in_place(case, max_q_len, dtype):
    inputs = random_inputs(case, dtype)
    step = jax.jit(paged_attention, static_argnames=SETTINGS, donate_argnames=POOL)
    compiled = step.lower(
        **shapes_of(inputs), implementation="reference", max_q_len=max_q_len
    ).compile()
    assert_in_place(compiled, inputs.arguments["key_pages"])
    places = [inputs.arguments[name].unsafe_buffer_pointer() for name in POOL]
    result = compiled(**inputs.arguments)
    assert all(inputs.arguments[name].is_deleted() for name in POOL)
    assert [getattr(result, name).unsafe_buffer_pointer() for name in POOL] == places


def test_loop_carries_the_pool_without_a_copy():
    """A decode loop: whoever lives takes one token a turn, for as long as the table has room."""
    inputs = random_inputs(DECODE, jnp.float32)

    def decode(key_pages, value_pages, arguments):
        def step(state):
            kv_lens, out, key_pages, value_pages = state
            result = paged_attention(
                **{**arguments, "kv_lens": kv_lens, "queries": out},
                key_pages=key_pages,
                value_pages=value_pages,
                max_q_len=1,
                implementation="reference",
            )
            return kv_lens + 1, result.out, result.key_pages, result.value_pages

        start = arguments["kv_lens"], arguments["queries"], key_pages, value_pages
        return jax.lax.while_loop(lambda state: state[0][0] < 48, step, start)

    arguments = shapes_of(inputs)
    pools = [arguments.pop(name) for name in POOL]
    compiled = jax.jit(decode, donate_argnums=(0, 1)).lower(*pools, arguments).compile()
    assert_in_place(compiled, inputs.arguments["key_pages"])


def pages_read(monkeypatch: pytest.MonkeyPatch, case: Case) -> int:
    """How many pages the reference gathers keys and values from, counted as it runs."""
    counts = []

    def counting(pages, page_ids, **options):
        jax.debug.callback(lambda: counts.append(page_ids.size))
        return layout.gather_pages(pages, page_ids, **options)

    inputs = random_inputs(case, jnp.float32)
    max_q_len = 1 if case.is_decode else None
    monkeypatch.setattr(reference, "gather_pages", counting)
    call = jax.jit(lambda x: paged_attention(**x, **inputs.settings, max_q_len=max_q_len))
    jax.block_until_ready(call(inputs.arguments))
    jax.effects_barrier()
    return sum(counts)


@pytest.mark.parametrize("q_len", [1, 4])
class TestCostOfTheReference:
    def test_table_width_costs_nothing(self, monkeypatch, q_len):
        lengths = ((q_len, 700), (q_len, 90))
        narrow, wide = (
            pages_read(monkeypatch, Case(lengths=lengths, max_pages=width)) for width in (64, 4096)
        )
        assert narrow == wide

    def test_pages_read_follow_the_tokens_stored(self, monkeypatch, q_len):
        short = ((q_len, 10),) * 31
        uneven = pages_read(monkeypatch, Case(lengths=((q_len, 4000), *short), max_pages=256))
        even = pages_read(monkeypatch, Case(lengths=((q_len, 4000),), max_pages=256))
        assert 2 * 250 <= even <= 2 * 500  # of 16 tokens, for keys and for values
        assert uneven <= even + 2 * 31 * 32  # a tile of 512 tokens for each of the others

    def test_what_a_window_hides_is_not_read(self, monkeypatch, q_len):
        case = Case(lengths=((q_len, 4000),), max_pages=256, window=100)
        assert pages_read(monkeypatch, case) <= 2 * (16 * 16 + 32)


def equations(jaxpr: jex_core.Jaxpr) -> Iterator[jex_core.JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jex_core.jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("implementation", ["reference", "tpu", "gpu"])
@pytest.mark.parametrize("max_q_len", [None, 1])
def test_no_index_of_a_huge_pool_overflows(implementation, max_q_len):
    """2**34 elements in a pool: no axis is so long that int32 could not count along it."""
    shapes = shapes_of(random_inputs(Case(lengths=((1, 9), (1, 30))), jnp.bfloat16))
    num_pages, *page = 2**24, *shapes["key_pages"].shape[1:]
    pool = jax.ShapeDtypeStruct((num_pages, *page), jnp.bfloat16)
    assert pool.size > 2**34
    shapes |= {"key_pages": pool, "value_pages": pool}

    def call(arguments):
        return paged_attention(**arguments, max_q_len=max_q_len, implementation=implementation)

    traced = jax.make_jaxpr(call)(shapes)
    longest, touches = 0, set()
    for equation in equations(traced.jaxpr):
        arrays = [x.aval for x in (*equation.invars, *equation.outvars)]
        sizes = [x.shape for x in arrays if isinstance(x, jax.core.ShapedArray)]
        longest = max(longest, *(max(shape, default=0) for shape in sizes), 0)
        if any(math.prod(shape) >= pool.size for shape in sizes):
            touches.add(equation.primitive.name)
    assert num_pages <= longest < 2**31
    assert touches & {"gather", "scatter", "write_tokens", "pallas_call"}


@pytest.mark.parametrize("max_q_len", [None, 1])
def test_pages_wider_than_heads_change_nothing(max_q_len):
    """As a TPU stores them: zeros behind each head's numbers."""
    inputs = random_inputs(DECODE, jnp.float32)
    narrow = {name: inputs.arguments[name] for name in POOL}
    wide = {name: layout.fill_heads(pages, 128) for name, pages in narrow.items()}
    attend = jax.jit(paged_attention, static_argnames=SETTINGS)
    right = attend(**inputs.arguments, max_q_len=max_q_len)
    found = attend(**(inputs.arguments | wide), max_q_len=max_q_len)
    assert found.out.shape == right.out.shape
    testing.assert_close(found.out, right.out, jnp.float32)
    testing.assert_close(found.log_sum_exp, right.log_sum_exp, jnp.float32)
    for name in POOL:
        pages = getattr(found, name)
        testing.assert_same_bits(pages[..., : DECODE.head_dim], getattr(right, name), name)
        assert not jnp.nan_to_num(pages[..., DECODE.head_dim :]).any()


def test_one_program_is_exported_for_cpu_gpu_and_tpu():
    inputs = random_inputs(DECODE, jnp.bfloat16)
    attend = jax.jit(functools.partial(paged_attention, max_q_len=1))
    chip = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=chip)
    with use_abstract_mesh(mesh):
        exported = export.export(attend, platforms=("cpu", "cuda", "tpu"))(**shapes_of(inputs))
    assert "mosaic_gpu" in exported.mlir_module()
    assert "tpu_custom_call" in exported.mlir_module()


def test_call_outside_of_jit_takes_numpy_arrays():
    inputs = random_inputs(DECODE, jnp.float32)
    arguments: dict[str, Any] = {name: np.asarray(x) for name, x in inputs.arguments.items()}
    testing.assert_right(inputs, paged_attention(**arguments, max_q_len=1))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.uint32])
def test_whole_numbers_of_any_dtype_are_page_ids_and_lengths(dtype):
    """Page ids times KV heads pass 255 here, and positions are differences."""
    inputs = random_inputs(
        Case(lengths=((5, 100), (1, 29)), num_heads=8, num_kv_heads=8, num_pages=99), jnp.float32
    )
    arguments = dict(inputs.arguments)
    arguments["block_tables"] = jnp.asarray(inputs.tables, dtype)
    for name in ("kv_lens", "cu_q_lens"):
        arguments[name] = arguments[name].astype(dtype)
    testing.assert_right(inputs, paged_attention(**arguments))
