"""A block table in dicts and lists: what the array one must do, said one page at a time."""

from paxkv.pallas_kernels.layout import NULL_PAGE


class Oracle:
    """Hands out the lowest free page first, slot by slot; each operation returns its verdict."""

    def __init__(self, *, num_slots: int, max_pages: int, num_pages: int, page_size: int) -> None:
        self.max_pages = max_pages
        self.page_size = page_size
        self.free = [page for page in range(num_pages) if page != NULL_PAGE]
        self.rows: dict[int, list[int]] = {slot: [] for slot in range(num_slots)}
        self.lengths: dict[int, int] = dict.fromkeys(self.rows, 0)

    def reserve(self, new_tokens: list[int]) -> bool:
        wanted = {}
        for slot, row in self.rows.items():
            pages = self._pages_of(self.lengths[slot] + new_tokens[slot])
            if new_tokens[slot] < 0 or pages > self.max_pages:
                return False
            wanted[slot] = max(pages - len(row), 0)
        if sum(wanted.values()) > len(self.free):
            return False
        for slot, row in self.rows.items():
            for _ in range(wanted[slot]):
                row.append(self.free.pop(0))
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

    def give_up_first_page(self, slot: int) -> None:
        """What a sliding window does: the page goes, its entry stays as the null page."""
        column = next(i for i, page in enumerate(self.rows[slot]) if page != NULL_PAGE)
        self._free(self.rows[slot][column])
        self.rows[slot][column] = NULL_PAGE

    def _shorten(self, slot: int, length: int) -> None:
        kept = self._pages_of(length)
        for page in self.rows[slot][kept:]:
            if page != NULL_PAGE:
                self._free(page)
        del self.rows[slot][kept:]
        self.lengths[slot] = length

    def _free(self, page: int) -> None:
        assert page not in self.free
        self.free = sorted([*self.free, page])

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
