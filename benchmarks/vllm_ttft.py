"""Time to the first token (TTFT) with mooncake-kv in vLLM, against vLLM alone and against its in-tree MooncakeStoreConnector.

    python benchmarks/vllm_ttft.py [--quick] [--json FILE] [--sessions N] [--repetitions N] [--only PART ...]

Real engines on the CPU with SmolLM2, one 1 GiB KV cache and the same two cores each; a real mooncake_master on loopback. Everybody's store
is 2 GiB: in the in-tree engine's process, in a standalone mooncake_client, or in our node. Every request is a prefix of 2,944 tokens (46
pages of 64, 92 blocks of 32) and a tail of its own of 63 or 20 tokens, so that exactly 2,944 tokens can be reused; vLLM's num_cached_tokens
is checked for each. All engines of a part live at once and take turns; before each measurement all processes are idle, and the order of the
engines changes from round to round. Token ids are random: they change no timing, and no prompt ever hits by accident.

Parts:
- `ttft`: sessions of fresh engine processes. In each, rounds of: a prompt that nobody has seen (cold), the same prefix again (local), and
  again after a reset of the engine's prefix cache (warm). The time inside our connector's calls (all of them, scheduler and worker, and
  those of the tiny request that collects the last reports) is compared with TTFT.
- `cold`: sessions of two fresh processes, plain and ours, that take turns with prompts nobody has seen. A session's value is the median
  of log(ours / plain) of neighbours; the interval is Student's t over the sessions.
- `fresh`: prefixes stored by one engine process, each read once by another, ours from the node, in-tree from a standalone store client.
- `gap`: a request decodes, and 3,007 tokens arrive: the largest time between two of its tokens until the newcomer has its first.
- `queue`: a request decodes while 200 others wait. With ours they wait for staging: the node is stopped (SIGSTOP) while they are added, and
  the time-out is two minutes, so each step of the scheduler asks our connector about all 200. Each has 1,920 tokens in vLLM's own prefix
  cache and 192 more, which is the case that hurts: vLLM matches those 1,920 tokens again whenever it asks. With plain vLLM the same
  requests wait because max_num_seqs is 1, so that it has nothing to do for them: the strictest comparison. vLLM's own gauge must say
  that 200 were waiting, and none may have got a token.

The scatter rate in the limit for warm is not our connector's own figure, which would excuse a slow connector: it is what the view alone
reaches in this process with the engine's layout, 46 pages into blocks in random order, on the cores the engine has (see core.py).
Repeated on the same pages, it finds them in the last-level cache where they fit; the connector finds them in memory.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import vllm_report
from benchmarks.vllm_setups import CORES, IN_TREE, OURS, PLAIN, STANDALONE, STORE_BYTES, Setups, pause, reused
from tests.engines.harness import Engine, Request
from tests.models import SMOLLM2

PAGE = 64
PREFIX = 2944
TAILS = (63, 20)
QUEUED, QUEUED_LOCAL, QUEUED_NEW = 200, 1920, 192
DECODER_TOKENS = 40  # less than a page: it asks the node for nothing
QUEUE_TIMEOUT_MS = 120_000
PARTS = ("ttft", "cold", "fresh", "gap", "queue")


@dataclass
class Size:
    """How much is measured."""

    sessions: int = 4
    rounds: int = 3
    cold_rounds: int = 16
    fresh_prefixes: int = 5
    gap_rounds: int = 5
    queue_rounds: int = 3


@dataclass
class Samples:
    """Raw measurements, in seconds. Keys of `ttft` and `fresh`: (setup, case, prompt tokens)."""

    ttft: dict[tuple[str, str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    cold_log_ratios: list[list[float]] = field(default_factory=list)  # of each session
    calls: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # of the cold requests, by name
    call_shares: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    fresh: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    gaps: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    queue: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    scatter: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # bytes per second, by threads
    loads: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    engine: dict[str, Any] = field(default_factory=dict)


class Benchmark:
    def __init__(self, setups: Setups, size: Size, step: Callable[[str], None]) -> None:
        self.setups = setups
        self.size = size
        self.step = step
        self.samples = Samples()
        self._random = random.Random(0)
        self._turn = 0

    def ids(self, count: int) -> list[int]:
        return [self._random.randrange(1000, 40000) for _ in range(count)]

    def order(self, engines: dict[str, Engine]) -> list[tuple[str, Engine]]:
        """Each call starts with another engine and turns the direction every time they have all been first."""
        names = list(engines)
        first, self._turn = self._turn % len(names), self._turn + 1
        names = names[first:] + names[:first]
        if self._turn // len(names) % 2:
            names.reverse()
        return [(name, engines[name]) for name in names]

    def warm_up(self, engine: Engine) -> None:
        """First use of the kernels, of the KV memory and of the connector's copies."""
        prefix = self.ids(PREFIX)
        for tail in TAILS:
            engine.generate(prefix + self.ids(tail), 1)
            self.setups.settle(engine)
            engine.reset_prefix_cache()
        self.setups.settle(engine)

    # ---- ttft --------------------------------------------------------------------------------------------------------------------

    def session(self, number: int) -> None:
        with ExitStack() as stack:
            engines = self._engines(stack, f"session{number}")
            for repetition in range(self.size.rounds):
                for tail in TAILS:
                    self.step(f"session {number + 1}, round {repetition + 1}, {PREFIX + tail} tokens")
                    self._round(engines, tail)
            self.setups.wait_idle()
            self._scatter()
        self.setups.end_nodes()

    def _engines(self, stack: ExitStack, node: str) -> dict[str, Engine]:
        master = stack.enter_context(self.setups.master())
        engines: dict[str, Engine] = {}
        for name, start in (
            (PLAIN, self.setups.plain()),
            (IN_TREE, self.setups.in_tree(master)),
            (OURS, self.setups.ours(node)),
        ):
            self.step(f"starting vLLM: {name}")
            engines[name] = stack.enter_context(start)
        for name, engine in engines.items():
            self.step(f"warming up: {name}")
            self.warm_up(engine)
        self.samples.engine = engines[PLAIN].call("benchmarks.vllm_inside:facts")
        return engines

    def _round(self, engines: dict[str, Engine], tail: int) -> None:
        """Cold, local and warm on each engine."""
        prefix, tokens = self.ids(PREFIX), PREFIX + tail
        for case in ("cold", "local", "warm"):
            prompt = prefix + self.ids(tail)
            for name, engine in self.order(engines):
                if case == "warm" and name == PLAIN:
                    continue
                if case != "local" and not engine.reset_prefix_cache():
                    raise RuntimeError(f"{name}: the prefix cache was not reset")
                self.setups.settle(engine)
                counting = name == OURS and case != "local"
                before = engine.metrics() if counting else {}
                result = engine.generate(prompt, 1)
                ttft = reused(engine, result, 0 if case == "cold" else PREFIX, f"{name}, {case}, {tokens} tokens")
                self.samples.ttft[name, case, tokens].append(ttft)
                if counting:
                    self.setups.settle(engine)
                    self._count(before, engine.metrics(), case, tokens, ttft)

    def _count(self, before: dict[str, float], after: dict[str, float], case: str, tokens: int, ttft: float) -> None:
        new = {name: value - before.get(name, 0.0) for name, value in after.items()}
        calls = {_label(n, "call"): v for n, v in new.items() if n.startswith("vllm:mooncake_kv_call_microseconds_total")}
        if case == "cold":
            self.samples.call_shares[tokens].append(sum(calls.values()) / 1e6 / ttft)
        for call, microseconds in calls.items():
            self.samples.calls[f"{case} {call}"] += microseconds
        for name, value in new.items():
            if case == "warm" and "mooncake_kv_copy_microseconds_total" in name and _label(name, "direction") == "in":
                self.samples.loads["us"] += value
            if case == "warm" and "mooncake_kv_bytes_total" in name and _label(name, "direction") == "in":
                self.samples.loads["bytes"] += value

    def _scatter(self) -> None:
        """Bytes per second by number of threads, see above."""
        import numpy as np
        import torch

        from benchmarks.core import pages_of, pin, seconds
        from mooncake_kv.common.identity import KVNamespace
        from mooncake_kv.common.kv_views import vllm_cpu
        from mooncake_kv.common.page import PageLayout

        engine = self.samples.engine
        layers, heads, dim, block = engine["num_layers"], engine["num_kv_heads"], engine["head_dim"], engine["block_size"]
        namespace = KVNamespace.build(
            model="benchmark", kv_dtype=engine["dtype"], num_layers=layers, num_kv_heads=heads, k_head_dim=dim, v_head_dim=dim
        )
        layout = PageLayout(namespace)
        pages = pages_of(layout, PREFIX // PAGE)
        # One tensor a layer, as vLLM allocates them; memory is used only where something is written.
        shape, dtype = (engine["num_blocks"], heads, block, 2 * dim), getattr(torch, engine["dtype"])
        view = vllm_cpu([torch.zeros(shape, dtype=dtype) for _ in range(layers)], block, engine["isa"])
        chosen = np.random.default_rng(0).permutation(PREFIX // block + 4)[: PREFIX // block]
        slots = (chosen[:, None] * block + np.arange(block)).ravel()
        size = PREFIX * namespace.page_bytes // PAGE
        allowed = os.sched_getaffinity(0)
        cores = sorted(allowed)[:2]
        try:
            for threads in sorted({1, len(cores)}):
                bound = view.bind(layout, 0, 0, threads=threads)
                bound.scatter(slots, 0, pages)
                pin(cores)
                self.samples.scatter[threads] += [size / seconds(partial(bound.scatter, slots, 0, pages)) for _ in range(9)]
                bound.close()
        finally:
            os.sched_setaffinity(0, allowed)

    # ---- cold --------------------------------------------------------------------------------------------------------------------

    def cold(self) -> None:
        for number in range(self.size.sessions):
            with ExitStack() as stack:
                engines: dict[str, Engine] = {}
                for name, start in ((PLAIN, self.setups.plain()), (OURS, self.setups.ours(f"cold{number}"))):
                    self.step(f"starting vLLM: {name}")
                    engines[name] = stack.enter_context(start)
                    self.warm_up(engines[name])
                ratios = []
                for repetition in range(self.size.cold_rounds):
                    self.step(f"cold, session {number + 1}, round {repetition + 1}")
                    prompt = self.ids(PREFIX + TAILS[repetition % len(TAILS)])
                    ttft = {}
                    for name, engine in self.order(engines):
                        self.setups.settle(engine)
                        ttft[name] = reused(engine, engine.generate(prompt, 1), 0, f"{name}, cold")
                    ratios.append(math.log(ttft[OURS] / ttft[PLAIN]))
                self.samples.cold_log_ratios.append(ratios)
            self.setups.end_nodes()

    # ---- fresh -------------------------------------------------------------------------------------------------------------------

    def fresh(self) -> None:
        prefixes = [(self.ids(PREFIX), tail) for tail in TAILS for _ in range(self.size.fresh_prefixes)]
        with ExitStack() as stack:
            master = stack.enter_context(self.setups.master())
            stack.enter_context(self.setups.store_client(master))
            starts = {STANDALONE: lambda: self.setups.in_tree(master, standalone=True), OURS: lambda: self.setups.ours("fresh")}
            for name, start in starts.items():
                self.step(f"starting vLLM: {name}, the writer")
                with start() as engine:
                    for number, (prefix, tail) in enumerate(prefixes):
                        self.step(f"{name}: storing prefix {number + 1} of {len(prefixes)}")
                        reused(engine, engine.generate(prefix + self.ids(tail), 1), 0, f"{name}, storing")
                    self.setups.settle(engine)
            engines: dict[str, Engine] = {}
            for name, start in starts.items():
                self.step(f"starting vLLM: {name}, the reader")
                engines[name] = stack.enter_context(start())
            for engine in engines.values():
                self.warm_up(engine)
            for prefix, tail in prefixes:
                self.step(f"reading in a fresh process, {PREFIX + tail} tokens")
                prompt = prefix + self.ids(tail)
                for name, engine in self.order(engines):
                    self.setups.settle(engine)
                    what = f"{name}, fresh process, {len(prompt)} tokens"
                    self.samples.fresh[name, len(prompt)].append(reused(engine, engine.generate(prompt, 1), PREFIX, what))
        self.setups.end_nodes()

    # ---- gap ---------------------------------------------------------------------------------------------------------------------

    def gap(self) -> None:
        with ExitStack() as stack:
            engines = self._engines(stack, "gap")
            for number in range(self.size.gap_rounds):
                self.step(f"gaps, round {number + 1}")
                prefix, decoder = self.ids(PREFIX), self.ids(DECODER_TOKENS)
                for case in ("alone", "cold", "local", "warm"):
                    for name, engine in self.order(engines):
                        if case == "warm" and name == PLAIN:
                            continue
                        if case in ("cold", "warm"):
                            engine.reset_prefix_cache()
                        self.setups.settle(engine)
                        newcomer = None if case == "alone" else prefix + self.ids(TAILS[0])
                        expected = 0 if case == "cold" else PREFIX
                        self.samples.gaps[name, case].append(self._largest_gap(engine, decoder, newcomer, expected, f"{name}, gap, {case}"))
        self.setups.end_nodes()

    def _largest_gap(self, engine: Engine, decoder: list[int], newcomer: list[int] | None, expected: int, what: str) -> float:
        requests = [Request(ids=decoder, sampling={"max_tokens": 100, "ignore_eos": True}, id="decoder")]
        if newcomer is not None:
            requests.append(Request(ids=newcomer, sampling={"max_tokens": 1}, id="newcomer", after="decoder", after_tokens=40))
        results = engine.run(requests)
        times = [results[0].added + passed for passed in results[0].token_times]
        begin, end = times[40], times[60]
        if newcomer is not None:
            begin, end = results[1].added, results[1].added + reused(engine, results[1], expected, what)
        last = next((i for i, at in enumerate(times) if at > end), len(times) - 1)
        return max(b - a for a, b in pairwise(times[: last + 1]) if b > begin)

    # ---- queue -------------------------------------------------------------------------------------------------------------------

    def queue(self) -> None:
        with ExitStack() as stack:
            self.step("starting vLLM: plain, one sequence at a time")
            plain = stack.enter_context(self.setups.plain(max_num_seqs=1))
            self.step("starting vLLM: ours")
            ours = stack.enter_context(self.setups.ours("queue", {"fetch_timeout_ms": QUEUE_TIMEOUT_MS}))
            engines = {PLAIN: plain, OURS: ours}
            nodes = self.setups.nodes()
            prefix, decoder = self.ids(QUEUED_LOCAL), self.ids(DECODER_TOKENS)
            for number in range(self.size.queue_rounds):
                tails = [self.ids(QUEUED_NEW) for _ in range(QUEUED)]
                for case in ("empty", "queue"):
                    for name, engine in self.order(engines):
                        self.step(f"decoding, round {number + 1}, {case}, {name}")
                        engine.generate(prefix + self.ids(1), 1)
                        self.setups.settle(engine)
                        with _stopped(nodes if name == OURS and case == "queue" else []):
                            step_s = self._step_s(engine, decoder, prefix, tails if case == "queue" else [], name)
                            self.samples.queue[name, case].append(step_s)
        self.setups.end_nodes()

    def _step_s(self, engine: Engine, decoder: list[int], prefix: list[int], tails: list[list[int]], name: str) -> float:
        """Median time between the decoder's tokens, once the queue has arrived."""
        after, arrived, tokens = 20, 50, 130
        what = "benchmarks.vllm_inside:decode_with_queue"
        found = engine.call(what, decoder=decoder, tokens=tokens, after=after, prefix=prefix, tails=tails)
        waiting = sum(found["waiting"].values())
        if found["answered"] or waiting != len(tails):
            raise RuntimeError(f"{name}: {waiting:.0f} of {len(tails)} requests waited, {found['answered']} tokens were given to them")
        return statistics.median(found["gaps"][arrived:])


@contextmanager
def _stopped(nodes: Sequence[Any]) -> Iterator[None]:
    pause(nodes, True)
    try:
        yield
    finally:
        pause(nodes, False)


def _label(sample: str, label: str) -> str:
    """Of `name{a="x",b="y"}`."""
    return sample.partition(f'{label}="')[2].partition('"')[0]


def _machine() -> dict[str, Any]:
    from importlib.metadata import version

    model = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    return {
        "cpu": model,
        "cpus": os.cpu_count(),
        "cores": CORES,
        "store_bytes": STORE_BYTES,
        "vllm": version("vllm"),
        "mooncake": version("mooncake-transfer-engine-non-cuda"),
    }


def run(setups: Setups, size: Size, parts: Sequence[str], console: Console) -> Samples:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        steps = {
            "ttft": size.sessions * (6 + size.rounds * len(TAILS)),
            "cold": size.sessions * (2 + size.cold_rounds),
            "fresh": 4 + size.fresh_prefixes * len(TAILS) * 3,
            "gap": 6 + size.gap_rounds,
            "queue": 2 + size.queue_rounds * 4,
        }
        task = progress.add_task("", total=sum(steps[part] for part in parts))

        def step(text: str) -> None:
            progress.update(task, description=text, advance=1)

        benchmark = Benchmark(setups, size, step)
        if "ttft" in parts:
            for number in range(size.sessions):
                benchmark.session(number)
        for part in parts:
            if part != "ttft":
                getattr(benchmark, part)()
        return benchmark.samples


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
    quick: Annotated[bool, typer.Option(help="A smoke test: one session, few repetitions.")] = False,
    sessions: Annotated[int, typer.Option(min=1, help="Fresh sets of engine processes for the TTFTs.")] = Size.sessions,
    repetitions: Annotated[int, typer.Option(min=1, help="Rounds in each of them.")] = Size.rounds,
    only: Annotated[list[str] | None, typer.Option(help=f"Measure only this part: {', '.join(PARTS)}.")] = None,
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = SMOLLM2,
) -> None:
    """Measure, print a table, and compare with the limits. Exit code 1 if one is missed and it was no smoke test."""
    if unknown := set(only or ()) - set(PARTS):
        raise typer.BadParameter(f"{', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    size = Size(1, 1, 2, 1, 1, 1) if quick else Size(sessions, repetitions)
    console = Console()
    if not console.is_terminal:
        console.width = 140  # a log file takes whole rows
    folder = Path(tempfile.mkdtemp(prefix="mkv-bench-", dir="/tmp"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    setups = Setups(model, folder)
    try:
        samples = run(setups, size, [part for part in PARTS if part in (only or PARTS)], console)
    except Exception:
        console.print(f"the logs are in {folder}", style="bold red")
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        setups.end_nodes()
    shutil.rmtree(folder, ignore_errors=True)
    report = vllm_report.Report(samples, PREFIX, [PREFIX + tail for tail in TAILS])
    report.show(console, _machine(), setups.foreign_load)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(_machine(), setups.foreign_load), indent=1) + "\n")
    if not quick and not all(check.passed for check in report.checks):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
