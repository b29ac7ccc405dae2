"""Steps that the TPU kernels share."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from paxkv.pallas_kernels.attention_call import AttentionSettings
from paxkv.pallas_kernels.online_softmax import MASKED
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


def scale_and_cap(scores: jax.Array, settings: AttentionSettings) -> jax.Array:
    """What the softmax takes of the products of queries and keys."""
    scores = scores * settings.scale
    if settings.soft_cap is None:
        return scores
    return settings.soft_cap * jnp.tanh(scores / settings.soft_cap)


def finish_softmax(
    top: jax.Array, total: jax.Array, values: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Outputs `f32[R, H]` and log-sum-exp `f32[R, 128]`, as `online_softmax.normalise`.

    Args:
        top: `f32[R, 128]`, in all lanes the largest score of the row.
        total: `f32[R, 128]`, likewise the sum of its weights.
        values: `f32[R, H]` weighted by them.
        sinks: `f32[R, 128]` or None.
    """
    if sinks is not None:
        with_sink = jnp.maximum(top, sinks)
        shrink = jnp.exp(top - with_sink)
        values = values * shrink[:, :1]
        total = total * shrink + jnp.exp(sinks - with_sink)
        top = with_sink
    # A NaN must show, and not every way of taking the largest score keeps one: the total does.
    saw_keys = ~(top <= MASKED / 2) | (total != total)
    total = jnp.where(saw_keys, total, 1.0)
    out = jnp.where(saw_keys[:, :1], values / total[:, :1], 0.0)
    return out, jnp.where(saw_keys, top + jnp.log(total), -jnp.inf)


def pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Fills an axis up to `size` with zeros."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)
