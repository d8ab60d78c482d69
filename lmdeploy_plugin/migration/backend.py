"""LMDeploy's migration backend `Mooncake`: its calls, in terms of connectors.migration.

Promises: all links of a process share one transfer engine and registrations; a link that is initialized again begins anew, so a peer that
was restarted, on either side, is connected again by the same calls. A migration that fails raises MigrationError within
`migration_timeout_ms` and leaves everything as it was. Settings come from the file and the environment, as LMDeploy has no flag for them;
the protocol, too, for LMDeploy's proxy cannot say TCP.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlparse

from ...common.config import CacheConfig, load_config
from ...connectors.migration import Link, MigrationError, Piece, shared

if TYPE_CHECKING:
    from lmdeploy.pytorch.disagg.config import DistServeEngineConfig
    from lmdeploy.pytorch.disagg.conn.protocol import DistServeInitRequest, DistServeKVTransferEndpointInfo, MigrationProtocol
    from lmdeploy.pytorch.disagg.messages import DistServeRegisterMRMessage, MigrationAssignment


class _Connection(NamedTuple):
    """What LMDeploy's cache engine looks up in `links`."""

    link: Link
    remote_engine_config: DistServeEngineConfig


class MooncakeMigrationBackend:
    """One per worker. Engine ids are the URLs of api_servers."""

    def __init__(self) -> None:
        self._config = settings()
        self.links: dict[str, _Connection] = {}

    def p2p_initialize(self, init_request: DistServeInitRequest) -> None:
        """Raises ConfigError, MigrationError."""
        own, peer = (urlparse(url).hostname for url in (init_request.local_engine_id, init_request.remote_engine_id))
        link = Link(shared(self._config, own, peer), init_request.remote_engine_id)
        self.links[init_request.remote_engine_id] = _Connection(link, init_request.remote_engine_config)

    def register_memory_region(self, req: DistServeRegisterMRMessage) -> None:
        self.links[req.remote_engine_id].link.add(str(req.mr_key), req.addr, req.length)

    def endpoint_info(self, remote_engine_id: str, protocol: MigrationProtocol) -> dict[str, Any]:
        return self.links[remote_engine_id].link.endpoint()

    def p2p_connect(self, remote_engine_id: str, conn_req: DistServeKVTransferEndpointInfo) -> None:
        self.links[remote_engine_id].link.connect(conn_req.endpoint_info)

    async def p2p_migrate(self, assignment: MigrationAssignment, async_op: bool = False) -> None:
        """An assignment is a read: its source is our memory, its target the peer's."""
        connection = self.links.get(assignment.remote_engine_id)
        if connection is None:
            raise MigrationError(f"{assignment.remote_engine_id} is not connected")
        pieces = [Piece(str(one.mr_key), one.target_offset, one.source_offset, one.length) for one in assignment.batch]
        await connection.link.read(pieces, self._config.migration_timeout_ms / 1000)


@functools.cache
def settings() -> CacheConfig:
    """Of this process. Raises ConfigError."""
    return load_config()
