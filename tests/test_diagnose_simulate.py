"""Simulated caches: conservation, known small cases, and published and independent figures."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_diagnose import OPT_CONTEXT, OPT_SLOTS, make_trace, trace_path, with_blocks
from paxkv.diagnose.contiguous import AllocatorName, ContiguousPolicy, Want
from paxkv.diagnose.distributions import DISTRIBUTIONS, sample_trace
from paxkv.diagnose.footprint import Footprint
from paxkv.diagnose.paged import PagedPolicy
from paxkv.diagnose.prefixes import reuse_over_time
from paxkv.diagnose.readers import read_trace
from paxkv.diagnose.simulate import Simulation, simulate
from paxkv.diagnose.tails import (
    PAGE_SIZES,
    recommended_page_size,
    sampling_percent,
    tail_percent,
)
from paxkv.diagnose.trace import Trace, fit_to_context

CONTEXT = 32  # of the small traces
MIXED = Footprint(((2, None), (3, 7)))  # of five layers, three keep six tokens
POOL = 50  # no multiple of a page, nor a power of two


def contiguous(want: Want, allocator: AllocatorName = "buddy", pool=POOL, context=CONTEXT, **more):
    return lambda: ContiguousPolicy(
        pool, max_length=context, want=want, allocator=allocator, **more
    )


def paged(page_size=4, pool=POOL, **more):
    return lambda: PagedPolicy(pool, page_size=page_size, **more)


POLICIES = {
    "max": contiguous("max"),
    "pow2": contiguous("pow2"),
    "oracle": contiguous("oracle"),
    "first fit": contiguous("oracle", "first-fit"),
    "best fit": contiguous("pow2", "best-fit"),
    "pages of 1": paged(1),
    "pages of 4": paged(4),
    "pages of 16": paged(16),
    "two at most": paged(4, max_running=2),
    "two samples": paged(4, num_samples=2, pool=80),
    "shared prefixes": paged(4, shares_prefixes=True, block_tokens=8),
    "windows, max": contiguous("max", footprint=MIXED, pool=150),
    "windows, pages": paged(4, footprint=MIXED, pool=150),
    "windows, shared": paged(4, footprint=MIXED, pool=150, shares_prefixes=True, block_tokens=8),
    "windows only": paged(4, footprint=Footprint(((1, 7),)), pool=30),
}


@st.composite
def traces(draw) -> Trace:
    """Small traces, with and without arrival times, of prompts that may begin alike."""
    lengths = draw(
        st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=25)
    )
    seconds = None
    if draw(st.booleans()):
        gaps = draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
        seconds = np.cumsum(gaps).astype(float).tolist()
    families = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    blocks = [
        [10 * family + index for index in range(-(-prompt // 8))]
        for family, (prompt, _) in zip(families, lengths, strict=True)
    ]
    return with_blocks(make_trace(*lengths, seconds=seconds), blocks, block_tokens=8)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(trace=traces())
def test_kinds_add_up_to_the_pool_and_every_request_is_served(name, trace):
    policy = POLICIES[name]()
    if trace.arrival_seconds is None:  # so that it runs to its end
        trace = dataclasses.replace(trace, arrival_seconds=np.zeros(len(trace)))
    result = simulate(policy, trace, step_seconds=1.0)
    kinds = np.array(result.account)
    assert np.all(kinds >= 0)
    assert np.all(kinds.sum(axis=0) == policy.num_slots)
    assert np.all((result.account.external < policy.num_slots) | result.blocked)
    assert result.num_completed == len(trace) and result.num_refused == 0
    assert result.running.sum() == trace.output_tokens.sum()  # one token per step and request
    assert np.all(result.duplicate <= result.account.used)
    assert list(policy.running()) == [] and result.waiting[-1] == 0


# One request at a time, by hand.


@pytest.mark.parametrize(
    ("want", "used", "reserved", "internal"),
    [
        ("max", [3, 4, 5], [3, 2, 1], [26, 26, 26]),
        ("pow2", [3, 4, 5], [3, 2, 1], [1, 1, 1]),
        ("oracle", [3, 4, 5], [3, 2, 1], [0, 0, 0]),
    ],
)
def test_a_chunk_is_used_reserved_and_internal(want, used, reserved, internal):
    account = simulate(contiguous(want)(), make_trace((3, 3), seconds=[0.0])).account
    assert account.used.tolist() == used
    assert account.reserved.tolist() == reserved
    assert account.internal.tolist() == internal
    rounding = {"max": 0, "pow2": 1, "oracle": 2}[want]
    assert account.external.tolist() == [rounding] * 3


def test_pages_are_taken_when_they_are_needed():
    account = simulate(paged(4)(), make_trace((3, 4), seconds=[0.0])).account
    assert account.used.tolist() == [3, 4, 5, 6]
    assert account.reserved.tolist() == [1, 0, 2, 1]  # 7 tokens in all fill 8 slots but for one
    assert account.internal.tolist() == [0, 0, 1, 1]
    assert account.external.tolist() == [2] * 4  # 50 is no multiple of 4
    assert account.free.tolist() == [44, 44, 40, 40]


def test_layers_with_a_window_stop_growing():
    trace = make_trace((5, 5), seconds=[0.0])  # stores 5, 6, 7, 8, 9 tokens
    rows = simulate(contiguous("oracle", footprint=MIXED, pool=64)(), trace).account
    assert rows.used.tolist() == [25, 30, 32, 34, 36]
    assert (rows.used + rows.reserved).tolist() == [38] * 5  # 10 tokens would be 2 * 10 + 3 * 6
    pages = simulate(paged(4, footprint=MIXED, pool=60)(), trace).account
    assert pages.used.tolist() == rows.used.tolist()
    # Five pages for tokens 0 to 3 and five for 4 to 7; at 9 tokens 2 + 3 for token 8. From the
    # tenth token on, which is never stored, the first page would have left the window.
    assert (60 - pages.free - pages.external).tolist() == [40, 40, 40, 40, 60]
    assert pages.internal.tolist() == [0, 0, 3 * 1, 3 * 2, 3 * 3 + 5 * 2]


def test_pages_before_a_window_are_given_back():
    trace = make_trace((8, 4), seconds=[0.0])  # stores 8, 9, 10, 11
    pages = simulate(paged(4, footprint=Footprint(((1, 7),)))(), trace).account
    assert pages.used.tolist() == [6] * 4
    assert (POOL - pages.free - pages.external).tolist() == [8, 12, 8, 8]


@given(
    windows=st.lists(st.none() | st.integers(2, 9), min_size=1, max_size=8),
    tokens=st.integers(1, 40), page_size=st.integers(1, 9),
)  # fmt: skip
def test_a_footprint_counts_what_windows_hold(windows, tokens, page_size):
    footprint, lengths = Footprint.of_layers(windows), np.arange(1, tokens + 1)
    unit = len(windows) // footprint.shares
    seen = [tokens + 1 if window is None else window for window in windows]  # by the next query
    kept = [range(max(tokens - (window - 1), 0), tokens) for window in seen]
    assert unit * footprint.used(lengths)[-1] == sum(map(len, kept))
    held = sum(len({token // page_size for token in tokens}) for tokens in kept)
    pages = footprint.pages(lengths, page_size)
    assert unit * pages[-1] == held
    assert pages.max() <= footprint.most_pages(tokens, page_size)


def test_a_queue_makes_what_is_left_external():
    result = simulate(contiguous("max", pool=64)(), make_trace(*[(4, 4)] * 6))
    assert result.running.tolist() == [2] * 8  # the queue ends with the last two
    assert set(result.account.external.tolist()) == {0}
    result = simulate(contiguous("max", pool=80)(), make_trace(*[(4, 4)] * 6))
    assert set(result.account.external.tolist()) == {16}


def test_the_newest_request_is_preempted_and_begins_again():
    # Two requests that grow to 3 pages of 4 each, in 5 pages.
    trace = make_trace((4, 8), (4, 8), seconds=[0.0, 0.0])
    result = simulate(paged(4, pool=20)(), trace, step_seconds=1.0)
    # Admitted together with a page to spare each; at 9 tokens each they want 6 pages.
    assert result.running.tolist() == [2] * 5 + [1] * 6
    assert result.num_preemptions == 1
    assert result.recomputed_tokens == 8
    assert result.recomputed_share == 0.5 and result.num_completed == 2


def test_a_request_that_never_fits_is_refused_and_the_others_are_served():
    trace = make_trace((4, 2), (40, 20), (4, 2), seconds=[0.0, 0.0, 0.0])
    result = simulate(paged(4)(), trace)
    assert result.num_refused == 1 and result.num_completed == 2
    with pytest.raises(
        ValueError, match="a chunk of 64 slots, and the largest in a pool of 50 is 32"
    ):
        simulate(contiguous("max", context=64)(), trace)
    with pytest.raises(ValueError, match="needs 15 pages of 4, and a pool of 50 tokens has 12"):
        simulate(paged(4)(), make_trace((40, 20)))


def test_requests_that_arrive_later_wait_for_their_time():
    result = simulate(paged(4)(), make_trace((4, 2), (4, 2), seconds=[0.0, 5.0]), step_seconds=1.0)
    assert result.running.tolist() == [1, 1, 0, 0, 0, 1, 1]
    assert result.account.free.tolist()[2:5] == [48] * 3


def test_samples_share_the_full_pages_of_their_prompt():
    # A prompt of 10 in pages of 4: two full pages shared, the third and more by each sample.
    result = simulate(paged(4, num_samples=3)(), make_trace((10, 3), seconds=[0.0]))
    assert result.account.used.tolist() == [8 + 3 * 2, 8 + 3 * 3, 8 + 3 * 4]
    assert (result.account.used + result.account.reserved + result.account.internal).tolist() == (
        [4 * (2 + 3)] * 3
    )


def test_shared_blocks_stand_in_memory_once():
    trace = make_trace((20, 2), (20, 2), seconds=[0.0, 0.0])
    trace = with_blocks(trace, [[1, 2, 3], [1, 2, 4]], block_tokens=8)
    apart = simulate(paged(4, pool=100, block_tokens=8)(), trace)
    shared = simulate(paged(4, pool=100, block_tokens=8, shares_prefixes=True)(), trace)
    assert apart.duplicate.tolist() == [16, 16] and shared.duplicate.tolist() == [0, 0]
    assert (apart.account.used - shared.account.used).tolist() == [16, 16]
    with pytest.raises(ValueError, match="page_size=3 must divide the 8 tokens"):
        paged(3, shares_prefixes=True, block_tokens=8)()


def test_no_more_requests_run_than_may():
    result = simulate(paged(4, max_running=2)(), make_trace(*[(2, 3)] * 5, seconds=[0.0] * 5))
    assert result.running.max() == 2 and not result.blocked.any()
    assert result.account.external.max() == 2  # the rounding: nobody waits for memory


# Lengths alone.


def test_tails_are_summed_over_requests_and_steps():
    # Stored 3, 4, 5 and 2; held 4, 4, 8 and 4.
    assert tail_percent(make_trace((3, 3), (2, 1)), 4) == pytest.approx(100 * 6 / 20)
    assert tail_percent(make_trace((3, 3), (2, 1)), 1) == 0


@given(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 70)), min_size=1, max_size=5))
def test_tails_in_closed_form_are_the_sums(lengths):
    for page_size in (1, 4, 16):
        stored = np.array([p + t for p, o in lengths for t in range(o)])
        held = -(-stored // page_size) * page_size
        if held.sum():
            expected = 100 * (held - stored).sum() / held.sum()
            assert tail_percent(make_trace(*lengths), page_size) == pytest.approx(expected)


def test_the_largest_page_with_little_waste_is_recommended():
    assert recommended_page_size(make_trace((7, 2)), 800 * 1024) == 8
    assert recommended_page_size(sample_trace("sharegpt"), 800 * 1024) == 32
    assert recommended_page_size(make_trace((4000, 100)), 800 * 1024) == 256
    # With a byte a token, bookkeeping outweighs tails.
    assert recommended_page_size(sample_trace("sharegpt"), 1) == 128


def test_reuse_needs_the_whole_prefix():
    trace = with_blocks(
        make_trace((24, 1), (24, 1), (24, 1)), [[1, 2, 3], [1, 2, 4], [1, 2, 4]], block_tokens=8
    )
    assert reuse_over_time(trace).num_reused == 2 + 3
    # Two blocks are kept: the front of the prompt outlives what builds on it.
    assert reuse_over_time(trace, capacity_tokens=16).num_reused == 2 + 2


# The figures of the PagedAttention paper, its figure 2, on the project's own lengths.

PUBLISHED = {
    "max": (20.4, 13.3, 57.3, 8.9),
    "pow2": (26.8, 17.9, 13.6, 41.6),
    "oracle": (38.2, 25.2, 0.0, 36.6),
}
INDEPENDENT = {
    "max": ((18.1, 11.0, 62.1, 8.9), 7.0),
    "pow2": ((26.2, 16.1, 12.7, 45.0), 10.2),
    "oracle": ((37.9, 23.7, 0.0, 38.4), 15.0),
}
KINDS = ("used", "reserved", "internal", "external")


OPT = {
    "max": contiguous("max", pool=OPT_SLOTS, context=OPT_CONTEXT),
    "pow2": contiguous("pow2", pool=OPT_SLOTS, context=OPT_CONTEXT),
    "oracle": contiguous("oracle", pool=OPT_SLOTS, context=OPT_CONTEXT),
    "pages": paged(16, pool=OPT_SLOTS),
}


def saturated(name: str, trace: Trace) -> Simulation:
    return simulate(OPT[name](), trace, max_steps=20_000, warmup_steps=3000)


@pytest.fixture(scope="module")
def built_in() -> Trace:
    return sample_trace("sharegpt")


@pytest.mark.parametrize("name", PUBLISHED)
def test_built_in_lengths_give_the_published_figure(name, built_in):
    shares = saturated(name, built_in).shares
    for kind, published in zip(KINDS, PUBLISHED[name], strict=True):
        assert shares[kind] == pytest.approx(published, abs=6), kind


def test_built_in_lengths_fill_pages_as_published(built_in):
    pages = saturated("pages", built_in)
    assert pages.shares["used"] == pytest.approx(96.3, abs=6)
    assert pages.mean_running > 2.1 * saturated("oracle", built_in).mean_running


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [("sharegpt", 161.31, 337.99), ("azure-conv", 1154.7, 211.1), ("azure-code", 2047.9, 27.9)],
)
def test_built_in_lengths_have_the_published_means(name, prompt, output):
    trace = sample_trace(name, num_requests=50_000)
    assert trace.prompt_tokens.mean() == pytest.approx(prompt, rel=0.03)
    assert trace.output_tokens.mean() == pytest.approx(output, rel=0.03)
    assert trace.total_tokens.max() <= DISTRIBUTIONS[name].max_length


def test_a_seed_gives_one_trace():
    first, again, other = (sample_trace("sharegpt", num_requests=50, seed=s) for s in (1, 1, 2))
    assert np.array_equal(first.total_tokens, again.total_tokens)
    assert not np.array_equal(first.total_tokens, other.total_tokens)


def test_arrivals_may_be_drawn():
    trace = sample_trace("sharegpt", num_requests=5000, requests_per_second=4.0)
    assert trace.arrival_seconds is not None and trace.arrival_seconds[0] == 0
    assert trace.arrival_seconds[-1] == pytest.approx(1250, rel=0.05)
    with pytest.raises(ValueError, match="0 requests per second: the rate must be above 0"):
        sample_trace("sharegpt", requests_per_second=0)
    with pytest.raises(ValueError, match="'shakespeare' is none of sharegpt, azure-conv"):
        sample_trace("shakespeare")


# Real traces, and what an independent computation says of them.


@pytest.fixture(scope="module")
def sharegpt() -> Trace:
    trace = read_trace(trace_path("sharegpt_lengths/sharegpt.csv"))
    return fit_to_context(trace, OPT_CONTEXT, skips_longer=True)


@pytest.mark.parametrize("name", [*INDEPENDENT, "pages"])
def test_real_lengths_give_the_independent_figures(name, sharegpt):
    assert len(sharegpt) == 55_857
    runs = [
        saturated(name, sharegpt.take(np.random.default_rng(seed).permutation(len(sharegpt))))
        for seed in range(3)
    ]

    def mean(kind: str) -> float:
        return float(np.mean([run.shares[kind] for run in runs]))

    batch = float(np.mean([run.mean_running for run in runs]))
    if name == "pages":
        assert mean("used") == pytest.approx(96.1, abs=2)
        assert mean("reserved") + mean("internal") == pytest.approx(1.8, abs=0.2)
        assert batch == pytest.approx(37.3, abs=1.5)
        return
    expected, expected_batch = INDEPENDENT[name]
    for kind, independent in zip(KINDS, expected, strict=True):
        assert mean(kind) == pytest.approx(independent, abs=0.7), kind
    assert batch == pytest.approx(expected_batch, abs=0.3)


TAILS = {
    "sharegpt_lengths/sharegpt.csv": (0.86, 1.82, 3.68, 7.22, 13.67, 24.73),
    "azure_llm_2023/AzureLLMInferenceTrace_conv.csv": (0.28, 0.61, 1.25, 2.51, 4.95, 9.22),
    "azure_llm_2023/AzureLLMInferenceTrace_code.csv": (0.16, 0.35, 0.72, 1.47, 2.94, 5.88),
}


@pytest.mark.parametrize("name", TAILS, ids=lambda name: name.split("/")[1])
def test_real_tails_are_the_independent_ones(name):
    trace = read_trace(trace_path(name))
    if "sharegpt" in name:
        trace = trace.take(trace.total_tokens <= OPT_CONTEXT)
    for page_size, expected in zip(PAGE_SIZES, TAILS[name], strict=True):
        assert tail_percent(trace, page_size) == pytest.approx(expected, abs=0.02)


def test_real_samples_share_as_much_as_computed_independently(sharegpt):
    for num_samples, percent in ((2, 18.1), (4, 27.2), (6, 30.2)):
        first = sharegpt.take(np.arange(20_000))
        assert sampling_percent(first, num_samples, 16) == pytest.approx(percent, abs=0.1)


def test_real_prefixes_are_reused_as_often_as_counted_independently():
    trace = read_trace(trace_path("mooncake_fast25/conversation_trace.jsonl"))
    reuse = reuse_over_time(trace)
    assert len(trace) == 12_031
    assert (reuse.num_reused, reuse.num_blocks) == (105_710, 288_500)
