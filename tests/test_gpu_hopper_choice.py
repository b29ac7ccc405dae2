"""Which GPU takes which kernel, and what none takes."""

import jax
import jax.numpy as jnp
import pytest

from paxkv.pallas_kernels import PagedAttention, gpu
from paxkv.pallas_kernels.attention_cases import SMALL_CASES
from paxkv.pallas_kernels.attention_inputs import random_inputs
from paxkv.pallas_kernels.testing import assert_right


class TestGpuRefusal:
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_kernel_takes_16_bit(self, dtype):
        assert (
            gpu.gpu_refusal(jnp.empty((3, 8, 128), dtype), jnp.empty((9, 1, 16, 128), dtype))
            is None
        )

    @pytest.mark.parametrize(
        ("dtype", "pages_dtype", "found"),
        [
            (jnp.float32, jnp.float32, "found float32"),
            (jnp.bfloat16, jnp.float32, "found float32"),
            (jnp.int8, jnp.int8, "found int8 and int8"),
            (jnp.bfloat16, jnp.float16, "found bfloat16 and float16"),
        ],
    )
    def test_reason_gives_what_was_found(self, dtype, pages_dtype, found):
        queries, pages = jnp.empty((3, 8, 128), dtype), jnp.empty((9, 1, 16, 128), pages_dtype)
        assert found in str(gpu.gpu_refusal(queries, pages))


class TestPagedAttentionGpu:
    def call(self, dtype) -> None:
        inputs = random_inputs(SMALL_CASES["decode_plain"], dtype)
        out, lse, key_pages, value_pages = gpu.paged_attention_gpu(
            **inputs.arguments, scale=inputs.case.head_dim**-0.5, window=None, soft_cap=None,
            sinks=None, max_q_len=1,
        )  # fmt: skip
        assert_right(inputs, PagedAttention(out, key_pages, value_pages, lse))

    def test_float32_takes_the_reference(self):
        self.call(jnp.float32)

    def test_old_gpu_takes_the_reference_and_warns_once(self, monkeypatch):
        monkeypatch.setattr(gpu, "compute_capability", lambda: (7, 5))
        gpu._warn_of_old_gpu.cache_clear()
        with pytest.warns(UserWarning, match=r"compute capability 7\.5"):
            self.call(jnp.bfloat16)
        self.call(jnp.bfloat16)  # warnings are errors: a second one would raise

    def test_program_without_a_gpu_is_for_hopper(self):
        assert gpu.compute_capability()[0] >= 7
        with jax.default_device(jax.devices("cpu")[0]):
            assert gpu.compute_capability()[0] >= 7
