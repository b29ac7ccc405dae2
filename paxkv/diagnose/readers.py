"""Reads request traces, line by line: CSV with a header, and JSON lines.

Among the latter are OpenAI's batch files, and the logs of paxkv's own engine.
"""

import csv
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from paxkv.diagnose.batch_files import batch_row, is_batch_line
from paxkv.diagnose.engine_log import EngineLog, is_engine_log
from paxkv.diagnose.rows import Columns, TraceBuilder, find_columns
from paxkv.diagnose.trace import Trace

_MAX_LINE = 64 * 2**20  # characters; a file without line ends must not fill the memory
_BATCH_COLUMNS = Columns("prompt_tokens", "output_tokens")


def read_trace(
    path: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    time_unit: str | None = None,
    max_requests: int | None = None,
) -> Trace:
    """Reads a trace from a file, which may be larger than memory.

    Args:
        path: CSV with a header, or one JSON object per line.
        columns: What the columns `prompt`, `output`, `arrival` and `prefix` are called, where it
            is not as in the public traces of Azure, Mooncake, BurstGPT or ShareGPT lengths.
        time_unit: "s", "ms", "us" or "ns"; None where dates, names or sizes of numbers tell.
        max_requests: Reading ends after so many.

    Raises:
        ValueError: There is no such file or no request in it, or a line is wrong: the message
            says which and why.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file: name a trace (CSV or JSON lines)")
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        start = file.read(4096).lstrip()
        file.seek(0)
        if not start:
            raise ValueError(f"{path} is empty: a trace has a header and a line per request")
        if "\0" in start:
            raise ValueError(f"{path} is not text in UTF-8: name a trace (CSV or JSON lines)")
        if start.startswith("["):
            raise ValueError(
                f"{path} is one JSON array: write one object per line, as `jq -c .[]` does"
            )
        rows = _json_rows if start.startswith("{") else _csv_rows
        notes: list[str] = []
        found = rows(path, file, columns or {}, notes)
        return _build(path, found, notes, time_unit, max_requests)


def _build(
    path: Path,
    rows: Iterator[tuple[int, Mapping[str, Any] | None, Columns]],
    notes: list[str],
    time_unit: str | None,
    max_requests: int | None,
) -> Trace:
    builder, num_failed = None, 0
    for line, row, columns in rows:
        if builder is None:
            builder = TraceBuilder(time_unit or columns.time_unit)
            if columns is _BATCH_COLUMNS:
                notes.append("prompts without a usage are counted as 4 bytes a token")
        if max_requests is not None and len(builder) == max_requests:
            notes.append(f"the first {max_requests:,} requests of {path.name}")
            break
        if row is None:
            num_failed += 1
            continue
        try:
            builder.add(row, columns)
        except ValueError as error:
            raise ValueError(f"{path}, line {line}: {error}") from None
    if num_failed:
        notes.append(f"{num_failed:,} requests of the batch failed and are left out")
    if not builder:
        raise ValueError(f"{path} has no requests: a trace has a line for each, below a header")
    return builder.build(path.name, notes)


def _lines(path: Path, file: IO[str]) -> Iterator[str]:
    for number in itertools.count(1):
        text = file.readline(_MAX_LINE)
        if len(text) == _MAX_LINE:
            raise ValueError(f"{path}, line {number}: longer than {_MAX_LINE} characters")
        if not text:
            return
        yield text


def _csv_rows(
    path: Path, file: IO[str], named: Mapping[str, str], notes: list[str]
) -> Iterator[tuple[int, dict[str, str], Columns]]:
    reader = csv.reader(_lines(path, file))
    try:
        header = [name.strip() for name in next(reader)]
        columns = _found(path, header, named)
        for values in reader:
            if not values:
                continue
            if len(values) < len(header):
                raise ValueError(
                    f"{path}, line {reader.line_num}: {len(values)} of {len(header)} columns"
                )
            yield reader.line_num, dict(zip(header, values, strict=False)), columns
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from error


def _json_rows(
    path: Path, file: IO[str], named: Mapping[str, str], notes: list[str]
) -> Iterator[tuple[int, Mapping[str, Any] | None, Columns]]:
    """Rows by line; None for a request that failed. In the end `notes` say what a log measured."""
    columns, log = None, None
    for number, text in enumerate(_lines(path, file), 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
            if not isinstance(row, dict):
                raise ValueError(f"{type(row).__name__} where an object is needed")
            if number == 1 and is_engine_log(row):
                log = EngineLog(row)
                continue
            if log is not None and not log.take(row):
                continue
            if columns is None:
                columns = _BATCH_COLUMNS if is_batch_line(row) else _found(path, row, named)
                columns = _of_log(columns, log) if log else columns
            yield number, batch_row(row) if columns is _BATCH_COLUMNS else row, columns
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if str(error).startswith(str(path)):
                raise
            raise ValueError(f"{path}, line {number}: {error}") from None
    if log is not None and log.num_steps:
        notes.append(log.note())


def _of_log(columns: Columns, log: EngineLog) -> Columns:
    """Requests stand in the order in which they ended; their ids tell in which they came."""
    return dataclasses.replace(columns, order="id", block_tokens=log.page_size)


def _found(path: Path, present: list[str] | dict[str, Any], named: Mapping[str, str]) -> Columns:
    try:
        return find_columns(present, named)
    except ValueError as error:
        raise ValueError(
            f"{path}, line 1: {error}. It has {', '.join(map(str, present))}. Say which is which, "
            "such as --columns prompt=NAME,output=NAME,arrival=NAME"
        ) from None
