"""The setups that vllm_ttft.py compares: vLLM alone, with its in-tree MooncakeStoreConnector, and with mooncake-kv.

Promises: all engines get the same arguments, cores and KV space, and vLLM without our plugin unless they use it; every process is started
in a session of its own, so that Ctrl-C reaches only the benchmark, and is ended by its pid when its context is left, however it is left.
What survives a SIGKILL of the benchmark ends by itself: engines when their pipe closes, nodes when idle, Mooncake's with their parent.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.engines.harness import Engine, Result, free_port, transfer_config

PLAIN, IN_TREE, STANDALONE, OURS = "plain", "in-tree", "in-tree standalone", "ours"
STORE_BYTES = 2 << 30  # for everybody: segment in the engine's process, standalone segment, the node's DRAM
CORES = "0-1"
# A node that lost its benchmark leaves after this; longer than the longest time without an engine.
NODE_IDLE_EXIT_S = 600
STOP_S = 10.0
IDLE_DEADLINE_S = 20.0
IDLE_SAMPLE_S = 0.1
# A CPU-second share of all our processes together below which they count as idle: one 10 ms tick of the kernel's accounting.
IDLE_SHARE = 0.11
# Mooncake's TCP transport takes 1,024 fragments a peer by default and refuses the rest; 2,944 tokens of SmolLM2 are 2,760 (a layer of a
# block each), so that without this a standalone store loses a quarter of the pages and a load ends the request with an error.
TRANSPORT = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "120000",
}


class Setups:
    """`folder`: short, private, becomes XDG_RUNTIME_DIR of everything; logs lie in it."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.foreign_load: list[float] = []  # CPUs used by others, whenever ours were idle
        self._engines: list[Engine] = []
        self._others: list[psutil.Process] = []
        self._count = 0
        for name in [name for name in os.environ if name.startswith("MOONCAKE_")]:
            del os.environ[name]  # would configure ours and the in-tree connector alike
        os.environ["XDG_RUNTIME_DIR"] = str(folder)

    # ---- engines -----------------------------------------------------------------------------------------------------------------

    @contextmanager
    def plain(self, **engine_arguments: Any) -> Iterator[Engine]:
        with self._engine(PLAIN, {}, **engine_arguments) as engine:
            yield engine

    @contextmanager
    def in_tree(self, master: str, *, standalone: bool = False) -> Iterator[Engine]:
        """`standalone`: the engine has no segment of its own, its pages go to the store client of the same master."""
        self._count += 1
        config = {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": master,
            "protocol": "tcp",
            "mode": "standalone-store" if standalone else "embedded",
            "global_segment_size": 0 if standalone else STORE_BYTES,
            "local_buffer_size": "512MB",
        }
        file = self.folder / f"in-tree-{self._count}.json"
        file.write_text(json.dumps(config))
        environment = {"MOONCAKE_CONFIG_PATH": str(file), "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1", **TRANSPORT}
        # Two engines on one machine would otherwise take each other's lookup socket.
        transfer = transfer_config({"lookup_rpc_port": free_port()}, "MooncakeStoreConnector")
        name = STANDALONE if standalone else IN_TREE
        with self._engine(name, environment, kv_transfer_config=transfer) as engine:
            yield engine

    @contextmanager
    def ours(self, node: str, settings: dict[str, Any] | None = None, **engine_arguments: Any) -> Iterator[Engine]:
        """With the node of that name, which lives on when the engine ends."""
        settings = {"node": node, "dram_size": STORE_BYTES, "idle_exit_s": NODE_IDLE_EXIT_S, **(settings or {})}
        environment = {"VLLM_PLUGINS": "mooncake_kv"}
        with self._engine(OURS, environment, settings=settings, **engine_arguments) as engine:
            yield engine

    @contextmanager
    def _engine(self, name: str, environment: dict[str, str], **arguments: Any) -> Iterator[Engine]:
        self._count += 1
        log = self.folder / f"{self._count}-{name.replace(' ', '-')}.log"
        environment = {"VLLM_PLUGINS": "none", "VLLM_CPU_OMP_THREADS_BIND": CORES, **environment}
        with Engine(self.model, log, environment=environment, **arguments) as engine:
            self._engines.append(engine)
            try:
                yield engine
            finally:
                self._engines.remove(engine)

    # ---- Mooncake's own processes ------------------------------------------------------------------------------------------------

    @contextmanager
    def master(self) -> Iterator[str]:
        """A mooncake_master on loopback; gives its host:port."""
        port = free_port()
        command = ["mooncake_master", f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={free_port()}"]
        with self._background(command, port):
            yield f"127.0.0.1:{port}"

    @contextmanager
    def store_client(self, master: str) -> Iterator[None]:
        """A standalone mooncake_client that holds the segment."""
        port = free_port()
        command = [
            "mooncake_client",
            "--host=127.0.0.1",
            f"--port={port}",
            f"--master_server_address={master}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            f"--global_segment_size={STORE_BYTES >> 20} MB",
        ]
        with self._background(command, port):
            yield

    @contextmanager
    def _background(self, command: Sequence[str], port: int) -> Iterator[None]:
        program = shutil.which(command[0], path=os.pathsep.join(_script_folders()))
        if program is None:
            raise FileNotFoundError(f"{command[0]} is not installed: it comes with the mooncake-transfer-engine wheels")
        with_parent = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        log = self.folder / f"{command[0]}-{port}.log"
        with log.open("wb") as out:
            child = subprocess.Popen(
                [*with_parent, program, *command[1:]],
                env={**os.environ, **TRANSPORT},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        process = psutil.Process(child.pid)
        self._others.append(process)
        try:
            deadline = time.monotonic() + 30
            while not _accepts(port):
                if child.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{command[0]} does not accept connections\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.05)
            yield
        finally:
            self._others.remove(process)
            _end([process])
            child.wait(STOP_S)

    # ---- order -------------------------------------------------------------------------------------------------------------------

    def nodes(self) -> list[psutil.Process]:
        """Our nodes that run below `folder`."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if "mooncake_kv.common.node" in (words := process.cmdline()) and any(word.startswith(str(self.folder)) for word in words):
                    found.append(process)
        return found

    def end_nodes(self) -> None:
        _end(self.nodes())

    def settle(self, engine: Engine) -> None:
        """Before and after each measurement: a request of 8 tokens, so that reports of earlier steps are in and every engine is equally
        awake, then until all our processes are idle (saves, checksums and OpenMP's spinning threads have ended)."""
        engine.generate(range(1000, 1008), 2)
        self.wait_idle()

    def wait_idle(self) -> None:
        processes = [*self._others, *self.nodes()]
        for engine in self._engines:
            processes += engine.processes()
        deadline = time.monotonic() + IDLE_DEADLINE_S
        while time.monotonic() < deadline:
            ours, everybody, begin = _cpu_s(processes), sum(_busy()), time.monotonic()
            time.sleep(IDLE_SAMPLE_S)
            ours, everybody, passed = _cpu_s(processes) - ours, sum(_busy()) - everybody, time.monotonic() - begin
            if ours <= IDLE_SHARE * passed:
                self.foreign_load.append(max(0.0, everybody - ours) / passed)
                return
        raise TimeoutError(f"the benchmark's idle engines and nodes used more than {IDLE_SHARE} CPUs for {IDLE_DEADLINE_S} s")


def reused(engine: Engine, result: Result, expected: int, what: str) -> float:
    """The request's TTFT in seconds, if it reused exactly that many tokens."""
    if result.cached == expected and result.ttft_s is not None:
        return result.ttft_s
    counts = [f"{name.partition('mooncake_kv_')[2]} {value:.0f}" for name, value in engine.metrics().items() if _explains(name) and value]
    why = f" ({', '.join(counts)})" if counts else ""
    raise RuntimeError(f"{what}: {result.cached} tokens were reused instead of {expected}, so its time means nothing{why}")


def _explains(metric: str) -> bool:
    return metric.startswith(tuple(f"vllm:mooncake_kv_{name}_total" for name in ("no_load", "pages", "failures")))


def pause(processes: Sequence[psutil.Process], stop: bool) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP if stop else signal.SIGCONT)


def _busy() -> tuple[float, ...]:
    times = psutil.cpu_times()
    return times.user, times.nice, times.system


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _end(processes: Sequence[psutil.Process]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
                process.send_signal(sign)
        _, processes = psutil.wait_procs(processes, timeout=STOP_S)


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _script_folders() -> list[str]:
    """Where this interpreter's packages have put their commands."""
    sites = [Path(entry) for entry in sys.path if entry.endswith("site-packages")]
    return [str(Path(sys.executable).parent), *(str(site.parents[2] / "bin") for site in sites)]
