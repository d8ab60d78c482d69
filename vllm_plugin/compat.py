"""The one place that names the vLLM versions this plugin is written for and the private interfaces it relies on.

vLLM promises no stability for any of them. A vLLM that the plugin does not fit keeps working without the plugin: loading it only logs, and
whoever asks for the cache gets one sentence that says which call differs.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any

from ..common.errors import UnsupportedError
from ..connectors import compat
from ..connectors.compat import Signatures, own_version

logger = logging.getLogger(__name__)

TESTED = "0.32"

FLAGS: Signatures = {
    "vllm.engine.arg_utils:EngineArgs.add_cli_args": ("parser",),
    "vllm.engine.arg_utils:EngineArgs.from_cli_args": ("args",),
    "vllm.utils.argparse_utils:FlexibleArgumentParser.parse_args": ("self", "args", "namespace"),
    "vllm.utils.argparse_utils:FlexibleArgumentParser.load_config_file": ("self", "file_path"),
}
REGISTRY: Signatures = {
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.register_connector": ("name", "module_path", "class_name"),
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.get_connector_class_by_name": ("connector_name",),
}
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1."
CONNECTOR: Signatures = {
    f"{_BASE}__init__": ("self", "vllm_config", "role", "kv_cache_config"),
    f"{_BASE}register_kv_caches": ("self", "kv_caches"),
    f"{_BASE}start_load_kv": ("self", "forward_context", "kwargs"),
    f"{_BASE}get_num_new_matched_tokens": ("self", "request", "num_computed_tokens"),
    f"{_BASE}update_state_after_alloc": ("self", "request", "blocks", "num_external_tokens"),
    f"{_BASE}build_connector_meta": ("self", "scheduler_output"),
    f"{_BASE}build_connector_worker_meta": ("self",),
    f"{_BASE}update_connector_output": ("self", "connector_output"),
    f"{_BASE}request_finished": ("self", "request", "block_ids"),
    f"{_BASE}on_new_request": ("self", "request"),
    f"{_BASE}get_finished": ("self", "finished_req_ids"),
    f"{_BASE}get_block_ids_with_load_errors": ("self",),
    f"{_BASE}reset_cache": ("self",),
}
CPU_LAYOUT: Signatures = {
    "vllm.v1.attention.backends.cpu_attn:_get_attn_isa": ("dtype", "block_size", "head_size", "kv_cache_dtype"),
}
MEDIA: Signatures = {
    "vllm.multimodal.processing.inputs:ProcessorInputs.get_mm_hashes": ("self", "model_id", "hash_algorithm"),
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": ("self", "usage_context", "headless"),
}
LORA: Signatures = {
    "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter": ("self", "lora_request"),
}


def vllm_version() -> str:
    return str(import_module("vllm.version").__version__)


def require(signatures: Signatures) -> None:
    """Raises UnsupportedError with one sentence if this vLLM lacks one of the calls, or takes other parameters for it."""
    compat.require(signatures, "vLLM", f"{TESTED}.x", vllm_version())


@cache
def warn_if_untested() -> None:
    """One log line in a process that uses the cache with a vLLM whose calls fit but which we have not run."""
    if not vllm_version().startswith(f"{TESTED}."):
        logger.warning("mooncake-kv %s was tested with vLLM %s.x; this is vLLM %s", own_version(), TESTED, vllm_version())


def register_connector(name: str, module: str, class_name: str) -> None:
    """Make `name` known to vLLM's connector factory; a second call does nothing."""
    try:
        require(REGISTRY)
    except UnsupportedError as error:
        logger.warning("%s", error)
        return
    if not connector_exists(name):
        _factory().register_connector(name, module, class_name)


def connector_exists(name: str) -> bool:
    return name in connector_names()


def connector_names() -> list[str]:
    """Names that vLLM's factory knows, ours included; loads none of them."""
    return list(_factory()._registry)


def _factory() -> Any:
    return import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
