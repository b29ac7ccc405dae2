"""Who runs, on counts alone: the device is played by adding up."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.prefix_index import Node
from paxkv.request import SamplingParams
from paxkv.request_state import Request
from paxkv.scheduler import Scheduler, bucket

PARAMS = SamplingParams(max_tokens=4)


def make_request(number: int, prompt_len: int, max_tokens: int = 4) -> Request:
    return Request(
        id=number,
        prompt=[0] * prompt_len,
        params=PARAMS,
        stop_token_ids=(),
        max_num_tokens=prompt_len + max_tokens,
    )


def make_scheduler(*prompt_lens: int, shares_prefixes: bool = True, **sizes: int) -> Scheduler:
    sizes = {"num_slots": 2, "num_pages": 10, "page_size": 4, "max_prefill_tokens": 64} | sizes
    scheduler = Scheduler(**sizes, shares_prefixes=shares_prefixes)
    scheduler.waiting.extend(make_request(i, length) for i, length in enumerate(prompt_lens))
    return scheduler


def ids(scheduler: Scheduler) -> list[int]:
    return [request.id for request in scheduler.running.values()]


def prefill(scheduler: Scheduler) -> list[tuple[dict[int, int], int]]:
    """Stores every prompt that is running; the plans this took."""
    plans = []
    while plan := scheduler.next_prefill():
        plans.append(plan)
        for slot, q_len in plan[0].items():
            scheduler.running[slot].num_stored += q_len
    return plans


@pytest.mark.parametrize(
    ("num_tokens", "rows"),
    [(1, 16), (16, 16), (17, 16), (24, 16), (25, 32), (32, 32), (48, 32), (49, 64), (300, 256)],
)
def test_bucket_of_so_many_tokens_has_rows(num_tokens, rows):
    assert bucket(num_tokens) == rows


@given(st.integers(1, 2**20))
def test_bucket_is_a_power_of_two_and_mostly_tokens(num_tokens):
    rows = bucket(num_tokens)
    assert rows.bit_count() == 1
    assert rows >= 16
    assert rows == 16 or min(rows, num_tokens) > 0.75 * rows


@given(st.integers(1, 5000), st.sampled_from([16, 64, 512]))
def test_prompt_takes_few_calls_of_few_shapes(prompt_len, max_prefill_tokens):
    scheduler = make_scheduler(prompt_len, num_pages=5000, max_prefill_tokens=max_prefill_tokens)
    scheduler.admit()
    plans = prefill(scheduler)
    full, rest = divmod(prompt_len - 1, max_prefill_tokens)
    assert sum(q_lens[0] for q_lens, _ in plans) == prompt_len - 1
    assert {rows for _, rows in plans} <= {16 << i for i in range(10)}
    assert all(rows <= max_prefill_tokens for _, rows in plans)
    assert len(plans) <= full + (rest > 0) * max(1, rest.bit_length() - 3)


def test_every_batch_of_every_length_is_stored_in_the_same_few_shapes():
    shapes = set()
    for prompt_len in range(1, 318):
        for batch in range(1, 6):
            scheduler = make_scheduler(
                *[prompt_len] * batch,
                num_slots=5,
                num_pages=1000,
                max_prefill_tokens=512,
                shares_prefixes=False,
            )
            scheduler.admit()
            plans = prefill(scheduler)
            shapes |= {num_rows for _, num_rows in plans}
            stored = sum(sum(q_lens.values()) for q_lens, _ in plans)
            assert stored == batch * (prompt_len - 1)
    assert shapes == {16, 32, 64, 128, 256, 512}


def test_chunks_of_several_prompts_are_packed_in_one_call():
    scheduler = make_scheduler(20, 11)
    scheduler.admit()
    assert prefill(scheduler) == [({0: 19, 1: 10}, 32)]


def test_prompts_longer_than_a_call_are_stored_in_chunks():
    scheduler = make_scheduler(100, 30, num_pages=100)
    scheduler.admit()
    assert prefill(scheduler) == [({0: 64}, 64), ({0: 35, 1: 29}, 64)]


def test_newest_token_is_left_to_decode():
    scheduler = make_scheduler(1)
    scheduler.admit()
    assert scheduler.next_prefill() is None


def test_requests_are_admitted_in_turn_and_wait_for_slots():
    scheduler = make_scheduler(1, 1, 1)
    assert {slot: r.id for slot, r in scheduler.admit().items()} == {0: 0, 1: 1}
    assert scheduler.admit() == {}
    del scheduler.running[0]
    assert {slot: r.id for slot, r in scheduler.admit().items()} == {0: 2}
    assert ids(scheduler) == [1, 2]


def test_request_waits_until_its_pages_and_one_more_each_are_free():
    scheduler = make_scheduler(16, 16, num_pages=9)  # 4 pages and 1 more, twice
    assert len(scheduler.admit()) == 1
    scheduler = make_scheduler(16, 16, num_pages=10)
    assert len(scheduler.admit()) == 2


def test_large_request_at_the_front_is_not_overtaken():
    scheduler = make_scheduler(4, 36, 1)
    assert [r.id for r in scheduler.admit().values()] == [0]
    assert [r.id for r in scheduler.waiting] == [1, 2]


def test_request_alone_is_admitted_though_it_fills_the_pool():
    scheduler = make_scheduler(40)
    assert len(scheduler.admit()) == 1


def test_newest_request_is_sent_back_to_the_front_and_keeps_its_output():
    scheduler = make_scheduler(4, 4, 4, num_slots=3)
    scheduler.admit()
    prefill(scheduler)
    for request in scheduler.running.values():
        request.output += [1, 2]
        request.num_stored += 2
    late = make_request(3, 4)
    scheduler.waiting.append(late)
    assert scheduler.preempt() == [2]
    assert ids(scheduler) == [0, 1]
    assert [r.id for r in scheduler.waiting] == [2, 3]
    again = scheduler.waiting[0]
    assert (again.output, again.num_stored, again.num_tokens) == ([1, 2], 0, 6)
    scheduler.admit()
    assert prefill(scheduler) == [({2: 5}, 16)]  # prompt and output, but the newest token


def test_pages_held_follow_from_the_tokens_stored():
    scheduler = make_scheduler(6, 4)
    scheduler.admit()
    assert scheduler.num_pages_used == 0
    prefill(scheduler)
    assert scheduler.num_pages_used == 2 + 1  # 5 and 3 tokens in pages of 4


def store(scheduler: Scheduler, tokens: list[int], first_page: int = 1) -> None:
    """Has the index know a sequence's full pages."""
    path: list[Node] = []
    for i in range(len(tokens) // 4):
        scheduler.index.extend(path, tuple(tokens[4 * i : 4 * i + 4]), (first_page + i,))
    scheduler.index.release(path)


def test_request_begins_after_the_tokens_that_are_known():
    scheduler = make_scheduler(20)
    store(scheduler, [0] * 12)
    [request] = scheduler.admit().values()
    assert (len(request.path), request.num_stored, request.copied) == (3, 12, None)
    assert scheduler.next_prefill() == ({0: 7}, 16)
    assert scheduler.num_pages_used == 3


def test_page_that_only_begins_alike_is_kept_until_it_is_copied():
    scheduler = make_scheduler(20)
    store(scheduler, [0] * 6 + [1, 1])
    [request] = scheduler.admit().values()
    assert request.num_stored == 6 and request.copied
    assert scheduler.index.num_used == 2
    scheduler.note_copied([request])
    assert request.copied is None and scheduler.index.num_used == 1


def test_pages_that_are_known_are_not_counted_again():
    scheduler = make_scheduler(16, 16, num_pages=7)  # 4 pages each, 3 of them shared, 1 more each
    store(scheduler, [0] * 12)
    assert len(scheduler.admit()) == 2
    scheduler = make_scheduler(16, 16, num_pages=6)
    store(scheduler, [0] * 12)
    assert len(scheduler.admit()) == 1


def test_page_is_copied_only_where_there_is_one_for_the_copy_too():
    for num_pages, num_stored in ((6, 14), (5, 12)):  # of 15; 5 pages, 3 of them shared
        scheduler = make_scheduler(16, num_pages=num_pages)
        store(scheduler, [0] * 14 + [1, 1])
        [request] = scheduler.admit().values()
        assert request.num_stored == num_stored


def test_pages_nobody_uses_make_room_for_what_the_next_steps_take():
    scheduler = make_scheduler(5)
    store(scheduler, [1] * 40)
    scheduler.admit()
    scheduler.make_room(num_steps=2)  # 6 tokens
    assert scheduler.index.num_pages == 8
    scheduler.make_room(num_steps=100)  # 8 tokens of the 9 that it may have are stored
    assert scheduler.index.num_pages == 8
    assert not scheduler.is_short


def test_requests_that_share_much_wait_for_the_first_to_store_it():
    scheduler = make_scheduler(200, 200, 10, num_slots=4, num_pages=1000)
    assert [r.id for r in scheduler.admit().values()] == [0]
    assert scheduler.is_waiting_for_pages
    store(scheduler, [0] * 199)
    assert [r.id for r in scheduler.admit().values()] == [1, 2]
    assert not scheduler.is_waiting_for_pages
    for length, shares_prefixes in ((200, False), (100, True)):
        scheduler = make_scheduler(length, length, num_pages=1000, shares_prefixes=shares_prefixes)
        assert len(scheduler.admit()) == 2


def test_samples_with_a_window_are_promised_a_window_each():
    # A window of 6 and 16 tokens of a prompt are 7 pages at most, of 11: never two at a time. That
    # the samples share a prompt of 20 pages, of which they keep 2, gives nobody any room.
    scheduler = make_scheduler(
        *[80] * 5, num_slots=8, num_pages=11, max_prefill_tokens=16, shares_prefixes=False,
        window=6,
    )  # fmt: skip
    for request in scheduler.waiting[:4]:
        request.family = 7
    assert [r.id for r in scheduler.admit().values()] == [0]
    assert scheduler.admit() == {} and not scheduler.is_short


@dataclasses.dataclass
class Clock:
    """Serves requests token by token as the engine does, with the pool as a number."""

    scheduler: Scheduler
    finished: list[int] = dataclasses.field(default_factory=list)

    def step(self) -> None:
        self.scheduler.admit()
        in_turn = ids(self.scheduler)
        assert in_turn == sorted(in_turn), "the oldest must be the last to be sent back"
        assert all(r.id > max(in_turn) for r in self.scheduler.waiting)
        prefill(self.scheduler)
        assert self.scheduler.num_pages_used <= self.scheduler.num_pages
        running = self.scheduler.running
        wanted = sum(-(-r.num_tokens // self.scheduler.page_size) for r in running.values())
        if wanted > self.scheduler.num_pages:
            assert len(running) > 1, "a request alone always fits"
            self.scheduler.preempt()
            return
        for slot, request in list(running.items()):
            request.num_stored += 1
            request.output.append(0)
            if request.num_tokens == request.max_num_tokens:
                self.finished.append(request.id)
                del running[slot]


@given(
    requests=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8)), min_size=1, max_size=12),
    num_slots=st.integers(1, 5),
    page_size=st.integers(1, 4),
    spare_pages=st.integers(0, 6),
)
def test_every_request_ends_in_any_pool_that_holds_the_largest(
    requests, num_slots, page_size, spare_pages
):
    largest = max(prompt_len + max_tokens - 1 for prompt_len, max_tokens in requests)
    scheduler = Scheduler(
        num_slots=num_slots,
        num_pages=-(-largest // page_size) + spare_pages,
        page_size=page_size,
        max_prefill_tokens=16,
    )
    for i, (prompt_len, max_tokens) in enumerate(requests):
        scheduler.waiting.append(make_request(i, prompt_len, max_tokens))
    clock = Clock(scheduler)
    # Each step stores a token of the oldest request, unless it sends another one back.
    for _ in range(2 * sum(max_tokens for _, max_tokens in requests)):
        if scheduler.running or scheduler.waiting:
            clock.step()
    assert sorted(clock.finished) == list(range(len(requests)))
