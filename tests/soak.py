"""Faults at random, under load: a real engine, vLLM or SGLang, with node, disk and pool.

    python tests/soak.py [--engine NAME] [--minutes N] [--seed N] [--json FILE]

Rounds of traffic, in which all of the cache's processes are killed and frozen and its disk is taken away, made read-only and damaged, then
a pause without faults in which what was stored is judged. The engine has no prefix cache of its own, or a small one, and computes in a way
that does not depend on batches (judge.EXACT), so that an answer is the same whether it was loaded or computed.

Counted, and each must be 0: wrong pages (stored prompt pages that are not bit for bit what the engine computes, or pages of answers too far
from it; see judge), wrong answers (not those of the undisturbed engine), stuck requests (none may take longer than STUCK_S), engine
restarts. The exit code is 0 only then. Everything lives in a folder that is removed, after a failure but for the logs, and all processes
are ended, however this ends.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mooncake_kv.common.node.paths import node_paths
from mooncake_kv.common.node.spawn import NodeUnavailable
from mooncake_kv.common.node.tool import NodeTool
from tests.conftest import RUN_VARIABLE, end, processes_of
from tests.engines.harness import EngineError, Result
from tests.engines.judge import MAX_ERROR, PageReader
from tests.engines.test_vllm_hits import random_ids
from tests.node.pool_peer import Master
from tests.soak_engines import ENGINES, VLLM

PROMPTS = 30
TOKENS = 8
ROUND_S = 25.0
STUCK_S = 20.0
# The longest back-off of a tier's breaker, and its start.
HEAL_S = 60.0
# A page has 132 KiB. Memory holds one round's pages, their references (46 MiB) and the engine's free slots. Pages come from all tiers
# because faults empty the memory and take the disk away.
SETTINGS: dict[str, Any] = {
    "dram_size": "128mb",
    "extent_size": "16mb",
    "ssd_size": "64mb",
    "global_segment_size": "128mb",
    "local_hostname": "127.0.0.1",
    "write_policy": "all",
    "metrics_port": -1,
    "idle_exit_s": 120,
}
Undo = Callable[[], object]


class Faults:
    """Plants one fault after another until stopped. `planted` counts those that hit something."""

    def __init__(self, seed: int, master: Master, disk: Path, can_remount: bool) -> None:
        self._random = random.Random(seed)
        self._master, self._disk, self._ssd = master, disk, disk / "ssd"
        self.planted: Counter[str] = Counter()
        self.errors: list[str] = []
        self._stop = threading.Event()
        self.kinds: dict[str, Callable[[], Undo | None]] = {
            "master killed": self._kill_master,
            "master frozen": lambda: self._freeze(self._master.process.pid),
            "disk removed": self._remove_disk,
            "files damaged": self._damage,
        }
        if can_remount:
            self.kinds["disk read-only"] = self._read_only
        for name, find in {
            "node": lambda: self._stats()["pid"],
            "helper": lambda: self._stats()["helper_pid"],
            "disk process": lambda: self._stats()["tiers"]["ssd"]["pid"],
            "pool process": lambda: self._stats()["tiers"]["pool"]["pid"],
            "keeper": self._keeper,
        }.items():
            self.kinds[f"{name} killed"] = lambda find=find: self._kill(find())
            self.kinds[f"{name} frozen"] = lambda find=find: self._freeze(find())

    def run(self) -> None:
        """On a thread of its own, until `stop`."""
        self._stop.clear()
        waiting: list[str] = []
        while not self._stop.wait(self._random.uniform(0.2, 1.5)):
            if not waiting:
                # Each kind as often as any other.
                waiting = self._random.sample(sorted(self.kinds), len(self.kinds))
            name = waiting.pop()
            try:
                undo = self.kinds[name]()
            except (NodeUnavailable, psutil.Error, OSError):
                continue  # what it was meant for is away, because of the one before
            if undo is None:
                continue
            self.planted[name] += 1
            try:
                self._stop.wait(self._random.choice((0.1, 0.5, 1.0, 3.0, 6.0)))
            finally:
                try:
                    undo()
                except Exception as error:
                    self.errors.append(f"{name} could not be undone: {error!r}")

    def stop(self) -> None:
        self._stop.set()

    def _stats(self) -> dict[str, Any]:
        with NodeTool(node_paths("default"), version="test", timeout_s=1) as tool:
            return tool.stats()

    def _keeper(self) -> int:
        children = psutil.Process(self._stats()["pid"]).children()
        return next((child.pid for child in children if "pool.keeper" in " ".join(child.cmdline())), 0)

    def _kill(self, pid: int) -> Undo | None:
        if not pid:
            return None
        os.kill(pid, signal.SIGKILL)
        return lambda: None

    def _freeze(self, pid: int) -> Undo | None:
        if not pid:
            return None
        process = psutil.Process(pid)
        process.suspend()

        def resume() -> None:
            with suppress(psutil.NoSuchProcess):
                process.resume()

        return resume

    def _kill_master(self) -> Undo:
        self._master.kill()
        return self._master.start

    def _read_only(self) -> Undo:
        remount(self._disk, "ro")
        return lambda: remount(self._disk, "rw")

    def _remove_disk(self) -> Undo | None:
        away = self._disk / "away"
        shutil.rmtree(away, ignore_errors=True)
        self._ssd.rename(away)

        def back() -> None:
            # Sometimes with what it held, sometimes without; a node may have made a new one meanwhile.
            if self._random.random() < 0.5 and not self._ssd.exists():
                away.rename(self._ssd)
            else:
                self._ssd.mkdir(mode=0o700, exist_ok=True)

        return back

    def _damage(self) -> Undo | None:
        files = [file for file in self._ssd.glob("*/*/*") if file.is_file()]
        for file in self._random.sample(files, min(20, len(files))):
            with suppress(OSError), file.open("r+b") as changed:
                size = file.stat().st_size
                if self._random.random() < 0.3:
                    changed.truncate(size // 2)
                else:
                    changed.seek(self._random.randrange(max(size - 4096, 1)))
                    changed.write(self._random.randbytes(64))
        return (lambda: None) if files else None


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True, timeout=10)


@contextmanager
def file_system(disk: Path) -> Iterator[bool]:
    """A folder of its own for the SSD tier; whether it is a file system that can be made read-only."""
    disk.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=512m,mode=0700", "none", str(disk)]
    mounted = os.geteuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=True, timeout=10)


class Soak:
    def __init__(self, engine: VLLM, faults: Faults, settings: dict[str, Any], deadline: float) -> None:
        self._engine, self._faults, self._settings, self._deadline = engine, faults, settings, deadline
        self._space = engine.namespace()
        self._engine_processes = {process.pid for process in engine.processes()}
        self._shared = [random_ids(640, 10 + i) for i in range(4)]
        self._right: dict[str, list[int]] = {}
        self.cold_s = 0.0
        self.found: dict[str, Any] = {
            "requests": 0,
            "requests_with_hits": 0,
            "pages_judged": 0,
            "pages_missing": 0,
            "wrong_pages": 0,
            "wrong_answers": 0,
            "stuck_requests": 0,
            "engine_restarts": 0,
            "slowest_ttft_s": 0.0,
            "worst_error": 0.0,
        }
        self.tokens: Counter[str] = Counter()

    def run(self, say: Callable[[str], object]) -> None:
        number = 0
        while number == 0 or time.monotonic() < self._deadline:
            say(f"round {number + 1}: the undisturbed answers")
            prompts = self._prompts(number)
            for name, ids in prompts:
                alone = self._engine.alone(ids, TOKENS)
                self._right[name] = alone.output
                self.cold_s = max(self.cold_s, alone.ttft_s or 0.0)
            say(f"round {number + 1}: traffic and faults")
            results = self._traffic(prompts, min(ROUND_S, max(10.0, self._deadline - time.monotonic())))
            say(f"round {number + 1}: judging {len(results)} answers and their pages")
            self._count(results)
            self._heal()
            self._judge(prompts, results)
            number += 1

    def _prompts(self, number: int) -> list[tuple[str, list[int]]]:
        """(name, token ids) each."""
        made = []
        for i in range(PROMPTS):
            tail = random_ids(40 + 37 * (i % 12), 1000 * number + 100 + i)
            made.append((f"n{number}-{i}", self._shared[i % len(self._shared)] + tail))
        return made

    def _traffic(self, prompts: Sequence[tuple[str, list[int]]], seconds: float) -> list[Result]:
        with ThreadPoolExecutor(1) as pool:
            planting = pool.submit(self._faults.run)
            try:
                return self._engine.traffic(prompts, TOKENS, seconds, 3 * STUCK_S)
            finally:
                self._faults.stop()
                planting.result(60)

    def _count(self, results: Sequence[Result]) -> None:
        found = self.found
        found["requests"] += len(results)
        found["requests_with_hits"] += sum(bool(r.cached) for r in results)
        found["stuck_requests"] += sum(r.finish is None or not r.token_times or r.token_times[-1] > STUCK_S for r in results)
        found["slowest_ttft_s"] = max([found["slowest_ttft_s"], *(round(r.ttft_s or STUCK_S, 3) for r in results)])
        found["wrong_answers"] += sum(r.output != self._right[r.id.partition("/")[0]] for r in results)
        now = {process.pid for process in self._engine.processes()}
        found["engine_restarts"] += not self._engine_processes <= now
        for name, value in self._engine.metrics().items():
            if "mooncake_kv_loaded_tokens_total" in name:
                tier = name.partition('tier="')[2].partition('"')[0]
                self.tokens[tier] = max(self.tokens[tier], int(value))

    def _heal(self) -> None:
        """Wait until all of the engine is back at a node whose tiers work."""
        deadline = time.monotonic() + HEAL_S
        why: object = ""
        while time.monotonic() < deadline:
            with suppress(NodeUnavailable), NodeTool(node_paths("default"), version="test") as tool:
                stats = tool.stats()
                why = {name: (tier.get("state"), tier.get("reason")) for name, tier in stats["tiers"].items()}, stats["clients"]
                up = all(tier.get("state", "up") == "up" for tier in stats["tiers"].values())
                if up and self._engine.at_work(stats):
                    return
            time.sleep(0.2)
        raise AssertionError(f"not all is well {HEAL_S:g} s after the last fault: {why}")

    def _judge(self, prompts: Sequence[tuple[str, list[int]]], results: Sequence[Result]) -> None:
        outputs = {r.id.partition("/")[0]: r.output for r in results}
        pairs = [(ids, outputs[name]) for name, ids in prompts if name in outputs]
        # Patient: this process shares the cores with the engine, and a late answer is no fault here.
        with PageReader(self._space, {**self._settings, "fetch_timeout_ms": 10000}) as reader:
            judged = self._engine.judge(reader, pairs)
        self.found["pages_judged"] += judged.pages
        self.found["pages_missing"] += judged.missing
        self.found["wrong_pages"] += judged.different + (judged.worst > MAX_ERROR)
        self.found["worst_error"] = max(self.found["worst_error"], judged.worst)


def soak(engine_name: str, minutes: float, seed: int, console: Console) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="mkv-soak-", dir="/tmp"))
    os.environ |= {"XDG_RUNTIME_DIR": str(folder), RUN_VARIABLE: str(folder)}
    report: dict[str, Any] = {"engine": engine_name, "seed": seed, "minutes": minutes}
    master: Master | None = None
    kept = False
    try:
        with file_system(folder / "disk") as can_remount:
            master = Master()
            settings = {**SETTINGS, "ssd_path": str(folder / "disk" / "ssd"), "master_server_address": master.address}
            began = time.monotonic()
            with ENGINES[engine_name](folder, settings) as engine:
                faults = Faults(seed, master, folder / "disk", can_remount)
                run = Soak(engine, faults, settings, time.monotonic() + 60 * minutes)
                try:
                    run._heal()
                    run.run(lambda text: console.print(f"{time.monotonic() - began:6.1f} s  {text}", highlight=False))
                except (EngineError, TimeoutError) as error:
                    what = "stuck_requests" if isinstance(error, TimeoutError) else "engine_restarts"
                    run.found[what] += 1
                    report["error"] = str(error)[:2000]
                except AssertionError:
                    report["error"] = traceback.format_exc()[-2000:]
                report |= run.found
                report |= {"plain_ttft_s": round(run.cold_s, 3), "loaded_tokens": dict(run.tokens)}
                report |= {
                    "faults": dict(sorted(faults.planted.items())),
                    "faults_never_planted": sorted(faults.kinds.keys() - faults.planted.keys()),
                }
                if faults.errors:
                    report["error"] = "; ".join(faults.errors)[:2000]
        kept = not passed(report)
    finally:
        if master is not None:
            master.process.send_signal(signal.SIGCONT)
            master.kill()
        end(processes_of(folder))
        shutil.rmtree(folder / "disk", ignore_errors=True)
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    if kept:
        report["logs"] = str(folder)
    return report


ZERO = ("wrong_pages", "wrong_answers", "stuck_requests", "engine_restarts")


def passed(report: dict[str, Any]) -> bool:
    judged = report.get("pages_judged", 0) and report.get("requests_with_hits", 0)
    return bool(judged) and not any(report[key] for key in ZERO) and "error" not in report


def main() -> int:
    parser = argparse.ArgumentParser(description="Random faults under load on a real engine.")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parsed = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    report = soak(parsed.engine, parsed.minutes, parsed.seed, console)
    table = Table(
        title=f"{parsed.engine}: faults at random for {parsed.minutes:g} minutes (seed {parsed.seed})",
        title_justify="left",
        show_header=False,
    )
    for key, value in report.items():
        text = ", ".join(f"{name} {count}" for name, count in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(key, text, style="bold red" if key in ZERO and value else "")
    console.print(table)
    if parsed.json:
        parsed.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if passed(report) else 1


if __name__ == "__main__":
    sys.exit(main())
