"""One batch without an engine, in shapes that tests share. Unused memory holds NaN throughout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from helpers import VOCAB
from paxkv.cache import PagedCache, init_cache
from paxkv.decoder import Decoder
from paxkv.logits_processors import LogitsProcessor
from paxkv.sampling import Sampling
from paxkv.slots import DEFAULT_PROCESSOR, Slots, init_slots, requests_from_prompts
from paxkv.steps import Burst, decode_loop_jit, prefill_step_jit

NUM_SLOTS = 3
LONGEST, MAX_TOKENS = 32, 32  # of prompt and output: one shape for all tests
PAGE_SIZE, NUM_PAGES, MAX_BURST = 4, 33, 16
NUM_ROWS = 32  # of prefill calls


def make_cache(decoder: Decoder, dtype: DTypeLike = jnp.float32) -> PagedCache:
    cache = init_cache(
        decoder.layer_groups,
        num_slots=NUM_SLOTS,
        max_length=LONGEST + MAX_TOKENS,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        dtype=dtype,
    )
    return tuple((jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), p), t) for p, t in cache)


def make_slots(
    prompts: list[list[int]],
    *,
    max_tokens: int | list[int] = 8,
    stop_id: int = VOCAB,
    sampling: Sampling | None = None,
    processor: LogitsProcessor = DEFAULT_PROCESSOR,
) -> Slots:
    padded = np.full((len(prompts), LONGEST), VOCAB - 1, np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    lens = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
    requests = requests_from_prompts(
        jnp.asarray(padded), lens, max_tokens=MAX_TOKENS, sampling=sampling,
        stop_ids=(stop_id,), wants_logprobs=True,
    )  # fmt: skip
    requests = dataclasses.replace(
        requests, max_num_tokens=lens + jnp.broadcast_to(jnp.int32(max_tokens), lens.shape)
    )
    return init_slots(requests, max_burst=MAX_BURST, max_logprobs=VOCAB, processor=processor)


def prefill(decoder: Decoder, cache: PagedCache, slots: Slots, chunk: int = LONGEST) -> PagedCache:
    """Stores all but the newest token of every slot, `chunk` tokens of each in a call."""
    left = np.maximum(np.asarray(slots.requests.num_tokens) - 1, 0)
    while left.any():
        q_lens = np.minimum(left, chunk)
        cache, fits, _ = prefill_step_jit(decoder, cache, slots, q_lens, num_rows=NUM_ROWS)
        assert fits
        left -= q_lens
    return cache


def decode(
    decoder: Decoder,
    cache: PagedCache,
    slots: Slots,
    num_steps: int = MAX_BURST,
    *,
    until_finish: bool = False,
    num_rows: int | None = None,
    processor: LogitsProcessor = DEFAULT_PROCESSOR,
) -> tuple[PagedCache, Slots, Burst]:
    return decode_loop_jit(
        decoder, cache, slots, np.int32(num_steps), until_finish=np.bool_(until_finish),
        num_rows=num_rows, processor=processor,
    )  # fmt: skip


def generate(
    decoder: Decoder, slots: Slots, num_steps: int = MAX_BURST, chunk: int = LONGEST, **options
) -> tuple[PagedCache, Slots, Burst]:
    cache = prefill(decoder, make_cache(decoder), slots, chunk)
    return decode(decoder, cache, slots, num_steps, **options)


def tokens_of(burst: Burst) -> list[list[int]]:
    return [
        tokens[:count].tolist()
        for tokens, count in zip(np.asarray(burst.news.tokens), burst.news.counts, strict=True)
    ]
