"""The decode kernel's softmax, over query heads that are stacked.

Query heads of several KV heads are stacked so that their scores fill whole registers: a stack
holds some KV heads with `group` query heads each, `rows` rows in all, and its scores are the sum
over its heads of (the query rows of that head, others zero) times (the keys of that head).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from paxkv.pallas_kernels.attention_call import AttentionSettings
from paxkv.pallas_kernels.online_softmax import MASKED
from paxkv.pallas_kernels.tpu_float16 import dtype_of_numbers
from paxkv.pallas_kernels.tpu_steps import dot, finish_softmax, pad, scale_and_cap
from paxkv.pallas_kernels.tpu_tiles import LANES, power_of_two_over

_SUBLANES = 8  # rows of a register


@dataclasses.dataclass(frozen=True, slots=True)
class Stacks:
    """Which rows of which stack a query head has."""

    num_kv_heads: int  # K
    real_group: int  # query heads of a KV head

    @property
    def group(self) -> int:
        """Rows of a KV head."""
        return power_of_two_over(self.real_group)

    @property
    def heads(self) -> int:
        """KV heads of a stack: as many as a register has rows for."""
        most = max(1, _SUBLANES // self.group)
        return max(n for n in range(1, most + 1) if self.num_kv_heads % n == 0)

    @property
    def count(self) -> int:
        """J, the stacks."""
        return self.num_kv_heads // self.heads

    @property
    def rows(self) -> int:
        """R, the rows of a stack."""
        return -(-self.heads * self.group // _SUBLANES) * _SUBLANES

    def stack(self, x: jax.Array) -> jax.Array:
        """`[..., N, H]` to `[..., J, R, H]`, with zeros in rows of no head."""
        lead, tail = x.shape[:-2], x.shape[-1]
        x = pad(x.reshape(*lead, self.num_kv_heads, self.real_group, tail), -2, self.group)
        x = x.reshape(*lead, self.count, self.heads * self.group, tail)
        return pad(x, -2, self.rows)

    def unstack(self, x: jax.Array) -> jax.Array:
        """`[..., J, R, H]` to `[..., N, H]`."""
        lead, tail = x.shape[:-3], x.shape[-1]
        x = x[..., : self.heads * self.group, :]
        x = x.reshape(*lead, self.num_kv_heads, self.group, tail)[..., : self.real_group, :]
        return x.reshape(*lead, self.num_kv_heads * self.real_group, tail)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackSoftmax:
    """Unfinished softmaxes of one sequence's queries, in a kernel's memory."""

    stacks: Stacks
    settings: AttentionSettings
    query_buf: Any  # [2, J, R, H]
    key_buf: Any  # [2, K, C, S, H]
    value_buf: Any
    bias: Any  # f32[8, t] 0 or MASKED
    top: Any  # f32[J, R, 128]
    total: Any  # f32[J, R, 128]
    weighted: Any  # f32[J, R, heads * H]
    row_head: jax.Array  # i32[R, 1] which of its stack's heads a row is of

    def clear(self) -> None:
        """Nothing is seen yet."""
        self.top[...] = jnp.full(self.top.shape, MASKED, jnp.float32)
        self.total[...] = jnp.zeros(self.total.shape, jnp.float32)
        self.weighted[...] = jnp.zeros(self.weighted.shape, jnp.float32)

    def attend(
        self, pages, half, buf, *, is_masked: bool, between: Callable[[int], None] | None = None
    ) -> None:
        """Merges some pages of a tile into the softmaxes.

        The scores of a stack are asked for before the values of the one before it, so that the
        matrix units work while a softmax is computed.

        Args:
            pages: Slice of the tile.
            half: Which half of `query_buf`.
            buf: Which half of `key_buf` and `value_buf`.
            is_masked: Whether `bias` hides some tokens.
            between: Called once for each stack.
        """
        scores = self._score(0, pages, half, buf)
        for stack in range(self.stacks.count):
            has_following = stack + 1 < self.stacks.count
            following = self._score(stack + 1, pages, half, buf) if has_following else None
            if between is not None:
                between(stack)
            self._gather(stack, pages, buf, *self._weigh(stack, scores, is_masked=is_masked))
            scores = following

    def _score(self, stack: int, pages, half, buf):
        query, head_dim = self.query_buf[half, stack], self.query_buf.shape[3]
        scores = None
        for i in range(self.stacks.heads):
            keys = self.key_buf[buf, stack * self.stacks.heads + i, pages].reshape(-1, head_dim)
            mine = query
            if self.stacks.heads > 1:
                mine = jnp.where(self.row_head == i, query, jnp.zeros_like(query))
            part = dot(mine, keys, (1, 1))
            scores = part if scores is None else scores + part
        return scores

    def _weigh(self, stack: int, scores, *, is_masked: bool):
        """The weights of a tile's tokens, and by how much those of earlier ones shrink."""
        scores = scale_and_cap(scores, self.settings)
        if is_masked:
            hidden = jnp.broadcast_to(self.bias[0:1], scores.shape)
            scores = jnp.where(hidden == 0, scores, MASKED)
        old_top = self.top[stack]
        new_top = jnp.maximum(old_top, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - new_top[:, :1])
        keep = jnp.exp(old_top - new_top)
        self.top[stack] = new_top
        self.total[stack] = keep * self.total[stack] + jnp.sum(weights, axis=1, keepdims=True)
        return weights.astype(dtype_of_numbers(self.value_buf.dtype)), keep[:, :1]

    def _gather(self, stack: int, pages, buf, weights, keep) -> None:
        head_dim = self.value_buf.shape[4]
        for i in range(self.stacks.heads):
            values = self.value_buf[buf, stack * self.stacks.heads + i, pages]
            part = slice(i * head_dim, (i + 1) * head_dim)
            self.weighted[stack, :, part] = keep * self.weighted[stack, :, part] + dot(
                weights, values.reshape(-1, head_dim), (1, 0)
            )

    def finished(self, stack: int, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Outputs `f32[R, H]` and log-sum-exp `f32[R, 128]` of one stack."""
        head_dim = self.value_buf.shape[4]
        values = self.weighted[stack, :, :head_dim]
        for i in range(1, self.stacks.heads):
            part = self.weighted[stack, :, i * head_dim : (i + 1) * head_dim]
            values = jnp.where(self.row_head == i, part, values)
        return finish_softmax(self.top[stack], self.total[stack], values, sinks)


def row_heads(stacks: Stacks) -> jax.Array:
    """Which of its stack's heads each row is of, `i32[R, 1]`."""
    rows = lax.broadcasted_iota(jnp.int32, (stacks.rows, LANES), 0)
    return (rows // stacks.group)[:, :1]
