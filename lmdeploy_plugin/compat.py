"""The one place that names the LMDeploy version this plugin is written for and the private interfaces it relies on.

LMDeploy promises no stability for any of them. An LMDeploy that the plugin does not fit keeps working without the plugin; whoever asks for
the cache or the migration backend gets one sentence that says which call differs.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module

from ..connectors import compat
from ..connectors.compat import Signatures, own_version

logger = logging.getLogger(__name__)

TESTED = "0.18.0"

_FACTORY = "lmdeploy.pytorch.kv_connector.factory:"
_BACKEND = "lmdeploy.pytorch.disagg.backend.base:MigrationBackendImpl."

FACTORY: Signatures = {
    f"{_FACTORY}prepare_kv_connector_config": ("cache_config", "model_path", "dist_config", "distributed_executor_backend"),
    f"{_FACTORY}build_kv_connector": ("role", "cache_config", "global_rank", "tp_rank", "tp_size", "kv_head_replica_num"),
}
MIGRATION: Signatures = {
    f"{_BACKEND}p2p_initialize": ("self", "init_request"),
    f"{_BACKEND}register_memory_region": ("self", "register_mr_request"),
    f"{_BACKEND}endpoint_info": ("self", "remote_engine_id", "protocol"),
    f"{_BACKEND}p2p_connect": ("self", "remote_engine_id", "conn_req"),
    f"{_BACKEND}p2p_migrate": ("self", "assignment", "async_op"),
}


def lmdeploy_version() -> str:
    return str(import_module("lmdeploy.version").__version__)


def require(signatures: Signatures) -> None:
    """Raises UnsupportedError with one sentence if this LMDeploy lacks one of the calls, or takes other parameters for it."""
    compat.require(signatures, "LMDeploy", TESTED, lmdeploy_version())


@cache
def warn_if_untested() -> None:
    """One log line in a process that uses the plugin with an LMDeploy whose calls fit but which we have not run."""
    if lmdeploy_version() != TESTED:
        logger.warning("mooncake-kv %s was tested with LMDeploy %s; this is LMDeploy %s", own_version(), TESTED, lmdeploy_version())
