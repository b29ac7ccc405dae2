"""What is compiled ahead of time: attention over the test cases and big shapes, movers, a loop."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from benchmarks.aot import Job
from benchmarks.chips import Chip
from paxkv.cache import init_cache
from paxkv.models.config import DecoderConfig
from paxkv.models.llama import LlamaDecoder
from paxkv.models.rope import RopeConfig
from paxkv.pallas_kernels import movers, paged_attention
from paxkv.pallas_kernels.attention_cases import CASES, HEADS, Case
from paxkv.slots import init_slots, requests_from_prompts
from paxkv.steps import decode_loop

# Whose kernels are compiled for which platform.
IMPLEMENTATIONS = {"tpu": "tpu", "cuda": "gpu"}

_LONG = Case(lengths=((1, 131_072),) * 4, num_heads=32, num_kv_heads=8, head_dim=128)
_BIG_CASES = {
    "big_decode_131072_tokens": _LONG,
    "big_decode_1024_sequences": Case(
        lengths=((1, 2048),) * 1024, num_heads=32, num_kv_heads=8, head_dim=128
    ),
    "big_prefill_4096_rows": Case(
        lengths=((4096, 4096),), num_heads=32, num_kv_heads=8, head_dim=128
    ),
    "big_prefill_131072_tokens": Case(
        lengths=((512, 131_072), (1, 100)), num_heads=32, num_kv_heads=8, head_dim=128
    ),
    "big_pool": Case(  # more than 2^31 elements in each of its arrays, and yet room on a v5e
        lengths=((1, 4096),) * 8, num_heads=32, num_kv_heads=8, head_dim=128, num_pages=2**17 + 64
    ),
    "big_pool_prefill": Case(
        lengths=((64, 4096),) * 2, num_heads=32, num_kv_heads=8, head_dim=128, num_pages=2**17 + 64
    ),
}
_SHAPES = {
    **{
        f"shape_page_{page_size}": Case(
            lengths=((1, 700),) * 8, num_heads=32, num_kv_heads=8, head_dim=128,
            page_size=page_size,
        )
        for page_size in (8, 16, 32, 64, 128, 256)
    },
    **{
        f"shape_head_dim_{head_dim}": Case(
            lengths=((1, 700),) * 8, num_heads=8, num_kv_heads=2, head_dim=head_dim
        )
        for head_dim in (64, 80, 96, 128, 256)
    },
    **{
        f"shape_group_{num_heads}_{num_kv_heads}": Case(
            lengths=((1, 700),) * 8, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=128
        )
        for num_heads, num_kv_heads in (*HEADS, (16, 1), (16, 16))
    },
}  # fmt: skip
ATTENTION_CASES = {
    name: case for name, case in (CASES | _SHAPES | _BIG_CASES).items() if case.page_size >= 8
}

# Of each kernel what the number of bytes and the way into registers may change.
_EVERY_DTYPE = (
    "shape_page_8", "shape_page_16", "shape_head_dim_256", "head_dim_80", "chunks_page_8",
    "mixed_list",
)  # fmt: skip
_OTHER_DTYPES = {"tpu": ("float16", "float32"), "cuda": ("float16",)}
# What chips compile that share their kernels with another one: the ends of each range.
_ENDS = (
    "shape_page_8", "shape_page_16", "shape_page_256", "shape_head_dim_64", "shape_head_dim_80",
    "shape_head_dim_256", "shape_group_16_1", "shape_group_9_3", *_BIG_CASES,
)  # fmt: skip


def attention_names(platform: str, *, every_case: bool = True) -> list[str]:
    """The names of `attention_jobs`: `decode:` where one query a sequence is promised.

    Args:
        platform: "tpu" or "cuda".
        every_case: All of them, not only the ends of each range of shapes and sizes.
    """
    names = []
    for name, case in ATTENTION_CASES.items():
        if every_case or name in _ENDS:
            if case.is_decode:
                names.append(f"decode:{name}:bfloat16")
            if not case.is_decode or name in CASES:
                names.append(f"mixed:{name}:bfloat16")
    for name in _EVERY_DTYPE if every_case else ("shape_page_16", "mixed_list"):
        kind = "decode" if ATTENTION_CASES[name].is_decode else "mixed"
        names += [f"{kind}:{name}:{dtype}" for dtype in _OTHER_DTYPES[platform]]
    return names


def attention_jobs(chip: Chip) -> dict[str, Job]:
    """Attention on each case, by the platform's implementation."""
    jobs = {}
    for job_name in attention_names(chip.platform):
        kind, name, dtype = job_name.split(":")
        jobs[job_name] = attention_job(
            ATTENTION_CASES[name],
            max_q_len=1 if kind == "decode" else None,
            implementation=IMPLEMENTATIONS[chip.platform],
            dtype=dtype,
        )
    return jobs


def attention_job(
    case: Case, *, max_q_len: int | None, implementation: Any, dtype: DTypeLike = jnp.bfloat16
) -> Job:
    """Attention on one case's shapes, the pool donated."""
    arguments = attention_shapes(case, dtype)
    if implementation == "tpu" and dtype == "float16":  # see `layout.stored_dtype`
        for name in ("key_pages", "value_pages"):
            arguments[name] = arguments[name].update(dtype=jnp.int16)

    def attend(arguments: dict[str, Any], key_pages: jax.Array, value_pages: jax.Array):
        return paged_attention(
            **arguments, key_pages=key_pages, value_pages=value_pages, scale=case.scale,
            window=case.window, soft_cap=case.soft_cap, max_q_len=max_q_len,
            implementation=implementation,
        )  # fmt: skip

    pools = [arguments.pop(name) for name in ("key_pages", "value_pages")]
    return Job(function=attend, arguments=(arguments, *pools), donated=(1, 2), pool=pools[0].shape)


def attention_shapes(case: Case, dtype: DTypeLike) -> dict[str, jax.ShapeDtypeStruct]:
    """The arguments of `paged_attention` for a case, without memory."""
    shape = jax.ShapeDtypeStruct
    num_held = [-(-kv_len // case.page_size) for _, kv_len in case.lengths]
    num_rows = case.num_rows or sum(q_len for q_len, _ in case.lengths) + 3
    num_slots = len(case.lengths)
    max_pages = case.max_pages or max(num_held) + 2
    num_pages = case.num_pages or sum(num_held) + 4
    new = shape((num_rows, case.num_kv_heads, case.head_dim), dtype)
    pages = shape((num_pages, case.num_kv_heads, case.page_size, case.head_dim), dtype)
    arguments = {
        "queries": shape((num_rows, case.num_heads, case.head_dim), dtype),
        "new_keys": new,
        "new_values": new,
        "key_pages": pages,
        "value_pages": pages,
        "block_tables": shape((num_slots, max_pages), jnp.int32),
        "kv_lens": shape((num_slots,), jnp.int32),
        "cu_q_lens": shape((num_slots + 1,), jnp.int32),
    }
    if case.has_sinks:
        arguments["sinks"] = shape((case.num_heads,), jnp.float32)
    return arguments


def _mover_calls(pages, ids, offsets, tokens, contents) -> dict[str, Callable[..., Any]]:
    return {
        "write": lambda pages: movers.write_tokens(pages, ids, offsets, tokens),
        "copy": lambda pages: movers.copy_pages(pages, ids, ids[::-1]),
        "put": lambda pages: movers.put_pages(pages, ids, contents),
    }


def mover_names() -> list[str]:
    return [
        f"{mover}:{how}:{shape}"
        for mover in ("write", "copy", "put", "take")
        for how in (("once",) if mover == "take" else ("loop", "cond"))
        for shape in _MOVER_SHAPES
    ]


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


def mover_jobs(chip: Chip) -> dict[str, Job]:
    """The movers in a loop that carries the pool, and under a condition."""
    del chip  # each call chooses for its platform
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


LOOP_HEAD_DIMS = {"decode_loop": 128, "decode_loop_narrow_heads": 64}
LOOP_NAMES = list(LOOP_HEAD_DIMS)
_CONFIG = DecoderConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=8,
    num_kv_heads=2, head_dim=128, max_position=4096, rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
)  # fmt: skip
_NUM_SLOTS, _PAGE_SIZE, _NUM_PAGES = 8, 16, 2048


def loop_jobs(chip: Chip) -> dict[str, Job]:
    """The whole decode loop of decoders of two layers in bfloat16."""
    return {name: _loop_job(chip, head_dim) for name, head_dim in LOOP_HEAD_DIMS.items()}


def _loop_job(chip: Chip, head_dim: int) -> Job:
    config = dataclasses.replace(_CONFIG, head_dim=head_dim)
    decoder = nnx.eval_shape(lambda: LlamaDecoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    with mock.patch("jax.default_backend", return_value=chip.platform):  # whose page shape counts
        cache = jax.eval_shape(
            functools.partial(
                init_cache, config.layer_groups, num_slots=_NUM_SLOTS, max_length=1024,
                num_pages=_NUM_PAGES, page_size=_PAGE_SIZE, dtype=jnp.bfloat16,
            )
        )  # fmt: skip
    prompts = jax.ShapeDtypeStruct((_NUM_SLOTS, 512), jnp.int32)
    prompt_lens = jax.ShapeDtypeStruct((_NUM_SLOTS,), jnp.int32)
    slots = jax.eval_shape(
        lambda *prompts: init_slots(requests_from_prompts(*prompts, max_tokens=512)),
        prompts, prompt_lens,
    )  # fmt: skip
    pool = cache[0][0].k_pages[0].shape
    assert math.prod(pool) >= 2**22  # larger than all else there is
    return Job(
        function=decode_loop,
        arguments=(decoder, cache, slots, jax.ShapeDtypeStruct((), jnp.int32)),
        donated=(1, 2),
        pool=pool,
        in_rows=False,  # as it comes from `init_cache`
    )


def broken_jobs(chip: Chip) -> dict[str, Job]:
    """Jobs that show what becomes of those that fail."""
    del chip
    pool = (4096, 64)
    pages = jax.ShapeDtypeStruct(pool, jnp.float32)

    def write(pages):
        return pages.at[3].set(1.0)

    good = Job(function=write, arguments=(pages,), donated=(0,), pool=pool)
    return {
        "good": good,
        "abort": dataclasses.replace(good, function=lambda pages: os.abort()),
        "raise": dataclasses.replace(good, function=lambda pages: pages * (1 // 0)),
        "last": good,
        "copies": dataclasses.replace(good, donated=()),
    }
