"""What is trained with optax is sampled from the paged cache, on the same weights."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paxkv
from helpers import StubDecoder, pages_held
from helpers_text import byte_level_tokenizer
from helpers_training import END, SENTENCES, log_likelihoods, small_config, trained_decoder
from paxkv import LLM, LayerGroup, SamplingParams
from paxkv.models.llama import LlamaDecoder
from paxkv.steps import decode_loop_jit, prefill_step_jit

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, stop_token_ids=(END,))


def make_llm(decoder, **sizes: Any) -> LLM:
    defaults: dict[str, Any] = {"max_slots": 4, "max_length": 80, "page_size": 8}
    return LLM(
        decoder, tokenizer=byte_level_tokenizer(), dtype="float32", max_prefill_tokens=32,
        compilation_cache=False, **(defaults | sizes),
    )  # fmt: skip


# A model that has learned some sentences.


@pytest.mark.parametrize("num_letters", [3, 12])
def test_learned_sentences_are_continued_to_their_end(num_letters):
    llm = make_llm(trained_decoder())
    prompts = [text[:num_letters] for text in SENTENCES]
    for text, completion in zip(SENTENCES, llm.generate(prompts, GREEDY), strict=True):
        assert completion.text == text[num_letters:] and completion.finish_reason == "stop"
    assert pages_held(llm.engine) == 0


def test_learned_sentences_survive_a_pool_too_small_for_all():
    llm = make_llm(trained_decoder(), kv_memory=15 * 2 * 2 * 8 * 2 * 16 * 4)
    assert llm.engine.num_pages == 14
    prompts = [text[:3] for text in SENTENCES]
    for text, completion in zip(SENTENCES, llm.generate(prompts, GREEDY), strict=True):
        assert completion.text == text[3:]
    assert llm.engine.stats.num_preemptions > 0


def test_a_learned_sentence_streams_in_whole_characters():
    llm, text = make_llm(trained_decoder()), SENTENCES[-1]
    pieces = [piece.text for piece in llm.stream(text[:5], GREEDY)]
    assert "".join(pieces) == text[5:] and len(pieces) > 10
    assert not any("\ufffd" in piece for piece in pieces)


def test_learned_sentences_are_likely_and_others_are_not():
    llm = make_llm(trained_decoder())
    known, shuffled = llm.score([SENTENCES[0], "".join(sorted(SENTENCES[0]))])
    assert known.perplexity < 1.5 and shuffled.perplexity > 20


def test_full_sequences_score_as_the_paged_cache_does():
    llm, tokens = make_llm(trained_decoder()), [*SENTENCES[1].encode()]
    expected = log_likelihoods(trained_decoder(), jnp.array([tokens, tokens[::-1]]))
    for score, row in zip(llm.score([tokens, tokens[::-1]]), expected, strict=True):
        np.testing.assert_allclose(score.logprobs, row, atol=1e-3)


# Gradients.


def test_gradients_are_those_of_finite_differences():
    decoder = LlamaDecoder(small_config(32), rngs=nnx.Rngs(1))
    tokens = jax.random.randint(jax.random.key(0), (3, 12), 0, 32)
    graph, weights = nnx.split(decoder)

    def loss(weights):
        return jnp.mean(log_likelihoods(nnx.merge(graph, weights), tokens))

    gradient = jax.jit(jax.grad(loss))(weights)
    chex.assert_tree_all_finite(gradient)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(gradient))
    norm = optax.tree.norm(gradient)

    @jax.jit
    def loss_at(step):  # along the gradient
        return loss(jax.tree.map(lambda w, g: w + step * g / norm, weights, gradient))

    slope = (loss_at(1e-2) - loss_at(-1e-2)) / 2e-2
    assert float(slope) == pytest.approx(float(norm), rel=1e-2)


class ManyAttentions(StubDecoder):
    """A layer for every option that attention has, on keys of its own."""

    layer_groups = (
        LayerGroup(layers=(0, 1, 2, 3), num_kv_heads=2, head_dim=8),
        LayerGroup(layers=(4, 5), num_kv_heads=2, head_dim=8, window=3),
    )
    sinks = (0.5, -1.0, 0.0, 2.0)

    def __call__(self, tokens, positions, cache):
        sinks = jnp.array(self.sinks)
        options = ({}, {"soft_cap": 0.5}, {"sinks": sinks}, {"scale": 0.9}, {}, {"sinks": sinks})
        total = jnp.zeros((tokens.shape[0], 4, 8))
        for layer, choice in enumerate(options):
            keys = jax.random.split(jax.random.key(layer), 3)
            shapes = (self.vocab_size, 4, 8), (self.vocab_size, 2, 8), (self.vocab_size, 2, 8)
            q, k, v = (jax.random.normal(*each)[tokens] for each in zip(keys, shapes, strict=True))
            out, cache = cache.attend(layer, q, k, v, **choice)
            total += (layer + 1) * out
        return total.reshape(tokens.shape[0], -1), cache

    def logits(self, hidden):
        return hidden


def test_whole_sequences_see_what_the_paged_cache_shows():
    decoder = ManyAttentions(np.zeros(32))
    tokens = jax.random.randint(jax.random.key(4), (2, 13), 0, 32)
    expected = log_likelihoods(decoder, tokens)
    scores = make_llm(decoder).score(tokens.tolist())
    np.testing.assert_allclose([score.logprobs for score in scores], expected, atol=1e-4)


def test_whole_sequences_are_apart_from_each_other():
    decoder = LlamaDecoder(small_config(32), rngs=nnx.Rngs(1))
    tokens = jax.random.randint(jax.random.key(0), (4, 9), 0, 32)
    together = log_likelihoods(decoder, tokens)
    alone = [log_likelihoods(decoder, row[None])[0] for row in tokens]
    np.testing.assert_allclose(together, jnp.stack(alone), atol=1e-5)


# Policy gradients: a reward rises.

NUM_SAMPLES, PROMPT_LEN, NUM_NEW = 32, 4, 12
WANTED = 5  # the reward is the share of this token


def rollout(decoder, key):
    """Sampled sequences `i32[B, L]`, prompt and all, from the paged cache."""
    prompts = jnp.tile(jnp.arange(PROMPT_LEN, dtype=jnp.int32), (NUM_SAMPLES, 1))
    prompt_lens = jnp.full(NUM_SAMPLES, PROMPT_LEN, jnp.int32)
    requests = paxkv.requests_from_prompts(
        prompts, prompt_lens, max_tokens=NUM_NEW, sampling=paxkv.same_sampling(NUM_SAMPLES, key)
    )
    slots = paxkv.init_slots(requests, max_burst=NUM_NEW, max_logprobs=1)
    cache = paxkv.init_cache(
        decoder.layer_groups, num_slots=NUM_SAMPLES, max_length=PROMPT_LEN + NUM_NEW,
        num_pages=NUM_SAMPLES * 4 + 1, page_size=4, dtype=jnp.float32,
    )  # fmt: skip
    cache, fits, _ = paxkv.prefill_step(
        decoder, cache, slots, prompt_lens - 1, num_rows=NUM_SAMPLES * PROMPT_LEN
    )
    _, slots, burst = paxkv.decode_loop(decoder, cache, slots, NUM_NEW)
    return slots.requests.tokens, fits & burst.fits & jnp.all(burst.news.counts == NUM_NEW)


def reward_of(tokens):
    return jnp.mean(tokens[:, PROMPT_LEN:] == WANTED, axis=1)


def policy_loss(weights, graph, tokens):
    """Of REINFORCE: what did better than the mean becomes likelier."""
    reward = reward_of(tokens)
    logprobs = log_likelihoods(nnx.merge(graph, weights), tokens)[:, PROMPT_LEN - 1 :]
    return -jnp.mean((reward - jnp.mean(reward)) * jnp.sum(logprobs, axis=1))


def test_a_reward_rises_with_sampling_inside_jit():
    decoder = LlamaDecoder(small_config(16), rngs=nnx.Rngs(0))
    optimizer = optax.adam(3e-3)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def improve(weights, state, key):
        tokens, ok = rollout(nnx.merge(graph, weights), key)
        gradient = jax.grad(policy_loss)(weights, graph, tokens)
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, jnp.mean(reward_of(tokens)), ok

    graph, weights = nnx.split(decoder)
    state, rewards = optimizer.init(weights), []
    for key in jax.random.split(jax.random.key(0), 12):
        weights, state, reward, ok = improve(weights, state, key)
        assert ok
        rewards.append(float(reward))
    assert rewards[0] < 0.2 and rewards[-1] > 0.8, rewards


def test_a_reward_rises_with_weights_swapped_into_an_llm():
    decoder = LlamaDecoder(small_config(16), rngs=nnx.Rngs(0))
    llm, optimizer = make_llm(decoder, max_slots=NUM_SAMPLES, max_length=16), optax.adam(3e-3)
    graph, weights = nnx.split(decoder)
    state, rewards, num_programs = optimizer.init(weights), [], set()

    @jax.jit
    def improve(weights, state, tokens):
        gradient = jax.grad(policy_loss)(weights, graph, tokens)
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state

    prompts = [list(range(PROMPT_LEN))] * NUM_SAMPLES
    for seed in range(12):
        params = [
            SamplingParams(max_tokens=NUM_NEW, seed=seed * NUM_SAMPLES + i)
            for i in range(NUM_SAMPLES)
        ]
        completions = llm.generate(prompts, params)
        tokens = jnp.array([c.prompt_token_ids + c.token_ids for c in completions])
        rewards.append(float(jnp.mean(reward_of(tokens))))
        weights, state = improve(weights, state, tokens)
        llm.set_weights(weights)
        steps: list[Any] = [prefill_step_jit, decode_loop_jit]
        num_programs.add(tuple(step._cache_size() for step in steps))
    assert rewards[0] < 0.2 and rewards[-1] > 0.8, rewards
    assert len(num_programs) == 1
    assert pages_held(llm.engine) == 0


def test_what_an_llm_says_of_its_samples_is_what_training_computes():
    llm = make_llm(trained_decoder())
    params = SamplingParams(max_tokens=20, seed=1, logprobs=0, ignore_eos=True)
    [completion] = llm.generate([list(b"The ")], params)
    assert completion.logprobs is not None
    tokens = jnp.array([completion.prompt_token_ids + completion.token_ids])
    expected = log_likelihoods(trained_decoder(), tokens)[0, 3:]
    np.testing.assert_allclose([t.logprob for t in completion.logprobs], expected, atol=1e-3)
