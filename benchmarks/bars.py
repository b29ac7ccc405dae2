"""What a benchmark is asked to show, and whether it did."""

import dataclasses
from collections.abc import Iterable
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.common import spread


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A ratio or share that is asked for, and what it was in each round."""

    what: str
    found: list[float]
    least: float | None = None
    most: float | None = None

    @property
    def is_reached(self) -> bool:
        middle = median(self.found)
        is_enough = self.least is None or middle >= self.least
        return is_enough and (self.most is None or middle <= self.most)

    def __str__(self) -> str:
        middle, lowest, highest = spread(self.found)
        limits = ("at least", self.least), ("at most", self.most)
        asked = " and ".join(f"{word} {limit:g}" for word, limit in limits if limit is not None)
        return (
            f"{'reached' if self.is_reached else 'missed'}: {self.what} {middle:.3g} "
            f"({lowest:.3g} to {highest:.3g}), asked {asked}"
        )


def tell_bars(bars: Iterable[Bar], console: Console) -> list[dict[str, Any]]:
    """Prints each bar with what came of it; returns them for the record."""
    bars = list(bars)
    for bar in bars:
        console.print(str(bar), highlight=False)
    return [dataclasses.asdict(bar) | {"is_reached": bar.is_reached} for bar in bars]
