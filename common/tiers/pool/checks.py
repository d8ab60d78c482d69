"""What is checked before Mooncake's client is set up: its setup takes wrong values silently, blocks for 90 s, or leaves a client whose next
call crashes the process.

Promises: every refusal is one sentence that names the key, its value and its source. `check_settings` touches no network but the resolver;
`check_master` is one TCP connection with a deadline.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ...config import EMBEDDED, SEGMENT_UNIT
from ...errors import ConfigError
from ...node.memory import available
from ..base import TierDown

CONNECT_S = 2.0
# Of the memory that is available, at most this much may be given to the pool.
SEGMENT_SHARE = 2
# Mooncake's word for: no metadata server.
P2P = "P2PHANDSHAKE"
INFINIBAND = Path("/sys/class/infiniband")


class PoolSettings:
    """The checked settings of one pool client. `hostname` is an address of this machine, under which others reach it."""

    def __init__(self, settings: Mapping[str, Any], sources: Mapping[str, str], *, infiniband: Path = INFINIBAND) -> None:
        """Raises ConfigError. `settings`: the pool's keys of CacheConfig.node_settings()."""
        self.sources = sources
        self.master: str = settings["master_server_address"]
        self.metadata: str = settings["metadata_server"]
        self.protocol: str = settings["protocol"]
        self.device: str = settings["device_name"]
        self.buffer_bytes: int = settings["local_buffer_size"]
        self.segment_bytes: int = settings["global_segment_size"]
        self.write_policy: str = settings["write_policy"]
        self.replicas: int = settings["replicas"]
        self.soft_pin: bool = settings["soft_pin"]
        check_protocol(self.protocol, self.device, sources, infiniband)
        self._check_metadata()
        self._check_segment()
        self.hostname = self._host(settings["local_hostname"])

    def _refuse(self, key: str, value: object, why: str) -> NoReturn:
        _refuse(self.sources, key, value, why)

    def _check_metadata(self) -> None:
        # The wheels have no redis: Mooncake ends the process there.
        if self.metadata != P2P and not re.fullmatch(r"(https?|etcd)://[^\s/]+\S*|[^\s:/]+:\d{1,5}", self.metadata):
            why = "it must be 'P2PHANDSHAKE', a URL such as http://host:port/metadata or etcd://host:port, or host:port"
            self._refuse("metadata_server", self.metadata, why)

    def _check_segment(self) -> None:
        if self.segment_bytes % SEGMENT_UNIT:
            self._refuse("global_segment_size", self.segment_bytes, f"it must be a multiple of {SEGMENT_UNIT} bytes")
        limit = available() // SEGMENT_SHARE // SEGMENT_UNIT * SEGMENT_UNIT
        if self.segment_bytes > limit:
            if self.sources.get("global_segment_size", "default") != "default":
                self._refuse(
                    "global_segment_size", self.segment_bytes, f"at most {limit} bytes, half of the memory available here, can be given"
                )
            self.segment_bytes = limit

    def _host(self, name: str) -> str:
        """An address of this machine. With an embedded master only this machine takes part."""
        if not name:
            if self.master == EMBEDDED or _is_loopback(self.master):
                return "127.0.0.1"
            return self._towards_master()
        return own_address(name, self.sources)

    def _towards_master(self) -> str:
        """The address from which this machine reaches the master; others reach it there too. No packet is sent."""
        host, port = master_addresses(self.master)[0]
        try:
            return address_towards(host, port)
        except OSError as error:
            # The master's name does not resolve at this moment, perhaps.
            raise TierDown(f"master_server_address {self.master!r} cannot be reached: {error.strerror or error}") from None


def _refuse(sources: Mapping[str, str], key: str, value: object, why: str) -> NoReturn:
    raise ConfigError(f"{key} is {value!r} ({sources.get(key, 'default')}): {why}")


def check_protocol(protocol: str, device: str, sources: Mapping[str, str], infiniband: Path = INFINIBAND) -> None:
    """Raises ConfigError unless Mooncake can use the protocol and the network cards here; it would not say so."""
    if protocol not in ("tcp", "rdma"):
        _refuse(sources, "protocol", protocol, "it must be 'tcp' or 'rdma'")
    if protocol != "rdma":
        return
    try:
        cards = sorted(os.listdir(infiniband))
    except OSError:
        cards = []
    if not cards:
        _refuse(sources, "protocol", "rdma", f"there is no network card below {infiniband}, and Mooncake would use TCP without a word")
    for name in filter(None, device.split(",")):
        if name not in cards:
            _refuse(sources, "device_name", device, f"the network cards here are {', '.join(cards)}")


def own_address(name: str, sources: Mapping[str, str]) -> str:
    """The address of this machine that `local_hostname` stands for. Raises ConfigError."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        _refuse(sources, "local_hostname", name, f"it does not resolve: {error.strerror or error}")
    for address in sorted(addresses):
        if is_ours(address):
            return address
    _refuse(sources, "local_hostname", name, f"it resolves to {', '.join(sorted(addresses))}, which is no address of this machine")


def address_towards(host: str, port: int) -> str:
    """The address from which this machine reaches another; that one reaches it there too. No packet is sent. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def master_addresses(master: str) -> list[tuple[str, int]]:
    """host and port of each `host:port` in an address or a URL such as etcd://a:1;b:2."""
    found = re.findall(r"(\[[^\]\s]+\]|[^\s:/;,]+):(\d{1,5})", master.partition("://")[2] or master)
    return [(host.strip("[]"), int(port)) for host, port in found]


def check_metadata_server(settings: PoolSettings) -> None:
    """Raises TierDown where there is one and nothing accepts a TCP connection there: Mooncake waits more than 100 s for etcd."""
    if settings.metadata != P2P and master_addresses(settings.metadata):
        _check("metadata server", "metadata_server", settings.metadata, settings.sources.get("metadata_server", "default"))


def check_master(master: str, source: str) -> None:
    """Raises TierDown unless something accepts a TCP connection there within CONNECT_S."""
    _check("Mooncake master", "master_server_address", master, source)


def _check(what: str, key: str, value: str, source: str) -> None:
    why = "no host:port in it"
    for host, port in master_addresses(value):
        try:
            socket.create_connection((host, port), CONNECT_S).close()
            return
        except OSError as error:
            why = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error))
    raise TierDown(f"no {what} answers at {key} {value!r} ({source}): {why}")


def is_ours(address: str) -> bool:
    """Only an address of this machine can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return address not in ("0.0.0.0", "::")


def _is_loopback(address: str) -> bool:
    found = master_addresses(address)
    return bool(found) and all(host in ("localhost", "::1") or host.startswith("127.") for host, _ in found)
