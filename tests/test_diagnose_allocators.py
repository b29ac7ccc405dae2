"""Allocators of contiguous memory: nothing is lost, nothing is handed out twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_diagnose import OPT_SLOTS
from paxkv.diagnose.allocators import BuddyAllocator, HoleAllocator

MAKERS = {
    "buddy": BuddyAllocator,
    "first": lambda size: HoleAllocator(size, choice="first"),
    "best": lambda size: HoleAllocator(size, choice="best"),
}


def free_pieces(allocator) -> list[tuple[int, int]]:
    """Address and size of everything that is free, by address."""
    if isinstance(allocator, BuddyAllocator):
        pieces = [(a, 1 << k) for k, addresses in enumerate(allocator.free) for a in addresses]
        return sorted(pieces)
    return allocator.holes


def size_of(name: str, tokens: int) -> int:
    return 1 << (tokens - 1).bit_length() if name == "buddy" else tokens


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 300),
    st.lists(st.one_of(st.integers(1, 120), st.integers(-30, -1)), max_size=60),
)
def test_chunks_and_holes_tile_the_pool(name, pool, operations):
    allocator, held = MAKERS[name](pool), {}
    for operation in operations:
        if operation > 0:
            largest = allocator.largest_hole()
            address = allocator.allocate(operation)
            assert (address is not None) == (size_of(name, operation) <= largest)
            if address is not None:
                held[address] = size_of(name, operation)
        elif held:
            address = list(held)[operation % len(held)]
            allocator.release(address)
            del held[address]
        end = 0
        for address, size in sorted([*held.items(), *free_pieces(allocator)]):
            assert address == end
            end += size
        assert end == pool
    for address in held:
        allocator.release(address)
    assert free_pieces(allocator) == free_pieces(MAKERS[name](pool))  # all merged again


def test_the_pool_is_cut_into_the_powers_of_two_that_add_up_to_it():
    sizes = [size for _, size in free_pieces(BuddyAllocator(OPT_SLOTS))]
    assert sizes == [8192, 4096, 2048, 1024, 256, 64, 32, 16]


def test_a_buddy_allocator_takes_the_lowest_smallest_block_and_rounds_up():
    buddy = BuddyAllocator(64)
    assert [buddy.allocate(9) for _ in range(3)] == [0, 16, 32]
    assert buddy.allocate(3) == 48 and buddy.allocate(16) is None
    buddy.release(16)
    assert buddy.allocate(4) == 52 and buddy.allocate(16) == 16


def test_first_fit_and_best_fit_choose_different_holes():
    for name, address in (("first", 0), ("best", 30)):
        holes = MAKERS[name](64)
        for tokens in (20, 10, 10, 24):
            holes.allocate(tokens)
        holes.release(0)
        holes.release(30)
        assert holes.holes == [(0, 20), (30, 10)]
        assert holes.allocate(8) == address
        assert holes.allocate(21) is None
