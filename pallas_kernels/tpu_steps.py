"""Steps that the TPU kernels share."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from paxkv.pallas_kernels.tpu_float16 import numbers, product_precision


def interpreter(is_interpreted: bool):
    """What `pallas_call` takes as `interpret`.

    Copies are carried out when they are started: one that nobody waited for is then a race, where
    copies carried out when waited for would only show as wrong numbers.
    """
    if not is_interpreted:
        return False
    return pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")


def dot(x: jax.Array, stored: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """A product with stored keys or values, accumulated in float32."""
    return lax.dot_general(
        x, numbers(stored), (((contracted[0],), (contracted[1],)), ((), ())),
        precision=product_precision(stored.dtype),
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Fills an axis up to `size` with zeros."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)
