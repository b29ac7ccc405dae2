"""From one row of a trace, whatever its format, to numbers; and from many to a `Trace`."""

import array
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from paxkv.diagnose.timestamps import Clock
from paxkv.diagnose.trace import Prefixes, Trace

MAX_TOKENS = 100_000_000  # of a prompt or output; more is another unit or a mistake
MOONCAKE_BLOCK = 512  # tokens that one of its hash ids stands for

# Names of columns in public traces, by what they mean.
_NAMES = {
    "prompt": (
        "ContextTokens", "input_length", "prompt_tokens", "prompt_len", "prompt_length",
        "num_prompt_tokens", "input_tokens", "input_len", "Request tokens",
    ),
    "output": (
        "GeneratedTokens", "output_length", "output_tokens", "output_len", "completion_tokens",
        "num_output_tokens", "generated_tokens", "Response tokens",
    ),
    "arrival": (
        "TIMESTAMP", "timestamp", "Timestamp", "arrival_seconds", "arrival_ms", "arrival_time",
        "timestamp_ms",
    ),
    "prefix": ("hash_ids",),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """What the columns of a trace are called; None where it has no such one."""

    prompt: str
    output: str
    arrival: str | None = None
    prefix: str | None = None
    order: str | None = None  # a number that requests are sorted by first
    block_tokens: int = MOONCAKE_BLOCK  # that an id of `prefix` stands for

    @property
    def time_unit(self) -> str | None:
        """The unit of times, where the names tell: Mooncake's files have milliseconds."""
        is_mooncake = self.prefix is not None and self.arrival == "timestamp"
        is_ms = is_mooncake or (self.arrival or "").endswith("_ms")
        return "ms" if is_ms else None


def find_columns(present: Iterable[str], named: Mapping[str, str]) -> Columns:
    """Which column is which: as `named`, else by the names known from public traces.

    Raises:
        ValueError: A column is missing; the message lists those that are there.
    """
    present = list(present)
    if unknown := set(named) - set(_NAMES):
        raise ValueError(f"{sorted(unknown)[0]!r} is not one of {', '.join(_NAMES)}")
    found = {}
    for role, known in _NAMES.items():
        wanted = (named[role],) if role in named else known
        found[role] = next((name for name in wanted if name in present), None)
        if found[role] is None and (role in named or role in ("prompt", "output")):
            what = f"{wanted[0]!r} for {role}" if role in named else f"of {role} lengths"
            raise ValueError(f"no column {what}")
    return Columns(**found)


class TraceBuilder:
    """Collects rows in a few bytes each, so that a large file needs little memory."""

    def __init__(self, time_unit: str | None = None) -> None:
        self._clock = Clock(time_unit)
        self._prompts, self._outputs = array.array("q"), array.array("q")
        self._seconds = array.array("d")
        self._ids, self._starts = array.array("q"), array.array("q", [0])
        self._block_tokens = 0
        self._order = array.array("q")

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, row: Mapping[str, Any], columns: Columns) -> None:
        """Takes a row in.

        Raises:
            ValueError: A value is missing or cannot be; the message does not name the line.
        """
        prompt = _tokens(row, columns.prompt)
        output = _tokens(row, columns.output)
        if columns.arrival is not None:
            seconds = self._clock.seconds(row.get(columns.arrival))
            if seconds is not None:
                self._seconds.append(seconds)
        if columns.prefix is not None:
            self._block_tokens = columns.block_tokens
            self._ids.extend(_prefix_ids(row, columns.prefix, prompt, columns.block_tokens))
            self._starts.append(len(self._ids))
        if columns.order is not None:
            self._order.append(_tokens(row, columns.order))
        self._prompts.append(prompt)
        self._outputs.append(output)

    def build(self, name: str, notes: Iterable[str]) -> Trace:
        """The trace of what was taken in, in order of arrival."""
        trace = Trace(
            name=name,
            prompt_tokens=np.array(self._prompts, np.int64),
            output_tokens=np.array(self._outputs, np.int64),
            arrival_seconds=np.array(self._seconds) if self._seconds else None,
            prefixes=self._prefixes(),
            notes=tuple(notes),
        )
        if self._order:
            trace = trace.take(np.argsort(np.array(self._order), kind="stable"))
        seconds = trace.arrival_seconds
        if seconds is None:
            return trace
        if np.any(np.diff(seconds) < 0):
            trace = trace.take(np.argsort(seconds, kind="stable"), note="sorted by arrival")
            seconds = trace.arrival_seconds
        assert seconds is not None
        return dataclasses.replace(trace, arrival_seconds=seconds - seconds[0])

    def _prefixes(self) -> Prefixes | None:
        if len(self._starts) == 1:
            return None
        return Prefixes(
            block_tokens=self._block_tokens,
            ids=np.array(self._ids, np.int64),
            starts=np.array(self._starts, np.int64),
        )


def _tokens(row: Mapping[str, Any], name: str) -> int:
    """A count; "10.0" is one, as tables with gaps in them write whole numbers."""
    value: Any = row.get(name)
    try:
        number = float(value)
        tokens = int(number) if number.is_integer() else None
    except (ValueError, TypeError, OverflowError):
        tokens = None
    if tokens is None:
        raise ValueError(f"{name} is {value!r}; a whole number of tokens is needed")
    if tokens < 0:
        raise ValueError(f"{name} is {tokens}; a number of tokens is 0 or more")
    if tokens > MAX_TOKENS:
        raise ValueError(f"{name} is {tokens}, more than {MAX_TOKENS} tokens: is it in bytes?")
    return tokens


def _prefix_ids(row: Mapping[str, Any], name: str, prompt: int, block_tokens: int) -> list[int]:
    ids = row.get(name)
    if not isinstance(ids, list) or not all(type(i) is int and abs(i) < 2**63 for i in ids):
        raise ValueError(f"{name} is {str(ids)[:40]!r}; a list of whole numbers is needed")
    blocks = -(-prompt // block_tokens)
    if len(ids) not in (blocks, blocks - 1):
        raise ValueError(
            f"{name} has {len(ids)} ids; a prompt of {prompt} tokens has {blocks} blocks of "
            f"{block_tokens}"
        )
    return ids
