"""The whole memory system against an oracle: who holds which page, and what stands in it.

A token's key and value name the tokens that it ends, so that a page wrongly shared, copied, merged,
swapped or given up shows. Memory that holds no token is NaN throughout.
"""

import copy
import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from helpers_oracle import Oracle
from paxkv import cache as caches
from paxkv import swap
from paxkv.cache import PagedCache
from paxkv.config import pages_of
from paxkv.decoder import LayerGroup
from paxkv.integrity import check_integrity
from paxkv.page_pool import dense_from_pages
from paxkv.pallas_kernels import movers
from paxkv.pallas_kernels.layout import NULL_PAGE
from paxkv.prefix_index import Hit, Node, PrefixIndex
from paxkv.transfer import table_changes

B, M, S = 4, 6, 4  # slots, pages of a slot, tokens of a page
MOST_NEW = 2 * S + 1  # tokens that a slot stores at once
WINDOW = 6
NUM_EXAMPLES = int(os.environ.get("PAXKV_EXAMPLES", "300"))
FULL = (LayerGroup(layers=(0, 1), num_kv_heads=1, head_dim=1),)
WINDOWED = (
    LayerGroup(layers=(0,), num_kv_heads=1, head_dim=1),
    LayerGroup(layers=(1,), num_kv_heads=1, head_dim=1, window=WINDOW),
)
# Pages of each group's pool, the null page among them. All slots together may want 24, and 12 in
# the window: either pool of a cache with windows may be the one that runs short.
FULL_POOL = (13,)
WINDOWED_POOLS = (18, 9)

reserve_all = jax.jit(caches.reserve_all)
fork_all = jax.jit(caches.fork_all)
truncate_all = jax.jit(caches.truncate_all)
release_all = jax.jit(caches.release_all)
release_windows = jax.jit(partial(caches.release_windows, layer_groups=WINDOWED))
adopt_all = jax.jit(caches.adopt_all)
settle_all = jax.jit(caches.settle_all)
swap_out = jax.jit(swap.swap_out, static_argnames="num_pages")
swap_in = jax.jit(swap.swap_in)


@jax.jit
def store(
    cache: PagedCache, new_tokens: jax.Array, names: jax.Array
) -> tuple[PagedCache, jax.Array]:
    """Stores `new_tokens` (`i32[B]`) more in each slot, with `names` (`f32[B, MOST_NEW]`)."""
    new = jnp.arange(MOST_NEW, dtype=jnp.int32)[None]
    position = cache[0][1].lengths[:, None] + new
    cache, fits = caches.reserve_all(cache, new_tokens)
    is_written = (new < new_tokens[:, None]) & fits
    written, layer = [], 0
    for pool, table in cache:
        nowhere = table.ref_counts.shape[0] + jnp.arange(B * MOST_NEW, dtype=jnp.int32)
        page_ids = jnp.take_along_axis(table.block_tables, position // S, axis=1, mode="clip")
        write = partial(
            movers.write_tokens,
            page_ids=jnp.where(is_written.ravel(), page_ids.ravel(), nowhere),
            offsets=(position % S).ravel(),
        )
        first = layer
        pool = dataclasses.replace(
            pool,
            k_pages=tuple(
                write(pages, tokens=_tagged(names, first + i, 0))
                for i, pages in enumerate(pool.k_pages)
            ),
            v_pages=tuple(
                write(pages, tokens=_tagged(names, first + i, 1))
                for i, pages in enumerate(pool.v_pages)
            ),
        )
        written.append((pool, table))
        layer += len(pool.k_pages)
    cache, stored = caches.append_all(tuple(written), jnp.where(fits, new_tokens, 0))
    return cache, fits & stored


def _tagged(names: jax.Array, layer: int, is_value: int) -> jax.Array:
    return (names + (2 * layer + is_value)).reshape(-1, 1, 1)


def _kept(is_token: np.ndarray, pages: jax.Array) -> np.ndarray:
    return np.where(is_token, pages, np.float32(np.nan))


@jax.jit
def gather(cache: PagedCache) -> jax.Array:
    """Keys and values of all slots as they stand in the pages, `f32[2 layers, 2, B, M * S]`."""
    layers = [
        dense_from_pages(pool, table, place, M * S)
        for pool, table in cache
        for place in range(len(pool.k_pages))
    ]
    return jnp.array(layers)[..., 0, 0]


def i32(numbers: Sequence[int]) -> np.ndarray:
    return np.array(numbers, np.int32)


# Runs of few tokens: pages are often equal, wholly or in part, and prefixes are often known.
slots = st.integers(0, B - 1)
some_slots = st.sets(slots, min_size=1, max_size=2)
bits = st.integers(0, 1)
runs = st.tuples(st.sampled_from([1, 2, S, S + 1, 2 * S]), bits)
prompts = st.lists(runs, min_size=1, max_size=3)


def written_out(runs: Sequence[tuple[int, int]]) -> list[int]:
    return [bit for count, bit in runs for _ in range(count)]


class Memory(RuleBasedStateMachine):
    """Any sequence of operations: same verdict, pages and contents; nothing changed if refused."""

    groups: tuple[LayerGroup, ...]
    pools: tuple[int, ...]

    @initialize()
    def start(self) -> None:
        self.cache: PagedCache = tuple(
            caches.init_cache(
                [group], num_slots=B, max_length=M * S, num_pages=pages, page_size=S, dtype="f4"
            )[0]
            for group, pages in zip(self.groups, self.pools, strict=True)
        )
        self.oracles = [
            Oracle(num_slots=B, max_pages=M, num_pages=pages, page_size=S) for pages in self.pools
        ]
        self.tokens: dict[int, list[int]] = {slot: [] for slot in range(B)}
        self.paths: dict[int, list[Node]] = {slot: [] for slot in range(B)}
        self.index = PrefixIndex(page_size=S)
        self.names: dict[tuple[int, ...], int] = {}  # of tokens from the beginning

    @rule(new=st.dictionaries(slots, prompts, min_size=1))
    def append(self, new: dict[int, list[tuple[int, int]]]) -> None:
        self.store({slot: written_out(runs)[:MOST_NEW] for slot, runs in new.items()})

    @rule(new=st.dictionaries(slots, bits, min_size=1))
    def decode(self, new: dict[int, int]) -> None:
        self.store({slot: [bit] for slot, bit in new.items()})

    @rule(slots=some_slots, tokens=st.sampled_from([1, S, M * S]))
    def reserve(self, slots: set[int], tokens: int) -> None:
        new_tokens = [tokens if slot in slots else 0 for slot in range(B)]
        cache, fits = reserve_all(self.cache, i32(new_tokens))
        self.agree(cache, fits, lambda oracle: oracle.reserve(new_tokens)[0])

    @rule(chosen=st.dictionaries(slots, slots, min_size=1))
    def fork(self, chosen: dict[int, int]) -> None:
        parents = [chosen.get(slot, slot) for slot in range(B)]
        cache, ok = fork_all(self.cache, i32(parents))
        self.agree(cache, ok, lambda oracle: oracle.fork(parents))
        tokens, paths = dict(self.tokens), dict(self.paths)
        for slot, parent in enumerate(parents):
            self.tokens[slot], self.paths[slot] = list(tokens[parent]), list(paths[parent])
            self.index.use(paths[parent])
        for path in paths.values():
            self.index.release(path)

    # What rules are made of.

    def agree(
        self, cache: PagedCache, verdict: jax.Array, change: Callable[[Oracle], bool]
    ) -> bool:
        """Has the oracles do the same, wholly or not at all; the verdict must be theirs."""
        after = copy.deepcopy(self.oracles)
        expected = all([change(oracle) for oracle in after])
        assert bool(verdict) == expected
        if expected:
            self.oracles = after
        else:
            chex.assert_trees_all_equal(cache, self.cache)
        self.cache = cache
        return expected

    def store(self, new: dict[int, list[int]]) -> None:
        counts = [len(new.get(slot, ())) for slot in range(B)]
        names = np.zeros((B, MOST_NEW), np.float32)
        for slot, tokens in new.items():
            before = self.tokens[slot]
            names[slot, : len(tokens)] = self.names_of(before + tokens)[len(before) :]
        cache, ok = store(self.cache, i32(counts), names)
        if self.agree(cache, ok, lambda o: o.reserve(counts)[0] and o.append(counts)):
            self.tokens |= {slot: self.tokens[slot] + tokens for slot, tokens in new.items()}

    def names_of(self, tokens: Sequence[int]) -> list[int]:
        """A number for each token: one for each beginning that it may end."""
        beginnings = [tuple(tokens[: i + 1]) for i in range(len(tokens))]
        return [4 * self.names.setdefault(its, len(self.names) + 1) for its in beginnings]

    # What holds after each.

    @invariant()
    def tables_are_sound_and_as_the_oracle_has_them(self) -> None:
        for (_, table), oracle in zip(self.cache, self.oracles, strict=True):
            held = np.zeros(oracle.num_pages, np.int32)
            for node in self.index.nodes():
                held[node.pages] += 1
            assert [oracle.holds[page] for page in range(oracle.num_pages)] == held.tolist()
            check_integrity(table, held)
            rows = [row + [NULL_PAGE] * (M - len(row)) for row in oracle.rows.values()]
            assert np.asarray(table.block_tables).tolist() == rows
            assert list(oracle.lengths.values()) == [len(its) for its in self.tokens.values()]
            assert np.asarray(table.lengths).tolist() == list(oracle.lengths.values())
            assert np.flatnonzero(np.asarray(table.ref_counts) == 0).tolist() == oracle.free

    @invariant()
    def contents_are_the_tokens(self) -> None:
        names = np.zeros((B, M * S), np.float32)
        for slot, tokens in self.tokens.items():
            names[slot, : len(tokens)] = self.names_of(tokens)
        layers = [oracle for oracle in self.oracles for _ in range(2 // len(self.oracles))]
        expected = [
            [np.where(self.is_there(oracle), names + 2 * layer + i, 0) for i in range(2)]
            for layer, oracle in enumerate(layers)
        ]
        np.testing.assert_array_equal(gather(self.cache), np.array(expected))
        self.poison()

    def is_there(self, oracle: Oracle) -> np.ndarray:
        """`bool[B, M * S]`, tokens that are stored and not given up."""
        rows = np.zeros((B, M), bool)
        for slot, row in oracle.rows.items():
            rows[slot, : len(row)] = np.array(row) != NULL_PAGE
        lengths = np.array([len(tokens) for tokens in self.tokens.values()])
        return np.repeat(rows, S, axis=1) & (np.arange(M * S) < lengths[:, None])

    def poison(self) -> None:
        """Makes NaN of all memory that holds no token of a slot or of the index."""
        poisoned = []
        for (pool, table), oracle in zip(self.cache, self.oracles, strict=True):
            filled = np.zeros(oracle.num_pages, np.int32)
            for slot, row in oracle.rows.items():
                for i, page in enumerate(row):
                    filled[page] = max(filled[page], min(S, oracle.lengths[slot] - i * S))
            filled[[page for page, count in oracle.holds.items() if count]] = S
            filled[NULL_PAGE] = 0
            is_token = (np.arange(S) < filled[:, None])[:, None, :, None]
            poisoned.append((jax.tree.map(partial(_kept, is_token), pool), table))
        self.cache = tuple(poisoned)


class WindowedMemory(Memory):
    """Layers that see all tokens, and layers that give back pages that have left their window."""

    groups, pools = WINDOWED, WINDOWED_POOLS

    @rule()
    def release_windows(self) -> None:
        cache, ok = release_windows(self.cache)
        oracle = self.oracles[1]
        for slot, row in oracle.rows.items():
            num_left = max(0, oracle.lengths[slot] - (WINDOW - 1)) // S
            while any(row[:num_left]):
                oracle.give_up_first_page(slot)
        self.agree(cache, ok, lambda _: True)

    @rule(slots=some_slots)
    def release(self, slots: set[int]) -> None:
        done = [slot in slots for slot in range(B)]
        cache, ok = release_all(self.cache, np.array(done))
        self.agree(cache, ok, lambda oracle: oracle.release(done))
        self.tokens |= {slot: [] for slot in slots}


class PrefixMemory(Memory):
    """Layers that see all tokens, whose pages a prefix index knows and the host may keep."""

    groups, pools = FULL, FULL_POOL

    @initialize()
    def start_swapping(self) -> None:
        self.swapped: list[tuple[list[int], swap.Contents]] = []

    @rule(
        asked=st.dictionaries(slots, prompts, min_size=1, max_size=2),
        num_evicted=st.sampled_from([0, 1, 4]),
    )
    def admit(self, asked: dict[int, list[tuple[int, int]]], num_evicted: int) -> None:
        """New sequences take the place of others, and begin with what the index has."""
        self.note_written(asked)
        self.end(asked)
        prompts = {slot: written_out(runs) for slot, runs in asked.items()}
        hits = {slot: self.index.lookup([*tokens, 0]) for slot, tokens in prompts.items()}
        for hit in hits.values():
            self.index.use(hit.all_nodes)
        self.index.evict(num_evicted)
        self.settle([])
        if self.adopt(prompts, hits):
            rest = {slot: its[len(self.tokens[slot]) :] for slot, its in prompts.items()}
            self.store({slot: tokens[:MOST_NEW] for slot, tokens in rest.items()})

    @rule(slots=some_slots)
    def note_what_was_written(self, slots: set[int]) -> None:
        self.note_written(slots)
        self.settle([])

    @rule(slots=some_slots, is_noted=st.booleans())
    def release(self, slots: set[int], is_noted: bool) -> None:
        """Sequences end, or, if what they wrote last was not noted, are aborted."""
        self.note_written(slots if is_noted else [])
        self.end(slots)

    @rule(num_pages=st.integers(1, 9))
    def evict(self, num_pages: int) -> None:
        self.index.evict(num_pages)
        self.settle([])

    @rule(slots=some_slots, cut=st.sampled_from([1, 3, S, MOST_NEW]))
    def truncate(self, slots: set[int], cut: int) -> None:
        lengths = [max(0, len(self.tokens[s]) - cut * (s in slots)) for s in range(B)]
        cache, ok = truncate_all(self.cache, i32(lengths))
        self.agree(cache, ok, lambda oracle: oracle.truncate(lengths))
        for slot, length in enumerate(lengths):
            del self.tokens[slot][length:]
            self.index.release(self.paths[slot][length // S :])
            del self.paths[slot][length // S :]

    @precondition(lambda self: any(self.tokens.values()))
    @rule(data=st.data(), is_noted=st.booleans())
    def swap_out(self, data: st.DataObject, is_noted: bool) -> None:
        slot = data.draw(st.sampled_from([s for s in range(B) if self.tokens[s]]))
        self.note_written([slot] if is_noted else [])
        num_pages = min(1 << (pages_of(len(self.tokens[slot]), S) - 1).bit_length(), M)
        contents = jax.device_get(swap_out(self.cache, np.int32(slot), num_pages=num_pages))
        self.swapped.append((self.tokens[slot], contents))
        self.end([slot])

    @precondition(lambda self: self.swapped and self.empty)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        which, slot = data.draw(st.integers(0, len(self.swapped) - 1)), self.empty[0]
        tokens, contents = self.swapped[which]
        nodes = self.index.lookup([*tokens, 0]).nodes
        self.index.use(nodes)
        assert self.adopt({slot: tokens}, {slot: Hit(nodes)})
        cache, ok = swap_in(
            self.cache, np.int32(slot), contents, np.int32(len(nodes)), np.int32(len(tokens))
        )
        new = [len(tokens) - len(nodes) * S if s == slot else 0 for s in range(B)]
        if self.agree(cache, ok, lambda oracle: oracle.reserve(new)[0] and oracle.append(new)):
            self.tokens[slot] = tokens
            del self.swapped[which]

    @precondition(lambda self: self.swapped)
    @rule()
    def abort_swapped(self) -> None:
        del self.swapped[0]

    @property
    def empty(self) -> list[int]:
        """Slots that hold no page, not even for tokens to come."""
        return [slot for slot, row in self.oracles[0].rows.items() if not row]

    def adopt(self, prompts: dict[int, list[int]], hits: dict[int, Hit]) -> bool:
        """Has empty slots begin with what the index has, whose nodes are in use for them."""
        pages, lengths = [[NULL_PAGE] * M for _ in range(B)], [0] * B
        for slot, hit in hits.items():
            for i, node in enumerate(hit.all_nodes):
                [pages[slot][i]] = node.pages
            lengths[slot] = len(hit.nodes) * S + hit.num_partial
        is_partial = [int(length % S > 0) for length in lengths]
        cache, ok = adopt_all(self.cache, np.array([pages], np.int32), i32(lengths))
        fits = self.agree(cache, ok, lambda o: o.adopt(pages, lengths) and o.reserve(is_partial)[0])
        for slot, hit in hits.items():
            if fits:
                self.paths[slot] = hit.nodes
                self.tokens[slot] = prompts[slot][: lengths[slot]]
            self.index.release(hit.all_nodes[len(hit.nodes) if fits else 0 :])
        return fits

    def note_written(self, slots: Iterable[int]) -> None:
        for slot in sorted(slots):
            path, tokens = self.paths[slot], self.tokens[slot]
            for i in range(len(path), len(tokens) // S):
                page = self.oracles[0].rows[slot][i]
                self.index.extend(path, tuple(tokens[i * S : (i + 1) * S]), (page,))

    def end(self, slots: Collection[int]) -> None:
        for slot in slots:
            self.index.release(self.paths[slot])
            self.paths[slot], self.tokens[slot] = [], []
        self.settle(slots)

    def settle(self, ended: Collection[int]) -> None:
        """Tells the tables what the index wants of them, and empties slots."""
        done = [slot in ended for slot in range(B)]
        changes = self.index.take_changes()
        holds, same_as = table_changes(changes, self.cache)
        cache, ok = settle_all(self.cache, np.array(done), holds, same_as)
        held = {int(page): int(holds[0, page]) for page in np.flatnonzero(holds[0])}
        equal = {page: other for (page,), (other,) in changes.merged}
        self.agree(cache, ok, lambda o: o.hold(held) and o.merge(equal) and o.release(done))

    @invariant()
    def known_pages_hold_their_tokens(self) -> None:
        beginnings: dict[Node | None, list[int]] = {}
        for node in self.index.nodes():  # parents first
            tokens = beginnings.get(node.parent, []) + list(node.tokens)
            beginnings[node] = tokens
            names, [page] = np.array(self.names_of(tokens)[-S:]), node.pages
            pool, _ = self.cache[0]
            for layer in range(2):
                assert np.array_equal(pool.k_pages[layer][page, 0, :, 0], names + 2 * layer)
                assert np.array_equal(pool.v_pages[layer][page, 0, :, 0], names + 2 * layer + 1)


TestWindowedMemory = WindowedMemory.TestCase
TestWindowedMemory.settings = settings(
    max_examples=NUM_EXAMPLES, stateful_step_count=80, deadline=None
)
TestPrefixMemory = PrefixMemory.TestCase
TestPrefixMemory.settings = settings(
    max_examples=NUM_EXAMPLES, stateful_step_count=80, deadline=None
)
