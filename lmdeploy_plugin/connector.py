"""MooncakeConnector: LMDeploy's connector interface, translated to the two halves of `connectors.store`.

A load is asynchronous in LMDeploy's sense: the sequence waits, its blocks are its own, and a step that may carry nothing else copies the
pages in; the step's output publishes the blocks or rolls them back. Saves ride on any step: LMDeploy hands over block tables for prefill
steps only, those of decode steps come from its block manager.

A step's number is the id of its one save operation, so its completion on all ranks is the step's report. What went wrong on a rank travels
with it among the invalid blocks, whose union over ranks LMDeploy makes, as negative numbers.

Promises: it holds no logic of its own beyond LMDeploy's shapes and calls; whatever goes wrong at run time makes LMDeploy compute, never
fail; with `on_unsupported: "disable"` an engine that the cache does not serve runs as if the connector were not there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lmdeploy.pytorch.kv_connector.base import (
    KVConnectorBase,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorResult,
    KVConnectorRole,
    KVConnectorStepInput,
    KVLoadResult,
    KVSaveBlockLease,
)

from ..common.errors import UnsupportedError
from ..common.identity import KVNamespace, trailer_key
from ..common.node.client import NodeClient
from ..common.page import PageLayout
from ..connectors.store import Plan, Report, SchedulerHalf, WorkerHalf, setup
from . import compat, metrics
from .facts import config_of, facts_of, fingerprints, rank_of, same_machine, view_of
from .requests import block_table, reason_to_skip, seed_of, wants_all_tokens

if TYPE_CHECKING:
    from lmdeploy.pytorch.messages import SchedulerSequence

logger = logging.getLogger("mooncake_kv.lmdeploy")

# Among invalid blocks: this rank copies nothing at all; and below it, one number for each save of the engine that failed.
_UNABLE = -1
_FAILED_SAVE = -2


@dataclass
class PlanMetadata(KVConnectorMetadata):
    """One step's plan on its way to the workers. `leased`: logical blocks that must stay until the step's report."""

    plan: Plan
    leased: tuple[int, ...] = ()

    def get_save_block_leases(self) -> tuple[KVSaveBlockLease, ...]:
        return (KVSaveBlockLease(self.plan.step, self.leased),) if self.leased else ()


class MooncakeConnector(KVConnectorBase):
    """`kv_connector: "mooncake"`. Raises ConfigError or UnsupportedError at engine start only."""

    def __init__(
        self,
        role: KVConnectorRole,
        cache_config: Any,
        *,
        global_rank: int = 0,
        tp_rank: int = 0,
        tp_size: int = 1,
        kv_head_replica_num: int = 1,
    ) -> None:
        super().__init__(role)
        _log_like_lmdeploy()
        compat.require(compat.CONNECTOR)
        compat.warn_if_untested()
        transfer = cache_config.kv_transfer_config
        self.config = config_of(cache_config)
        self._cache_config = cache_config
        self._consumes = transfer.is_kv_consumer
        self._produces = transfer.is_kv_producer
        self._tp_rank, self._tp_size = tp_rank, tp_size
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._client: NodeClient | None = None
        # Scheduler: sequences that the cache knows; those whose blocks are settled since they were last asked about; saves of steps without
        # a report; what came of a step before all ranks had reported it.
        self._sequences: dict[int, SchedulerSequence] = {}
        self._settled: set[int] = set()
        self._saves: dict[int, list[int]] = {}
        self._invalid: set[int] = set()
        # Worker: the step under way, and why this rank copies nothing.
        self._report: Report | None = None
        self._unable = ""
        facts = self._facts = facts_of(cache_config)
        scheduler = role is KVConnectorRole.SCHEDULER
        if facts.refused:
            if scheduler:
                logger.error("runs without the cache: %s", facts.refused)
            return
        self._namespace = KVNamespace.decode(facts.namespace)
        self._layout = PageLayout(self._namespace, trailer_key(self.config.pool_secret))
        step_tokens = cache_config.max_prefill_token_num
        self._client = setup.start_client(
            self.config,
            self._namespace,
            engine=facts.engine,
            role="scheduler" if scheduler else "worker",
            credits=setup.credits_of(self.config, self._layout, step_tokens) if scheduler else 0,
        )
        if scheduler:
            self._scheduler = setup.scheduler_half(
                self._client,
                self.config,
                self._layout,
                block_tokens=cache_config.block_size,
                ranks=tp_size,
                on_cpu=False,  # LMDeploy computes on CUDA devices only
            )
            # LMDeploy has read the adapters since the first time.
            again = fingerprints(facts.adapter_paths, self.config.fingerprint)
            self._adapters = {name: mark if again[name] == mark else "" for name, mark in facts.adapters.items()}
            self._summary = metrics.Summary(self._scheduler.counters)
            metrics.count(facts.engine, self._scheduler.counters)
            logger.info("mooncake-kv serves namespace %s (node %r)", self._namespace.digest(self.config.pool_secret), self.config.node)

    # ---- scheduler ---------------------------------------------------------------------------------------------------------------

    def on_new_request(self, request: SchedulerSequence) -> None:
        half = self._scheduler
        if half is None:
            return
        skip = reason_to_skip(request, self._adapters)
        if not skip:
            self._sequences[request.seq_id] = request
        seed = b"" if skip else seed_of(request, self._adapters)
        half.arrive(str(request.seq_id), request.all_ids.tolist(), seed=seed, skip=skip)

    def is_lookup_pending(self, request_id: int) -> bool:
        return self._scheduler is not None and self._scheduler.blind_ask(str(request_id))

    def get_num_new_matched_tokens(self, request: SchedulerSequence, num_computed_tokens: int) -> tuple[int | None, bool]:
        half = self._scheduler
        self._settled.discard(request.seq_id)
        if half is None or not self._consumes or not self._follows(request) or wants_all_tokens(request):
            return 0, False
        # LMDeploy loads whole blocks, and computes the last token.
        block, last = self._cache_config.block_size, request.get_prefix_cache_max_match_step()
        if last <= num_computed_tokens:
            return 0, False
        self._extend(half, request, request.num_all_ids)
        begin = num_computed_tokens // block * block
        tokens = half.match(str(request.seq_id), begin, last + 1)
        if tokens is None:
            return None, False
        found = max(0, (begin + tokens) // block * block - num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: SchedulerSequence, block_ids: Sequence[int], num_external_tokens: int) -> None:
        assert self._scheduler is not None
        first = request.num_history_ids // self._cache_config.block_size
        self._scheduler.start(str(request.seq_id), num_external_tokens, lambda: [0] * first + list(block_ids))
        self._settled.add(request.seq_id)

    def build_connector_meta(self, step_input: KVConnectorStepInput) -> KVConnectorMetadata | None:
        half = self._scheduler
        if half is None:
            return None
        prefill = bool(step_input.connector_token_lens)
        logical: dict[str, Sequence[int]] = {}
        for i, request in enumerate(step_input.running):
            if not self._follows(request):
                continue
            name = str(request.seq_id)
            if request.seq_id not in self._settled:
                self._settled.add(request.seq_id)
                half.start(name, 0, list)
            # A decode step computes the token that was known last, or, planned ahead, one that is not known yet.
            final = step_input.connector_token_lens[i] if prefill else request.num_all_ids
            if not self._produces:
                final = 0
            self._extend(half, request, final)

            def table(i: int = i, name: str = name, request: SchedulerSequence = request) -> list[int]:
                if prefill:
                    logical[name] = step_input.connector_logical_block_ids[i]
                    return list(step_input.connector_block_ids[i])
                logical[name] = request.logical_blocks.get_real_blocks().tolist()
                return block_table(request)

            half.scheduled(name, final, table)
        plan = half.end_step()
        self._summary.log()
        if not (plan.saves or plan.loads or plan.loaded):
            return None
        self._saves[plan.step] = [save.op for save in plan.saves]
        leased = {block for s in plan.saves for block in logical[s.request_id][s.first_block : s.first_block + len(s.block_ids)]}
        return PlanMetadata(plan, tuple(sorted(leased)))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> KVConnectorResult:
        half = self._scheduler
        if half is None:
            return KVConnectorResult()
        self._invalid |= connector_output.invalid_block_ids
        done = frozenset(connector_output.completed_save_ids or ())
        results: list[KVLoadResult] = []
        for step in sorted(done & self._saves.keys()):
            invalid, self._invalid = self._invalid, set()
            saved = {op: self._tp_size for op in self._saves.pop(step) if _FAILED_SAVE - op not in invalid}
            unable = "its log says why" if _UNABLE in invalid else ""
            ended = half.output(Report(step, saved, unable), {block for block in invalid if block >= 0})
            results += [KVLoadResult(int(name), ok) for name, ok in ended.items()]
        return KVConnectorResult(tuple(results), done)

    def cancel_lookup(self, request_id: int) -> None:
        if self._scheduler is not None:
            self._scheduler.cancel(str(request_id))

    def request_finished(self, request: SchedulerSequence) -> None:
        self._settled.discard(request.seq_id)
        self._sequences.pop(request.seq_id, None)
        if self._scheduler is not None:
            # LMDeploy frees the blocks at once: a page that its last step completed is given up.
            self._scheduler.finish(str(request.seq_id), 0, [])

    def finish_transfers_after_worker_drain(self) -> None:
        """The engine goes to sleep: outputs of steps under way were thrown away, and the workers are gone."""
        if self._scheduler is not None and self._saves:
            self._scheduler.output(Report(max(self._saves)), ())
            self._saves.clear()
        self._invalid.clear()

    def counts(self) -> tuple[str, dict[str, int]]:
        """For LMDeploy's server (see metrics): the engine's name, and what its halves in this process have counted."""
        return self._facts.engine, metrics.counts(self._facts.engine)

    def weights_changed(self) -> None:
        """The weights are about to be replaced: no key says what the KV is from now on."""
        if self._scheduler is not None:
            self._scheduler.stop("the weights were changed at run time")

    def reset_cache(self) -> bool:
        """Forgets all pages of this engine's namespace in the node, nobody else's."""
        if self._client is None or not self._client.ready:
            return False
        self._client.drop()
        return True

    def _follows(self, request: SchedulerSequence) -> bool:
        """Does the cache serve this sequence (still)?"""
        if request.seq_id not in self._sequences:
            return False
        if not reason_to_skip(request, self._adapters):
            return True
        del self._sequences[request.seq_id]  # an image, in a later turn of the session
        return False

    def _extend(self, half: SchedulerHalf, request: SchedulerSequence, final: int) -> None:
        """Hand over new token ids, when they complete a page."""
        known, page = half.known_tokens(str(request.seq_id)), self._namespace.page_tokens
        if final >= known + page - known % page and known >= 0:
            half.extend(str(request.seq_id), request.all_ids[known:].tolist())

    # ---- worker ------------------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        if self._client is None:
            return
        try:
            rank = rank_of(self._namespace, self._tp_rank, self._tp_size)
            self._worker = setup.worker_half(
                self._client,
                self.config,
                self._layout,
                view_of(self._facts, self._namespace, rank.heads, self._cache_config.kernel_block_size, kv_caches),
                first_layer=0,
                first_head=rank.first_head,
                writes=rank.writes,
                block_tokens=self._cache_config.block_size,
                on_cpu=next(iter(kv_caches.values())).device.type == "cpu",
                threads=torch.get_num_threads(),
            )
            same_machine(self._facts)
        except UnsupportedError as error:
            if self.config.on_unsupported != "disable":
                raise
            logger.error("this rank copies nothing: %s", error)
            self._unable = str(error)
            return
        metrics.count(self._facts.engine, self._worker.counters)

    def start_load_kv(self) -> None:
        plan = self._plan()
        self._report = Report(plan.step, unable=self._unable)
        if self._worker is not None and not self._unable:
            self._invalid |= self._worker.load(plan, self._report)
        else:
            for load in plan.loads:  # planned although this rank cannot copy: all of it has failed
                self._invalid.update(load.block_ids)

    def start_save_kv(self) -> None:
        if self._worker is not None and self._report is not None and not self._unable:
            self._worker.save(self._plan(), self._report)

    def get_finished(self) -> KVConnectorOutput:
        """What this rank did in the step that is bound; nothing of it is still under way."""
        plan, report, invalid = self._plan(), self._report, self._invalid
        self._report, self._invalid = None, set()
        if report is None:
            return KVConnectorOutput()
        invalid |= {_FAILED_SAVE - save.op for save in plan.saves if save.op not in report.saved}
        if report.unable:
            invalid.add(_UNABLE)
        return KVConnectorOutput(completed_save_ids={plan.step}, invalid_block_ids=invalid)

    def _plan(self) -> Plan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PlanMetadata)
        return metadata.plan

    # ---- both --------------------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._client is not None:
            self._client.close()


def _log_like_lmdeploy() -> None:
    """Our lines appear where LMDeploy's do, with its format and level; without this Python shows only warnings."""
    ours, theirs = logging.getLogger("mooncake_kv"), logging.getLogger("lmdeploy")
    if not ours.handlers and theirs.handlers:
        ours.handlers, ours.propagate = theirs.handlers, False
        ours.setLevel(theirs.level)
