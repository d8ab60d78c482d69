"""How long the engine's threads spend inside a connector's calls.

Promises: recording costs below a microsecond and keeps constant memory; percentiles come from buckets a quarter of a power of two wide.
"""

from __future__ import annotations

import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

BUCKETS_PER_OCTAVE = 4


class CallTimes:
    """Per call name: how often, microseconds in all, and a count per bucket of microseconds."""

    def __init__(self) -> None:
        self._calls: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._sums: dict[str, float] = defaultdict(float)

    def record(self, name: str, microseconds: float) -> None:
        bucket = int(BUCKETS_PER_OCTAVE * math.log2(microseconds)) if microseconds > 1 else 0
        self._calls[name][bucket] += 1
        self._sums[name] += microseconds

    def take(self) -> dict[str, float]:
        """Flat numbers that add up over intervals and ranks, `call_us/NAME` and `call_bucket/NAME/BUCKET`; starts a new interval."""
        taken: dict[str, float] = {f"call_us/{name}": total for name, total in self._sums.items()}
        for name, buckets in self._calls.items():
            taken.update({f"call_bucket/{name}/{bucket}": count for bucket, count in buckets.items()})
        self._calls.clear()
        self._sums.clear()
        return taken


def bucket_limit_us(bucket: int) -> float:
    """Upper limit of a bucket in microseconds."""
    return float(2 ** ((bucket + 1) / BUCKETS_PER_OCTAVE))


def percentile_us(numbers: dict[str, float], name: str, share: float) -> float:
    """Upper limit of the bucket in which `share` of the calls of `name` lie, from summed `take()` numbers; 0.0 without a call."""
    prefix = f"call_bucket/{name}/"
    buckets = sorted((int(key.removeprefix(prefix)), count) for key, count in numbers.items() if key.startswith(prefix))
    left = share * sum(count for _, count in buckets)
    for bucket, count in buckets:
        left -= count
        if left <= 0:
            return bucket_limit_us(bucket)
    return 0.0


def timed(method: F) -> F:
    """Record each call of a method in its object's `call_times`."""
    name = method.__name__

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter_ns()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.call_times.record(name, (time.perf_counter_ns() - begin) / 1000)

    return wrapper  # type: ignore[return-value]
