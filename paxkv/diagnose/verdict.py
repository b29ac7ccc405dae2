"""Whether memory is the problem, and which waste hurts.

Fragmentation dominates when the weights fit, many requests are wanted at once and the KV budget
limits them. Where one of the three is not so, the cache is the wrong place to look.
"""

import dataclasses
from typing import Literal

from paxkv.diagnose.simulate import Simulation

type Kind = Literal["fragmentation", "capacity", "concurrency", "far from full", "idle"]

_BLOCKED = 0.01  # part of the steps in which a request waits for memory: less is none
_FEW = 8  # requests at once
_IDLE = 0.1  # requests at once, below which most steps have nothing to run
_WORTH_IT = 1.25  # times as many requests, from which on pages are the answer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The finding, in a word and in a sentence or two."""

    kind: Kind
    sentence: str

    @property
    def is_about_memory(self) -> bool:
        """Whether to look at the cache, and not at the model."""
        return self.kind in ("fragmentation", "capacity")


def judge(
    rows: Simulation | None, pages: Simulation, *, page_size: int, max_length: int
) -> Verdict:
    """Compares a cache of full-length rows with one of pages, on the same requests.

    Args:
        rows: A contiguous chunk of `max_length` for each request; None if not one fits.
        pages: The paged cache.
        page_size: Tokens per page.
        max_length: Tokens of one request at most.
    """
    is_blocked = rows is None or rows.blocked_share > _BLOCKED
    gain = pages.mean_running / rows.mean_running if rows else float("inf")
    is_wanted = gain >= _WORTH_IT and (rows is not None or pages.mean_running >= _FEW)
    if not is_blocked or (not is_wanted and pages.blocked_share <= _BLOCKED):
        return _not_the_memory(rows, pages, page_size=page_size, max_length=max_length)
    if gain < _WORTH_IT:
        return Verdict(
            kind="capacity",
            sentence=(
                f"The KV memory is too small, but not fragmented: {_percent(pages)} of it holds "
                f"tokens in pages{_redone(pages)}, and they run {gain:.2f} times as many requests "
                f"as rows of {max_length:,} tokens do. Make tokens smaller, share prompts, or add "
                "memory." + (_thrash(pages) if pages.is_thrashing else "")
            ),
        )
    return Verdict(kind="fragmentation", sentence=_fragmented(rows, pages, page_size, max_length))


def _fragmented(rows: Simulation | None, pages: Simulation, page_size: int, max_length: int) -> str:
    after = (
        f"pages of {page_size} run {pages.mean_running:.1f} with {_percent(pages)} holding tokens"
        f"{_redone(pages)}"
    )
    if rows is None:
        return (
            f"Fragmentation dominates: not one row of {max_length:,} tokens fits in the KV memory; "
            f"{after}."
        )
    gain = pages.mean_running / rows.mean_running
    return (
        f"Fragmentation dominates: rows of {max_length:,} tokens run {rows.mean_running:.1f} "
        f"requests at once and {_percent(rows)} of the KV memory holds tokens; {after}, "
        f"{gain:.1f} times as many requests."
        + (_thrash(pages) if pages.is_thrashing else "")
    )  # fmt: skip


def _redone(pages: Simulation) -> str:
    """The price of running so many."""
    if not pages.num_preemptions:
        return ""
    return f" ({pages.num_preemptions:,} preemptions, {100 * pages.recomputed_share:.0f} % redone)"


def _thrash(pages: Simulation) -> str:
    return (
        f" But they thrash: {pages.num_preemptions:,} preemptions and "
        f"{pages.recomputed_share:.2f} tokens computed again per new one. Run fewer at once."
    )


def _not_the_memory(
    rows: Simulation | None, pages: Simulation, *, page_size: int, max_length: int
) -> Verdict:
    begin, waits = "Memory is", "no request waits for it, even with full-length rows"
    if rows is None or rows.blocked_share > _BLOCKED:
        begin = "With pages, memory is"
    if rows is None:
        waits = (
            f"none waits with pages of {page_size}, although not one row of {max_length:,} tokens "
            "fits"
        )
    elif rows.blocked_share > _BLOCKED:
        waits = (
            f"with full-length rows one waits for it in {100 * rows.blocked_share:.0f} % of the "
            f"steps, with pages of {page_size} hardly ever"
        )
    if pages.mean_running < _IDLE:
        return Verdict(
            kind="idle",
            sentence=(
                f"Too little runs to judge the memory by: {pages.mean_running:.2g} requests at "
                f"once on average, and {waits}. Diagnose a busier stretch of the trace."
            ),
        )
    if pages.mean_running < _FEW:
        return Verdict(
            kind="concurrency",
            sentence=(
                f"{begin} not the limit: {pages.mean_running:.1f} requests run at once, and "
                f"{waits}. Look at the model: a step reads all of its weights for few tokens."
            ),
        )
    return Verdict(
        kind="far from full",
        sentence=(
            f"{begin} not the limit: {waits}, and at most {pages.peak_used_percent:.0f} % of it "
            "ever holds tokens. Look at the model, or serve more requests at once."
        ),
    )


def _percent(simulation: Simulation) -> str:
    return f"{simulation.shares['used']:.0f} %"
