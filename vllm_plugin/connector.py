"""MooncakeKVConnector: vLLM's connector interface, translated to the two halves of `connectors.store`.

Promises: it holds no logic of its own beyond vLLM's shapes and calls; whatever goes wrong at run time makes vLLM compute, never fail; with
`on_unsupported: "disable"` an engine that the cache does not serve runs as if the connector were not there.
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ..common.config import load_config
from ..common.errors import UnsupportedError
from ..common.identity import trailer_key
from ..common.node.client import NodeClient
from ..common.page import PageLayout
from ..connectors.calls import CallTimes, timed
from ..connectors.store import Plan, Report, SchedulerHalf, WorkerHalf, setup
from . import adapters, compat
from .facts import namespace_of, rank_of
from .media import processing_identity
from .metrics import MooncakeKVPromMetrics, MooncakeKVStats
from .requests import image_extras, reason_to_skip, seed_of
from .views import skip_local_match, view_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("mooncake_kv.vllm")

# What vLLM calls the tiers that loads come from.
_SOURCES = {"dram": CacheHitSource.HOST, "ssd": CacheHitSource.DISK, "pool": CacheHitSource.P2P}


class PlanMetadata(KVConnectorMetadata):
    """One step's plan on its way to the workers."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


class ReportMetadata(KVConnectorWorkerMetadata):
    """One step's report on its way back, merged over the ranks."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, ReportMetadata)
        self.report.merge(other.report)
        return self


class MooncakeKVConnector(KVConnectorBase_V1, SupportsHMA):
    """`kv_connector: "mooncake"`. Raises ConfigError or UnsupportedError at engine start only."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        compat.require(compat.CONNECTOR)
        compat.warn_if_untested()
        transfer = self._kv_transfer_config
        # vLLM's default ends a request whose load failed with an error. The scheduler reads this after it has made its connector.
        transfer.kv_load_failure_policy = "recompute"
        self.config = load_config(transfer.kv_connector_extra_config, flag_source="kv_connector_extra_config")
        self.call_times = CallTimes()
        self._consumes = transfer.is_kv_consumer
        self._produces = transfer.is_kv_producer
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._client: NodeClient | None = None
        self._requests: dict[str, Request] = {}
        self._adapters: dict[int, str] = {}
        self._plan: Plan | None = None
        self._report: Report | None = None
        self._invalid: set[int] = set()
        self._reported: Counter[str] = Counter()
        self._unable = ""  # why this worker copies nothing
        try:
            self._namespace = namespace_of(vllm_config, kv_cache_config, self.config)
        except UnsupportedError as error:
            if self.config.on_unsupported != "disable":
                raise
            logger.error("runs without the cache: %s", error)
            self._unable = str(error)
            return
        self._layout = PageLayout(self._namespace, trailer_key(self.config.pool_secret))
        scheduler = role == KVConnectorRole.SCHEDULER
        self._client = setup.start_client(
            self.config,
            self._namespace,
            engine=str(transfer.engine_id),
            role="scheduler" if scheduler else "worker",
            credits=setup.credits_of(self.config, self._layout, vllm_config.scheduler_config.max_num_batched_tokens) if scheduler else 0,
        )
        if scheduler:
            self._processing = processing_identity(vllm_config)
            self._scheduler = setup.scheduler_half(
                self._client,
                self.config,
                self._layout,
                block_tokens=vllm_config.cache_config.block_size,
                ranks=vllm_config.parallel_config.world_size,
                on_cpu=current_platform.is_cpu(),
            )
            logger.info("mooncake-kv serves namespace %s (node %r)", self._namespace.digest(self.config.pool_secret), self.config.node)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: what is not saved is computed again

    # ---- scheduler ---------------------------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            skip_local_match(kv_cache_manager, self._scheduler.blind_ask)

    @timed
    def on_new_request(self, request: Request) -> None:
        if self._scheduler is None:
            return
        skip = reason_to_skip(request)
        seed, weights = b"", ""
        if not skip and (request.lora_request is not None or request.cache_salt is not None):
            try:
                seed, weights = seed_of(request, self._adapters, self.config.fingerprint)
            except (OSError, ValueError) as error:
                logger.warning("request %s is served without the cache: its LoRA adapter: %s", request.request_id, error)
                skip = "lora_unreadable"
        extras = image_extras(request, self._namespace.page_tokens, self._processing) if request.mm_features else None
        self._requests[request.request_id] = request
        self._scheduler.arrive(request.request_id, request.prompt_token_ids or (), seed=seed, extras=extras, skip=skip, weights=weights)

    @timed
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None or not self._consumes or request.skip_reading_prefix_cache:
            return 0, False
        tokens = self._scheduler.match(request.request_id, num_computed_tokens, request.num_tokens)
        return tokens, bool(tokens)  # vLLM does not schedule the request until get_finished names it

    @timed
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        half, manager = self._scheduler, self._kv_cache_manager
        if half is not None:
            assert manager is not None
            half.start(request.request_id, num_external_tokens, partial(_block_table, manager, request.request_id))

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        loaded = {} if self._scheduler is None else self._scheduler.loaded_tokens(request.request_id)
        if sum(loaded.values()) != num_external_tokens:  # it was preempted before its load began
            return super().get_external_cache_hit_sources(request, num_external_tokens)
        return {_SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED): tokens for tier, tokens in loaded.items()}

    @timed
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        half = self._scheduler
        if half is None:
            return PlanMetadata(Plan())
        manager, page = self._kv_cache_manager, self._namespace.page_tokens
        assert manager is not None
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            final = _final_tokens(request, count) if self._produces else 0
            known = half.known_tokens(request_id)
            if final >= known + page - known % page and known >= 0:
                half.extend(request_id, request.all_token_ids[known : request.num_tokens])
            half.scheduled(request_id, final, partial(_block_table, manager, request_id))
        return PlanMetadata(half.end_step())

    @timed
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is None:
            return
        meta = connector_output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, ReportMetadata) else None
        self._scheduler.output(report, connector_output.invalid_block_ids or ())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @timed
    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        half = self._scheduler
        if half is None or self._requests.pop(request.request_id, None) is None:
            return False, None
        # The last token was sampled and never fed back: it has no KV.
        final = min(_final_tokens(request, 0), request.num_tokens - 1) if self._produces else 0
        known = half.known_tokens(request.request_id)
        if 0 <= known < final:
            half.extend(request.request_id, request.all_token_ids[known:final])
        return half.finish(request.request_id, final, block_ids[0] if block_ids else []), None

    def reset_cache(self) -> bool | None:
        """Forgets all pages of this engine's namespace in the node, nobody else's."""
        if self._client is None or not self._client.ready:
            return False
        self._client.drop()
        return True

    # ---- worker ------------------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._client is None:
            return
        try:
            if self._vllm_config.lora_config is not None:
                compat.require(compat.LORA)
                adapters.watch(self.config.fingerprint)
            rank = rank_of(self._vllm_config, self._namespace)
            self._worker = setup.worker_half(
                self._client,
                self.config,
                self._layout,
                view_of(self._vllm_config, kv_caches),
                first_layer=rank.first_layer,
                first_head=rank.first_head,
                writes=rank.writes,
                block_tokens=self._vllm_config.cache_config.block_size,
                on_cpu=next(iter(kv_caches.values())).device.type == "cpu",
                threads=torch.get_num_threads(),
                lacks=adapters.differ,
            )
        except UnsupportedError as error:
            if self.config.on_unsupported != "disable":
                raise
            self._unable = str(error)  # the scheduler logs it, once for all ranks

    @timed
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PlanMetadata)
        self._plan = plan = metadata.plan
        self._report = Report(plan.step, unable=self._unable)
        if self._worker is not None:
            self._invalid |= self._worker.load(plan, self._report)
        else:
            for load in plan.loads:  # planned although this rank cannot copy: all of it has failed
                self._invalid.update(load.block_ids)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    @timed
    def wait_for_save(self) -> None:
        self._save()

    def _save(self) -> None:
        """Once a step, after the target model's forward pass."""
        plan, self._plan = self._plan, None
        if plan is not None and self._worker is not None and self._report is not None:
            self._worker.save(plan, self._report)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        # With speculative decoding vLLM collects the report before it calls wait_for_save; the target's KV is complete by now.
        self._save()
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PlanMetadata)
        return set(metadata.plan.finished) or None, set(metadata.plan.loaded) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report, self._report = self._report, None
        return None if report is None else ReportMetadata(report)

    # ---- both --------------------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._client is not None:
            self._client.close()

    def get_kv_connector_stats(self) -> MooncakeKVStats | None:
        half = self._scheduler or self._worker
        if half is None:
            return None
        new = half.counters - self._reported
        self._reported = Counter(half.counters)
        return MooncakeKVStats({**new, **self.call_times.take()})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MooncakeKVStats:
        return MooncakeKVStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> MooncakeKVPromMetrics:
        return MooncakeKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _log_like_vllm() -> None:
    """Our lines appear where vLLM's do, with its format and level; without this Python shows only warnings."""
    ours, vllms = logging.getLogger("mooncake_kv"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers, ours.propagate = vllms.handlers, False
        ours.setLevel(vllms.level)


def _block_table(manager: KVCacheManager, request_id: str) -> list[int]:
    return manager.get_block_ids(request_id)[0]


def _final_tokens(request: Request, scheduled: int) -> int:
    """Tokens from the start whose ids are known and whose KV is final after a step that schedules `scheduled` more: all of the past but
    scheduled-ahead and draft positions, and the prompt tokens of the step."""
    past = min(request.num_computed_tokens - request.num_output_placeholders, request.num_tokens)
    return max(past, min(request.num_computed_tokens + scheduled, request.num_prompt_tokens))
