"""Arrival times as traces write them: dates, or numbers in one of several units."""

import datetime

_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_NO_TIME = ("", "XXX", None)
_FIRST_EPOCH = 1e9  # as seconds, a day of 2001; no trace is that long


class Clock:
    """Turns a trace's timestamps into seconds, and notices when their kind changes.

    Args:
        unit: "s", "ms", "us" or "ns" for numbers. None goes by their size: numbers that would be
            dates since 1970 are taken for that, in the unit that fits, others for seconds.

    Raises:
        ValueError: There is no such unit.
    """

    def __init__(self, unit: str | None = None) -> None:
        if unit is not None and unit not in _PER_SECOND:
            raise ValueError(f"time unit {unit!r} is none of {', '.join(_PER_SECOND)}")
        self._unit = unit
        self._kind: str | None = None

    def seconds(self, stamp: str | float | None) -> float | None:
        """Seconds since some moment, the same one for all of a trace; None for no time at all.

        Raises:
            ValueError: It is no time, or one of another kind than those before.
        """
        seconds, kind = self._read(stamp)
        if self._kind is None:
            self._kind = kind
        if kind != self._kind:
            raise ValueError(f"timestamp {stamp!r} is {kind}, but those before are {self._kind}")
        return seconds

    def _read(self, stamp: str | float | None) -> tuple[float | None, str]:
        if stamp in _NO_TIME:
            return None, "missing"
        try:
            number = float(stamp)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return _date_seconds(str(stamp)), "a date"
        if not 0 <= number < float("inf"):
            raise ValueError(f"timestamp {stamp!r} must be 0 or more")
        unit = self._unit or _unit_by_size(number)
        kind = f"a number of {unit}" + (" since 1970" if number >= _FIRST_EPOCH else "")
        return number / _PER_SECOND[unit], kind if not self._unit else f"a number of {unit}"


def _unit_by_size(number: float) -> str:
    """1700000000 is a day of 2023 in seconds, 1700000000000 the same in milliseconds."""
    for unit, per_second in _PER_SECOND.items():
        if number < 100 * _FIRST_EPOCH * per_second:
            return unit
    raise ValueError(f"timestamp {number:.0f} is too large for a time in any unit down to ns")


def _date_seconds(text: str) -> float:
    try:
        date = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"timestamp {text!r} is neither a number nor a date such as 2023-11-16 18:17:03.97"
        ) from None
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.UTC)
    return date.timestamp()
