"""Numbers that JSON can write."""

import math
from typing import Any


def finite(value: Any) -> Any:
    """The same with None, JSON's null, for infinities and NaN: a log-probability may be one."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
