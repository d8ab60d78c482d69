"""One meaning for every spelling of a size: `512mb`, `1.5gb`, `4g`, `4GiB`, `4 GiB`, `4096`, 4096. Units are powers of 1024."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_SIZE = 1 << 60

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(?:i?b)?|b)?", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(value: object) -> int:
    """Bytes, rounded down. Raises ValueError saying what a size looks like for anything else: signs, booleans, empty strings,
    other units."""
    if isinstance(value, str) and len(value) <= 40 and (match := _SIZE.fullmatch(value.strip())):
        size = int(Fraction(match[1]) * 1024 ** _POWERS[(match[2] or "").lower()])
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, float) and value.is_integer():
        size = int(value)
    else:
        raise ValueError("a size is a number of bytes or a number with a unit, such as 4096, '512mb', '1.5gb' or '4GiB'")
    if not 0 <= size <= MAX_SIZE:
        raise ValueError("a size is at least 0 and at most 1 EiB")
    return size
