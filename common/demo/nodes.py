"""The demo's nodes, as engines start them: what they hold, how one is replaced by an empty one, and their end.

Promises: the demo's nodes lie below a folder of its own, and nobody else's is touched; every wait has a deadline and ends in DemoFailed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError
from ..node.paths import NodePaths, known_nodes, node_paths
from ..node.spawn import NodeUnavailable
from ..node.tool import NodeTool
from .server import DemoFailed

# Patient, because the demo is started on machines that are busy with other things, and has to show hits.
PATIENT = {"kind": "Store", "idle_exit_s": 60, "metrics_port": -1, "fetch_timeout_ms": 5000, "fetch_deadline_ms": 20000}
SIZES = {"dram_size": "2gb", "extent_size": "256mb"}
DISK_BYTES = 2 << 30
POOL_BYTES = 512 << 20
WRITTEN_S = 60.0
RESTART_S = 60.0
TIER_S = 30.0
STOP_S = 15.0
QUIET_S = 0.5
_STEP_S = 0.05


class DemoNode:
    """A node that engines with these `settings` start, in `folder`."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self.settings = {**PATIENT, **SIZES, "node": name, **settings}
        self._paths: NodePaths = node_paths(name, environ={"XDG_RUNTIME_DIR": str(folder)})

    def stats(self) -> dict[str, Any]:
        """Raises NodeUnavailable."""
        with NodeTool(self._paths, version=version("mooncake-kv")) as tool:
            return tool.stats()

    def hits(self) -> dict[str, int]:
        """Pages that it has handed out since it began, by tier."""
        return {name: int(tier["hit_pages"]) for name, tier in self.stats()["tiers"].items()}

    def tier(self, name: str) -> str:
        """Wait until the tier has opened or says why not; the reason, "" if it works."""
        found: dict[str, Any] = {}

        def decided() -> bool:
            found.update(self.stats()["tiers"][name])
            return found["state"] in ("up", "down")

        self._wait(TIER_S, f"the tier {name} of node {self._paths.name!r} has neither opened nor failed", decided)
        return "" if found["state"] == "up" else str(found["reason"])

    def wait_written(self, name: str, pages: int, show: Callable[[int], object]) -> None:
        """Until the tier has been given at least so many pages and none is on its way. `show` gets the number of those written."""

        def written() -> bool:
            tier = self.stats()["tiers"][name]
            show(min(tier["pages_written"], pages))
            return bool(tier["pages_written"] >= pages and not tier["queued_bytes"])

        self._wait(WRITTEN_S, f"node {self._paths.name!r} has not written {pages} pages to {name}", written)

    def pages(self) -> int:
        """Pages that can be fetched; 0 of a node that does not run yet."""
        try:
            return int(self.stats()["pages"])
        except NodeUnavailable:
            return 0

    def wait_stored(self, pages: int) -> None:
        """Until the node has so many pages and gets no more: engines go on storing after an answer."""
        seen, since = -1, 0.0

        def quiet() -> bool:
            nonlocal seen, since
            if (now := int(self.stats()["pages"])) != seen:
                seen, since = now, time.monotonic()
            return seen >= pages and time.monotonic() - since > QUIET_S

        self._wait(WRITTEN_S, f"node {self._paths.name!r} has not got {pages} pages", quiet)

    def restart(self) -> None:
        """End the node. The running engine starts the next one, empty, and this waits until all its processes have joined that and it
        has memory to give."""
        clients = self.stats()["clients"]
        with NodeTool(self._paths, version=version("mooncake-kv"), timeout_s=STOP_S) as tool:
            before = tool.welcome.pid
            tool.stop()

        def back() -> bool:
            stats = self.stats()
            return bool(stats["pid"] != before and stats["clients"] == clients and stats["granted_slots"])

        self._wait(RESTART_S, f"the engine has not started node {self._paths.name!r} again", back)

    def master(self) -> str:
        """host:port of the Mooncake master that the node has started."""
        try:
            port = int(msgspec.json.decode((self._paths.folder / "pool-master").read_bytes())["port"])
        except (OSError, ValueError, KeyError, msgspec.DecodeError) as error:
            raise DemoFailed(f"node {self._paths.name!r} does not say where its Mooncake master is: {error}") from None
        return f"127.0.0.1:{port}"

    @staticmethod
    def _wait(seconds: float, failure: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while True:
            why = ""
            try:
                if done():
                    return
            except NodeUnavailable as error:
                why = f" ({error})"
            if time.monotonic() > deadline:
                raise DemoFailed(f"{failure} within {seconds:g} s{why}")
            time.sleep(_STEP_S)


def end_nodes(folder: Path) -> None:
    """End all nodes that lie in `folder`: in order, or else by force. Their engines have ended."""
    for paths in reversed(known_nodes({"XDG_RUNTIME_DIR": str(folder)})):
        try:
            with NodeTool(paths, version=version("mooncake-kv"), timeout_s=STOP_S) as tool:
                tool.stop()
        except (NodeUnavailable, ConfigError):
            # It was killed, or hangs. Its number may be somebody else's by now.
            with suppress(OSError, ValueError):
                pid = int(paths.pid.read_text())
                if str(paths.folder) in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
