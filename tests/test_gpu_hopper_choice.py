"""Which GPU takes which kernel, and what none takes."""

import jax
import jax.numpy as jnp
import pytest

from paxkv.pallas_kernels import gpu
from paxkv.pallas_kernels.attention_call import AttentionArrays, AttentionSettings
from paxkv.pallas_kernels.attention_cases import SMALL_CASES
from paxkv.pallas_kernels.attention_inputs import random_inputs
from paxkv.pallas_kernels.testing import assert_right


def call_of(dtype, pages_dtype) -> AttentionArrays:
    """Arguments for three rows, of which only dtypes matter."""
    inputs = random_inputs(SMALL_CASES["decode_plain"], jnp.float32)
    return AttentionArrays(
        **{
            name: x.astype(pages_dtype if "pages" in name else dtype) if x.ndim > 2 else x
            for name, x in inputs.arguments.items()
        }
    )


class TestGpuRefusal:
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_kernel_takes_16_bit(self, dtype):
        assert gpu.gpu_refusal(call_of(dtype, dtype)) is None

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
        assert found in str(gpu.gpu_refusal(call_of(dtype, pages_dtype)))


class TestPagedAttentionGpu:
    def call(self, dtype) -> None:
        inputs = random_inputs(SMALL_CASES["decode_plain"], dtype)
        settings = AttentionSettings(scale=inputs.case.head_dim**-0.5, max_q_len=1)
        result = gpu.paged_attention_gpu(AttentionArrays(**inputs.arguments), settings)
        assert_right(inputs, result)

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
