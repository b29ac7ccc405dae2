"""A tensor in a file, read piece by piece straight to where it belongs."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

_PIECE_BYTES = 16 << 20  # of decoded numbers held at once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies in a file, and how its bytes become numbers.

    It is read with plain reads: pages of a memory-mapped file would count as resident memory
    until the whole model is loaded.
    """

    path: Path
    offset: int  # bytes from the file's start
    num_bytes: int
    shape: tuple[int, ...]
    decode: Callable[[np.ndarray], np.ndarray]  # u8[rows, bytes of a row] to [rows, ...]

    def pieces(self, num_groups: int) -> Iterator[tuple[slice, np.ndarray]]:
        """The rows in `num_groups` equal groups, some groups at a time.

        Yields:
            Which groups, and their rows `[rows, ...]`.
        """
        num_rows = self.shape[0]
        group_rows, row_bytes = num_rows // num_groups, self.num_bytes // num_rows
        group_numbers = group_rows * int(np.prod(self.shape[1:]))
        step = max(1, _PIECE_BYTES // (4 * group_numbers))
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for start in range(0, num_groups, step):
                stop = min(start + step, num_groups)
                rows = (stop - start) * group_rows
                raw = np.fromfile(file, np.uint8, rows * row_bytes)
                if raw.size < rows * row_bytes:
                    raise ValueError(f"{self.path} ends in the middle of a tensor")
                yield slice(start, stop), self.decode(raw.reshape(rows, row_bytes))

    def read_into(self, target: np.ndarray) -> None:
        """Fills `target`, in its dtype; its first axis splits the rows into equal groups."""
        for groups, rows in self.pieces(target.shape[0]):
            place = target[groups]
            place[...] = rows.reshape(place.shape)

    def equals(self, other: "StoredTensor") -> bool:
        """Whether both hold the same numbers."""
        if self.shape != other.shape:
            return False
        pairs = zip(self.pieces(self.shape[0]), other.pieces(self.shape[0]), strict=True)
        return all(np.array_equal(mine, theirs) for (_, mine), (_, theirs) in pairs)
