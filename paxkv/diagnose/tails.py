"""Waste and savings of pages that follow from lengths alone, without a simulation."""

import numpy as np

from paxkv.diagnose.trace import Trace

PAGE_SIZES = (8, 16, 32, 64, 128, 256)
MAX_TAIL_PERCENT = 4.0  # "near zero": what the PagedAttention paper claims for pages of 16
ENTRY_BYTES = 8  # a page's entry in a block table and its reference count, i32 each


def tail_percent(trace: Trace, page_size: int) -> float:
    """Percent of the slots that requests hold which lie behind their tokens.

    Over all requests and decode steps: at step `t` a request stores `prompt + t` tokens and holds
    that, rounded up to whole pages.
    """
    stored, held = _stored(trace), page_size * _held_pages(trace, page_size)
    return 100 * float((held - stored).sum() / held.sum())


def sampling_percent(trace: Trace, num_samples: int, page_size: int) -> float:
    """Percent of pages saved where samples of one length share their prompt's full pages.

    Over the decode life of all requests, against samples that share nothing.
    """
    alone = num_samples * _held_pages(trace, page_size)
    shared = (num_samples - 1) * (trace.prompt_tokens // page_size) * trace.output_tokens
    return 100 * float(shared.sum() / alone.sum())


def table_percent(page_size: int, kv_bytes_per_token: float) -> float:
    """Memory of a page's bookkeeping, in percent of the page."""
    return 100 * ENTRY_BYTES / (page_size * kv_bytes_per_token)


def recommended_page_size(trace: Trace, kv_bytes_per_token: float) -> int:
    """The largest page with little waste: tables are shorter then, and copies fewer and larger.

    "Little" is `MAX_TAIL_PERCENT` for tail and bookkeeping together. Where no page has that, the
    one with the least.
    """
    waste = {
        size: tail_percent(trace, size) + table_percent(size, kv_bytes_per_token)
        for size in PAGE_SIZES
    }
    good = [size for size in PAGE_SIZES if waste[size] <= MAX_TAIL_PERCENT]
    return max(good) if good else min(waste, key=waste.__getitem__)


def _stored(trace: Trace) -> np.ndarray:
    """Tokens stored, summed over a request's steps: `prompt`, `prompt + 1`, ..."""
    prompt, output = trace.prompt_tokens, trace.output_tokens
    return prompt * output + output * (output - 1) // 2


def _held_pages(trace: Trace, page_size: int) -> np.ndarray:
    """Pages held, summed over a request's steps."""
    prompt, output = trace.prompt_tokens, trace.output_tokens
    return _pages_up_to(prompt + output - 1, page_size) - _pages_up_to(prompt - 1, page_size)


def _pages_up_to(tokens: np.ndarray, page_size: int) -> np.ndarray:
    """Pages of lengths 1, 2, ... `tokens`, summed: 1 for each of the first page's, then 2, ..."""
    full, rest = np.divmod(np.maximum(tokens, 0), page_size)
    return page_size * full * (full + 1) // 2 + rest * (full + 1)
