"""paxkv: the paged KV cache for JAX.

`LLM` generates text. `prefill_step` and `decode_loop` do it inside a `jit` of your own, with a
decoder of your own. `paxkv.pallas_kernels` has the attention alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paxkv.async_engine import AsyncEngine
    from paxkv.beam_steps import beam_search
    from paxkv.beams import Hypotheses
    from paxkv.block_table import BlockTable, append, fork, init_block_table, release, truncate
    from paxkv.cache import (
        PagedCache,
        adopt_all,
        append_all,
        fork_all,
        init_cache,
        release_all,
        reserve_all,
        settle_all,
        truncate_all,
    )
    from paxkv.causal_view import CausalView
    from paxkv.decoder import Decoder, LayerGroup
    from paxkv.engine import Engine
    from paxkv.errors import DeadlineExceeded, NoToken, QueueFull, RequestError
    from paxkv.integrity import check_integrity
    from paxkv.llm import LLM, Score, StreamPiece
    from paxkv.logits_processors import LogitsProcessor, chain, default_processors, stateless
    from paxkv.memory_report import MemoryReport, PoolReport, RequestMemory
    from paxkv.memory_series import MemorySeries
    from paxkv.memory_trace import MemoryTrace
    from paxkv.metrics import EngineStats, Metrics
    from paxkv.page_pool import (
        PagePool,
        copy_pages,
        dense_from_pages,
        init_page_pool,
        pages_from_dense,
    )
    from paxkv.prefix_index import PrefixIndex, PrefixKey
    from paxkv.request import Completion, SamplingParams, TokenLogprob
    from paxkv.request_state import Request
    from paxkv.reservation import reserve
    from paxkv.sampling import Sampling, greedy_sampling, same_sampling
    from paxkv.sharing import adopt, hold, merge
    from paxkv.slots import Finish, Slots, init_slots, requests_from_prompts
    from paxkv.steps import Burst, decode_loop, decode_step, prefill_step
    from paxkv.swap import swap_in, swap_out
    from paxkv.waste import (
        PoolAccount,
        SlotAccounts,
        account_pool,
        account_slots,
        duplicate_tokens,
        page_fill,
    )
    from paxkv.windows import release_window

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "BlockTable",
    "Burst",
    "CausalView",
    "Completion",
    "DeadlineExceeded",
    "Decoder",
    "Engine",
    "EngineStats",
    "Finish",
    "Hypotheses",
    "LayerGroup",
    "LogitsProcessor",
    "MemoryReport",
    "MemorySeries",
    "MemoryTrace",
    "Metrics",
    "NoToken",
    "PagePool",
    "PagedCache",
    "PoolAccount",
    "PoolReport",
    "PrefixIndex",
    "PrefixKey",
    "QueueFull",
    "Request",
    "RequestError",
    "RequestMemory",
    "Sampling",
    "SamplingParams",
    "Score",
    "SlotAccounts",
    "Slots",
    "StreamPiece",
    "TokenLogprob",
    "account_pool",
    "account_slots",
    "adopt",
    "adopt_all",
    "append",
    "append_all",
    "beam_search",
    "chain",
    "check_integrity",
    "copy_pages",
    "decode_loop",
    "decode_step",
    "default_processors",
    "dense_from_pages",
    "duplicate_tokens",
    "fork",
    "fork_all",
    "greedy_sampling",
    "hold",
    "init_block_table",
    "init_cache",
    "init_page_pool",
    "init_slots",
    "merge",
    "page_fill",
    "pages_from_dense",
    "prefill_step",
    "release",
    "release_all",
    "release_window",
    "requests_from_prompts",
    "reserve",
    "reserve_all",
    "same_sampling",
    "settle_all",
    "stateless",
    "swap_in",
    "swap_out",
    "truncate",
    "truncate_all",
]

# Where each name lives. Names are imported when they are first used, so that who wants only the
# attention (`paxkv.pallas_kernels`) does not import flax.
_HOMES = {
    "async_engine": "AsyncEngine",
    "beam_steps": "beam_search",
    "beams": "Hypotheses",
    "block_table": "BlockTable append fork init_block_table release truncate",
    "cache": "PagedCache adopt_all append_all fork_all init_cache release_all reserve_all "
    "settle_all truncate_all",
    "decoder": "Decoder LayerGroup",
    "causal_view": "CausalView",
    "engine": "Engine",
    "errors": "DeadlineExceeded NoToken QueueFull RequestError",
    "integrity": "check_integrity",
    "llm": "LLM Score StreamPiece",
    "logits_processors": "LogitsProcessor chain default_processors stateless",
    "memory_report": "MemoryReport PoolReport RequestMemory",
    "memory_series": "MemorySeries",
    "memory_trace": "MemoryTrace",
    "metrics": "EngineStats Metrics",
    "page_pool": "PagePool copy_pages dense_from_pages init_page_pool pages_from_dense",
    "prefix_index": "PrefixIndex PrefixKey",
    "reservation": "reserve",
    "request": "Completion SamplingParams TokenLogprob",
    "request_state": "Request",
    "sampling": "Sampling greedy_sampling same_sampling",
    "sharing": "adopt hold merge",
    "slots": "Finish Slots init_slots requests_from_prompts",
    "steps": "Burst decode_loop decode_step prefill_step",
    "swap": "swap_in swap_out",
    "windows": "release_window",
    "waste": "PoolAccount SlotAccounts account_pool account_slots duplicate_tokens page_fill",
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"paxkv.{home}"), name)
    raise AttributeError(f"module 'paxkv' has no attribute {name!r}")
