"""What prefill and decode compute, against dense attention."""

import dataclasses
import functools
import inspect
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import paxkv.decoder
from helpers import (
    assert_greedy,
    logits_of,
    random_prompts,
    tiny_decoder,
)
from helpers_steps import NUM_ROWS, decode, generate, make_cache, make_slots, prefill, tokens_of
from paxkv import init_cache, init_slots, requests_from_prompts
from paxkv.cache import PagedCache
from paxkv.decoder import Decoder, LayerGroup
from paxkv.integrity import check_integrity
from paxkv.models.llama import LlamaDecoder
from paxkv.page_pool import dense_from_pages
from paxkv.sampling import same_sampling
from paxkv.slots import Slots
from paxkv.steps import (
    Burst,
    decode_loop,
    decode_step,
    prefill_step,
    prefill_step_jit,
)


def all_logprobs(burst: Burst, place: int = 0) -> np.ndarray:
    """Log-probabilities of the whole vocabulary at a place of the burst, `f32[B, V]`."""
    top = np.asarray(burst.news.top_logprobs)[:, place]
    out = np.empty_like(top)
    np.put_along_axis(out, np.asarray(burst.news.top_ids)[:, place], top, axis=1)
    return out


def stored(cache: PagedCache, num_layers: int) -> list[np.ndarray]:
    pool, table = cache[0]
    return [
        np.asarray(x)
        for layer in range(num_layers)
        for x in dense_from_pages(pool, table, layer, 48)
    ]


PROMPTS = random_prompts([9, 5, 12])
OTHERS = random_prompts([9, 5, 12], seed=1)


@functools.cache
def at_once() -> tuple[PagedCache, Slots, Burst]:
    return generate(tiny_decoder(), make_slots(PROMPTS, max_tokens=20), 6)


def test_tokens_and_logprobs_are_those_of_dense_attention():
    _, _, burst = at_once()
    decoder = tiny_decoder()
    for slot, (prompt, output) in enumerate(zip(PROMPTS, tokens_of(burst), strict=True)):
        assert len(output) == 6
        assert_greedy(decoder, prompt, output)
        expected = jax.nn.log_softmax(logits_of(decoder, [*prompt, *output]))
        for place in range(6):
            np.testing.assert_allclose(
                all_logprobs(burst, place)[slot], expected[len(prompt) - 1 + place], atol=1e-4
            )
    np.testing.assert_array_equal(
        burst.news.logprobs[:, :6], np.max(burst.news.top_logprobs[:, :6], axis=2)
    )


@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_prefill_in_chunks_equals_at_once(chunk):
    cache, slots, burst = generate(
        tiny_decoder(), make_slots(PROMPTS, max_tokens=20), 6, chunk=chunk
    )
    assert_same_state((cache, slots, burst), at_once())


def test_prompt_stored_by_decode_equals_prefill():
    decoder, cache = tiny_decoder(), make_cache(tiny_decoder())
    lens = np.array([len(prompt) for prompt in PROMPTS], np.int32)
    for place in range(1, 12):  # what is decoded is dropped for the prompt's own next token
        slots = make_slots(PROMPTS, max_tokens=20)
        slots = dataclasses.replace(
            slots,
            requests=dataclasses.replace(slots.requests, num_tokens=jnp.minimum(place, lens)),
            is_active=jnp.asarray(place < lens),
        )
        cache, _, burst = decode(decoder, cache, slots, 1)
        assert burst.num_steps == 1
        np.testing.assert_array_equal(burst.lengths, np.minimum(place, lens - 1))
    state = decode(decoder, cache, make_slots(PROMPTS, max_tokens=20), 6)
    assert_same_state(state, at_once())


def assert_same_state(found, expected):
    (cache, slots, burst), (cache_2, slots_2, burst_2) = found, expected
    assert tokens_of(burst) == tokens_of(burst_2)
    np.testing.assert_allclose(burst.news.logprobs, burst_2.news.logprobs, atol=1e-5)
    for x, y in zip(stored(cache, 2), stored(cache_2, 2), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    np.testing.assert_array_equal(slots.requests.tokens, slots_2.requests.tokens)
    for _, table in cache:
        check_integrity(table)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_is_the_same_to_the_bit_beside_other_neighbours(dtype):
    """Neighbours of the same lengths: any difference would be their data, not rounding."""
    logprobs, pages = [], []
    for neighbours in (PROMPTS, OTHERS):
        cache, _, burst = first_step(dtype, [PROMPTS[0], *neighbours[1:]])
        logprobs.append(all_logprobs(burst)[0])
        pages.append([x[0] for x in stored(cache, 2)])
    np.testing.assert_array_equal(*logprobs)
    jax.tree.map(np.testing.assert_array_equal, *pages)


@pytest.mark.parametrize(
    "prompts", [[PROMPTS[0], [], []], [*PROMPTS[:0:-1], PROMPTS[0]]], ids=["alone", "last slot"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_is_the_same_alone_and_in_another_slot(dtype, prompts):
    expected = all_logprobs(first_step(dtype, PROMPTS)[2])[0]
    found = all_logprobs(first_step(dtype, prompts)[2])[prompts.index(PROMPTS[0])]
    tolerance = 1e-5 if dtype == "float32" else 0.02 * np.ptp(expected)
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0)
    second, best = np.sort(expected)[-2:]
    assert np.argmax(found) == np.argmax(expected) or best - second <= tolerance


def first_step(dtype: str, prompts: list[list[int]]) -> tuple[PagedCache, Slots, Burst]:
    decoder, slots = tiny_decoder(dtype), make_slots(prompts)
    cache = prefill(decoder, make_cache(decoder, dtype=jnp.dtype(dtype)), slots)
    return decode(decoder, cache, slots, 1)


@functools.cache
def windowed_decoder() -> LlamaDecoder:
    """The tiny decoder's second layer sees 5 tokens: two groups of layers, each with a table."""
    decoder = nnx.clone(tiny_decoder())
    [group] = decoder.layer_groups
    decoder.layer_groups = (
        dataclasses.replace(group, layers=(1,), window=5),
        dataclasses.replace(group, layers=(0,)),
    )
    return decoder


def test_layer_groups_each_with_a_window_of_its_own_equal_dense_attention():
    decoder, slots = windowed_decoder(), make_slots(PROMPTS, max_tokens=12)
    step = jax.jit(decode_step, donate_argnames=("cache", "slots"))
    cache = prefill(decoder, make_cache(decoder), slots, chunk=7)
    for _ in range(11):
        cache, slots, fits = step(decoder, cache, slots)
        assert fits
    assert len(cache) == 2
    for _, table in cache:
        check_integrity(table)
        np.testing.assert_array_equal(table.lengths, [9 + 10, 5 + 10, 12 + 10])
    for slot, prompt in enumerate(PROMPTS):
        row = np.asarray(slots.requests.tokens)[slot, : len(prompt) + 11].tolist()
        assert_greedy(decoder, prompt, row[len(prompt) :])
        logprobs = jax.nn.log_softmax(logits_of(decoder, row))
        found = np.asarray(slots.news.logprobs)[slot, :11]
        places = np.arange(len(prompt), len(row))
        np.testing.assert_allclose(found, logprobs[places - 1, np.array(row)[places]], atol=1e-4)
        full = logits_of(tiny_decoder(), row)
        assert np.abs(full - logits_of(decoder, row))[6:].max() > 0.1  # the window does matter


def test_group_that_does_not_fit_leaves_every_group_as_it_was():
    decoder, slots = windowed_decoder(), make_slots(PROMPTS, max_tokens=12)
    first, (pool, table) = make_cache(decoder)
    table = dataclasses.replace(table, ref_counts=table.ref_counts.at[4:].add(1))
    cache = (first, (pool, table))
    before = jax.device_get(cache)
    q_lens = np.array([8, 4, 11], np.int32)
    cache, fits, _ = prefill_step_jit(decoder, cache, slots, q_lens, num_rows=NUM_ROWS)
    assert not fits
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(cache), before)


def decoder_of_the_docstring() -> Decoder:
    """Runs the example in `paxkv.decoder` as it stands there."""
    text = inspect.getdoc(paxkv.decoder)
    assert text
    lines = text.split("    class TinyDecoder", 1)[1].splitlines()
    body = [line for line in lines[1:] if not line or line.startswith("    ")]
    source = textwrap.dedent("    class TinyDecoder" + "\n".join([lines[0], *body]))
    names = {"nnx": nnx, "jax": jax, "jnp": jnp, "LayerGroup": LayerGroup}
    exec(source, names)
    return names["TinyDecoder"](nnx.Rngs(0))


def test_decoder_of_ones_own_generates_inside_ones_own_jit():
    decoder = decoder_of_the_docstring()
    assert isinstance(decoder, Decoder)

    @jax.jit
    def rollout(decoder, prompts, prompt_lens, key):
        requests = requests_from_prompts(
            prompts, prompt_lens, max_tokens=10, wants_logprobs=True,
            sampling=same_sampling(2, key, temperature=0.0),
        )  # fmt: skip
        slots = init_slots(requests, max_burst=10, max_logprobs=1)
        cache = init_cache(
            decoder.layer_groups, num_slots=2, max_length=18, num_pages=11, page_size=4,
            dtype=jnp.float32,
        )  # fmt: skip
        cache, fits, _ = prefill_step(decoder, cache, slots, prompt_lens - 1, num_rows=16)
        cache, slots, burst = decode_loop(decoder, cache, slots, 10)
        return slots.requests.tokens, burst, fits & burst.fits

    prompts = np.array([[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 0, 0, 0, 0, 0]], np.int32)
    lens = np.array([8, 3], np.int32)
    tokens, burst, fits = rollout(decoder, prompts, lens, jax.random.key(0))
    assert fits
    assert burst.news.counts.tolist() == [10, 10]
    for row, length in zip(np.asarray(tokens), lens, strict=True):
        assert_greedy(decoder, row[:length].tolist(), row[length : length + 10].tolist())


def test_prompt_logprobs_are_those_of_dense_attention_whole_or_in_chunks():
    decoder, slots = tiny_decoder(), make_slots(PROMPTS)
    for chunks in ([[8, 4, 11]], [[5, 0, 2], [3, 4, 0], [0, 0, 9]]):
        cache, found = make_cache(decoder), [[], [], []]
        for q_lens in np.array(chunks, np.int32):
            cache, _, logprobs = prefill_step_jit(
                decoder, cache, slots, q_lens, num_rows=NUM_ROWS, num_prompt_logprobs=3
            )
            ends = np.cumsum(q_lens)
            for slot, (end, q_len) in enumerate(zip(ends, q_lens, strict=True)):
                found[slot] += list(zip(*logprobs, strict=True))[end - q_len : end]
        for prompt, rows in zip(PROMPTS, found, strict=True):
            expected = jax.nn.log_softmax(logits_of(decoder, prompt))
            assert len(rows) == len(prompt) - 1
            for place, (logprob, top_ids, top_logprobs) in enumerate(rows):
                best = np.argsort(-expected[place])[:3]
                np.testing.assert_allclose(logprob, expected[place, prompt[place + 1]], atol=1e-4)
                np.testing.assert_array_equal(top_ids, best)
                np.testing.assert_allclose(top_logprobs, expected[place, best], atol=1e-4)
