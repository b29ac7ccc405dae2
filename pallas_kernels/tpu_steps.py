"""Steps that the TPU kernels share."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu


def interpreter(is_interpreted: bool):
    """What `pallas_call` takes as `interpret`.

    Copies are carried out when they are started: one that nobody waited for is then a race, where
    copies carried out when waited for would only show as wrong numbers.
    """
    if not is_interpreted:
        return False
    return pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")


def dot(x: jax.Array, y: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """A product accumulated in float32; float32 operands are not rounded to bfloat16 first."""
    exact = x.dtype == jnp.float32
    return lax.dot_general(
        x, y, (((contracted[0],), (contracted[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Fills an axis up to `size` with zeros."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)
