"""The first words between a client and a node, and whether the two fit together.

Promises: every wait has a deadline; a node that does not fit is told apart from one that is not there now, with a reason for the user.
"""

from __future__ import annotations

import functools
import selectors
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from . import protocol
from .client_wire import ConnectionLost, Wire
from .spawn import NodeUnavailable

HELLO_S = 10.0


class NodeRefuses(Exception):
    """The node and this client do not fit together; the message is one sentence that says why."""


def greet(wire: Wire, hello: protocol.Hello, name: str, stop: Callable[[], bool]) -> tuple[protocol.Welcome, list[protocol.ToClient]]:
    """Say hello to node `name`. Returns its Welcome and what came together with it. Raises NodeRefuses, or NodeUnavailable."""
    try:
        wire.send(hello)
        messages = _first_messages(wire, name, stop)
    except ConnectionLost as lost:
        raise NodeUnavailable(f"node {name!r}: {lost}") from None
    welcome = messages[0]
    if isinstance(welcome, protocol.Refused):
        raise NodeRefuses(f"node {name!r} refuses this engine: {welcome.reason}")
    if not isinstance(welcome, protocol.Welcome):
        raise NodeRefuses(f"node {name!r} answers hello with {type(welcome).__name__}")
    if welcome.major != protocol.MAJOR:
        raise NodeRefuses(
            f"node {name!r} (version {welcome.version}) speaks protocol {welcome.major}.{welcome.minor}, this engine (version "
            f"{hello.version}) {protocol.MAJOR}.{protocol.MINOR}; to replace the node, stop it with that version's "
            f"`mooncake-kv node stop {name}` or kill {welcome.pid}"
        )
    return welcome, messages[1:]


def _first_messages(wire: Wire, name: str, stop: Callable[[], bool]) -> list[protocol.ToClient]:
    deadline = time.monotonic() + HELLO_S
    with selectors.DefaultSelector() as selector:
        selector.register(wire.socket, selectors.EVENT_READ)
        while not stop() and time.monotonic() < deadline:
            if selector.select(0.05) and (messages := wire.receive()):
                return messages
    raise NodeUnavailable(f"node {name!r} has not answered hello in {HELLO_S:.0f} s")


@functools.cache
def own_version() -> str:
    try:
        return version("mooncake-kv")
    except PackageNotFoundError:
        return "unknown"
