"""Several answers to one prompt: how each is drawn, and which are kept."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from paxkv.request import Completion, SamplingParams


def sample_params(params: SamplingParams) -> list[SamplingParams]:
    """The settings of each of `best_of` samples, or `n`, as if it were asked for alone."""
    is_ranked = params.num_samples > params.n
    # What samples are ranked by is known only if it is asked for.
    logprobs = 0 if is_ranked and params.logprobs is None else params.logprobs
    return [
        dataclasses.replace(
            params,
            n=1,
            best_of=None,
            seed=sample_seed(params.seed, index),
            logprobs=logprobs,
            prompt_logprobs=None if index else params.prompt_logprobs,
        )
        for index in range(params.num_samples)
    ]


def sample_seed(seed: int | None, index: int) -> int | None:
    """The seed of a sample: the first has the request's own, and no other request has the rest's.

    Without a seed each is a request that draws for itself.
    """
    if seed is None or not index:
        return seed
    sequence = np.random.SeedSequence(seed % 2**64, spawn_key=(index,))
    return int(sequence.generate_state(1, np.uint64)[0])


def best_samples(completions: Sequence[Completion], params: SamplingParams) -> Completion:
    """The completion of a prompt: its first sample, or its best where `best_of` drew more than n.

    Args:
        completions: Of `sample_params(params)`, in their order.
        params: As they were asked for.
    """
    samples = [
        dataclasses.replace(sample, prompt_logprobs=completions[0].prompt_logprobs)
        for sample in completions
    ]
    if len(samples) > params.n:
        scored = [(_mean_logprob(sample), sample) for sample in samples]
        scored.sort(key=lambda pair: -pair[0])
        samples = [dataclasses.replace(sample, score=score) for score, sample in scored]
    if params.logprobs is None:
        samples = [dataclasses.replace(sample, logprobs=None) for sample in samples]
    return dataclasses.replace(samples[0], samples=samples[: params.n])


def _mean_logprob(sample: Completion) -> float:
    """Of its tokens; one that ended in an error comes last."""
    assert sample.logprobs is not None
    if sample.error or not sample.logprobs:
        return -math.inf
    return math.fsum(token.logprob for token in sample.logprobs) / len(sample.logprobs)
