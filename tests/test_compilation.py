"""What is compiled: how often, and that no program copies the pool or asks the host."""

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator

import jax
import numpy as np
import pytest

from helpers import (
    VOCAB,
    StubDecoder,
    add,
    assert_greedy,
    make_engine,
    random_prompts,
    serve,
    settled,
    tiny_decoder,
)
from helpers_llm import make_llm
from paxkv.beam_steps import beam_loop_jit, start_beams
from paxkv.engine import Engine
from paxkv.models.llama import LlamaDecoder
from paxkv.request import SamplingParams
from paxkv.slots import idle_requests
from paxkv.steps import (
    admit_step_jit,
    decode_loop_jit,
    prefill_step_jit,
    settle_step_jit,
    swap_in_jit,
)
from paxkv.swap import swap_out
from paxkv.transfer import NUM_STOP_IDS

NUM_SLOTS, PAGE_SIZE, NUM_PAGES = 4, 64, 4099  # no other array has this many rows
POOL_ARRAY = f"f32[{NUM_PAGES},2,{PAGE_SIZE},8]"  # 16 MB; keys and values of 2 layers are 64 MB
PROGRAMS = ("admit", "prefill", "prefill with logprobs", "decode", "settle", "beams", "swap in")


@contextlib.contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """The names of the programs that XLA compiles meanwhile."""
    names: list[str] = []

    def note(event: str, duration_secs: float, **details: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(details.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def large_engine(decoder: LlamaDecoder) -> Engine:
    return make_engine(decoder, page_size=PAGE_SIZE, num_pages=NUM_PAGES, num_slots=NUM_SLOTS)


@pytest.fixture(scope="module")
def programs() -> dict[str, jax.stages.Compiled]:
    """The programs that change the pool, compiled as the engine calls them."""
    decoder = tiny_decoder()
    engine = large_engine(decoder)
    cache, slots = engine._runner.cache, engine._runner.slots
    q_lens, done = np.zeros(NUM_SLOTS, np.int32), np.zeros(NUM_SLOTS, bool)
    pages = np.zeros((1, *cache[0][1].block_tables.shape), np.int32)
    same_as = np.arange(NUM_PAGES, dtype=np.int32)[None]
    idle = idle_requests(NUM_SLOTS, engine.max_length, NUM_STOP_IDS)
    _, beams = jax.eval_shape(
        functools.partial(start_beams, width=2, max_length=8, eos_ids=(1,)),
        cache, q_lens[:2], q_lens[:2],
    )  # fmt: skip
    contents = jax.eval_shape(functools.partial(swap_out, num_pages=1), cache, np.int32(0))
    lowered = (
        admit_step_jit.lower(cache, slots, done, idle, pages, q_lens),
        prefill_step_jit.lower(decoder, cache, slots, q_lens, num_rows=16),
        prefill_step_jit.lower(decoder, cache, slots, q_lens, num_rows=16, num_prompt_logprobs=2),
        decode_loop_jit.lower(
            decoder, cache, slots, np.int32(1), until_finish=np.bool_(False), keeps_pages=True
        ),
        settle_step_jit.lower(cache, slots, done, np.zeros_like(same_as), same_as),
        beam_loop_jit.lower(decoder, cache, beams, np.int32(1)),
        swap_in_jit.lower(cache, np.int32(0), contents, np.int32(0), np.int32(0)),
    )
    return {name: program.compile() for name, program in zip(PROGRAMS, lowered, strict=True)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_updates_the_pool_where_it_is(programs, name):
    text, memory = programs[name].as_text(), programs[name].memory_analysis()
    assert POOL_ARRAY in text
    makers = set(re.findall(rf"= {re.escape(POOL_ARRAY)}\S* ([a-z-]+)\(", text))
    assert "parameter" in makers
    assert not makers & {"copy", "copy-start", "concatenate", "broadcast", "select", "add"}
    pool_bytes = 4 * 4 * np.prod([NUM_PAGES, 2, PAGE_SIZE, 8])
    assert memory.alias_size_in_bytes >= pool_bytes  # results that take the arguments' place
    assert memory.temp_size_in_bytes < 0.01 * pool_bytes
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 0.01 * pool_bytes


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_asks_the_host_nothing(programs, name):
    text = programs[name].as_text()
    operations = set(re.findall(r" ([a-z-]+)\(", text))
    assert not operations & {"infeed", "outfeed", "send", "recv", "send-done", "recv-done"}
    assert "callback" not in text


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_rotations_are_computed_once_for_all_layers_and_heads(programs, name):
    text = programs[name].as_text()
    assert text.count(" cosine(") == text.count(" sine(") == 1


def pools_of(cache) -> list[jax.Array]:
    return [array for pool, _ in cache for array in jax.tree.leaves(pool)]


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def test_fifty_steps_keep_one_pool_alive_and_move_nothing_to_the_host(programs):
    decoder, before = tiny_decoder(), live_bytes()
    engine = large_engine(decoder)
    for prompt in random_prompts([21, 21, 21, 21]):
        add(engine, prompt, settled(max_tokens=43))
    engine._batching._admit(1)
    cache, slots = engine._runner.cache, engine._runner.slots
    del engine
    pool_bytes = sum(array.nbytes for array in pools_of(cache))
    assert pool_bytes > 64_000_000
    q_lens, one, no = jax.device_put((np.full(4, 2, np.int32), np.int32(1), np.bool_(False)))
    same_as = np.arange(NUM_PAGES, dtype=np.int32)[None]
    end = jax.device_put((np.ones(4, bool), np.zeros_like(same_as), same_as))
    most = 0
    for step in range(50):
        old_pools, old_slots = pools_of(cache), jax.tree.leaves(slots)
        with jax.transfer_guard("disallow"):
            if step < 10:  # a chunk of two tokens of each
                cache, fits, _ = programs["prefill"](decoder, cache, slots, q_lens)
            elif step < 49:
                cache, slots, burst = programs["decode"](
                    decoder, cache, slots, one, until_finish=no
                )
                fits = burst.fits
            else:
                cache, slots, fits = programs["settle"](cache, slots, *end)
        assert fits
        assert all(array.is_deleted() for array in old_pools)
        assert step < 10 or all(array.is_deleted() for array in old_slots)
        most = max(most, live_bytes() - before)
    assert pool_bytes <= most < 1.2 * pool_bytes
    assert slots.requests.num_tokens.tolist() == [21 + 39] * 4


def test_slots_that_are_admitted_take_the_place_of_the_old():
    engine = make_engine(tiny_decoder())
    add(engine, [1, 2], settled())
    old = jax.tree.leaves(engine._runner.slots)
    engine._batching._admit(1)
    assert all(array.is_deleted() for array in old)


NUM_BUCKETS = 7  # 16 to 1024 rows
COUNTER = StubDecoder(10.0 * np.roll(np.eye(VOCAB, dtype=np.float32), 1, axis=1))  # token + 1


@pytest.fixture(scope="module")
def warm() -> tuple[Engine, list[str]]:
    """An engine that has served 200 requests of 1 to 1,500 tokens, and what was compiled."""
    engine = make_engine(
        COUNTER, num_slots=5, max_length=1600, num_pages=1200, max_prefill_tokens=1024
    )
    rng = np.random.default_rng(0)
    with counted_compilations() as names:
        serve_counter(engine, rng.permutation(np.linspace(1, 1500, 200, dtype=int)))
        request = add(engine, [1], settled(max_tokens=64))
        engine.step()
        engine.abort(request.id)
    return engine, names


def serve_counter(engine: Engine, lengths: Iterable[int], are_alike: bool = False) -> None:
    requests = []
    for number, length in enumerate(map(int, lengths)):
        first = [1, 1] if are_alike or length < 3 else divmod(number, VOCAB)
        prompt = [*first, *[1] * length][:length]
        requests.append(add(engine, prompt, settled(max_tokens=6)))
    while engine.has_work:
        engine.step()
    assert all(request.output == [2, 3, 4, 5, 6, 7] for request in requests)


def test_two_hundred_requests_compile_twelve_programs_at_most(warm):
    _, names = warm
    others = ["jit(admit_step)", "jit(decode_loop)", "jit(settle_step)"]
    assert sorted(names) == sorted([*others, *["jit(prefill_step)"] * NUM_BUCKETS])
    assert len(names) <= 12


def test_nothing_is_compiled_once_the_engine_is_warm(warm):
    engine, _ = warm
    with counted_compilations() as names:
        for length in range(1, 318):
            serve_counter(engine, [length] * (1 + length % 5), are_alike=length % 2 > 0)
    assert names == []


def test_greedy_and_sampled_requests_share_a_program_and_so_do_new_weights():
    engine, other = make_engine(tiny_decoder()), tiny_decoder(seed=1)
    serve(engine, [[1, 2, 3]], settled())
    with counted_compilations() as names:
        choices = {"temperature": 0.7, "top_p": 0.9, "seed": 1, "logprobs": 5, "min_tokens": 2}
        serve(engine, [[4, 5], [6]], settled(**choices, stop_token_ids=[3], logit_bias={3: 1.0}))
        engine.set_decoder(other)
        [request] = serve(engine, [[1, 2, 3]], settled())
    assert names == []
    assert_greedy(other, request.prompt, request.output)


def test_beam_search_compiles_a_loop_for_each_width():
    llm = make_llm(COUNTER, max_slots=4)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0.0))
    with counted_compilations() as names:
        llm.beam_search([[1], [2, 3]], width=2, max_tokens=3)
    programs = ("beam_loop", "hypotheses", "release_all", "start_beams")
    assert sorted(names) == [f"jit({name})" for name in programs]
    with counted_compilations() as names:
        llm.beam_search([[1, 2, 3]] * 9, width=2, max_tokens=7, length_penalty=0.5, num_return=1)
    assert names == []
