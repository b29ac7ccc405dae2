"""Broken attention is noticed: the checks and the inputs of the contract tests have teeth.

Each mutant is the reference but for one fault, of the kinds that kernels really have. It is given
the named cases in turn and must fail at least one, in float32 and in bfloat16.
"""

import itertools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from helpers_attention import DTYPES, attend
from paxkv.pallas_kernels import PagedAttention
from paxkv.pallas_kernels.attention_cases import CASES
from paxkv.pallas_kernels.attention_inputs import Inputs, random_inputs
from paxkv.pallas_kernels.testing import assert_right

type Call = Callable[..., PagedAttention]  # right, on the inputs with the changes it is given
type Mutant = Callable[[Call, Inputs], PagedAttention]

KILLERS = ("mixed_all_settings", "decode_all_settings", "mixed_huge_scores")


def tokens_at(inputs: Inputs, first: Callable[[int, int], int]) -> dict[str, jnp.ndarray]:
    """New keys and values taken from elsewhere in each sequence.

    Args:
        inputs: Whose rows are filled.
        first: From a sequence's `q_len` and `kv_len` to the position its rows start from.
    """
    new = {name: np.array(inputs.arguments[name]) for name in ("new_keys", "new_values")}
    ends = np.asarray(inputs.arguments["cu_q_lens"])[1:]
    for slot, (q_len, kv_len) in enumerate(inputs.case.lengths):
        if q_len and kv_len:
            positions = np.clip(np.arange(q_len) + first(q_len, kv_len), 0, kv_len - 1)
            rows = slice(ends[slot] - q_len, ends[slot])
            new["new_keys"][rows] = inputs.keys[slot][positions]
            new["new_values"][rows] = inputs.values[slot][positions]
    return {name: jnp.asarray(x) for name, x in new.items()}


def one_token_earlier(inputs: Inputs) -> dict[str, jnp.ndarray]:
    return tokens_at(inputs, lambda q_len, kv_len: kv_len - q_len - 1)


def drop_last_token(call: Call, inputs: Inputs) -> PagedAttention:
    kv_lens = jnp.maximum(inputs.arguments["kv_lens"] - 1, 0)
    return call(kv_lens=kv_lens, **one_token_earlier(inputs))


def attend_to_stale_tokens(call: Call, inputs: Inputs) -> PagedAttention:
    return call(**one_token_earlier(inputs))


def drop_last_page(call: Call, inputs: Inputs) -> PagedAttention:
    tables = np.array(inputs.arguments["block_tables"])
    for slot, (_, kv_len) in enumerate(inputs.case.lengths):
        tables[slot, max(kv_len - 1, 0) // inputs.case.page_size] = 2**31 - 1  # counts as absent
    return call(block_tables=jnp.asarray(tables))


def swap_two_pages(call: Call, inputs: Inputs) -> PagedAttention:
    tables = inputs.arguments["block_tables"]
    return call(block_tables=tables.at[:, :2].set(tables[:, 1::-1]))


def read_the_neighbours_pages(call: Call, inputs: Inputs) -> PagedAttention:
    return call(block_tables=jnp.roll(inputs.arguments["block_tables"], 1, axis=0))


def change_window(by: int) -> Mutant:
    def mutant(call: Call, inputs: Inputs) -> PagedAttention:
        return call(window=inputs.case.window and inputs.case.window + by)

    return mutant


def map_heads_by_remainder(call: Call, inputs: Inputs) -> PagedAttention:
    """Query head h reads KV head h % K: done by putting it where h * K // N is that."""
    order = np.argsort(np.arange(inputs.case.num_heads) % inputs.case.num_kv_heads, kind="stable")
    back = np.argsort(order)
    sinks = inputs.arguments.get("sinks")
    result = call(
        queries=inputs.arguments["queries"][:, order],
        **({} if sinks is None else {"sinks": sinks[order]}),
    )
    return result._replace(out=result.out[:, back], log_sum_exp=result.log_sum_exp[:, back])


def align_causal_mask_at_the_start(call: Call, inputs: Inputs) -> PagedAttention:
    q_lens = jnp.diff(inputs.arguments["cu_q_lens"])
    kv_lens = jnp.minimum(inputs.arguments["kv_lens"], q_lens)
    return call(kv_lens=kv_lens, **tokens_at(inputs, lambda q_len, kv_len: 0))


def see_the_next_token(call: Call, inputs: Inputs) -> PagedAttention:
    """Each query stands one row late, all but the last of its sequence."""
    right = call()
    late = call(queries=jnp.roll(inputs.arguments["queries"], 1, axis=0))
    is_last = np.ones(len(right.out), bool)
    for first, end in itertools.pairwise(np.asarray(inputs.arguments["cu_q_lens"])):
        is_last[first : max(end - 1, first)] = False
    moved = jnp.roll(late.out, -1, axis=0)
    return right._replace(out=jnp.where(is_last[:, None, None], right.out, moved))


def do_not_subtract_the_max(call: Call, inputs: Inputs) -> PagedAttention:
    right = call()
    total = jnp.exp(right.log_sum_exp)[..., None]  # inf where a score is above 88
    total = jnp.where(total == 0, 1, total)
    return right._replace(out=(right.out * total / total).astype(right.out.dtype))


def take_the_mean_of_values(call: Call, inputs: Inputs) -> PagedAttention:
    return call(scale=0.0)


def leave_rows_of_nothing_unset(call: Call, inputs: Inputs) -> PagedAttention:
    right = call()
    is_empty = jnp.isneginf(right.log_sum_exp)[..., None]
    return right._replace(out=jnp.where(is_empty, jnp.asarray(1e-6, right.out.dtype), right.out))


def multiply_unseen_values_by_zero(call: Call, inputs: Inputs) -> PagedAttention:
    right = call()
    return right._replace(out=right.out + 0 * inputs.arguments["value_pages"][0, :1, :1])


def take_log_sum_exp_to_base_2(call: Call, inputs: Inputs) -> PagedAttention:
    right = call()
    return right._replace(log_sum_exp=right.log_sum_exp / jnp.log(2.0))


def write_one_slot_late(call: Call, inputs: Inputs) -> PagedAttention:
    late = call(kv_lens=inputs.arguments["kv_lens"] + 1)
    return call()._replace(key_pages=late.key_pages, value_pages=late.value_pages)


def do_not_write(call: Call, inputs: Inputs) -> PagedAttention:
    pages = {name: inputs.arguments[name] for name in ("key_pages", "value_pages")}
    return call()._replace(**pages)


def write_padding_to_the_null_page(call: Call, inputs: Inputs) -> PagedAttention:
    right = call()
    return right._replace(key_pages=right.key_pages.at[0, :, 0].set(0))


def swap_keys_and_values(call: Call, inputs: Inputs) -> PagedAttention:
    right = call()
    return right._replace(key_pages=right.value_pages, value_pages=right.key_pages)


# Their pool is the right one, so that it is the attention that gives them away.
ATTENTION_MUTANTS: dict[str, Mutant] = {
    "drop the last token": drop_last_token,
    "one stale token": attend_to_stale_tokens,
    "drop the last page": drop_last_page,
    "wrong page of two": swap_two_pages,
    "the neighbour's pages": read_the_neighbours_pages,
    "off-by-one window, too wide": change_window(+1),
    "off-by-one window, too narrow": change_window(-1),
    "window ignored": lambda call, inputs: call(window=None),
    "cap ignored": lambda call, inputs: call(soft_cap=None),
    "scale missing": lambda call, inputs: call(scale=1.0),
    "sinks ignored": lambda call, inputs: call(sinks=None),
    "wrong head map": map_heads_by_remainder,
    "causal mask aligned to the start": align_causal_mask_at_the_start,
    "the next token seen": see_the_next_token,
    "max not subtracted": do_not_subtract_the_max,
    "mean of V": take_the_mean_of_values,
    "rows of nothing unset": leave_rows_of_nothing_unset,
    "unseen values times zero": multiply_unseen_values_by_zero,
    "log-sum-exp to base 2": take_log_sum_exp_to_base_2,
}
WRITE_MUTANTS: dict[str, Mutant] = {
    "write one slot late": write_one_slot_late,
    "no write": do_not_write,
    "padding written to the null page": write_padding_to_the_null_page,
    "keys and values swapped": swap_keys_and_values,
}


def run(mutant: Mutant, name: str, dtype: str) -> None:
    """Raises an AssertionError where the contract tests would."""
    inputs = random_inputs(CASES[name], DTYPES[dtype])

    def call(**changes) -> PagedAttention:
        return attend("reference", inputs, **changes)

    broken = mutant(call, inputs)
    if mutant in ATTENTION_MUTANTS.values():
        right = call()
        broken = broken._replace(key_pages=right.key_pages, value_pages=right.value_pages)
    assert_right(inputs, broken)


def is_killed(mutant: Mutant, name: str, dtype: str) -> bool:
    try:
        run(mutant, name, dtype)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
class TestMutants:
    @pytest.mark.parametrize("mutant", ATTENTION_MUTANTS | WRITE_MUTANTS)
    def test_mutant_fails_a_case(self, mutant, dtype):
        broken = (ATTENTION_MUTANTS | WRITE_MUTANTS)[mutant]
        assert any(is_killed(broken, name, dtype) for name in KILLERS)

    @pytest.mark.parametrize("name", KILLERS)
    def test_unbroken_attention_passes(self, name, dtype):
        run(lambda call, inputs: call(), name, dtype)
