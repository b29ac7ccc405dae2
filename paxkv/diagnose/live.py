"""The log of a running engine, redrawn as it grows: `paxkv diagnose --live LOG`."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paxkv.diagnose.engine_log import EngineLog, is_engine_log
from paxkv.memory import format_bytes
from paxkv.memory_trace import KINDS

_POLL_SECONDS = 0.5
_BAR = 40  # characters
_LEVELS = " ▁▂▃▄▅▆▇█"
_NO_LOG = (
    "{} is no log of an engine: --live follows what `--memory-trace` writes; leave it out to "
    "diagnose a trace"
)
_MEANS = {
    "used": "holds tokens",
    "tail": "in pages, behind their tokens",
    "reusable": "kept for its prefix",
    "free": "free",
    "external": "free, but too little for who waits",
}


def watch(
    path: str, console: Console, *, sleep: Callable[[float], None] | None = None
) -> EngineLog:
    """Shows a log until the engine closes it.

    Args:
        path: The log.
        console: Where it is shown.
        sleep: Waits for more to be written; `time.sleep` when None.

    Returns:
        What it came to.

    Raises:
        ValueError: There is no such log, or a line is wrong; the message says which.
    """
    lines = _follow(path, sleep or time.sleep)
    log = _begin(path, lines)
    with Live(console=console, auto_refresh=False) as live:
        for number, row in lines:
            if row is not None:
                _take(log, row, path, number)
            if row is None or log.is_closed:  # all there is for now
                live.update(render(log), refresh=True)
            if log.is_closed:
                break
    return log


def render(log: EngineLog) -> Group:
    """The state of things in 80 columns."""
    state = "closed" if log.is_closed else "live"
    title = (
        f"{log.header.get('model') or 'engine'}, {state}: {format_bytes(log.pool_bytes)} of keys "
        f"and values, pages of {log.page_size}"
    )
    table = Table("of the pool, %", "now", "mean", "", box=None, padding=(0, 1, 0, 0))
    for column in table.columns[1:3]:
        column.justify = "right"
    mean = log.mean
    for kind in KINDS:
        now = log.now.get(kind, 0.0)
        table.add_row(kind, f"{now:.1f}", f"{mean[kind]:.1f}", _MEANS[kind])
    counts = (
        f"{log.running} running, {log.waiting} waiting, {log.num_requests:,} ended; "
        f"{log.num_steps:,} steps in {log.seconds:.0f} s; peak {log.peak_used:.1f} % used"
    )
    redone = (
        f"{log.preemptions:,} preemptions, {log.recomputed_tokens:,} tokens redone "
        f"({100 * log.recomputed_share:.0f} % of new ones)"
        + (": it thrashes" if log.is_thrashing else "")
    )
    return Group(
        Text(title, style="bold"), table, Text(f"used |{_sparkline(log)}|"), Text(counts),
        Text(redone, style="red" if log.is_thrashing else ""),
    )  # fmt: skip


def _sparkline(log: EngineLog) -> str:
    """Percent used in the last steps, oldest first: a full block is all of the pool."""
    recent = list(log.recent)
    size = max(-(-len(recent) // _BAR), 1)
    means = [sum(part) / len(part) for part in _parts(recent, size)]
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[min(round(top * mean / 100), top)] for mean in means).ljust(_BAR)


def _parts(values: list[float], size: int) -> Iterator[list[float]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _begin(path: str, lines: Iterator[tuple[int, dict[str, Any] | None]]) -> EngineLog:
    for _, row in lines:
        if row is None:
            continue  # nothing is written yet
        if not is_engine_log(row):
            break
        try:
            return EngineLog(row)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line 1: {error}") from None
    raise ValueError(_NO_LOG.format(path))


def _take(log: EngineLog, row: dict[str, Any], path: str, number: int) -> None:
    try:
        log.take(row)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}") from None


def _follow(
    path: str, sleep: Callable[[float], None]
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Its lines by number; None whenever there are no more for now."""
    if Path(path).is_dir():
        raise ValueError(_NO_LOG.format(path))
    if not Path(path).is_file():
        raise ValueError(f"there is no log {path}: start the engine with --memory-trace {path}")
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        number, text = 1, ""
        while True:
            text += file.readline()
            if not text.endswith("\n"):  # the end, perhaps in the middle of a line
                yield number, None
                sleep(_POLL_SECONDS)
                continue
            try:
                row = json.loads(text)
            except ValueError as error:
                what = _NO_LOG.format(path) if number == 1 else f"{path}, line {number}: {error}"
                raise ValueError(what) from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: an object is needed")
            yield number, row
            number, text = number + 1, ""
