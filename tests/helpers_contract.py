"""What the tests of the attention contract are made of: runs, inputs in one shape, calls in steps.

Compiling and interpreting a kernel takes seconds a shape, so that tests take the shape of the
named case `mixed_plain` wherever its sizes do not matter: the programs of the named cases serve
them.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from helpers_attention import DTYPES, IMPLEMENTATIONS, KERNELS, attend, exact_dtype
from paxkv.pallas_kernels.attention_cases import CASES, SMALL_CASES, Case
from paxkv.pallas_kernels.attention_inputs import Inputs, pack_inputs
from paxkv.pallas_kernels.testing import assert_same_bits, right_pages

# What differs between the two 16-bit types is range and rounding, not shapes.
FLOAT16_CASES = {"decode_all_settings", "mixed_all_settings", "decode_list", "mixed_list"}
REFERENCE_CASES = [
    ("reference", name, dtype)
    for name in CASES
    for dtype in DTYPES
    if dtype != "float16" or name in FLOAT16_CASES
]
# Kernels leave out what another test or case of theirs covers, and pages that they do not take.
HEAD_MAPS = ((28, 4), (14, 2), (12, 4), (40, 8), (8, 8), (8, 1))
COVERED_CASES = {
    *(f"heads_{num_heads}_{num_kv_heads}" for num_heads, num_kv_heads in HEAD_MAPS),
    *(f"{kind}_{setting}" for kind in ("decode", "mixed") for setting in ("scale", "window_5")),
}
KERNEL_CASES = [
    *(
        (kernel, name, "bfloat16")
        for kernel in KERNELS
        for name, case in SMALL_CASES.items()
        if case.page_size >= 8 and name not in COVERED_CASES
    ),
    # The lengths that other engines are tested on, once.
    *(
        (kernel, f"{kind}_list_soft_cap_sinks", "bfloat16")
        for kernel in KERNELS
        for kind in ("decode", "mixed")
    ),
    # What is written at once on TPU is 8 rows of float32 and 16 of bfloat16.
    *(
        ("tpu", name, "float32")
        for name in ("decode_all_settings", "decode_page_8", "mixed_all_settings", "chunks_page_16")
    ),
    *((kernel, "mixed_all_settings", "float16") for kernel in KERNELS),
    *(
        ("tpu", name, "float16")
        for name in ("decode_all_settings", "decode_huge_scores", "decode_page_8", "chunks_page_8")
    ),
]
UNBOUNDED_DECODE_CASES = [
    *(run for run in REFERENCE_CASES if run[1] in SMALL_CASES and CASES[run[1]].is_decode),
    *(
        (kernel, name, "bfloat16")
        for kernel in KERNELS
        for name in ("decode_plain", "decode_sinks")
    ),
]

# The reference in two dtypes, kernels in the more exact that they take.
EXACT = [(name, exact_dtype(name)) for name in IMPLEMENTATIONS]
TWO_DTYPES = [("reference", "bfloat16"), *EXACT]
# As the named cases, so that kernels are not compiled anew.
AS_COMPILED = [("reference", "float32"), *((name, "bfloat16") for name in IMPLEMENTATIONS)]


def contract(arguments: str, runs: Iterable[tuple]) -> Callable[[Any], Any]:
    """Says what a test of the contract runs with.

    Args:
        arguments: Names, as of `pytest.mark.parametrize`; the first is the implementation.
        runs: Values of them. A file runs those of the implementations that it is for.
    """

    def mark(test: Any) -> Any:
        test.arguments, test.runs = arguments, list(runs)
        return test

    return mark


def runs(dtypes: list[tuple], reference: Iterable, kernels: Iterable) -> list[tuple]:
    """Parameters of a test: an implementation, its dtype, and what of a list it runs with."""
    more = dict.fromkeys(KERNELS, kernels) | {"reference": reference}
    return [(name, dtype, what) for name, dtype in dtypes for what in more[name]]


def short_case(*lengths: tuple[int, int], **settings: Any) -> Case:
    """A case in the shape of `mixed_plain`: up to 7 sequences of 80 tokens, 19 pages of 16 in all.

    Args:
        lengths: (q_len, kv_len) of the first sequences; the others are empty.
        settings: Fields of the case.
    """
    shape = CASES["mixed_plain"]
    empty = ((0, 0),) * (len(shape.lengths) - len(lengths))
    return dataclasses.replace(shape, lengths=(*lengths, *empty), **settings)


def bound(q_len: int) -> int | None:
    """`max_q_len` for sequences of so many queries: only 1 makes a program of its own."""
    return 1 if q_len == 1 else None


def one_hot_inputs(case: Case, dtype: str) -> Inputs:
    """Queries and keys of zeros, values that are 1 at their position: outputs are weights."""
    kv_heads = case.num_kv_heads, case.head_dim
    return pack_inputs(
        case,
        [np.zeros((q_len, case.num_heads, case.head_dim)) for q_len, _ in case.lengths],
        [np.zeros((kv_len, *kv_heads)) for _, kv_len in case.lengths],
        [
            np.broadcast_to(np.eye(kv_len, case.head_dim)[:, None], (kv_len, *kv_heads))
            for _, kv_len in case.lengths
        ],
        DTYPES[dtype],
    )


def rows_of(inputs: Inputs, array, slot: int) -> np.ndarray:
    """A sequence's rows of a packed array."""
    cu_q_lens = np.asarray(inputs.arguments["cu_q_lens"])
    return np.asarray(array)[cu_q_lens[slot] : cu_q_lens[slot + 1]]


def attend_in_steps(
    implementation: str, inputs: Inputs, steps: list[list[int]], **changes
) -> list[np.ndarray]:
    """Feeds sequences that are all new bit by bit: at each step so many tokens of the first ones.

    Returns:
        Each sequence's outputs.
    """
    starts = np.asarray(inputs.arguments["cu_q_lens"])[:-1]
    padding = len(inputs.arguments["queries"]) - 1
    stored = np.zeros_like(starts)
    pools = {name: inputs.arguments[name] for name in ("key_pages", "value_pages")}
    outputs: list[list[np.ndarray]] = [[] for _ in starts]
    for of_first in steps:
        q_lens = [*of_first, *[0] * (len(starts) - len(of_first))]
        rows = np.full(padding + 1, padding)
        cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)])
        for slot, q_len in enumerate(q_lens):
            first = starts[slot] + stored[slot]
            rows[cu_q_lens[slot] : cu_q_lens[slot + 1]] = np.arange(first, first + q_len)
        stored += np.asarray(q_lens, stored.dtype)
        result = attend(
            implementation,
            inputs,
            **{
                name: inputs.arguments[name][rows] for name in ("queries", "new_keys", "new_values")
            },
            **pools,
            cu_q_lens=jnp.asarray(cu_q_lens, jnp.int32),
            kv_lens=jnp.asarray(stored, jnp.int32),
            **changes,
        )
        pools = {"key_pages": result.key_pages, "value_pages": result.value_pages}
        for slot, rows_out in enumerate(outputs):
            rows_out.append(np.asarray(result.out)[cu_q_lens[slot] : cu_q_lens[slot + 1]])
    for found, right in zip(pools.values(), right_pages(inputs), strict=True):
        assert_same_bits(found, right)
    return [np.concatenate(rows_out) for rows_out in outputs]
