"""The one place that names the SGLang version this plugin is written for and the private interfaces it relies on.

SGLang promises no stability for any of them. A SGLang that the plugin does not fit keeps working without the plugin: loading it only logs,
and whoever asks for the cache gets one sentence that says which call differs.
"""

from __future__ import annotations

import json
import logging
from functools import cache
from importlib import import_module
from typing import Any

from ..connectors import compat
from ..connectors.compat import Signatures, own_version

logger = logging.getLogger(__name__)

TESTED = "0.5.23"

_FACTORY = "sglang.srt.mem_cache.storage.backend_factory:StorageBackendFactory."
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager."
_STORAGE = "sglang.srt.mem_cache.hicache_storage:HiCacheStorage."
WEIGHT_UPDATES = tuple(f"{_WEIGHTS}update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc"))

HOOKS: Signatures = {
    f"{_FACTORY}_do_create_backend": ("backend_name", "storage_config", "mem_pool_host", "kwargs"),
    "sglang.srt.mem_cache.pool_host.common:get_allocator_type": (),
    "sglang.srt.distributed.device_communicators.mooncake_transfer_engine:maybe_init_shared_mooncake_transfer_engine": ("gpu_id",),
    "sglang.srt.mem_cache.embedding_store:EmbeddingStoreFactory.create_backend": ("backend_name", "kwargs"),
    "sglang.srt.lora.lora_registry:LoRARef.deterministic_id": ("lora_name", "lora_path"),
    **dict.fromkeys(WEIGHT_UPDATES, ("self", "recv_req")),
}
BACKEND: Signatures = {
    f"{_STORAGE}register_mem_pool_host": ("self", "mem_pool_host"),
    f"{_STORAGE}register_mem_host_pool_v2": ("self", "host_pool", "host_pool_name"),
    f"{_STORAGE}batch_get_v1": ("self", "keys", "host_indices", "extra_info"),
    f"{_STORAGE}batch_set_v1": ("self", "keys", "host_indices", "extra_info"),
    f"{_STORAGE}batch_exists": ("self", "keys", "extra_info"),
    f"{_STORAGE}get": ("self", "key", "target_location", "target_sizes"),
    f"{_STORAGE}batch_get": ("self", "keys", "target_locations", "target_sizes"),
    f"{_STORAGE}set": ("self", "key", "value", "target_location", "target_sizes"),
    f"{_STORAGE}batch_set": ("self", "keys", "values", "target_locations", "target_sizes"),
    f"{_STORAGE}exists": ("self", "key"),
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller:HybridCacheController.parse_storage_backend_extra_config": (
        "storage_backend_extra_config",
    ),
    "sglang.srt.runtime_context:process_model_config": (),
    "sglang.srt.runtime_context:get_server_args": (),
    "sglang.srt.mem_cache.utils:storage_namespace_seed": ("extra_key", "cache_salt"),
}
_EMBEDDINGS = "sglang.srt.mem_cache.embedding_store:EmbeddingStore."
EMBEDDINGS: Signatures = {
    f"{_EMBEDDINGS}register_buffer": ("self", "tensor"),
    f"{_EMBEDDINGS}batch_get_into_multi_buffers": ("self", "hashes", "ptrs", "sizes"),
    f"{_EMBEDDINGS}batch_put_from_multi_buffers": ("self", "hashes", "ptrs", "sizes"),
}


def sglang_version() -> str:
    return str(import_module("sglang.version").__version__)


def require(signatures: Signatures) -> None:
    """Raises UnsupportedError with one sentence if this SGLang lacks one of the calls, or takes other parameters for it."""
    compat.require(signatures, "SGLang", TESTED, sglang_version())


@cache
def warn_if_untested() -> None:
    """One log line in a process that uses the cache with a SGLang whose calls fit but which we have not run."""
    if sglang_version() != TESTED:
        logger.warning("mooncake-kv %s was tested with SGLang %s; this is SGLang %s", own_version(), TESTED, sglang_version())


def hook_target(name: str) -> str:
    """The name of a call as SGLang's hook registry spells it."""
    return name.replace(":", ".")


def settings(group: str) -> Any:
    """One group of SGLang's resolved settings ("model", "memory", ...)."""
    return getattr(import_module("sglang.srt.runtime_context"), f"get_{group}")()


def parallel() -> Any:
    return import_module("sglang.srt.runtime_context").get_parallel()


def server_args() -> Any:
    return import_module("sglang.srt.runtime_context").get_server_args()


def model_config() -> Any:
    """The effective model configuration, made anew: building the model may have changed the one that SGLang keeps."""
    return import_module("sglang.srt.configs.model_config").ModelConfig.from_server_args(server_args())


def metric_labels(storage_config: Any) -> dict[str, str]:
    """The labels of SGLang's own storage metrics, which tell ranks apart, and those that the user has added."""
    own = {name: getattr(storage_config, name) for name in ("tp_rank", "dp_rank", "pp_rank")}
    return {name: str(value) for name, value in {**own, **(settings("observability").extra_metric_labels or {})}.items()}


def startup_extra_config() -> dict[str, Any]:
    """What `--hicache-storage-backend-extra-config` says, without SGLang's own keys; {} where it cannot be read (SGLang says so itself)."""
    controller = import_module("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller").HybridCacheController
    try:
        extra = controller.parse_storage_backend_extra_config(settings("memory").hicache_storage_backend_extra_config)[0]
    except (OSError, ValueError, json.JSONDecodeError):
        return {}
    return extra if isinstance(extra, dict) else {}
