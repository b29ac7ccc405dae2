"""The simulation against the engine itself: the same tokens and the same pages at every step."""

import jax
import numpy as np
import pytest

from helpers import StubDecoder, add, make_engine, random_prompts, settled
from helpers_diagnose import make_trace
from paxkv.diagnose.paged import PagedPolicy
from paxkv.diagnose.simulate import simulate
from paxkv.waste import account_pool

LENGTHS = [(9, 12), (5, 20), (1, 3), (17, 9), (2, 30), (12, 1), (4, 25), (30, 6), (7, 14)]


@pytest.mark.parametrize("num_pages", [65, 15], ids=["roomy", "preempting"])
def test_an_engine_holds_what_its_simulation_says(num_pages):
    engine = make_engine(
        StubDecoder(np.zeros(1000, np.float32)), num_pages=num_pages, prefill_chunk=1024
    )
    prompts = random_prompts([prompt for prompt, _ in LENGTHS])
    for prompt, (_, output) in zip(prompts, LENGTHS, strict=True):
        add(engine, prompt, settled(max_tokens=output))
    used, tail = [], []
    while engine.has_work:
        changed = engine.step(max_steps=1)
        account = jax.device_get(account_pool(engine._runner.cache[0][1]))
        # What a request held that ended in this step is free by now.
        ended = [len(r.prompt) + len(r.output) - 1 for r in changed if r.finish_reason]
        used.append(int(account.used) + sum(ended))
        tail.append(int(account.tail) + sum(-tokens % engine.page_size for tokens in ended))
    policy = PagedPolicy(engine.capacity, page_size=engine.page_size, max_running=4)
    simulated = simulate(policy, make_trace(*LENGTHS, seconds=[0.0] * len(LENGTHS)))
    assert simulated.account.used.tolist() == used
    assert (simulated.account.reserved + simulated.account.internal).tolist() == tail
    assert simulated.num_preemptions == engine.stats.num_preemptions
    assert (engine.stats.num_preemptions > 0) == (num_pages == 15)
