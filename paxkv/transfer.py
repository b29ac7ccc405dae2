"""Between host and device: requests become rows of arrays, and news become tokens."""

import functools
from collections.abc import Mapping

import jax
import numpy as np

from paxkv.cache import PagedCache
from paxkv.errors import NoToken
from paxkv.prefix_index import PageChanges
from paxkv.request import FinishReason, TokenLogprob
from paxkv.request_state import Request
from paxkv.sampling import request_key
from paxkv.slots import Finish, News, Requests, idle_requests
from paxkv.steps import PromptLogprobs

NUM_STOP_IDS = 16  # stop tokens of one request
_INT32_MAX = 2**31 - 1

_REASONS: dict[int, FinishReason | None] = {
    Finish.NOT: None,
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.ERROR: "error",
}


def rows_of(
    admitted: Mapping[int, Request], num_slots: int, max_length: int, *, engine_seed: int
) -> tuple[np.ndarray, Requests]:
    """The rows of requests that were given slots.

    Returns:
        `bool[B]`, which rows they are, and the rows, as arrays of the host. Others are idle.
    """
    rows = jax.tree.map(np.array, _idle_rows(num_slots, max_length))
    is_new = np.zeros(num_slots, bool)
    for slot, request in admitted.items():
        is_new[slot] = True
        _fill_row(rows, slot, request, engine_seed)
    return is_new, rows


@functools.lru_cache(maxsize=4)
def _idle_rows(num_slots: int, max_length: int) -> Requests:
    """On the host, and made once: thirty small programs run to make them."""
    return jax.device_get(idle_requests(num_slots, max_length, NUM_STOP_IDS))


def _fill_row(rows: Requests, slot: int, request: Request, engine_seed: int) -> None:
    params, tokens = request.params, request.tokens
    rows.tokens[slot, : len(tokens)] = tokens
    rows.prompt_lens[slot] = len(request.prompt)
    rows.num_tokens[slot] = len(tokens)
    rows.max_num_tokens[slot] = request.max_num_tokens
    rows.wants_logprobs[slot] = params.logprobs is not None
    sampling, settings = rows.sampling, rows.settings
    assert params.top_k is not None, "params must be settled, see SamplingParams.with_defaults"
    sampling.temperature[slot] = params.temperature
    sampling.top_k[slot] = min(max(params.top_k, 0), _INT32_MAX)
    sampling.top_p[slot] = params.top_p
    sampling.min_p[slot] = params.min_p
    sampling.key[slot] = request_key(params.seed, request.id, engine_seed)
    settings.repetition_penalty[slot] = params.repetition_penalty
    settings.presence_penalty[slot] = params.presence_penalty
    settings.frequency_penalty[slot] = params.frequency_penalty
    settings.min_tokens[slot] = min(params.min_tokens, _INT32_MAX)
    settings.stop_ids[slot, : len(request.stop_token_ids)] = request.stop_token_ids
    biases = dict(params.logit_bias)
    settings.bias_ids[slot, : len(biases)] = list(biases)
    settings.bias_values[slot, : len(biases)] = list(biases.values())


def prefixes_of(
    admitted: Mapping[int, Request], cache: PagedCache
) -> tuple[np.ndarray, np.ndarray]:
    """What requests that were given slots begin with.

    Returns:
        `i32[G, B, M]`, pages of the prefix index, and `i32[B]`, how many tokens of them.
    """
    num_slots, max_pages = cache[0][1].block_tables.shape
    pages = np.zeros((len(cache), num_slots, max_pages), np.int32)
    lengths = np.zeros(num_slots, np.int32)
    for slot, request in admitted.items():
        nodes = [*request.path, *([request.copied] if request.copied else [])]
        for i, node in enumerate(nodes):
            pages[:, slot, i] = node.pages
        lengths[slot] = request.num_stored
    return pages, lengths


def table_changes(changes: PageChanges, cache: PagedCache) -> tuple[np.ndarray, np.ndarray]:
    """What the block tables are told of a prefix index: `i32[G, P]` twice, see `settle_all`."""
    num_pages = max(table.ref_counts.shape[0] for _, table in cache)
    holds = np.zeros((len(cache), num_pages), np.int32)
    same_as = np.tile(np.arange(num_pages, dtype=np.int32), (len(cache), 1))
    groups = np.arange(len(cache))
    for pages in changes.held:
        holds[groups, pages] += 1
    for pages in changes.dropped:
        holds[groups, pages] -= 1
    for pages, equal in changes.merged:
        same_as[groups, pages] = equal
    return holds, same_as


def take_tokens(request: Request, news: News, slot: int) -> int:
    """Adds what a slot has sampled to its request; returns how many tokens that were."""
    count = int(news.counts[slot])
    request.output += news.tokens[slot, :count].tolist()
    if request.params.logprobs is not None:
        for i in range(count):
            request.logprobs.append(
                _token_logprob(
                    int(news.tokens[slot, i]),
                    news.logprobs[slot, i],
                    news.top_ids[slot, i, : request.params.logprobs],
                    news.top_logprobs[slot, i, : request.params.logprobs],
                )
            )
    reason = _REASONS[int(news.finish[slot])]
    if reason == "error":
        request.error = NoToken(
            "no token could be chosen: the logits hold NaN or infinity, or every token is forbidden"
        )
    request.finish_reason = reason  # last: another thread that sees it sees all of the answer
    return count


def take_prompt_logprobs(
    running: Mapping[int, Request], q_lens: Mapping[int, int], logprobs: PromptLogprobs
) -> None:
    """Adds the log-probabilities of a prefill call's rows to the requests that want them."""
    row = 0
    for slot, q_len in sorted(q_lens.items()):  # packed in the order of slots
        request = running[slot]
        wanted, known = request.params.prompt_logprobs, request.prompt_logprobs
        if wanted is not None and request.needs_prompt_logprobs:
            # Row i of the prompt tells of token i + 1.
            for i, token in enumerate(request.prompt[len(known) : len(known) + q_len], row):
                known.append(
                    _token_logprob(
                        token,
                        logprobs.logprobs[i],
                        logprobs.top_ids[i, :wanted],
                        logprobs.top_logprobs[i, :wanted],
                    )
                )
        row += q_len


def _token_logprob(
    token: int, logprob: jax.Array, top_ids: jax.Array, top_logprobs: jax.Array
) -> TokenLogprob:
    top = zip(top_ids.tolist(), top_logprobs.tolist(), strict=True)
    return TokenLogprob(token_id=token, logprob=float(logprob), top=tuple(top))
