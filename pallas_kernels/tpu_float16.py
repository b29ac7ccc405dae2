"""float16 on TPUs, whose registers hold none: kernels take a pool of its bits, in int16.

Writing a token moves bits. What is multiplied becomes float32 where it is read: `numbers`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from paxkv.pallas_kernels.attention_call import AttentionArrays, PagedAttention
from paxkv.pallas_kernels.layout import to_stored

BITS = jnp.dtype(jnp.int16)


def float16_to_bits(arrays: AttentionArrays) -> AttentionArrays:
    """A call in float16 as the kernels take it: new K and V as bits, queries in float32."""
    return arrays._replace(
        queries=arrays.queries.astype(jnp.float32),
        new_keys=to_stored(arrays.new_keys, BITS),
        new_values=to_stored(arrays.new_values, BITS),
    )


def float16_from_bits(result: PagedAttention) -> PagedAttention:
    """The answer to a call of `float16_to_bits`, in float16."""
    return result._replace(out=result.out.astype(jnp.float16))


def numbers(stored: jax.Array) -> jax.Array:
    """What is stored, as numbers to multiply: bits of float16 become float32.

    Exact, but for two ends of the range: numbers below 2^-14, which float16 holds with fewer
    digits, are 0 on a TPU, which has no such numbers either; infinities are NaN.
    """
    if stored.dtype != BITS:
        return stored
    # Both formats have sign, exponent and fraction in this order: 1, 5 and 10 bits, 1, 8 and 23.
    # int32 repeats the sign above the exponent: the three copies that would lie in the wider
    # exponent are cleared. Its bias is 127 instead of 15.
    bits = (stored.astype(jnp.int32) << 13) & ~(0b111 << 28)
    wide = lax.bitcast_convert_type(bits, jnp.float32) * 2.0**112
    return jnp.where(jnp.abs(wide) < 2.0**16, wide, jnp.nan)


def dtype_of_numbers(stored: DTypeLike) -> jnp.dtype:
    """The dtype that `numbers` gives for one that is stored."""
    return jnp.dtype(jnp.float32) if stored == BITS else jnp.dtype(stored)


def dtype_of_words(stored: DTypeLike) -> jnp.dtype:
    """A dtype of 32 bits that takes what is stored there and back unchanged."""
    return jnp.dtype(jnp.int32 if stored == BITS else jnp.float32)


def product_precision(stored: DTypeLike) -> lax.Precision | None:
    """How exact products with what is stored have to be.

    A TPU multiplies bfloat16. It makes float32 of 6 such products, and of 3 what is as exact as
    float16.
    """
    exact = {BITS: lax.Precision.HIGH, jnp.dtype(jnp.float32): lax.Precision.HIGHEST}
    return exact.get(jnp.dtype(stored))
