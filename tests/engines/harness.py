"""Real engines for tests: `Driven` (an engine in a child process), `Engine` (vLLM's LLM class) and `Server` (its OpenAI API on a loopback
port). SGLang's are in sglang_harness, LMDeploy's in lmdeploy_harness.

Promises: every wait has a deadline; when one passes, or the test ends, the engine's whole process group is ended. A node that the engine
started is not in that group: the fixture `runtime_dir` stops it. What the engine printed is in `log`, and its end is in every error.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import psutil

DRIVER = Path(__file__).with_name("vllm_driver.py")
START_TIMEOUT_S = 180.0
RUN_TIMEOUT_S = 120.0
# One OpenMP thread per rank, on any core. A team waits, spinning, for its slowest member: on a busy machine, or where the ranks' teams
# together outnumber the cores, that is many times slower.
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class EngineError(Exception):
    """A command failed in the engine's process; the message is its error."""


class Request(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request. `sampling` goes to SamplingParams (temperature is 0); see vllm_driver.Driver.run for the order of several."""

    ids: list[int]
    id: str = ""
    sampling: dict[str, Any] = {}
    cache_salt: str | None = None
    lora: dict[str, Any] | None = None
    after: str | None = None
    after_tokens: int = 1
    abort_after_tokens: int | None = None
    abort_after_steps: int | None = None


class Result(msgspec.Struct, kw_only=True):
    """`cached`: tokens vLLM did not compute, local and external hits together. Times are seconds since the request was added, `added` is
    time.perf_counter(), which all processes of a machine share."""

    id: str
    output: list[int]
    token_times: list[float]
    cached: int | None
    finish: str | None
    ttft_s: float | None
    added: float
    text: str = ""


def engine_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with what every CPU engine needs. A connector makes vLLM's CPU build reserve one more core, so the cores
    are always named; without that, every comparison with a plain engine is wrong."""
    cores = len(os.sched_getaffinity(0))
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}" if cores > 1 else "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_PLUGINS": "mooncake_kv,mooncake_kv_cpu_engines",
        "SGLANG_PLUGINS": "mooncake_kv,mooncake_kv_cpu_engines",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # vLLM leaves sockets and files there; the run's folder goes when the run ends.
        "TMPDIR": os.environ.get("MOONCAKE_KV_TEST_RUN") or tempfile.gettempdir(),
        **(extra or {}),
    }


def transfer_config(settings: Mapping[str, Any] | None, connector: str = "mooncake") -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": dict(settings or {})}


class _Child:
    """A process in a group of its own, with its output in a file."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, pipes: bool) -> None:
        self.log = log
        pipe = subprocess.PIPE if pipes else subprocess.DEVNULL
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                list(command), env=dict(environment), stdin=pipe, stdout=pipe if pipes else out, stderr=out, start_new_session=True
            )

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """SIGKILL to the group, wait for its members; harmless when it has ended."""
        members = self._group()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        psutil.wait_procs(members, timeout=10)

    def _group(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) == self.process.pid:
                    found.append(process)
            except ProcessLookupError:
                continue
        return found


class Driven:
    """An engine in a child process that runs `driver`, a script around driver_loop.serve. `arguments` are those of its command `start`."""

    def __init__(
        self, driver: Path, log: Path, arguments: Mapping[str, Any], environment: Mapping[str, str] | None, start_timeout_s: float
    ) -> None:
        self._child = _Child([sys.executable, str(driver)], engine_environment(environment), log, pipes=True)
        self.log = log
        self._buffer = b""
        try:
            self.start_s: float = self._ask(start_timeout_s, do="start", engine=dict(arguments))["start_s"]
        except BaseException:
            self._child.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.stop()
        else:
            self._child.kill()

    @property
    def pid(self) -> int:
        return self._child.process.pid

    def processes(self) -> list[psutil.Process]:
        """The driver and what it started."""
        return self._child._group()

    def call(self, target: str, *, timeout_s: float = RUN_TIMEOUT_S, **arguments: Any) -> Any:
        """Run `module:function(engine, **arguments)` in the driver; what it returns comes back as JSON."""
        return self._ask(timeout_s, do="call", target=target, arguments=arguments)

    def metrics(self) -> dict[str, float]:
        """Of the driver's process."""
        return dict(self._ask(30, do="metrics"))

    def stop(self, timeout_s: float = 30) -> None:
        """End the engine in order, so that pending saves get their chance; kill what is left after `timeout_s`."""
        try:
            self._send({"do": "stop"})
            assert self._child.process.stdin is not None
            self._child.process.stdin.close()
            self._child.process.wait(timeout_s)
        except (OSError, subprocess.TimeoutExpired):
            pass
        self._child.kill()

    def kill(self) -> None:
        self._child.kill()

    def _ask(self, timeout_s: float, **command: Any) -> Any:
        self._send(command)
        answer = json.loads(self._line(time.monotonic() + timeout_s, str(command["do"])))
        if "error" in answer:
            raise EngineError(f"{answer['error']}\n{self._child.tail()}")
        return answer["ok"]

    def _send(self, command: Mapping[str, Any]) -> None:
        assert self._child.process.stdin is not None
        self._child.process.stdin.write(json.dumps(command).encode() + b"\n")
        self._child.process.stdin.flush()

    def _line(self, deadline: float, what: str) -> bytes:
        out = self._child.process.stdout
        assert out is not None
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._child.kill()
                    raise TimeoutError(f"the engine did not answer {what!r} in time\n{self._child.tail()}")
                data = os.read(out.fileno(), 1 << 16)
                if not data:
                    self._child.kill()
                    raise EngineError(f"the engine's process ended during {what!r}\n{self._child.tail()}")
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


class Engine(Driven):
    """A vLLM engine in a child process. `settings` configures the connector `mooncake`; None: an engine without connector (or with the one
    in `engine_arguments`). `in_process` keeps scheduler and worker in the child itself: it starts in 8 s instead of 20 and `call` can reach
    both, but it is not how engines are deployed."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        in_process: bool = False,
        start_timeout_s: float = START_TIMEOUT_S,
        **engine_arguments: Any,
    ) -> None:
        arguments: dict[str, Any] = {
            "model": str(model),
            "enforce_eager": True,
            "max_model_len": 4096,
            "block_size": 32,
            "disable_log_stats": False,
            "seed": 0,
        }
        if settings is not None:
            arguments["kv_transfer_config"] = transfer_config(settings)
        variables = {**(environment or {}), **({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if in_process else {})}
        self._next_id = 0
        super().__init__(DRIVER, log, {**arguments, **engine_arguments}, variables, start_timeout_s)

    def generate(self, ids: Sequence[int], max_tokens: int = 16, *, timeout_s: float = RUN_TIMEOUT_S, **more: Any) -> Result:
        """One request, alone. `more` are fields of Request."""
        sampling = {"max_tokens": max_tokens, **more.pop("sampling", {})}
        return self.run([Request(ids=list(ids), sampling=sampling, **more)], timeout_s=timeout_s)[0]

    def run(self, requests: Sequence[Request], *, reset_every: int = 0, timeout_s: float = RUN_TIMEOUT_S) -> list[Result]:
        answer = self._ask(timeout_s, do="run", requests=self._named(requests), reset_every=reset_every)
        return msgspec.convert(answer, list[Result])

    def traffic(self, requests: Sequence[Request], seconds: float, *, at_once: int = 1, timeout_s: float = RUN_TIMEOUT_S) -> list[Result]:
        """See vllm_driver.Driver.traffic. Blocks; to do something meanwhile, call it on another thread."""
        answer = self._ask(seconds + timeout_s, do="traffic", requests=self._named(requests), seconds=seconds, at_once=at_once)
        return msgspec.convert(answer, list[Result])

    def _named(self, requests: Sequence[Request]) -> Any:
        for request in requests:
            if not request.id:
                request.id = f"r{self._next_id}"
                self._next_id += 1
        return msgspec.to_builtins(requests)

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        return bool(self._ask(30, do="reset_prefix_cache", reset_connector=reset_connector))


class HttpServer:
    """A server that `command`, with an address at its end in two options called as in `address`, starts on a loopback port (a free one
    unless given), and that is ready when `health` answers."""

    health = "/health"

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        address: tuple[str, str] = ("--host", "--port"),
        port: int = 0,
    ) -> None:
        self.port = port or free_port()
        self.log = log
        command = [*command, address[0], "127.0.0.1", address[1], str(self.port)]
        began = time.monotonic()
        self._child = _Child(command, engine_environment(environment), log, pipes=False)
        try:
            self._wait_healthy(began + start_timeout_s)
        except BaseException:
            self._child.kill()
            raise
        self.start_s = time.monotonic() - began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def get(self, path: str, timeout_s: float = 30) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=timeout_s) as reply:
            return str(reply.read().decode())

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = RUN_TIMEOUT_S) -> Any:
        """The parsed answer; urllib.error.HTTPError for a status of 400 and above."""
        with urllib.request.urlopen(self._request(path, body), timeout=timeout_s) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None, key: str = "") -> tuple[int, str]:
        """(status, text) of any request, also of one that fails. `key`: for an API that wants one."""
        request = self._request(path, body or {})
        request.method = method
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=RUN_TIMEOUT_S) as reply:
                return int(reply.status), reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def stream(self, path: str, body: Mapping[str, Any], timeout_s: float = RUN_TIMEOUT_S) -> Iterator[tuple[float, Any]]:
        """(seconds since the request was sent, event) for each event of a streamed answer."""
        began = time.perf_counter()
        with urllib.request.urlopen(self._request(path, {**body, "stream": True}), timeout=timeout_s) as reply:
            for line in reply:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield time.perf_counter() - began, json.loads(line[6:])

    def processes(self) -> list[psutil.Process]:
        return self._child._group()

    def kill(self) -> None:
        self._child.kill()

    def stop(self, timeout_s: float = 20) -> None:
        if self._child.process.poll() is None:
            self._child.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._child.process.wait(timeout_s)
        self._child.kill()

    def _request(self, path: str, body: Mapping[str, Any]) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        return urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), headers)

    def _wait_healthy(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if (code := self._child.process.poll()) is not None:
                raise EngineError(f"the server ended with code {code}\n{self._child.tail()}")
            try:
                self.get(self.health, timeout_s=2)
                return
            except OSError:
                time.sleep(0.2)
        raise TimeoutError(f"the server was not healthy in time\n{self._child.tail()}")


class Server(HttpServer):
    """vLLM's OpenAI-compatible API: `vllm serve`, or with `module` `python -m vllm.entrypoints.openai.api_server`, followed by `arguments`
    word for word."""

    def __init__(self, arguments: Sequence[str], log: Path, *, module: bool = False, **more: Any) -> None:
        serve = [str(Path(sys.executable).with_name("vllm")), "serve"]
        super().__init__([*([sys.executable, "-m", "vllm.entrypoints.openai.api_server"] if module else serve), *arguments], log, **more)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
