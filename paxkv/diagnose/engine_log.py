"""What an engine's own log says (see `paxkv.memory_trace`), summed up as it comes."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from paxkv.diagnose.simulate import THRASHING
from paxkv.memory_trace import FORMAT, KINDS, VERSION

_RECENT = 600  # steps that a view of the last ones goes back


def is_engine_log(row: Mapping[str, Any]) -> bool:
    """Whether a JSON object is the first line of such a log."""
    return FORMAT in row


@dataclasses.dataclass(slots=True)
class EngineLog:
    """The sums over a log's lines.

    Args:
        header: Its first line.

    Raises:
        ValueError: It is of another version.
    """

    header: Mapping[str, Any]
    num_steps: int = 0
    num_requests: int = 0  # that have ended
    output_tokens: int = 0
    running: int = 0  # requests in the last step
    waiting: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    seconds: float = 0.0
    is_closed: bool = False
    now: dict[str, float] = dataclasses.field(default_factory=dict)  # percent, the last step's
    peak_used: float = 0.0  # percent
    recent: collections.deque[float] = dataclasses.field(  # percent used, step by step
        default_factory=lambda: collections.deque(maxlen=_RECENT)
    )
    _sums: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))

    def __post_init__(self) -> None:
        if self.header[FORMAT] != VERSION:
            raise ValueError(
                f"the log is of version {self.header[FORMAT]!r}, and this paxkv reads {VERSION}: "
                "use the paxkv that wrote it"
            )
        try:
            is_sized = self.pool_bytes > 0
        except (KeyError, TypeError):
            is_sized = False
        if not is_sized:
            raise ValueError("its first line describes no pool: is it whole?")

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.header["page_size"]

    @property
    def pool_bytes(self) -> int:
        """Of all pages that can be handed out, in all layer groups."""
        groups = self.header["groups"]
        return self.page_size * sum(g["num_pages"] * g["bytes_per_token"] for g in groups)

    @property
    def mean(self) -> dict[str, float]:
        """Percent of the pool by kind, over all steps."""
        return {kind: total / max(self.num_steps, 1) for kind, total in self._sums.items()}

    @property
    def recomputed_share(self) -> float:
        """Tokens computed again, per new token."""
        return self.recomputed_tokens / max(self.output_tokens, 1)

    @property
    def is_thrashing(self) -> bool:
        """Whether much of the work is lost to preemption."""
        return self.recomputed_share > THRASHING

    def take(self, row: Mapping[str, Any]) -> bool:
        """Adds a line; whether it is a request's.

        Raises:
            ValueError: It is not as such a log has it.
        """
        try:
            if "running" in row:
                self._take_steps(row)
            elif "output_tokens" in row:
                self.num_requests += 1
                return True
            elif "closed" in row:
                self.is_closed, self.running, self.waiting = True, 0, 0
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"not a line of an engine's log: {error!r}") from None
        return False

    def note(self) -> str:
        """What was measured, in a sentence."""
        mean = self.mean
        shares = ", ".join(f"{mean[kind]:.1f} % {kind}" for kind in KINDS)
        return (
            f"measured by the engine over {self.num_steps:,} steps: {shares} of its pool; "
            f"{self.preemptions:,} preemptions, {self.recomputed_tokens:,} tokens redone"
        )

    def _take_steps(self, row: Mapping[str, Any]) -> None:
        series = {kind: self._percents(row["groups"], kind) for kind in KINDS}
        for kind, percents in series.items():
            self._sums[kind] += sum(percents)
        self.now = {kind: percents[-1] for kind, percents in series.items()}
        self.recent.extend(series["used"])
        self.peak_used = max(self.peak_used, *series["used"])
        self.num_steps += len(row["running"])
        self.output_tokens += sum(row["running"])
        self.running, self.waiting = row["running"][-1], row["waiting"]
        self.preemptions, self.recomputed_tokens = row["preemptions"], row["recomputed_tokens"]
        self.seconds = row["end_seconds"]

    def _percents(self, groups: list[Mapping[str, list[int]]], kind: str) -> list[float]:
        """Of the pool's bytes, step by step: layer groups differ in bytes per token."""
        sizes = [group["bytes_per_token"] for group in self.header["groups"]]
        steps = zip(*(group[kind] for group in groups), strict=True)
        return [
            100 * sum(tokens * size for tokens, size in zip(step, sizes, strict=True))
            / self.pool_bytes
            for step in steps
        ]  # fmt: skip
