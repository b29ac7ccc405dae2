"""The whole decode loop of small models, to be compiled ahead of time."""

import dataclasses
import functools
import math
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.aot import Job
from benchmarks.chips import Chip
from paxkv.cache import init_cache
from paxkv.models.config import DecoderConfig
from paxkv.models.llama import LlamaDecoder
from paxkv.models.rope import RopeConfig
from paxkv.slots import init_slots, requests_from_prompts
from paxkv.steps import decode_loop

_LOOPS = {  # head_dim and dtype
    "decode_loop": (128, "bfloat16"),
    "decode_loop_float16": (128, "float16"),
    "decode_loop_narrow_heads": (64, "bfloat16"),
}
_CONFIG = DecoderConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=8,
    num_kv_heads=2, head_dim=128, max_position=4096, rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
)  # fmt: skip
_NUM_SLOTS, _PAGE_SIZE, _NUM_PAGES = 8, 16, 2048


def loop_names(platform: str) -> list[str]:
    """The names of `loop_jobs`. Only a TPU stores narrow heads otherwise, filled up with zeros."""
    return [name for name in _LOOPS if platform == "tpu" or "narrow" not in name]


def loop_jobs(chip: Chip) -> dict[str, Job]:
    """The decode loop of decoders of two layers."""
    return {name: _loop_job(chip, *_LOOPS[name]) for name in loop_names(chip.platform)}


def _loop_job(chip: Chip, head_dim: int, dtype: str) -> Job:
    config = dataclasses.replace(_CONFIG, head_dim=head_dim)
    decoder = nnx.eval_shape(lambda: LlamaDecoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))
    with mock.patch("jax.default_backend", return_value=chip.platform):  # whose page shape counts
        cache = jax.eval_shape(
            functools.partial(
                init_cache, config.layer_groups, num_slots=_NUM_SLOTS, max_length=1024,
                num_pages=_NUM_PAGES, page_size=_PAGE_SIZE, dtype=jnp.dtype(dtype),
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
