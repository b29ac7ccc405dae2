"""Which GPU takes which kernel, and what none takes."""

import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

from paxkv.pallas_kernels import gpu, gpu_device, paged_attention
from paxkv.pallas_kernels.attention_call import AttentionArrays
from paxkv.pallas_kernels.attention_cases import SMALL_CASES
from paxkv.pallas_kernels.attention_inputs import random_inputs
from paxkv.pallas_kernels.gpu_device import Gpu, gpu_traced_for


def arrays_of(dtype, pages_dtype) -> AttentionArrays:
    """Arguments of a call, of which only dtypes matter."""
    inputs = random_inputs(SMALL_CASES["decode_plain"], jnp.float32)
    return AttentionArrays(
        **{
            name: x.astype(pages_dtype if "pages" in name else dtype) if x.ndim > 2 else x
            for name, x in inputs.arguments.items()
        }
    )


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs are traced for a T4."""
    monkeypatch.setattr(gpu, "gpu_traced_for", lambda: Gpu((7, 5), 40))
    gpu._warn.cache_clear()
    yield
    gpu._warn.cache_clear()


def device(capability: str, core_count: int) -> SimpleNamespace:
    return SimpleNamespace(platform="gpu", compute_capability=capability, core_count=core_count)


class TestGpuTracedFor:
    def found(self, monkeypatch: pytest.MonkeyPatch, default: Any, *devices: Any) -> Gpu:
        """What is found with such a default device and such GPUs."""

        def local_devices(*, backend: str) -> Sequence[Any]:
            if not devices:
                raise RuntimeError(f"no backend {backend}")
            return devices

        config = SimpleNamespace(jax_default_device=default)
        stand_in = SimpleNamespace(config=config, local_devices=local_devices)
        monkeypatch.setattr(gpu_device, "jax", stand_in)
        return gpu_traced_for()

    @pytest.mark.parametrize("default", [None, "cpu", SimpleNamespace(platform="cpu")])
    def test_without_a_gpu_it_is_a_hopper(self, monkeypatch, default):
        assert self.found(monkeypatch, default) == Gpu((9, 0), 132)

    @pytest.mark.parametrize("default", [None, "gpu", SimpleNamespace(platform="cpu")])
    def test_first_gpu_is_known_by_its_numbers(self, monkeypatch, default):
        found = self.found(monkeypatch, default, device("8.6", 84), device("9.0", 132))
        assert found == Gpu((8, 6), 84)
        assert not found.has_tma

    def test_default_device_comes_first(self, monkeypatch):
        found = self.found(monkeypatch, device("10.0", 148), device("8.6", 84))
        assert found == Gpu((10, 0), 148)
        assert found.has_tma

    def test_interpreted_programs_are_few(self):
        assert gpu_traced_for(interpret=True).num_multiprocessors <= 4


class TestGpuRefusal:
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_kernel_takes_16_bit(self, dtype):
        assert gpu.gpu_refusal(arrays_of(dtype, dtype)) is None

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
        assert found in str(gpu.gpu_refusal(arrays_of(dtype, pages_dtype)))

    @pytest.mark.usefixtures("old_gpu")
    def test_kernel_that_is_named_refuses_an_old_gpu(self):
        inputs = random_inputs(SMALL_CASES["decode_plain"], jnp.bfloat16)
        message = "take compute capability 8.0 and later, found 7.5: use implementation='reference'"
        with pytest.raises(ValueError, match=re.escape(message)):
            paged_attention(**inputs.arguments, max_q_len=1, implementation="gpu")


class TestChoiceForThePlatform:
    def exported(self, dtype) -> str:
        """A call's program for GPUs."""
        arguments = random_inputs(SMALL_CASES["decode_plain"], dtype).arguments
        attend = jax.jit(lambda x: paged_attention(**x, max_q_len=1))
        return export.export(attend, platforms=("cuda",))(arguments).mlir_module()

    def test_16_bit_takes_a_kernel(self):
        assert "mosaic_gpu" in self.exported(jnp.bfloat16)

    def test_kernel_is_taken_where_numbers_have_64_bits(self):
        with jax.enable_x64(True):
            assert "mosaic_gpu" in self.exported(jnp.bfloat16)

    def test_float32_takes_the_reference(self):
        assert "mosaic_gpu" not in self.exported(jnp.float32)

    def test_no_product_of_float32_is_rounded(self):
        lines = self.exported(jnp.float32).splitlines()
        products = [line for line in lines if "stablehlo.dot_general" in line]
        assert products and all("[HIGHEST, HIGHEST]" in product for product in products)

    @pytest.mark.usefixtures("old_gpu")
    def test_old_gpu_takes_the_reference_and_warns_once(self):
        with pytest.warns(UserWarning, match=r"without a kernel.*8\.0 and later, found 7\.5"):
            assert "mosaic_gpu" not in self.exported(jnp.bfloat16)
        self.exported(jnp.bfloat16)  # warnings are errors: a second one would raise
