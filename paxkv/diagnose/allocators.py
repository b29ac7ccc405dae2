"""Allocators of contiguous memory: a chunk per request, as caches without pages have it.

They share out a pool of token slots. `allocate` gives the address of a chunk or None, `release`
takes it back.
"""

import bisect
from typing import Literal, Protocol


class Allocator(Protocol):
    """Shares out a pool in chunks that are in one piece."""

    def allocate(self, num_tokens: int) -> int | None:
        """The address of a chunk for so many tokens, or None if no hole is large enough."""
        ...

    def release(self, address: int) -> None:
        """Takes a chunk back."""
        ...

    def largest_hole(self) -> int:
        """Tokens that the largest chunk could have."""
        ...


class BuddyAllocator:
    """Chunks of powers of two, halved from larger ones and merged with their other half again.

    The pool is cut into the powers of two that add up to it, the largest at address 0, so every
    block of `2**k` tokens begins at a multiple of `2**k`, and its buddy's address differs from its
    own in that one bit. (Knowlton, A fast storage allocator, CACM 1965.)
    """

    def __init__(self, num_slots: int) -> None:
        self.free: list[set[int]] = [set() for _ in range(num_slots.bit_length())]  # by order
        self._orders: dict[int, int] = {}  # of what is allocated, by address
        address = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self.free[order].add(address)
                address += 1 << order

    def allocate(self, num_tokens: int) -> int | None:
        """Takes the smallest block that fits, the lowest one of that size, and halves it down."""
        order = (num_tokens - 1).bit_length()
        found = next((k for k in range(order, len(self.free)) if self.free[k]), None)
        if found is None:
            return None
        address = min(self.free[found])
        self.free[found].remove(address)
        for half in reversed(range(order, found)):
            self.free[half].add(address + (1 << half))
        self._orders[address] = order
        return address

    def release(self, address: int) -> None:
        """Takes a block back and merges it with its buddy for as long as that is free too."""
        order = self._orders.pop(address)
        while (buddy := address ^ (1 << order)) in self.free[order]:
            self.free[order].remove(buddy)
            address = min(address, buddy)
            order += 1
        self.free[order].add(address)

    def largest_hole(self) -> int:
        """Tokens of the largest free block."""
        return next((1 << k for k in reversed(range(len(self.free))) if self.free[k]), 0)


class HoleAllocator:
    """Chunks of any size, cut from the first hole that fits, or from the smallest such one."""

    def __init__(self, num_slots: int, *, choice: Literal["first", "best"]) -> None:
        self.holes: list[tuple[int, int]] = [(0, num_slots)]  # address and size, by address
        self._choice = choice
        self._sizes: dict[int, int] = {}  # of what is allocated, by address

    def allocate(self, num_tokens: int) -> int | None:
        """Cuts the chunk from the low end of a hole."""
        fitting = [place for place, (_, size) in enumerate(self.holes) if size >= num_tokens]
        if not fitting:
            return None
        place = fitting[0]
        if self._choice == "best":
            place = min(fitting, key=lambda index: self.holes[index][1])
        address, size = self.holes.pop(place)
        if size > num_tokens:
            self.holes.insert(place, (address + num_tokens, size - num_tokens))
        self._sizes[address] = num_tokens
        return address

    def release(self, address: int) -> None:
        """Opens a hole, joined with those on either side."""
        size = self._sizes.pop(address)
        place = bisect.bisect(self.holes, (address, 0))
        if place < len(self.holes) and self.holes[place][0] == address + size:
            size += self.holes.pop(place)[1]
        if place and sum(self.holes[place - 1]) == address:
            address, before = self.holes.pop(place - 1)
            size += before
            place -= 1
        self.holes.insert(place, (address, size))

    def largest_hole(self) -> int:
        """Tokens of the largest hole."""
        return max((size for _, size in self.holes), default=0)
