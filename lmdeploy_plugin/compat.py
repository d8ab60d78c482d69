"""The one place that names the LMDeploy version this plugin is written for and the private interfaces it relies on.

LMDeploy promises no stability for any of them. An LMDeploy that the plugin does not fit keeps working without the plugin; whoever asks for
the cache or the migration backend gets one sentence that says which call differs.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib import import_module

from ..connectors import compat
from ..connectors.compat import Signatures, own_version
from . import MIGRATION_SWITCH

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
_BASE = "lmdeploy.pytorch.kv_connector.base:KVConnectorBase."
CONNECTOR: Signatures = {
    f"{_BASE}__init__": ("self", "role"),
    f"{_BASE}register_kv_caches": ("self", "kv_caches"),
    f"{_BASE}start_load_kv": ("self",),
    f"{_BASE}start_save_kv": ("self",),
    f"{_BASE}get_finished": ("self",),
    f"{_BASE}get_num_new_matched_tokens": ("self", "request", "num_computed_tokens"),
    f"{_BASE}update_state_after_alloc": ("self", "request", "block_ids", "num_external_tokens"),
    f"{_BASE}build_connector_meta": ("self", "step_input"),
    f"{_BASE}on_new_request": ("self", "request"),
    f"{_BASE}is_lookup_pending": ("self", "request_id"),
    f"{_BASE}cancel_lookup": ("self", "request_id"),
    f"{_BASE}update_connector_output": ("self", "connector_output"),
    f"{_BASE}finish_transfers_after_worker_drain": ("self",),
    f"{_BASE}request_finished": ("self", "request"),
    "lmdeploy.pytorch.kv_connector.base:KVConnectorStepInput": (
        "running",
        "connector_token_lens",
        "connector_block_ids",
        "connector_logical_block_ids",
    ),
    "lmdeploy.pytorch.paging.block_manager.base_block_manager:BaseBlockManager.get_block_table": ("self", "msg"),
    "lmdeploy.pytorch.paging.seq_states.states:SequenceLifecycle.__init__": (
        "self",
        "seq_manager",
        "block_manager",
        "state_manager",
        "state_checkpoints",
        "prefix_cache_enabled",
        "is_ssm",
        "connector",
    ),
}

# What the mends of migrations replace and use, by the module of LMDeploy after which they are made.
_ENGINE = "lmdeploy.pytorch.engine.engine:Engine."
_LOOP = "lmdeploy.pytorch.engine.engine_loop:EngineLoop."
_CONNECTION = "lmdeploy.pytorch.disagg.conn.engine_conn:EngineP2PConnection."
_BLOCKS = "lmdeploy.pytorch.paging.block_manager.base_block_manager:BaseBlockManager."
_MANAGER = "lmdeploy.serve.proxy.proxy:NodeManager."
MIGRATION_ENGINE: Signatures = {
    f"{_ENGINE}end_session": ("self", "session_id"),
    f"{_ENGINE}_on_end_session": ("self", "reqs", "kwargs"),
    f"{_ENGINE}get_schedule_metrics": ("self",),
    f"{_ENGINE}_response": ("self", "resp", "resp_type", "data", "err_msg"),
}
MIGRATION_LOOP: Signatures = {
    f"{_LOOP}_send_resp": ("self", "out"),
    f"{_LOOP}_migration_loop_process_ready": ("self", "migration_ready"),
    f"{_LOOP}_migration_loop_get_outputs": ("self", "migration_ready"),
    f"{_LOOP}drain_for_sleep": ("self",),
    f"{_BLOCKS}pin_logical_blocks": ("self", "logical_block_ids"),
    f"{_BLOCKS}release_logical_blocks": ("self", "logical_block_ids"),
    "lmdeploy.pytorch.paging.scheduler:Scheduler.seqs_migration_activation": ("self", "running"),
    "lmdeploy.pytorch.paging.seq_states.states:MigrationReadyState.release_paging_resources": ("self",),
    "lmdeploy.pytorch.paging.seq_states.states:WaitingState.activate": ("self",),
}
MIGRATION_CONNECTION: Signatures = {
    f"{_CONNECTION}p2p_initialize": ("self", "init_request"),
    f"{_CONNECTION}handle_zmq_recv": ("self", "remote_engine_id"),
    f"{_CONNECTION}zmq_disconnect": ("self", "remote_engine_id"),
}
MIGRATION_PROXY: Signatures = {
    f"{_MANAGER}generate": ("self", "request", "node_url", "endpoint"),
    f"{_MANAGER}stream_generate": ("self", "request", "node_url", "endpoint"),
    f"{_MANAGER}get_node_url": ("self", "model_name", "role"),
    f"{_MANAGER}remove": ("self", "node_url"),
    "lmdeploy.pytorch.disagg.conn.proxy_conn:PDConnectionPool.connect": ("self", "conn_req"),
    "lmdeploy.pytorch.disagg.conn.proxy_conn:PDConnectionPool.is_connected": ("self", "p_url", "d_url"),
}


def lmdeploy_version() -> str:
    return str(import_module("lmdeploy.version").__version__)


def require(signatures: Signatures) -> None:
    """Raises UnsupportedError with one sentence if this LMDeploy lacks one of the calls, or takes other parameters for it."""
    compat.require(signatures, "LMDeploy", TESTED, lmdeploy_version())


def mends(signatures: Signatures) -> bool:
    """Whether migrations are to be mended in this process. Raises UnsupportedError where they cannot be: then the backend refuses, too."""
    if os.environ.get(MIGRATION_SWITCH) == "0":
        return False
    require(signatures)
    return True


@cache
def warn_if_untested() -> None:
    """One log line in a process that uses the plugin with an LMDeploy whose calls fit but which we have not run."""
    if lmdeploy_version() != TESTED:
        logger.warning("mooncake-kv %s was tested with LMDeploy %s; this is LMDeploy %s", own_version(), TESTED, lmdeploy_version())
