"""One call of paged attention, as every implementation takes it and answers it."""

from typing import NamedTuple

import jax


class AttentionArrays(NamedTuple):
    """The arrays of `paged_attention`; see there."""

    queries: jax.Array  # [T, N, H]
    new_keys: jax.Array  # [T, K, H]
    new_values: jax.Array  # [T, K, H]
    key_pages: jax.Array  # [P, K, S, H]
    value_pages: jax.Array  # [P, K, S, H]
    block_tables: jax.Array  # i32[B, M]
    kv_lens: jax.Array  # i32[B]
    cu_q_lens: jax.Array  # i32[B + 1]
    sinks: jax.Array | None = None  # f32[N]


class AttentionSettings(NamedTuple):
    """What is known of a call when it is compiled."""

    scale: float  # what scores are multiplied by
    window: int | None = None  # tokens a query sees, itself counted
    soft_cap: float | None = None  # what scaled scores are capped at
    max_q_len: int | None = None  # a bound on rows per sequence

    @property
    def is_decode(self) -> bool:
        """Whether no sequence has more than one query."""
        return self.max_q_len == 1


class PagedAttention(NamedTuple):
    """What `paged_attention` returns."""

    out: jax.Array  # [T, N, H] in the queries' dtype
    key_pages: jax.Array  # [P, K, S, H] with the new tokens in it
    value_pages: jax.Array  # [P, K, S, H]
    # f32[T, N] of scores and sink: where a row sees no key, the sink alone, and -inf without one;
    # -inf for rows of padding and of empty sequences, too
    log_sum_exp: jax.Array
