"""TPU kernels of others at the shapes of ours, to be compiled and counted beside them.

JAX's `ragged_paged_attention` comes with jax. The third generation of tpu-inference's kernel is in
PyPI's `tpu-inference`, whose package wants an engine: its kernels alone are imported past that.
Both choose their tiles by the default device, which here is a CPU: they are told which chip it is.
"""

import importlib
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.aot import Job
from benchmarks.chips import Chip
from paxkv.pallas_kernels.attention_cases import Case

_VERSIONS = {"v5e": 5, "v5p": 5, "v6e": 6, "tpu7x": 7}

_VMEM_BYTES = 32 * 2**20  # for JAX's kernel: v5e and v5p give one half of that unasked


def ragged_paged_attention_job(case: Case, *, tile_tokens: int, tile_queries: int) -> Job:
    """JAX's kernel on one case. It does not write the new tokens, which ours does as well."""
    shape = jax.ShapeDtypeStruct
    num_slots, max_pages, num_pages = _sizes(case)
    pages = (num_pages, case.page_size, 2 * case.num_kv_heads, case.head_dim)

    def attend(queries, pages, kv_lens, block_tables, cu_q_lens, num_slots):
        from jax.experimental.pallas.ops.tpu import ragged_paged_attention as peer

        return peer.ragged_paged_attention(
            queries, pages, kv_lens, block_tables, cu_q_lens, num_slots,
            sm_scale=case.head_dim**-0.5, num_kv_pages_per_block=tile_tokens // case.page_size,
            num_queries_per_block=tile_queries, vmem_limit_bytes=_VMEM_BYTES,
        )  # fmt: skip

    return Job(
        function=attend,
        arguments=(
            shape((num_slots, case.num_heads, case.head_dim), jnp.bfloat16),
            shape(pages, jnp.bfloat16),
            shape((num_slots,), jnp.int32),
            shape((num_slots, max_pages), jnp.int32),
            shape((num_slots + 1,), jnp.int32),
            shape((1,), jnp.int32),
        ),
        pool=pages,
    )


def tpu_inference_job(case: Case, *, tile_tokens: int) -> Job:
    """tpu-inference's third kernel on one case, with its tile of one query at decode."""
    shape = jax.ShapeDtypeStruct
    num_slots, max_pages, num_pages = _sizes(case)
    # [P, S, 2 K / packing, packing, H]
    pages = (num_pages, case.page_size, case.num_kv_heads, 2, case.head_dim)
    new = shape((num_slots, case.num_kv_heads, case.head_dim), jnp.bfloat16)
    tile = (1, tile_tokens, 1, tile_tokens)

    def attend(queries, keys, values, pages, kv_lens, block_tables, cu_q_lens, distribution):
        peer: Any = importlib.import_module(f"{_V3}.kernel")
        return peer.ragged_paged_attention(
            queries, keys, values, pages, kv_lens, block_tables, cu_q_lens, distribution,
            sm_scale=case.head_dim**-0.5, d_block_sizes=tile,
        )  # fmt: skip

    return Job(
        function=attend,
        arguments=(
            shape((num_slots, case.num_heads, case.head_dim), jnp.bfloat16),
            new,
            new,
            shape(pages, jnp.bfloat16),
            shape((num_slots,), jnp.int32),
            shape((num_slots * max_pages,), jnp.int32),
            shape((num_slots + 1,), jnp.int32),
            shape((3,), jnp.int32),
        ),
        donated=(3,),
        setup=_prepare_tpu_inference,
    )


_V3 = "tpu_inference.kernels.ragged_paged_attention.v3"


def _prepare_tpu_inference(chip: Chip) -> None:
    """Makes its kernels importable without its engine, and answers which chip it is."""
    if "tpu_inference" not in sys.modules:
        spec = find_spec("tpu_inference")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError("tpu-inference is not installed beside the compilers")
        package = types.ModuleType("tpu_inference")
        package.__path__ = [str(Path(spec.origin).parent)]
        logger: Any = types.ModuleType("tpu_inference.logger")
        logger.init_logger = lambda name: types.SimpleNamespace(
            info=print, warning=print, info_once=print, warning_once=print, debug=print
        )
        utils: Any = types.ModuleType("tpu_inference.utils")
        utils.get_device_name = lambda *_: f"TPU v{_VERSIONS[chip.name]}"
        sys.modules |= {
            "tpu_inference": package, "tpu_inference.logger": logger, "tpu_inference.utils": utils
        }  # fmt: skip
    version = _VERSIONS[chip.name]
    for module in ("util", "kernel", "tuned_block_sizes"):
        loaded: Any = importlib.import_module(f"{_V3}.{module}")
        loaded.get_tpu_version = lambda: version


def _sizes(case: Case) -> tuple[int, int, int]:
    """Sequences, pages of each one's table, and pages of the pool."""
    num_held = [-(-kv_len // case.page_size) for _, kv_len in case.lengths]
    return len(case.lengths), max(num_held), sum(num_held) + 1
