"""What an engine refuses before anything is changed."""

import dataclasses
import numbers
import operator
from typing import Any

import jax

from paxkv.decoder import Decoder
from paxkv.request_state import Request
from paxkv.transfer import NUM_STOP_IDS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request of an engine may have."""

    vocab_size: int
    max_length: int  # tokens of prompt and output
    num_pages: int  # that can be handed out
    page_size: int  # tokens

    def check(self, request: Request) -> None:
        """Raises a ValueError that says why a request can never be served, and what would help."""
        params = request.params
        if not params.is_settled:
            raise ValueError(f"settle what is left open with params.with_defaults(): {params}")
        self._check_prompt(request.prompt)
        named = (*params.stop_token_ids, *dict(params.logit_bias))
        if wrong := [token for token in named if token >= self.vocab_size]:
            raise ValueError(
                f"stop_token_ids and logit_bias name token id {wrong[0]}, which is not in the "
                f"vocabulary, 0 to {self.vocab_size - 1}"
            )
        if len(request.stop_token_ids) > NUM_STOP_IDS:
            raise ValueError(
                f"{len(request.stop_token_ids)} stop tokens, and a request may have "
                f"{NUM_STOP_IDS}: name fewer stop_token_ids, or ignore_eos"
            )
        timeout = request.timeout_seconds
        if timeout is not None and not (_is_number(timeout) and timeout > 0):
            raise ValueError(
                f"timeout_seconds={timeout!r} must be above 0, or None for no deadline"
            )

    def check_own_fields(self, request: Request) -> None:
        """Raises a ValueError for what would fail in a step, in the middle of others' work."""
        if request.output or request.finish_reason is not None:
            raise ValueError(
                f"the request has {len(request.output)} new tokens and "
                f"finish_reason={request.finish_reason!r} already: make a new one"
            )
        stops = request.stop_token_ids
        are_listed = isinstance(stops, tuple | list)
        if not are_listed or not all(_is_integer(token) and 0 <= token < 2**31 for token in stops):
            raise ValueError(f"stop_token_ids={stops!r:.60} must be a tuple of ids, 0 to 2**31 - 1")
        try:
            hash(request.prefix_key)
        except TypeError as error:
            raise ValueError(f"prefix_key={request.prefix_key!r:.60}: {error}") from None

    def _check_prompt(self, prompt: list[int]) -> None:
        if not isinstance(prompt, list):
            raise ValueError(f"the prompt must be a list of token ids, found {prompt!r:.60}")
        if strange := [token for token in prompt if not _is_integer(token)]:
            raise ValueError(f"the prompt holds {strange[0]!r:.60}, which is no token id")
        if not prompt:
            raise ValueError("the prompt has no tokens; at least 1 is needed to predict the next")
        if wrong := [token for token in prompt if not 0 <= token < self.vocab_size]:
            raise ValueError(
                f"token id {wrong[0]} is not in the vocabulary, 0 to {self.vocab_size - 1}"
            )
        if len(prompt) < self.max_length:
            return
        why, capacity = "shorten the prompt or raise max_length", self.num_pages * self.page_size
        if self.max_length > capacity:
            why = (
                f"the pool holds {capacity} tokens ({self.num_pages} pages of {self.page_size}), "
                "and one more need not be stored. Shorten the prompt or give the KV cache more "
                "memory"
            )
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, but prompt and output together may have "
            f"{self.max_length}: {why}"
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def whole_numbers(**sizes: object) -> tuple[int, ...]:
    """The sizes as plain integers.

    Raises:
        ValueError: One is no whole number.
    """
    numbers = []
    for name, size in sizes.items():
        try:
            numbers.append(operator.index(size))  # type: ignore[arg-type]
        except TypeError:
            raise ValueError(f"{name}={size!r} must be a whole number") from None
    return tuple(numbers)


def check_sizes(
    *, max_length: int, num_pages: int, page_size: int, max_burst: int, **rows_of_prefill: Any
) -> None:
    """Raises a ValueError that names the first size of an engine that cannot be."""
    for name, tokens in rows_of_prefill.items():
        if not _is_integer(tokens) or tokens < 16 or tokens & (tokens - 1):
            raise ValueError(f"{name}={tokens!r} must be a power of two, 16 or more")
    if max_burst < 1:
        raise ValueError(f"{max_burst=} must be at least 1 decode step")
    if max_length < 2:
        raise ValueError(f"{max_length=} must be at least 2: a token of prompt, one of output")
    if page_size < 1 or num_pages < 2:
        raise ValueError(
            f"{page_size=} must be at least 1 token, and {num_pages=} at least 2: the null page "
            "serves nobody"
        )


def check_policies(
    *, preemption: Any, max_waiting: Any, max_swap_bytes: Any, max_pinned_share: Any
) -> None:
    """Raises a ValueError that names the first setting of whom an engine serves that cannot be."""
    if preemption not in ("recompute", "swap", "auto"):
        raise ValueError(f'{preemption=} must be "recompute", "swap" or "auto"')
    if max_waiting is not None and not (_is_integer(max_waiting) and max_waiting >= 1):
        raise ValueError(f"{max_waiting=} must be at least 1, and whole, or None for any number")
    if max_swap_bytes is not None and not (_is_integer(max_swap_bytes) and max_swap_bytes >= 0):
        raise ValueError(
            f"{max_swap_bytes=} must be a whole number of bytes, 0 for no copies, or None for as "
            "many as the pool has"
        )
    if not (_is_number(max_pinned_share) and 0 <= max_pinned_share <= 1):
        raise ValueError(f"{max_pinned_share=} must be from 0 to 1")


def check_same_shapes(old: Decoder, new: Decoder) -> None:
    """Raises a ValueError that names the first weight of another shape or dtype."""
    old_leaves, old_tree = jax.tree.flatten_with_path(jax.eval_shape(lambda: old))
    new_leaves, new_tree = jax.tree.flatten_with_path(jax.eval_shape(lambda: new))
    if old_tree != new_tree:
        raise ValueError("the new weights differ from the old ones in structure")
    for (path, was), (_, found) in zip(old_leaves, new_leaves, strict=True):
        if (was.shape, was.dtype) != (found.shape, found.dtype):
            raise ValueError(
                f"the new weights differ from the old ones: {jax.tree_util.keystr(path)} is "
                f"{found.dtype}{list(found.shape)} and was {was.dtype}{list(was.shape)}"
            )


def check_max_steps(max_steps: int | None) -> None:
    """Raises a ValueError unless decode steps are made: samples are forked to decode at once."""
    if max_steps is not None and max_steps < 1:
        raise ValueError(f"max_steps={max_steps} must be at least 1, or None for max_burst")
