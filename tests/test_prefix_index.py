"""The index of known prefixes against an oracle that writes every prefix out."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paxkv.prefix_index import NO_KEY, Node, PrefixIndex, PrefixKey

S = 2  # tokens per page in the state machine
MAX_PINNED = 3
KEYS = [NO_KEY, PrefixKey(adapter="x"), PrefixKey(salt="x")]

type Prefix = tuple[PrefixKey, tuple[int, ...]]  # whole pages of tokens from the beginning


class Oracle:
    """Prefixes of whole pages, each with its page, its users and the time of its last use."""

    def __init__(self) -> None:
        self.pages: dict[Prefix, tuple[int, ...]] = {}
        self.users: dict[Prefix, list[int]] = {}
        self.idle_since: dict[Prefix, int] = {}
        self.pins: dict[Prefix, int] = {}
        self.clock = 0

    def known(self, key: PrefixKey, tokens: tuple[int, ...]) -> int:
        """How many pages a sequence can begin with."""
        count = 0
        while (count + 1) * S <= len(tokens) and (key, tokens[: (count + 1) * S]) in self.pages:
            count += 1
        return count

    def partial(self, key: PrefixKey, tokens: tuple[int, ...]) -> int:
        """How many tokens after these pages are the first ones of a known page."""
        begin = self.known(key, tokens) * S
        following = [
            other[begin:]
            for other_key, other in self.pages
            if other_key == key and len(other) == begin + S and other[:begin] == tokens[:begin]
        ]
        rest, lengths = tokens[begin:], range(S, 0, -1)
        return max((n for n in lengths for page in following if page[:n] == rest[:n]), default=0)

    def use(self, key: PrefixKey, tokens: tuple[int, ...], user: int) -> None:
        for end in range(S, len(tokens) + 1, S):
            self.users[key, tokens[:end]].append(user)

    def release(self, user: int) -> None:
        self.clock += 1
        for prefix, users in self.users.items():
            if user in users:
                users.remove(user)
                self.idle_since[prefix] = self.clock

    def idle(self) -> list[Prefix]:
        return [prefix for prefix, users in self.users.items() if not users]

    def evict(self, num_pages: int) -> list[tuple[int, ...]]:
        """The page that is given up is the longest idle one of those that no other follows."""
        evicted = []
        for _ in range(num_pages):
            parents = {(key, tokens[:-S]) for key, tokens in self.pages}
            leaves = [prefix for prefix in self.idle() if prefix not in parents]
            if leaves:
                oldest = min(leaves, key=self.idle_since.__getitem__)
                evicted.append(self.pages.pop(oldest))
                del self.users[oldest], self.idle_since[oldest]
        return evicted


class IndexMachine(RuleBasedStateMachine):
    """Sequences come, store pages, and end; the index and the oracle know the same."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.oracle = PrefixIndex(page_size=S, max_pinned_pages=MAX_PINNED), Oracle()
        self.running: dict[int, tuple[PrefixKey, tuple[int, ...], list[Node]]] = {}
        self.held: set[tuple[int, ...]] = set()
        self.num_started = 0

    def new_user(self) -> int:
        self.num_started += 1
        return self.num_started

    @rule(
        key=st.sampled_from(KEYS),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple),
    )
    def start(self, key: PrefixKey, tokens: tuple[int, ...]) -> None:
        hit = self.index.lookup(tokens, key)
        known = tokens[:-1]
        assert len(hit.nodes) == self.oracle.known(key, known)
        assert hit.num_partial == self.oracle.partial(key, known)
        self.check_path(key, known, hit.nodes)
        if hit.partial:
            assert hit.partial.parent in hit.nodes[-1:] or not hit.nodes
            begin = len(hit.nodes) * S
            ours, theirs = known[begin:][: hit.num_partial], hit.partial.tokens[: hit.num_partial]
            assert ours == theirs and hit.partial.key == key
        user = self.new_user()
        self.index.use(hit.nodes)
        self.oracle.use(key, known[: len(hit.nodes) * S], user)
        self.running[user] = key, tokens, hit.nodes

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def store_a_page(self, data: st.DataObject) -> None:
        user = data.draw(st.sampled_from(sorted(self.running)))
        key, tokens, path = self.running[user]
        begin, end = len(path) * S, len(path) * S + S
        if end > len(tokens):
            return
        pages = self.new_user(), self.new_user()
        self.index.extend(path, tokens[begin:end], pages, key)
        prefix = key, tokens[:end]
        changes = self.index.take_changes()
        if prefix in self.oracle.pages:
            assert changes.merged == [(pages, self.oracle.pages[prefix])] and not changes.held
        else:
            assert changes.held == [pages] and not changes.merged
            self.oracle.pages[prefix], self.oracle.users[prefix] = pages, []
            self.held.add(pages)
        self.oracle.users[prefix].append(user)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        user = data.draw(st.sampled_from(sorted(self.running)))
        *_, path = self.running.pop(user)
        self.index.release(path)
        self.oracle.release(user)

    @rule(num_pages=st.integers(0, 4))
    def evict(self, num_pages: int) -> None:
        self.index.evict(num_pages)
        self.check_dropped(self.oracle.evict(num_pages))

    @rule(
        key=st.sampled_from(KEYS),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple),
    )
    def pin(self, key: PrefixKey, tokens: tuple[int, ...]) -> None:
        full = tokens[: len(tokens) // S * S]
        pinned = {
            (pin_key, whole[:end])
            for pin_key, whole in [*self.oracle.pins, (key, full)]
            for end in range(S, len(whole) + 1, S)
        }
        if not full or self.oracle.known(key, full) * S < len(full):
            with pytest.raises(ValueError, match="only full pages that have been stored"):
                self.index.pin(tokens, key)
        elif len(pinned) > MAX_PINNED:
            with pytest.raises(ValueError, match=f"{len(pinned)} pages and may hold {MAX_PINNED}"):
                self.index.pin(tokens, key)
        else:
            assert self.index.pin(tokens, key) == len(full)
            if (key, full) not in self.oracle.pins:
                self.oracle.pins[key, full] = self.new_user()
                self.oracle.use(key, full, self.oracle.pins[key, full])

    @precondition(lambda self: self.oracle.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key, tokens = data.draw(st.sampled_from(sorted(self.oracle.pins, key=repr)))
        self.index.unpin(tokens, key)
        self.oracle.release(self.oracle.pins.pop((key, tokens)))
        with pytest.raises(ValueError, match="is not pinned"):
            self.index.unpin(tokens, key)

    @rule()
    def clear(self) -> None:
        self.index.clear()
        for user in self.oracle.pins.values():
            self.oracle.release(user)
        self.oracle.pins.clear()
        dropped = self.index.take_changes().dropped
        expected = self.oracle.evict(len(self.oracle.pages))
        assert sorted(dropped) == sorted(expected)
        self.held -= set(dropped)

    def check_dropped(self, expected: list[tuple[int, ...]]) -> None:
        changes = self.index.take_changes()
        assert (changes.held, changes.merged) == ([], [])
        assert changes.dropped == expected
        self.held -= set(expected)

    def check_path(self, key: PrefixKey, tokens: tuple[int, ...], path: list[Node]) -> None:
        for i, node in enumerate(path):
            assert node.pages == self.oracle.pages[key, tokens[: (i + 1) * S]]

    @invariant()
    def index_knows_what_the_oracle_knows(self) -> None:
        pages = [node.pages for node in self.index.nodes()]
        assert sorted(pages) == sorted(self.oracle.pages.values()) == sorted(self.held)
        assert self.index.num_pages == len(pages)
        assert self.index.num_used == len(pages) - len(self.oracle.idle())
        for key, tokens, path in self.running.values():
            self.check_path(key, tokens, path)
        assert not self.index.take_changes()


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def stored(
    index: PrefixIndex, tokens: list[int], first_page: int, key: PrefixKey = NO_KEY
) -> list[Node]:
    """Stores the full pages of a sequence as `first_page` and the pages after it, and ends it."""
    path, size = [], index.page_size
    for i in range(len(tokens) // size):
        index.extend(path, tuple(tokens[i * size : (i + 1) * size]), (first_page + i,), key)
    index.release(path)
    return path


def known(index: PrefixIndex, tokens: list[int], key: PrefixKey = NO_KEY) -> int:
    return len(index.lookup(tokens, key).nodes) * index.page_size


def test_tokens_that_are_equal_in_part_are_no_hit():
    index = PrefixIndex(page_size=4)
    stored(index, [65, 66, 67, 68, 1], 1)
    assert known(index, [321, 322, 323, 324, 1]) == 0  # equal in the low byte of each
    assert index.lookup([321, 322, 323, 324, 1]).num_partial == 0
    assert known(index, [65, 66, 67, 68, 2]) == 4


def test_page_is_not_used_again_after_another_one():
    index = PrefixIndex(page_size=4)
    stored(index, [1, 1, 1, 1, 5, 6, 7, 8], 1)
    stored(index, [2, 2, 2, 2, 9, 9, 9, 9], 3)
    assert known(index, [2, 2, 2, 2, 5, 6, 7, 8, 0]) == 4
    assert known(index, [5, 6, 7, 8, 0]) == 0


def test_kinds_of_extra_keys_do_not_meet():
    index, prompt = PrefixIndex(page_size=4), list(range(9))
    adapter, salt = PrefixKey(adapter="x"), PrefixKey(salt="x")
    hits = []
    for i, key in enumerate([adapter, salt, adapter, salt, NO_KEY, PrefixKey(revision="x")]):
        hits.append(known(index, prompt, key))
        stored(index, prompt, 10 * i, key)
    assert hits == [0, 0, 8, 8, 0, 0]


def test_last_token_is_never_a_hit():
    index = PrefixIndex(page_size=4)
    stored(index, list(range(8)), 1)
    hit = index.lookup(list(range(8)))
    assert (len(hit.nodes), hit.num_partial) == (1, 3)
    assert known(index, list(range(9))) == 8
    assert index.lookup([0]).num_partial == 0


def test_last_page_is_given_up_first_so_no_hit_goes_on_past_a_hole():
    index, prompt = PrefixIndex(page_size=4), list(range(12))
    stored(index, prompt, 1)
    for left in (8, 4, 0):
        index.evict(1)
        assert known(index, [*prompt, 0]) == left
    assert index.take_changes().dropped == [(3,), (2,), (1,)]


def test_page_that_was_given_up_serves_its_new_tokens_and_not_the_old():
    index, prompt = PrefixIndex(page_size=4), list(range(12))
    stored(index, prompt, 1)
    index.evict(2)
    other = [0, 1, 2, 3, 8, 8, 8, 8]
    stored(index, other, 1)
    assert known(index, [*prompt, 0]) == 4
    hit = index.lookup([*other, 0])
    assert [node.pages for node in hit.nodes] == [(1,), (2,)]


def test_least_recently_used_goes_first_and_what_is_used_stays():
    index = PrefixIndex(page_size=2)
    for token in range(4):
        stored(index, [token, token], 10 + token)
    again = index.lookup([0, 0, 9]).nodes
    index.use(again)
    index.release(again)
    used = index.lookup([2, 2, 9]).nodes
    index.use(used)
    index.take_changes()
    index.evict(9)
    assert index.take_changes().dropped == [(11,), (13,), (10,)]
    assert [node.pages for node in index.nodes()] == [(12,)]


def test_page_equal_to_a_known_one_is_merged_into_it():
    index = PrefixIndex(page_size=2)
    first, second = [], []
    index.extend(first, (1, 2), (5, 6))
    index.extend(second, (1, 2), (7, 8))
    assert index.take_changes().merged == [((7, 8), (5, 6))]
    assert first == second and index.num_pages == 1
    index.release(first)
    assert index.num_used == 1
    index.release(second)
    assert index.num_used == 0


def test_keys_that_nothing_is_stored_for_take_no_memory():
    index = PrefixIndex(page_size=2)
    for number in range(100):
        stored(index, [1, 2], 5, PrefixKey(salt=str(number)))
        index.evict(1)
    assert not index._roots and index.num_pages == 0
