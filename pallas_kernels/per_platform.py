"""Functions that are one thing on a CPU and a kernel elsewhere.

The choice falls when a program is lowered, so that one jitted program can be exported for several
platforms. `jax.lax.platform_dependent` does the same, but traces the code of every platform each
time, and importing and tracing Pallas kernels takes seconds that a CPU's user would wait for.
"""

import functools
from collections.abc import Callable, Sequence

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

type Function = Callable[..., Sequence[jax.Array]]


def per_platform(
    name: str,
    result_avals: Callable[..., Sequence[jax.core.ShapedArray]],
    reference: Function,
    **kernels: Function,
) -> Function:
    """A function of arrays and static settings that is lowered as its platform has it.

    It can be jitted, looped and branched over, but neither differentiated nor vmapped.

    Args:
        name: What it is called in jaxprs.
        result_avals: From the arguments' shapes and settings to the results'.
        reference: What it is on platforms that are not named.
        **kernels: What it is on others, by jax's names ("tpu", "cuda").
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(result_avals)
    mlir.register_lowering(primitive, mlir.lower_fun(reference, multiple_results=True))
    for platform, kernel in kernels.items():
        rule = mlir.lower_fun(kernel, multiple_results=True)
        mlir.register_lowering(primitive, rule, platform=platform)

    @functools.cache
    def compiled(**settings) -> Function:
        return jax.jit(functools.partial(primitive.bind, **settings))

    # Called outside of `jit`: compiled all the same, for the platform that the arrays are on.
    @primitive.def_impl
    def run(*arrays: jax.Array, **settings) -> Sequence[jax.Array]:
        with jax.disable_jit(False):
            return compiled(**settings)(*arrays)

    return primitive.bind
