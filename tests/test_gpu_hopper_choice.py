"""Which GPU takes which kernel, and what none takes."""

import jax
import jax.numpy as jnp
import pytest

from paxkv.pallas_kernels import PagedAttention, gpu
from paxkv.pallas_kernels.attention_cases import SMALL_CASES
from paxkv.pallas_kernels.attention_inputs import random_inputs
from paxkv.pallas_kernels.testing import assert_right


def shapes(
    *, head_dim: int = 128, page_size: int = 16, num_heads: int = 8, dtype=jnp.bfloat16
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return (
        jax.ShapeDtypeStruct((3, num_heads, head_dim), dtype),
        jax.ShapeDtypeStruct((9, 1, page_size, head_dim), dtype),
    )


class TestGpuRefusal:
    @pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
    @pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128, 256])
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_kernel_takes_what_the_contract_names(self, head_dim, page_size, dtype):
        for num_heads in (1, 3, 16):
            made = shapes(head_dim=head_dim, page_size=page_size, dtype=dtype, num_heads=num_heads)
            assert gpu.gpu_refusal(*made) is None

    @pytest.mark.parametrize(
        ("change", "found"),
        [
            ({"head_dim": 72}, "found 72"),
            ({"page_size": 4}, "found 4"),
            ({"page_size": 24}, "found 24"),
            ({"page_size": 512}, "found 512"),
            ({"num_heads": 17}, "found 17"),
            ({"dtype": jnp.float32}, "found float32"),
            ({"dtype": jnp.int8}, "found int8 and int8"),
        ],
    )
    def test_reason_gives_what_was_found(self, change, found):
        reason = gpu.gpu_refusal(*shapes(**change))
        assert reason is not None
        assert found in reason

    def test_mixed_dtypes_are_refused(self):
        queries, _ = shapes()
        _, pages = shapes(dtype=jnp.float16)
        assert "found bfloat16 and float16" in str(gpu.gpu_refusal(queries, pages))


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
