"""SmolLM2-135M-Instruct in float32 says what transformers says."""

import json
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np

from helpers import NEAR_TIE, pages_held
from helpers_reference import run_reference
from helpers_smollm2 import smollm2, smollm2_path
from paxkv import LLM, Completion, Decoder, SamplingParams, append_all, init_cache, reserve_all
from paxkv.cache_view import CacheView
from reference.make_smollm2_cases import DATA, LOGIT_STEPS, NUM_TOKENS, PROMPTS

CASES = json.loads((DATA / "smollm2_greedy.json").read_text())
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
LOGIT_TOLERANCE = 2e-3


def assert_says(completion: Completion, case: dict) -> None:
    """The tokens are the case's, up to a place where the two best logits are nearly equal."""
    assert completion.prompt_token_ids == case["prompt_ids"]
    assert completion.finish_reason == "length" and len(completion.token_ids) == NUM_TOKENS
    pairs = zip(completion.token_ids, case["token_ids"], case["gaps"], strict=True)
    for step, (ours, theirs, gap) in enumerate(pairs):
        if ours != theirs:
            assert gap <= NEAR_TIE, f"{ours} for {theirs} at {step}, logits {gap} apart"
            print(f"near tie at {step} of {case['token_ids'][:step]}: {gap}")
            return


def test_the_prompts_have_5_to_600_tokens():
    lengths = [len(case["prompt_ids"]) for case in CASES]
    assert len(PROMPTS) == len(lengths) == 20 and min(lengths) == 5 and 550 < max(lengths) < 600


def test_batched_together():
    llm = smollm2()
    for completion, case in zip(llm.generate(PROMPTS, GREEDY), CASES, strict=True):
        assert_says(completion, case)
    assert pages_held(llm.engine) == 0


def test_one_by_one():
    shared = smollm2()
    llm = LLM(
        shared.engine.decoder, tokenizer=shared.tokenizer, dtype="float32", max_slots=1,
        page_size=64, max_length=704, max_prefill_tokens=64, compilation_cache=False,
    )  # fmt: skip
    for prompt, case in zip(PROMPTS, CASES, strict=True):
        [completion] = llm.generate(prompt, GREEDY)
        assert_says(completion, case)


def test_stored_tokens_are_what_the_reference_says_now(tmp_path):
    packages = sysconfig.get_path("purelib")
    run_reference("export_smollm2.py", smollm2_path(), tmp_path, "--packages", packages)
    run_reference("make_smollm2_cases.py", tmp_path, "--data", tmp_path)
    now = json.loads((tmp_path / "smollm2_greedy.json").read_text())
    for completion, case in zip(smollm2().generate(PROMPTS, GREEDY), now, strict=True):
        assert_says(completion, case)
    for case, stored in zip(now, CASES, strict=True):
        assert case["token_ids"] == stored["token_ids"]
        np.testing.assert_allclose(case["gaps"], stored["gaps"], atol=1e-3)


def test_logits():
    decoder = smollm2().engine.decoder
    for case in CASES:
        tokens = case["prompt_ids"] + case["token_ids"]
        places = [len(case["prompt_ids"]) - 1 + step for step in LOGIT_STEPS]
        logits = paged_logits(decoder, tokens[:-1], places)
        for row, step in zip(logits, LOGIT_STEPS, strict=True):
            largest = case["largest"][str(step)]
            np.testing.assert_allclose(
                row[largest["token_ids"]], largest["logits"], atol=LOGIT_TOLERANCE
            )


def paged_logits(decoder: Decoder, tokens: list[int], places: list[int]) -> np.ndarray:
    """Logits `f32[R, V]` after `R` places of a sequence that is stored in chunks of 128 tokens."""
    cache = init_cache(
        decoder.layer_groups,
        num_slots=1, max_length=704, num_pages=45, page_size=16, dtype="float32",
    )  # fmt: skip
    hidden = []
    for start in range(0, len(tokens), 128):
        chunk = tokens[start : start + 128]
        rows = np.zeros(128, np.int32)
        rows[: len(chunk)] = chunk
        cache, states = store(decoder, cache, rows, np.array([len(chunk)], np.int32))
        hidden.append(states)
    return np.asarray(head(decoder, jnp.concatenate(hidden)[jnp.array(places)]))


@jax.jit
def head(decoder, hidden):
    return decoder.logits(hidden)


@jax.jit
def store(decoder, cache, tokens, q_lens):
    cache, _ = reserve_all(cache, q_lens)
    pools, tables = zip(*cache, strict=True)
    view = CacheView(
        pools=pools,
        tables=tables,
        cu_q_lens=jnp.pad(q_lens, (1, 0)),
        kv_lens=tables[0].lengths + q_lens,
        groups=decoder.layer_groups,
        max_q_len=None,
    )
    positions = view.rows(tokens.shape[0]).positions
    hidden, view = decoder(tokens, positions, view)
    cache, _ = append_all(tuple(zip(view.pools, view.tables, strict=True)), q_lens)
    return cache, hidden
