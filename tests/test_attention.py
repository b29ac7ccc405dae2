"""What every implementation of paged attention must do, on the same named cases.

Each test lists which implementations and dtypes it runs: the reference all that the test is for,
interpreted kernels, which take seconds a call, what takes different ways through them.
"""

import dataclasses
import itertools
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_attention import DTYPES, IMPLEMENTATIONS, KERNELS, attend, exact_dtype
from paxkv.pallas_kernels import NULL_PAGE, paged_attention
from paxkv.pallas_kernels.attention_cases import CASES, PAGE_SIZES, SMALL_CASES, Case
from paxkv.pallas_kernels.attention_inputs import Inputs, pack_inputs, random_inputs
from paxkv.pallas_kernels.testing import (
    assert_close,
    assert_right,
    assert_same_bits,
    dense_attention,
    right_pages,
    right_result,
    tolerance,
)

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


def runs(dtypes: list[tuple], reference: Iterable, kernels: Iterable) -> list[tuple]:
    """Parameters of a test: an implementation, its dtype, and what of a list it runs with."""
    more = dict.fromkeys(KERNELS, kernels) | {"reference": reference}
    return [(name, dtype, what) for name, dtype in dtypes for what in more[name]]


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
    """Feeds sequences that are all new bit by bit: at each step so many tokens of each.

    Returns:
        Each sequence's outputs.
    """
    starts = np.asarray(inputs.arguments["cu_q_lens"])[:-1]
    padding = len(inputs.arguments["queries"]) - 1
    stored = np.zeros_like(starts)
    pools = {name: inputs.arguments[name] for name in ("key_pages", "value_pages")}
    outputs: list[list[np.ndarray]] = [[] for _ in starts]
    for q_lens in steps:
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


class TestPagedAttention:
    @pytest.mark.parametrize(("implementation", "name", "dtype"), REFERENCE_CASES + KERNEL_CASES)
    def test_case_matches_dense_attention(self, implementation, name, dtype):
        inputs = random_inputs(CASES[name], DTYPES[dtype])
        max_q_len = 1 if inputs.case.is_decode else None
        assert_right(inputs, attend(implementation, inputs, max_q_len=max_q_len))

    @pytest.mark.parametrize(("implementation", "name", "dtype"), UNBOUNDED_DECODE_CASES)
    def test_decode_without_a_bound_on_rows_matches_too(self, implementation, name, dtype):
        inputs = random_inputs(CASES[name], DTYPES[dtype])
        assert_right(inputs, attend(implementation, inputs))

    @settings(max_examples=40)
    @given(
        lengths=st.lists(
            st.tuples(st.integers(0, 12), st.integers(0, 70)).map(lambda x: (min(x), x[1])),
            min_size=1,
            max_size=5,
        ),
        page_size=st.sampled_from([1, 4]),
        window=st.sampled_from([None, 7]),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_any_lengths_match_dense_attention(self, lengths, page_size, window, seed):
        lengths = (*lengths, *[(0, 0)] * (5 - len(lengths)))
        case = Case(
            lengths=lengths, page_size=page_size, window=window,
            num_rows=64, max_pages=72 // page_size + 1, num_pages=5 * (72 // page_size + 1) + 1,
        )  # fmt: skip
        inputs = random_inputs(case, jnp.float32, seed)
        assert_right(inputs, attend("reference", inputs))
        if case.is_decode:
            assert_right(inputs, attend("reference", inputs, max_q_len=1))

    @pytest.mark.parametrize(
        ("implementation", "dtype", "page_size_and_q_len"),
        runs(
            TWO_DTYPES,
            reference=list(itertools.product(PAGE_SIZES, [1, 8])),
            kernels=[(8, 1), (16, 8), (128, 8), (256, 1)],
        ),
    )
    def test_page_size_and_lengths_off_the_tile_change_nothing(
        self, implementation, dtype, page_size_and_q_len
    ):
        page_size, q_len = page_size_and_q_len
        case = Case(
            lengths=((q_len, 9), (q_len, 100), (q_len, 192)), num_heads=14, num_kv_heads=2,
            page_size=page_size,
        )  # fmt: skip
        inputs = random_inputs(case, DTYPES[dtype])
        max_q_len = 1 if q_len == 1 else None
        results = [attend(implementation, inputs, max_q_len=max_q_len) for _ in range(3)]
        assert_right(inputs, results[0])
        for result in results[1:]:
            for found, first in zip(result, results[0], strict=True):
                assert_same_bits(found, first)

    @pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEAD_MAPS)
    @pytest.mark.parametrize(
        ("implementation", "dtype", "max_q_len"),
        # The cases named after heads are of several rows a sequence.
        runs(TWO_DTYPES, reference=[None, 1], kernels=[1]),
    )
    def test_query_head_reads_its_kv_head(
        self, implementation, dtype, max_q_len, num_heads, num_kv_heads
    ):
        case = Case(
            lengths=((max_q_len or 5, 18), (1, 29)), num_heads=num_heads, num_kv_heads=num_kv_heads
        )
        zeros = one_hot_inputs(case, dtype)
        values = [np.empty_like(x) for x in zeros.values]
        for x in values:
            x[:] = np.arange(num_kv_heads)[:, None]
        inputs = pack_inputs(case, zeros.queries, zeros.keys, values, zeros.dtype)
        result = attend(implementation, inputs, max_q_len=max_q_len)
        assert_right(inputs, result)
        for slot in range(len(case.lengths)):
            found = rows_of(inputs, result.out, slot)
            head = np.arange(num_heads)[:, None] * num_kv_heads // num_heads
            np.testing.assert_array_equal(np.rint(found), np.broadcast_to(head, found.shape))

    @pytest.mark.parametrize(("implementation", "dtype"), EXACT)
    def test_window_counts_the_query_itself(self, implementation, dtype):
        case = Case(
            lengths=((10, 10),), window=4, page_size=8, num_rows=12, max_pages=4, num_pages=8
        )
        inputs = one_hot_inputs(case, dtype)
        in_steps = {
            "at once": attend_in_steps(implementation, inputs, [[10]]),
            "in chunks": attend_in_steps(implementation, inputs, [[3], [3], [3], [1]]),
            "by decode": attend_in_steps(implementation, inputs, [[1]] * 10, max_q_len=1),
        }
        right = np.tri(10) - np.tri(10, 10, -4)
        right /= right.sum(axis=1, keepdims=True)
        np.testing.assert_array_equal(right[9], [0] * 6 + [0.25] * 4)
        for (weights,) in in_steps.values():
            for head in range(case.num_heads):
                assert_close(weights[:, head, :10], right, inputs.dtype)
                assert not weights[:, head, 10:].any()

    @pytest.mark.parametrize(
        ("implementation", "dtype", "window"), runs(EXACT, reference=[10, 100], kernels=[10])
    )
    def test_window_as_long_as_the_sequence_hides_nothing(self, implementation, dtype, window):
        case = Case(lengths=((10, 10),), num_rows=12, page_size=8, max_pages=4, num_pages=8)
        full = random_inputs(case, DTYPES[dtype])
        assert_right(full, attend(implementation, full, window=window))
        steps = [[1]] * 10
        (by_decode,) = attend_in_steps(implementation, full, steps, max_q_len=1, window=window)
        assert_close(by_decode, right_result(full)[0][:10], full.dtype)

    @pytest.mark.parametrize(("implementation", "dtype"), EXACT)
    def test_causal_mask_is_aligned_at_the_end(self, implementation, dtype):
        case = Case(lengths=((4, 8), (1, 5), (3, 8), (3, 5), (3, 3)))
        inputs = one_hot_inputs(case, dtype)
        result = attend(implementation, inputs)
        assert_right(inputs, result)
        alone = one_hot_inputs(Case(lengths=((1, 5),)), dtype)
        assert_right(alone, attend(implementation, alone, max_q_len=1))
        for slot, (q_len, kv_len) in enumerate(case.lengths):
            weights = rows_of(inputs, result.out, slot)[:, 0, :kv_len]
            for row, seen in zip(weights, range(kv_len - q_len + 1, kv_len + 1), strict=True):
                assert_close(row, np.where(np.arange(kv_len) < seen, 1 / seen, 0), inputs.dtype)

    @pytest.mark.parametrize(
        ("implementation", "dtype", "soft_cap"),
        runs(TWO_DTYPES, reference=[50.0, None], kernels=[50.0]),
    )
    def test_soft_cap_comes_after_scale_and_before_mask(self, implementation, dtype, soft_cap):
        case = Case(
            lengths=((3, 3),), scale=0.5, soft_cap=soft_cap,
            num_rows=4, max_pages=2, num_pages=4,
        )  # fmt: skip
        queries = np.zeros((3, case.num_heads, case.head_dim))
        queries[..., 0] = 2
        keys = np.zeros((3, case.num_kv_heads, case.head_dim))
        keys[..., 0] = np.array([60, 58, 100])[:, None]  # the scaled scores; the last is hidden
        values = np.broadcast_to(np.eye(3, case.head_dim)[:, None], keys.shape)
        inputs = pack_inputs(case, [queries], [keys], [values], DTYPES[dtype])
        # The second token's query is the last one of the first call, or alone in the next.
        at_once = attend_in_steps(implementation, inputs, [[3]])[0][1]
        by_decode = attend_in_steps(implementation, inputs, [[1]] * 3, max_q_len=1)[0][1]
        right = np.array([0.6527, 0.3473] if soft_cap else [0.8808, 0.1192])
        for weights in (at_once, by_decode):
            weights = weights.astype(np.float64)
            assert np.abs(weights[:, :2] - right).max() <= max(1e-4, tolerance(DTYPES[dtype]))
            assert not weights[:, 2:].any()

    @pytest.mark.parametrize(("implementation", "dtype"), EXACT)
    def test_soft_cap_far_above_the_scores_is_as_exact(self, implementation, dtype):
        inputs = random_inputs(Case(lengths=((1, 18), (4, 29)), soft_cap=1e6), DTYPES[dtype])
        assert_right(inputs, attend(implementation, inputs))

    @pytest.mark.parametrize(("implementation", "dtype"), TWO_DTYPES)
    def test_chunks_agree_with_one_prefill(self, implementation, dtype):
        case = Case(lengths=((40, 40), (17, 17)), page_size=8, window=21)
        inputs = random_inputs(case, DTYPES[dtype])
        out, _ = right_result(inputs)
        steps = [[7, 0], [16, 5], [0, 9], [9, 3], [5, 0]]
        chunked = attend_in_steps(implementation, inputs, [*steps, [1, 0], [1, 0], [1, 0]])
        for slot, found in enumerate(chunked):
            assert_close(found, rows_of(inputs, out, slot), inputs.dtype)

    @pytest.mark.parametrize(
        ("implementation", "dtype", "has_sinks"),
        runs(TWO_DTYPES, reference=[False, True], kernels=[True]),
    )
    def test_halves_merge_by_log_sum_exp(self, implementation, dtype, has_sinks):
        lengths = ((1, 40), (1, 33), (1, 2), (1, 17))
        case = Case(lengths=lengths, num_rows=6, max_pages=5, num_pages=20)
        whole = random_inputs(case, DTYPES[dtype])
        sinks = {"sinks": jnp.linspace(-1, 4, whole.case.num_heads)} if has_sinks else {}

        def half(first: list[int], end: list[int]) -> Inputs:
            pairs = tuple((1, b - a) for a, b in zip(first, end, strict=True))
            keys, values = (
                [x[a:b] for x, a, b in zip(tokens, first, end, strict=True)]
                for tokens in (whole.keys, whole.values)
            )
            part = dataclasses.replace(case, lengths=pairs)
            return pack_inputs(part, whole.queries, keys, values, whole.dtype)

        none, middle, all_ = [0] * 4, [16, 9, 1, 16], [kv_len for _, kv_len in lengths]
        left = attend(implementation, half(none, middle))
        right = attend(implementation, half(middle, all_), **sinks)
        rows = slice(0, 4)
        lse = jnp.logaddexp(left.log_sum_exp, right.log_sum_exp)[rows]
        merged = sum(
            np.asarray(part.out[rows], np.float32) * np.exp(part.log_sum_exp[rows] - lse)[..., None]
            for part in (left, right)
        )
        result = attend(implementation, whole, **sinks)
        assert_close(merged, np.asarray(result.out[rows], np.float64), whole.dtype)
        assert_close(lse, np.asarray(result.log_sum_exp[rows], np.float64), whole.dtype)

    @pytest.mark.parametrize("columns", [[1], [2], [0, 1, 2]])
    @pytest.mark.parametrize("q_len", [1, 3])
    @pytest.mark.parametrize(("implementation", "dtype"), EXACT)
    def test_ids_that_name_no_page_are_never_read_or_written(
        self, implementation, dtype, q_len, columns
    ):
        case = Case(lengths=((q_len, 21),) * 6, page_size=8, num_pages=20)
        inputs = random_inputs(case, DTYPES[dtype])
        wrong = np.array([20, 21, -1, -(2**31), 2**31 - 1, NULL_PAGE], np.int32)
        tables, known = np.array(inputs.arguments["block_tables"]), inputs.tables.copy()
        tables[:, columns], known[:, columns] = wrong[:, None], NULL_PAGE
        # What stood in those pages is there still: were they read, it would show as a number.
        result = attend(implementation, inputs, block_tables=jnp.asarray(tables), max_q_len=q_len)
        is_stored = ~np.isin(np.arange(21) // 8, columns)
        for slot in range(6):
            out, lse = dense_attention(
                inputs.queries[slot], inputs.keys[slot], inputs.values[slot], is_stored=is_stored
            )
            assert_close(rows_of(inputs, result.out, slot), out, inputs.dtype)
            assert_close(rows_of(inputs, result.log_sum_exp, slot), lse, inputs.dtype)
        pools = right_pages(dataclasses.replace(inputs, tables=known))
        for found, right in zip((result.key_pages, result.value_pages), pools, strict=True):
            assert_same_bits(found, right)

    @pytest.mark.parametrize("q_len", [1, 3])
    @pytest.mark.parametrize(("implementation", "dtype"), EXACT)
    def test_shared_pages_serve_every_sequence(self, implementation, dtype, q_len):
        case = Case(lengths=((q_len, 37), (q_len, 40), (q_len, 21)), page_size=8)
        apart = random_inputs(case, DTYPES[dtype])
        keys, values = (
            [np.concatenate([tokens[0][:16], own[16:]]) for own in tokens]
            for tokens in (apart.keys, apart.values)
        )
        inputs = pack_inputs(case, apart.queries, keys, values, DTYPES[dtype])
        tables = inputs.tables.copy()
        tables[1:, :2] = tables[0, :2]
        arguments = inputs.arguments | {"block_tables": jnp.asarray(tables)}
        for name in ("key_pages", "value_pages"):  # the copies that are no longer needed
            arguments[name] = arguments[name].at[inputs.tables[1:, :2].ravel()].set(jnp.nan)
        shared = dataclasses.replace(inputs, tables=tables, arguments=arguments)
        assert_right(shared, attend(implementation, shared, max_q_len=q_len))

    @pytest.mark.parametrize(("implementation", "dtype"), EXACT)
    def test_row_used_again_ignores_what_it_held(self, implementation, dtype):
        case = Case(lengths=((1, 3),), max_pages=4, num_pages=9)
        inputs = random_inputs(case, DTYPES[dtype])
        (page,) = inputs.tables[inputs.tables != NULL_PAGE]
        others = [other for other in range(1, 9) if other != page][:3]  # NaN, all of them
        tables = jnp.asarray([[page, *others]], jnp.int32)
        for max_q_len in (None, 1):
            result = attend(implementation, inputs, block_tables=tables, max_q_len=max_q_len)
            assert_right(inputs, result)

    @pytest.mark.parametrize("name", ["mixed_plain", "decode_plain", "mixed_all_settings"])
    @pytest.mark.parametrize(("implementation", "dtype"), AS_COMPILED)
    def test_unused_memory_changes_no_bit(self, implementation, dtype, name):
        inputs = random_inputs(CASES[name], DTYPES[dtype])
        clean = {
            name: jnp.where(jnp.isnan(x), jnp.asarray(7, x.dtype), x)
            for name, x in inputs.arguments.items()
            if jnp.issubdtype(x.dtype, jnp.floating)
        }
        clean["block_tables"] = jnp.asarray(inputs.tables)
        max_q_len = 1 if inputs.case.is_decode else None
        poisoned = attend(implementation, inputs, max_q_len=max_q_len)
        unpoisoned = attend(implementation, inputs, max_q_len=max_q_len, **clean)
        for field in ("out", "log_sum_exp"):
            assert_same_bits(getattr(poisoned, field), getattr(unpoisoned, field), field)

    @pytest.mark.parametrize("q_len", [1, 3])
    @pytest.mark.parametrize(("implementation", "dtype"), TWO_DTYPES)
    def test_row_does_not_depend_on_its_neighbours(self, implementation, dtype, q_len):
        max_q_len = 1 if q_len == 1 else None
        kv_lens = [9, 5, 12]
        case = Case(lengths=(), num_rows=10, max_pages=3, num_pages=8, page_size=8)

        def rows_among(slot: int, seeds: list[int]) -> np.ndarray:
            """Outputs of one of some sequences, each made from a seed of its own."""
            lengths = tuple((q_len, kv_lens[seed % 3]) for seed in seeds)
            made = [
                random_inputs(dataclasses.replace(case, lengths=(pair,)), DTYPES[dtype], seed)
                for pair, seed in zip(lengths, seeds, strict=True)
            ]
            inputs = pack_inputs(
                dataclasses.replace(case, lengths=lengths), [x.queries[0] for x in made],
                [x.keys[0] for x in made], [x.values[0] for x in made], DTYPES[dtype],
            )  # fmt: skip
            result = attend(implementation, inputs, max_q_len=max_q_len)
            return rows_of(inputs, result.out, slot)

        fixed = rows_among(0, [0, 1, 2])
        assert_same_bits(rows_among(0, [0, 4, 5]), fixed)  # of the same lengths
        for other in (rows_among(0, [0]), rows_among(2, [1, 2, 0])):
            assert_close(other, fixed.astype(np.float64), DTYPES[dtype])

    @pytest.mark.parametrize(("implementation", "dtype"), EXACT)
    def test_bound_on_rows_changes_nothing(self, implementation, dtype):
        inputs = random_inputs(CASES["mixed_plain"], DTYPES[dtype])
        assert_right(inputs, attend(implementation, inputs, max_q_len=20))

    @pytest.mark.parametrize("implementation", ["tpu", "gpu"])
    def test_public_call_runs_a_named_kernel_interpreted(self, implementation):
        inputs = random_inputs(Case(lengths=((1, 18), (1, 5))), jnp.bfloat16)
        result = paged_attention(
            **inputs.arguments, max_q_len=1, implementation=implementation, interpret=True
        )
        assert_right(inputs, result)

    @pytest.mark.parametrize("name", ["queries", "new_keys", "new_values"])
    @pytest.mark.parametrize("q_len", [1, 3])
    @pytest.mark.parametrize(("implementation", "dtype"), EXACT)
    def test_nan_of_one_sequence_shows_there_and_nowhere_else(
        self, implementation, dtype, q_len, name
    ):
        case = Case(lengths=((q_len, 20),) * 3, num_rows=12, max_pages=5, num_pages=20)
        inputs = random_inputs(case, DTYPES[dtype])
        # The sequence in the middle: a kernel may have attended for the other two or not yet.
        broken = {name: inputs.arguments[name].at[q_len].set(jnp.nan)}
        result = attend(implementation, inputs, max_q_len=q_len, **broken)
        assert np.isnan(result.out[q_len]).all()
        others = np.r_[0:q_len, 2 * q_len : 3 * q_len]
        assert_close(result.out[others], right_result(inputs)[0][others], inputs.dtype)
        assert np.isfinite(result.log_sum_exp[others]).all()

    @pytest.mark.parametrize("max_q_len", [None, 1])
    @pytest.mark.parametrize(("implementation", "dtype"), EXACT)
    def test_tokens_past_the_table_count_as_absent(self, implementation, dtype, max_q_len):
        """Within `jit`, where lengths cannot be checked."""
        case = Case(lengths=((1, 17), (1, 5)), num_rows=4, max_pages=2, num_pages=5)
        inputs = random_inputs(case, DTYPES[dtype])
        first = {"block_tables": inputs.arguments["block_tables"][:, :1], "max_q_len": max_q_len}
        result = attend(implementation, inputs, **first)
        hidden = attend(
            implementation, inputs, **first, kv_lens=jnp.array([40, 5], jnp.int32), window=5
        )
        assert_close(rows_of(inputs, result.out, 1), right_result(inputs)[0][1:2], inputs.dtype)
        out, lse = dense_attention(
            inputs.queries[0], inputs.keys[0], inputs.values[0], is_stored=np.arange(17) < 16
        )
        assert_close(rows_of(inputs, result.out, 0), out, inputs.dtype)
        assert_close(rows_of(inputs, result.log_sum_exp, 0), lse, inputs.dtype, "log_sum_exp")
        assert not rows_of(inputs, hidden.out, 0).any()
        assert np.isneginf(rows_of(inputs, hidden.log_sum_exp, 0)).all()
        assert np.isfinite(rows_of(inputs, hidden.log_sum_exp, 1)).all()

    @pytest.mark.parametrize("max_q_len", [None, 1])
    @pytest.mark.parametrize(("implementation", "dtype"), EXACT)
    def test_row_that_sees_no_key_has_its_sink_alone(self, implementation, dtype, max_q_len):
        """Its page is missing; rows of padding and of empty sequences have not even that."""
        case = Case(lengths=((1, 5), (1, 0), (1, 7)), num_rows=4, has_sinks=True, num_pages=8)
        inputs = random_inputs(case, DTYPES[dtype])
        tables = jnp.asarray(inputs.tables).at[0].set(-7)
        result = attend(implementation, inputs, max_q_len=max_q_len, block_tables=tables)
        right, lse = right_result(inputs)
        assert_close(result.out[2], right[2], inputs.dtype)
        assert_close(result.log_sum_exp[2], lse[2], inputs.dtype, "log_sum_exp")
        assert not np.asarray(result.out, np.float32)[[0, 1, 3]].any()
        sinks = np.asarray(inputs.arguments["sinks"], np.float64)
        assert_close(result.log_sum_exp[0], sinks, np.float32, "log_sum_exp")
        assert np.isneginf(result.log_sum_exp[jnp.array([1, 3])]).all()
