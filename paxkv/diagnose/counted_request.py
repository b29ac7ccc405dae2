"""A request as a simulation knows it: how many tokens, and not which."""

import dataclasses

import numpy as np

from paxkv.request import SamplingParams
from paxkv.request_state import Request

_NO_BLOCKS = np.zeros(0, np.int64)
_PARAMS = SamplingParams()


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class CountedRequest(Request):
    """A request of counts, which the engine's scheduler takes as one of its own.

    It runs one step per output token, and at its step `t` stores `prompt + t` tokens: the last
    output token need not be stored. While it runs, its numbers follow from the simulation's step,
    so nothing is counted up.
    """

    prompt_tokens: int
    output_tokens: int
    block_ids: np.ndarray = dataclasses.field(default_factory=lambda: _NO_BLOCKS)  # full ones
    num_done: int = 0  # output tokens there were when it last began or was sent back
    base: int = 0  # while it runs: tokens stored at step `s` are `base + s`
    end: int = 0  # while it runs: the first step that it does not need
    shared_pages: int = 0  # pages of its outputs that are counted elsewhere, or once for all
    room_tokens: int = 0  # for the scheduler: tokens of the pages that are its own

    @property
    def num_tokens(self) -> int:
        """What the scheduler counts."""
        return self.room_tokens

    def begin(self, step: int) -> None:
        """Runs from this step on."""
        self.base = self.prompt_tokens + self.num_done - step
        self.end = step + self.output_tokens - self.num_done

    def send_back(self, step: int) -> int:
        """Stops it before a step. Returns the tokens that it had stored, to be computed again."""
        self.num_done = self.output_tokens - (self.end - step)
        return self.base + step - 1


def counted_request(
    index: int, prompt_tokens: int, output_tokens: int, block_ids: np.ndarray = _NO_BLOCKS
) -> CountedRequest:
    """A request that has not begun."""
    return CountedRequest(
        id=index,
        prompt=[],
        params=_PARAMS,
        stop_token_ids=(),
        max_num_tokens=prompt_tokens + output_tokens,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        block_ids=block_ids,
    )
