"""A block table in dicts and lists: what the array one must do, said one page at a time."""

import collections

from paxkv.pallas_kernels.layout import NULL_PAGE


class Oracle:
    """Hands out the lowest free page first, slot by slot; each operation returns its verdict."""

    def __init__(self, *, num_slots: int, max_pages: int, num_pages: int, page_size: int) -> None:
        self.max_pages = max_pages
        self.page_size = page_size
        self.num_pages = num_pages
        self.rows: dict[int, list[int]] = {slot: [] for slot in range(num_slots)}
        self.lengths: dict[int, int] = dict.fromkeys(self.rows, 0)
        self.holds: collections.Counter[int] = collections.Counter()  # from outside the table

    @property
    def free(self) -> list[int]:
        return [p for p in range(self.num_pages) if p != NULL_PAGE and not self.is_live(p)]

    def is_live(self, page: int) -> bool:
        return page != NULL_PAGE and bool(self.owners(page) or self.holds[page])

    def owners(self, page: int) -> list[int]:
        return [slot for slot, row in self.rows.items() if page in row]

    @property
    def unreserved(self) -> list[int]:
        """Pages that hold tokens or are free: those that may be shared, or refused."""
        reserved = {
            page
            for slot, row in self.rows.items()
            for page in row[self._pages_of(self.lengths[slot]) :]
        }
        return [page for page in range(1, self.num_pages) if page not in reserved]

    def reserve(self, new_tokens: list[int]) -> tuple[bool, dict[int, tuple[int, int]]]:
        """The verdict, and (source, target) of the page that a slot is given to copy to."""
        wanted = {}
        for slot, row in self.rows.items():
            pages = self._pages_of(self.lengths[slot] + new_tokens[slot])
            if new_tokens[slot] < 0 or pages > self.max_pages:
                return False, {}
            wanted[slot] = max(pages - len(row), 0)
        replaced = [slot for slot in self.rows if self._is_to_be_copied(slot, new_tokens)]
        free = self.free
        if sum(wanted.values()) + len(replaced) > len(free):
            return False, {}
        copies = {}
        for slot, row in self.rows.items():
            if slot in replaced:
                column = self.lengths[slot] // self.page_size
                copies[slot] = row[column], free.pop(0)
                row[column] = copies[slot][1]
            for _ in range(wanted[slot]):
                row.append(free.pop(0))
        return True, copies

    def _is_to_be_copied(self, slot: int, new_tokens: list[int]) -> bool:
        """The first of a half-full page's owners keeps it if all of them are about to write."""
        column, offset = divmod(self.lengths[slot], self.page_size)
        if not offset or not new_tokens[slot] or self.rows[slot][column] == NULL_PAGE:
            return False
        owners = self.owners(self.rows[slot][column])
        # Who has the page whole, or further along, does not write into it.
        writers = [
            other
            for other in owners
            if new_tokens[other] and self.lengths[other] // self.page_size == column
        ]
        if self.holds[self.rows[slot][column]]:
            return True
        return len(owners) > 1 and not (owners == writers and slot == writers[0])

    def fork(self, parents: list[int]) -> bool:
        if not all(parent in self.rows for parent in parents):
            return False
        rows = {slot: list(row) for slot, row in self.rows.items()}
        lengths = dict(self.lengths)
        for slot, parent in enumerate(parents):
            if parent != slot:
                self.rows[slot] = rows[parent][: self._pages_of(lengths[parent])]
                self.lengths[slot] = lengths[parent]
        return True

    def append(self, new_tokens: list[int]) -> bool:
        for slot, row in self.rows.items():
            end = self.lengths[slot] + new_tokens[slot]
            if new_tokens[slot] < 0 or end > len(row) * self.page_size:
                return False
        for slot in self.rows:
            self.lengths[slot] += new_tokens[slot]
        return True

    def release(self, done: list[bool]) -> bool:
        for slot in self.rows:
            if done[slot]:
                self._shorten(slot, 0)
        return True

    def truncate(self, lengths: list[int]) -> bool:
        if any(not 0 <= lengths[slot] <= self.lengths[slot] for slot in self.rows):
            return False
        for slot in self.rows:
            self._shorten(slot, lengths[slot])
        return True

    def adopt(self, pages: list[list[int]], lengths: list[int]) -> bool:
        adopted = {}
        for slot, row in self.rows.items():
            taken = pages[slot][: self._pages_of(lengths[slot])]
            is_there = len(taken) * self.page_size >= lengths[slot] >= 0
            if not is_there or not all(map(self.is_live, taken)) or (taken and row):
                return False
            adopted[slot] = taken
        for slot, taken in adopted.items():
            if taken:
                self.rows[slot], self.lengths[slot] = list(taken), lengths[slot]
        return True

    def hold(self, change: dict[int, int]) -> bool:
        if not all(map(self.is_live, change)):
            return False
        self.holds.update(change)
        return True

    def merge(self, same_as: dict[int, int]) -> bool:
        if not all(map(self.is_live, same_as.values())):
            return False
        for slot, row in self.rows.items():
            self.rows[slot] = [same_as.get(page, page) for page in row]
        return True

    def give_up_first_page(self, slot: int) -> None:
        """What a sliding window does: the page goes, its entry stays as the null page."""
        column = next(i for i, page in enumerate(self.rows[slot]) if page != NULL_PAGE)
        self.rows[slot][column] = NULL_PAGE

    def _shorten(self, slot: int, length: int) -> None:
        del self.rows[slot][self._pages_of(length) :]
        self.lengths[slot] = length

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
