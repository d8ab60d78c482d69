"""A string that does not show itself.

Promises: `repr`, `str`, `format`, logging and error messages show `***`; msgspec and pickle refuse to encode it. The only way to the value
is `reveal()`, so that every use can be found by name.
"""

from __future__ import annotations

import hmac
from typing import NoReturn


class Secret:
    """Holds a secret string. False when empty; equality takes constant time."""

    __slots__ = ("_value",)

    def __init__(self, value: str = "") -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __bool__(self) -> bool:
        return bool(self._value)

    def __repr__(self) -> str:
        return "***" if self._value else "''"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._value.encode(), other._value.encode())

    def __hash__(self) -> int:
        return hash(self._value)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled")
