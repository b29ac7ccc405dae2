"""What every implementation of paged attention must do, on the same named cases.

Each test lists which implementations and dtypes it runs: the reference all that the test is for,
interpreted kernels, which take seconds a call, what takes different ways through them. A file for
each platform runs those of its implementations.
"""

import dataclasses
import itertools
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from helpers_attention import DTYPES, attend
from helpers_contract import (
    AS_COMPILED,
    EXACT,
    HEAD_MAPS,
    KERNEL_CASES,
    REFERENCE_CASES,
    TWO_DTYPES,
    UNBOUNDED_DECODE_CASES,
    attend_in_steps,
    bound,
    contract,
    one_hot_inputs,
    rows_of,
    runs,
    short_case,
)
from paxkv.pallas_kernels import NULL_PAGE
from paxkv.pallas_kernels.attention_cases import CASES, PAGE_SIZES, Case
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


class PagedAttentionContract:
    """A subclass runs all tests with the implementations that it names."""

    implementations: ClassVar[tuple[str, ...]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        arguments, runs = metafunc.function.arguments, metafunc.function.runs
        metafunc.parametrize(arguments, [run for run in runs if run[0] in self.implementations])

    @contract("implementation, name, dtype", REFERENCE_CASES + KERNEL_CASES)
    def test_case_matches_dense_attention(self, implementation, name, dtype):
        inputs = random_inputs(CASES[name], DTYPES[dtype])
        max_q_len = 1 if inputs.case.is_decode else None
        assert_right(inputs, attend(implementation, inputs, max_q_len=max_q_len))

    @contract("implementation, name, dtype", UNBOUNDED_DECODE_CASES)
    def test_decode_without_a_bound_on_rows_matches_too(self, implementation, name, dtype):
        inputs = random_inputs(CASES[name], DTYPES[dtype])
        assert_right(inputs, attend(implementation, inputs))

    @contract(
        "implementation, dtype, page_size_and_q_len",
        runs(
            TWO_DTYPES,
            reference=list(itertools.product(PAGE_SIZES, [1, 8])),
            kernels=[(8, 8), (16, 8), (128, 8), (256, 8), (256, 1)],
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
    @contract(
        "implementation, dtype, max_q_len",
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

    @contract("implementation, dtype", EXACT)
    def test_window_counts_the_query_itself(self, implementation, dtype):
        inputs = one_hot_inputs(short_case((10, 10), window=4), dtype)
        in_steps = {
            "at once": attend_in_steps(implementation, inputs, [[10]]),
            "in chunks": attend_in_steps(implementation, inputs, [[3], [3], [3], [1]]),
            "by decode": attend_in_steps(implementation, inputs, [[1]] * 10, max_q_len=1),
        }
        right = np.tri(10) - np.tri(10, 10, -4)
        right /= right.sum(axis=1, keepdims=True)
        np.testing.assert_array_equal(right[9], [0] * 6 + [0.25] * 4)
        for weights, *_ in in_steps.values():
            for head in range(inputs.case.num_heads):
                assert_close(weights[:, head, :10], right, inputs.dtype)
                assert not weights[:, head, 10:].any()

    @contract(
        "implementation, dtype, window", [(*run, window) for run in EXACT for window in (10, 100)]
    )
    def test_window_as_long_as_the_sequence_hides_nothing(self, implementation, dtype, window):
        full = random_inputs(short_case((10, 10)), DTYPES[dtype])
        assert_right(full, attend(implementation, full, window=window))
        steps = [[1]] * 10
        by_decode, *_ = attend_in_steps(implementation, full, steps, max_q_len=1, window=window)
        assert_close(by_decode, right_result(full)[0][:10], full.dtype)

    @contract("implementation, dtype", EXACT)
    def test_causal_mask_is_aligned_at_the_end(self, implementation, dtype):
        case = short_case((4, 8), (1, 5), (3, 8), (3, 5), (3, 3))
        inputs = one_hot_inputs(case, dtype)
        result = attend(implementation, inputs)
        assert_right(inputs, result)
        alone = one_hot_inputs(short_case((1, 5)), dtype)
        assert_right(alone, attend(implementation, alone, max_q_len=1))
        for slot, (q_len, kv_len) in enumerate(case.lengths):
            weights = rows_of(inputs, result.out, slot)[:, 0, :kv_len]
            for row, seen in zip(weights, range(kv_len - q_len + 1, kv_len + 1), strict=True):
                assert_close(row, np.where(np.arange(kv_len) < seen, 1 / seen, 0), inputs.dtype)

    @contract(
        "implementation, dtype, soft_cap",
        [(*run, soft_cap) for run in TWO_DTYPES for soft_cap in (50.0, None)],
    )
    def test_soft_cap_comes_after_scale_and_before_mask(self, implementation, dtype, soft_cap):
        case = short_case((3, 3), scale=0.5, soft_cap=soft_cap)
        queries = np.zeros((3, case.num_heads, case.head_dim))
        queries[..., 0] = 2
        keys = np.zeros((3, case.num_kv_heads, case.head_dim))
        keys[..., 0] = np.array([60, 58, 100])[:, None]  # the scaled scores; the last is hidden
        values = np.broadcast_to(np.eye(3, case.head_dim)[:, None], keys.shape)
        rest = one_hot_inputs(case, dtype)
        inputs = pack_inputs(
            case, [queries, *rest.queries[1:]], [keys, *rest.keys[1:]],
            [values, *rest.values[1:]], DTYPES[dtype],
        )  # fmt: skip
        # The second token's query is the last one of the first call, or alone in the next.
        at_once = attend_in_steps(implementation, inputs, [[3]])[0][1]
        by_decode = attend_in_steps(implementation, inputs, [[1]] * 3, max_q_len=1)[0][1]
        right = np.array([0.6527, 0.3473] if soft_cap else [0.8808, 0.1192])
        for weights in (at_once, by_decode):
            weights = weights.astype(np.float64)
            assert np.abs(weights[:, :2] - right).max() <= max(1e-4, tolerance(DTYPES[dtype]))
            assert not weights[:, 2:].any()

    @contract("implementation, dtype", EXACT)
    def test_soft_cap_far_above_the_scores_is_as_exact(self, implementation, dtype):
        inputs = random_inputs(short_case((1, 18), (4, 29), soft_cap=1e6), DTYPES[dtype])
        assert_right(inputs, attend(implementation, inputs))

    @contract("implementation, dtype", TWO_DTYPES)
    def test_chunks_agree_with_one_prefill(self, implementation, dtype):
        inputs = random_inputs(short_case((24, 24), (17, 17), window=16), DTYPES[dtype])
        out, _ = right_result(inputs)
        steps = [[7, 0], [12, 5], [0, 9], [4, 3], [1, 0]]
        chunked = attend_in_steps(implementation, inputs, steps)
        for slot, found in enumerate(chunked):
            assert_close(found, rows_of(inputs, out, slot), inputs.dtype)

    @contract(
        "implementation, dtype, has_sinks",
        runs(TWO_DTYPES, reference=[False, True], kernels=[True]),
    )
    def test_halves_merge_by_log_sum_exp(self, implementation, dtype, has_sinks):
        case = short_case((1, 40), (1, 33), (1, 2), (1, 17))
        whole = random_inputs(case, DTYPES[dtype])
        sinks = {"sinks": jnp.linspace(-1, 4, whole.case.num_heads)} if has_sinks else {}

        def half(first: list[int], end: list[int]) -> Inputs:
            pairs = [(1, b - a) for a, b in zip(first, end, strict=True) if b]
            keys, values = (
                [x[a:b] for x, a, b in zip(tokens, first, end, strict=True)]
                for tokens in (whole.keys, whole.values)
            )
            return pack_inputs(short_case(*pairs), whole.queries, keys, values, whole.dtype)

        none, middle = [0] * 7, [16, 9, 1, 16, 0, 0, 0]
        all_ = [kv_len for _, kv_len in case.lengths]
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
    @contract("implementation, dtype", EXACT)
    def test_ids_that_name_no_page_are_never_read_or_written(
        self, implementation, dtype, q_len, columns
    ):
        case = short_case(*[(q_len, 37)] * 6)
        inputs = random_inputs(case, DTYPES[dtype])
        wrong = np.array([20, 21, -1, -(2**31), 2**31 - 1, NULL_PAGE], np.int32)
        tables, known = np.array(inputs.arguments["block_tables"]), inputs.tables.copy()
        tables[:6, columns], known[:6, columns] = wrong[:, None], NULL_PAGE
        # What stood in those pages is there still: were they read, it would show as a number.
        result = attend(
            implementation, inputs, block_tables=jnp.asarray(tables), max_q_len=bound(q_len)
        )
        is_stored = ~np.isin(np.arange(37) // 16, columns)
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
    @contract("implementation, dtype", EXACT)
    def test_shared_pages_serve_every_sequence(self, implementation, dtype, q_len):
        case = short_case((q_len, 37), (q_len, 40), (q_len, 21))
        apart = random_inputs(case, DTYPES[dtype])
        keys, values = (
            [np.concatenate([tokens[0][:16], own[16:]]) if len(own) else own for own in tokens]
            for tokens in (apart.keys, apart.values)
        )
        inputs = pack_inputs(case, apart.queries, keys, values, DTYPES[dtype])
        tables = inputs.tables.copy()
        tables[1:3, 0] = tables[0, 0]
        arguments = inputs.arguments | {"block_tables": jnp.asarray(tables)}
        for name in ("key_pages", "value_pages"):  # the copies that are no longer needed
            arguments[name] = arguments[name].at[inputs.tables[1:3, 0]].set(jnp.nan)
        shared = dataclasses.replace(inputs, tables=tables, arguments=arguments)
        assert_right(shared, attend(implementation, shared, max_q_len=bound(q_len)))

    @contract("implementation, dtype", EXACT)
    def test_row_used_again_ignores_what_it_held(self, implementation, dtype):
        inputs = random_inputs(short_case((1, 3)), DTYPES[dtype])
        (page,) = inputs.tables[inputs.tables != NULL_PAGE]
        others = [other for other in range(1, 9) if other != page][:3]  # NaN, all of them
        tables = jnp.asarray(inputs.tables).at[0, 1:4].set(jnp.asarray(others, jnp.int32))
        for max_q_len in (None, 1):
            result = attend(implementation, inputs, block_tables=tables, max_q_len=max_q_len)
            assert_right(inputs, result)

    @pytest.mark.parametrize("name", ["mixed_plain", "decode_plain", "mixed_all_settings"])
    @contract("implementation, dtype", AS_COMPILED)
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
    @contract("implementation, dtype", TWO_DTYPES)
    def test_row_does_not_depend_on_its_neighbours(self, implementation, dtype, q_len):
        kv_lens = [9, 5, 12]

        def rows_among(slot: int, seeds: list[int]) -> np.ndarray:
            """Outputs of one of some sequences, each made from a seed of its own."""
            case = short_case(*[(q_len, kv_lens[seed % 3]) for seed in seeds])
            made = [
                random_inputs(dataclasses.replace(case, lengths=(pair,)), DTYPES[dtype], seed)
                for pair, seed in zip(case.lengths, [*seeds, 6, 7, 8, 9, 10, 11], strict=False)
            ]
            inputs = pack_inputs(
                case, [x.queries[0] for x in made], [x.keys[0] for x in made],
                [x.values[0] for x in made], DTYPES[dtype],
            )  # fmt: skip
            result = attend(implementation, inputs, max_q_len=bound(q_len))
            return rows_of(inputs, result.out, slot)

        fixed = rows_among(0, [0, 1, 2])
        assert_same_bits(rows_among(0, [0, 4, 5]), fixed)  # of the same lengths
        for other in (rows_among(0, [0]), rows_among(2, [1, 2, 0])):
            assert_close(other, fixed.astype(np.float64), DTYPES[dtype])

    @contract("implementation, dtype", EXACT)
    def test_bound_on_rows_changes_nothing(self, implementation, dtype):
        inputs = random_inputs(CASES["mixed_plain"], DTYPES[dtype])
        assert_right(inputs, attend(implementation, inputs, max_q_len=20))

    @pytest.mark.parametrize("name", ["queries", "new_keys", "new_values"])
    @pytest.mark.parametrize("q_len", [1, 3])
    @contract("implementation, dtype", EXACT)
    def test_nan_of_one_sequence_shows_there_and_nowhere_else(
        self, implementation, dtype, q_len, name
    ):
        inputs = random_inputs(short_case(*[(q_len, 20)] * 3), DTYPES[dtype])
        # The sequence in the middle: a kernel may have attended for the other two or not yet.
        broken = {name: inputs.arguments[name].at[q_len].set(jnp.nan)}
        result = attend(implementation, inputs, max_q_len=bound(q_len), **broken)
        assert np.isnan(result.out[q_len]).all()
        others = np.r_[0:q_len, 2 * q_len : 3 * q_len]
        assert_close(result.out[others], right_result(inputs)[0][others], inputs.dtype)
        assert np.isfinite(result.log_sum_exp[others]).all()

    @pytest.mark.parametrize("max_q_len", [None, 1])
    @contract("implementation, dtype", EXACT)
    def test_tokens_past_the_table_count_as_absent(self, implementation, dtype, max_q_len):
        """Within `jit`, where lengths cannot be checked."""
        case = short_case((1, 83), (1, 5), max_pages=6)
        inputs = random_inputs(case, DTYPES[dtype])
        narrow = {"block_tables": inputs.arguments["block_tables"][:, :5], "max_q_len": max_q_len}
        result = attend(implementation, inputs, **narrow)
        kv_lens = inputs.arguments["kv_lens"].at[0].set(100)
        hidden = attend(implementation, inputs, **narrow, kv_lens=kv_lens, window=16)
        assert_close(rows_of(inputs, result.out, 1), right_result(inputs)[0][1:2], inputs.dtype)
        out, lse = dense_attention(
            inputs.queries[0], inputs.keys[0], inputs.values[0], is_stored=np.arange(83) < 80
        )
        assert_close(rows_of(inputs, result.out, 0), out, inputs.dtype)
        assert_close(rows_of(inputs, result.log_sum_exp, 0), lse, inputs.dtype, "log_sum_exp")
        assert not rows_of(inputs, hidden.out, 0).any()
        assert np.isneginf(rows_of(inputs, hidden.log_sum_exp, 0)).all()
        assert np.isfinite(rows_of(inputs, hidden.log_sum_exp, 1)).all()

    @pytest.mark.parametrize("max_q_len", [None, 1])
    @contract("implementation, dtype", EXACT)
    def test_row_that_sees_no_key_has_its_sink_alone(self, implementation, dtype, max_q_len):
        """Its page is missing; rows of padding and of empty sequences have not even that."""
        case = short_case((1, 5), (1, 0), (1, 7), has_sinks=True)
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
