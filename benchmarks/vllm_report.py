"""What vllm_ttft.py makes of its samples: medians, limits, tables, JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

# 97.5 % quantiles of Student's t by degrees of freedom.
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
MIN_SAMPLES = 5
MIN_PAIRS = 3


@dataclass(frozen=True)
class Check:
    """One demanded line. `enough`: as many measurements as the demand asks for."""

    name: str
    value: float
    limit: float
    unit: str
    enough: bool
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.enough and self.value <= self.limit


class Report:
    """`samples`: vllm_ttft.Samples."""

    def __init__(self, samples: Any, prefix: int, lengths: Sequence[int]) -> None:
        self.samples = samples
        self.lengths = lengths
        self.loaded_bytes = 0
        if engine := samples.engine:
            item = 4 if engine["dtype"] == "float32" else 2
            self.loaded_bytes = prefix * engine["num_layers"] * engine["num_kv_heads"] * 2 * engine["head_dim"] * item
        self.cold_ratio = cold_ratio(samples.cold_log_ratios)
        self.checks = [*self._ttft(), *self._cold(), *self._fresh(), *self._queue()]

    def _ttft(self) -> list[Check]:
        checks: list[Check] = []
        if not self.samples.ttft:
            return checks
        rate, one = self._scatter(max(self.samples.scatter)), self._scatter(1)
        for tokens in self.lengths:
            of = {key: values for key, values in self.samples.ttft.items() if key[2] == tokens}
            middle = {(setup, case): statistics.median(values) for (setup, case, _), values in of.items()}
            enough = all(len(values) >= MIN_SAMPLES for values in of.values())
            warm, local = middle["ours", "warm"], middle["plain", "local"]
            allowed = self.loaded_bytes / rate * 1e3 + 4
            checks += [
                Check(f"{tokens}: warm / in-tree warm", warm / middle["in-tree", "warm"], 1.2, "", enough),
                Check(
                    f"{tokens}: warm / plain cold",
                    warm / middle["plain", "cold"],
                    1 / 15,
                    "",
                    enough,
                    f"the plain local hit alone {local / middle['plain', 'cold']:.3f}",
                ),
                Check(
                    f"{tokens}: warm - plain local hit",
                    (warm - local) * 1e3,
                    allowed,
                    "ms",
                    enough,
                    f"{self.loaded_bytes / 1e6:.1f} MB at {rate / 1e9:.1f} GB/s, + 4 ms; one thread alone {one / 1e9:.1f} GB/s",
                ),
            ]
            shares = self.samples.call_shares[tokens]
            checks.append(
                Check(
                    f"{tokens}: connector calls in cold TTFT",
                    statistics.median(shares) * 100,
                    2,
                    "%",
                    len(shares) >= MIN_SAMPLES,
                    f"largest {max(shares) * 100:.2f} %",
                )
            )
        return checks

    def _cold(self) -> list[Check]:
        pairs = len(self.samples.cold_log_ratios)
        if not pairs:
            return []
        ratio, low, high = self.cold_ratio
        note = f"{ratio:.4f}, 95 % interval {low:.4f} to {high:.4f} over {pairs} process pairs"
        return [Check("cold: ours / plain, upper bound", high, 1.06, "", pairs >= MIN_PAIRS, note)]

    def _fresh(self) -> list[Check]:
        checks = []
        for tokens in self.lengths:
            ours, theirs = (self.samples.fresh.get((setup, tokens), []) for setup in ("ours", "in-tree standalone"))
            if ours:
                ratio = statistics.median(ours) / statistics.median(theirs)
                checks.append(Check(f"{tokens}: fresh process, ours / in-tree standalone", ratio, 0.8, "", len(ours) >= MIN_SAMPLES))
        return checks

    def _queue(self) -> list[Check]:
        queue = self.samples.queue
        if not queue:
            return []
        ours, plain = queue["ours", "queue"], queue["plain", "queue"]
        ratio = statistics.median(a / b for a, b in zip(ours, plain, strict=True))
        return [Check("decode step with 200 requests pending, ours / plain", ratio, 1.3, "", len(ours) >= 3)]

    def _scatter(self, threads: int) -> float:
        return statistics.median(self.samples.scatter[threads])

    # ---- output ------------------------------------------------------------------------------------------------------------------

    def show(self, console: Console, machine: dict[str, Any], foreign: Sequence[float]) -> None:
        engine = self.samples.engine
        console.print(
            f"{machine['cpu']}, cores {machine['cores']} of {machine['cpus']}, vLLM {machine['vllm']}, Mooncake {machine['mooncake']}"
        )
        if engine:
            console.print(
                f"attention isa {engine['isa']}, {engine['dtype']}, block size {engine['block_size']}, "
                f"at most {engine['max_num_batched_tokens']} tokens a step"
            )
        if foreign:
            text = f"other processes used {statistics.median(foreign):.2f} CPUs (median) and up to {max(foreign):.2f} while ours were idle"
            console.print(text, style="yellow" if statistics.mean(foreign) > 0.1 else None)
        if self.samples.ttft or self.samples.fresh:
            console.print(self._ttft_table())
        if self.samples.calls:
            console.print(self._calls_table())
        if self.samples.gaps or self.samples.queue:
            console.print(self._steps_table())
        table = Table("demanded", "measured", "limit", "", title="Limits")
        for check in self.checks:
            verdict = "pass" if check.passed else "FAIL" if check.enough else "too few runs"
            style = None if check.passed else "bold red" if check.enough else "yellow"
            measured = f"{check.value:.3f} {check.unit}".strip()
            table.add_row(check.name, measured + (f" ({check.note})" if check.note else ""), f"{check.limit:.3f}", verdict, style=style)
        console.print(table)

    def _ttft_table(self) -> Table:
        table = Table(
            "setup", "case", *(f"{tokens} tokens" for tokens in self.lengths), title="TTFT in ms: median (smallest to largest, runs)"
        )
        rows: dict[tuple[str, str], dict[int, list[float]]] = {}
        for (setup, case, tokens), values in self.samples.ttft.items():
            rows.setdefault((case, setup), {})[tokens] = values
        for (setup, tokens), values in self.samples.fresh.items():
            rows.setdefault(("warm, fresh process", setup), {})[tokens] = values
        for (case, setup), by_length in sorted(rows.items(), key=lambda row: _place(*row[0])):
            table.add_row(setup, case, *(_spread(by_length.get(tokens, [])) for tokens in self.lengths))
        return table

    def _calls_table(self) -> Table:
        table = Table("call", "cold", "warm", title="Time inside our connector's calls, ms per request")
        counts = {case: sum(len(v) for k, v in self.samples.ttft.items() if k[:2] == ("ours", case)) for case in ("cold", "warm")}
        names = sorted({name.partition(" ")[2] for name in self.samples.calls})
        for name in names:
            table.add_row(name, *(f"{self.samples.calls.get(f'{case} {name}', 0) / counts[case] / 1e3:.3f}" for case in counts))
        if self.samples.loads["us"]:
            rate = self.samples.loads["bytes"] / self.samples.loads["us"] / 1e3
            table.caption = (
                f"loads, with check and page lookup: {rate:.1f} GB/s; the view alone {statistics.median(self.samples.scatter) / 1e9:.1f}"
            )
        return table

    def _steps_table(self) -> Table:
        table = Table(
            "setup", "case", "ms", title="A request that decodes: largest gap (a prompt of 3,007 tokens comes), step (200 requests wait)"
        )
        for what, samples in (("gap", self.samples.gaps), ("step", self.samples.queue)):
            for (setup, case), values in sorted(samples.items(), key=lambda item: _place(item[0][1], item[0][0])):
                table.add_row(setup, f"{what}, {case}", _spread(values))
        return table

    def as_json(self, machine: dict[str, Any], foreign: Sequence[float]) -> dict[str, Any]:
        """Times in seconds, rates in bytes per second."""
        samples, (ratio, low, high) = self.samples, self.cold_ratio
        return {
            "machine": machine | {"foreign_load": list(foreign)},
            "engine": samples.engine,
            "bytes_loaded": self.loaded_bytes,
            "scatter_bytes_per_s": {str(threads): rates for threads, rates in samples.scatter.items()},
            "ttft": [
                {"setup": setup, "case": case, "tokens": tokens, "median_s": statistics.median(values), "values_s": values}
                for (setup, case, tokens), values in samples.ttft.items()
            ]
            + [
                {"setup": setup, "case": "fresh", "tokens": tokens, "median_s": statistics.median(values), "values_s": values}
                for (setup, tokens), values in samples.fresh.items()
            ],
            "cold_ratio": {"ratio": _finite(ratio), "low": _finite(low), "high": _finite(high), "log_ratios": samples.cold_log_ratios},
            "connector_calls_us": dict(samples.calls),
            "connector_calls_share": {str(tokens): shares for tokens, shares in samples.call_shares.items()},
            "largest_gap": _by_setup(samples.gaps),
            "decode_step": _by_setup(samples.queue),
            "checks": [
                {**asdict(check), "value": _finite(check.value), "passed": check.passed, "ratio": _finite(check.value / check.limit)}
                for check in self.checks
            ],
        }


def cold_ratio(sessions: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Geometric mean and 95 % interval over the sessions' medians of log ratios. A session is one observation: runs of one process are not
    independent. Its median, because on a shared machine one run in ten takes twice as long as the others. Infinite bounds for fewer than
    two."""
    middles = [statistics.median(ratios) for ratios in sessions]
    if len(middles) < 2:
        return math.exp(middles[0]) if middles else math.nan, 0.0, math.inf
    centre = statistics.mean(middles)
    half = STUDENT[min(len(middles) - 1, len(STUDENT)) - 1] * statistics.stdev(middles) / math.sqrt(len(middles))
    return math.exp(centre), math.exp(centre - half), math.exp(centre + half)


def _place(case: str, setup: str) -> tuple[int, int]:
    """Order of the rows."""
    cases = ("alone", "empty", "queue", "cold", "local", "warm", "warm, fresh process")
    return cases.index(case), ("plain", "in-tree", "in-tree standalone", "ours").index(setup)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values) * 1e3:.1f} ({min(values) * 1e3:.1f}-{max(values) * 1e3:.1f}, {len(values)})"


def _by_setup(samples: dict[tuple[str, str], list[float]]) -> list[dict[str, Any]]:
    return [
        {"setup": setup, "case": case, "median_s": statistics.median(values), "values_s": values}
        for (setup, case), values in samples.items()
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
