"""LMDeploy's own scheduler, block manager, prefix trie and report aggregator around our connector, with a real node and two ranks whose KV
rows are plain tensors. Only the model is missing: a token's KV is drawn from the tokens up to it, as attention would.

`Rig.step` does what LMDeploy's engine loop does for a step (engine_loop.py, inputs_maker.py and model_agent/agent.py of 0.18.0), and with
`ahead` plans the next step before it applies the output of the one before, as the engine does.
"""

from __future__ import annotations

import hashlib
import pickle
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lmdeploy.messages import KVTransferConfig
from lmdeploy.pytorch.config import CacheConfig, SchedulerConfig
from lmdeploy.pytorch.kv_connector import KVConnectorOutputAggregator, KVConnectorRole
from lmdeploy.pytorch.messages import MessageStatus, SamplingParam, SequenceMeta, UpdateTokenMode
from lmdeploy.pytorch.paging import Scheduler
from lmdeploy.pytorch.strategies.ar.sequence import ARSequenceStrategy

from mooncake_kv.common.hashing import page_hashes
from mooncake_kv.common.identity import KVNamespace
from mooncake_kv.lmdeploy_plugin import facts
from mooncake_kv.lmdeploy_plugin.connector import MooncakeConnector
from tests.node.scripted_peer import until

LAYERS, HEADS, DIM, RANKS, BLOCKS = 2, 2, 32, 2, 4096
SPACE = KVNamespace.build(model="m", kv_dtype="bfloat16", num_layers=LAYERS, num_kv_heads=HEADS, k_head_dim=DIM, v_head_dim=DIM)
SETTINGS = {"dram_size": "64mb", "extent_size": "16mb", "fetch_timeout_ms": 10000}
DEADLINE_S = 60.0


class Work(NamedTuple):
    """Tokens [first, last) of a sequence that a step computes, in these blocks. `final`: a token is sampled after it."""

    sequence: Any
    first: int
    last: int
    table: list[int]
    final: bool


Step = tuple[list[Any], Any, list[Work]]


class Rank:
    """One worker: rows `K || V` of one of the model's two heads, [kernel blocks, row bytes] per layer."""

    def __init__(self, number: int, cache_config: CacheConfig) -> None:
        self.number, self.block = number, cache_config.block_size
        kernel = cache_config.kernel_block_size
        self._pitch = -(-kernel * DIM * 2 // 256) * 256
        shape = (cache_config.num_gpu_blocks * self.block // kernel, 2 * self._pitch)
        self.rows = [torch.zeros(shape, dtype=torch.uint8) for _ in range(LAYERS)]
        self._kernel = kernel
        self.connector = MooncakeConnector(
            KVConnectorRole.WORKER, cache_config, global_rank=number, tp_rank=number, tp_size=RANKS, kv_head_replica_num=1
        )
        self.connector.register_kv_caches({f"cache_pool.0.row.{i}": row for i, row in enumerate(self.rows)})

    def kv(self, layer: int, component: int, slot: int) -> np.ndarray:
        """View of a token's vector: int16 [DIM]."""
        block, offset = divmod(slot, self._kernel)
        begin = component * self._pitch + offset * DIM * 2
        return self.rows[layer][block, begin : begin + 2 * DIM].numpy().view(np.int16)

    def compute(self, tokens: Sequence[int], table: Sequence[int], first: int, last: int, below: bool = True) -> None:
        """KV of tokens [first, last): drawn from the KV of the token before, as far as it is right, and from the token."""
        for i in range(first, last):
            slot = self.slot(table, i)
            for layer in range(LAYERS):
                for component in (0, 1):
                    before = self.kv(layer, component, self.slot(table, i - 1)).tobytes() if i and below else b""
                    seed = hashlib.sha256(before + bytes([layer, component, self.number]) + int(tokens[i]).to_bytes(4, "little"))
                    self.kv(layer, component, slot)[:] = np.frombuffer(seed.digest() * 2, np.int16)[:DIM]

    def read(self, table: Sequence[int], last: int) -> np.ndarray:
        """int16 [layers, 2, last, DIM]."""
        return np.stack([[[self.kv(layer, c, self.slot(table, i)).copy() for i in range(last)] for c in (0, 1)] for layer in range(LAYERS)])

    def slot(self, table: Sequence[int], i: int) -> int:
        return int(table[i // self.block]) * self.block + i % self.block


class Rig:
    def __init__(self, *, block: int = 64, kernel: int = -1, prefix_caching: bool = False, chunk: int = 8192, **settings: Any) -> None:
        transfer = KVTransferConfig("mooncake", "kv_both", {**SETTINGS, **settings})
        prepared = facts.EngineFacts("e", "ray", socket.gethostname(), SPACE.encode(), "", stored_dim=DIM)
        setattr(transfer, facts._ATTRIBUTE, prepared)
        self.cache_config = CacheConfig(
            max_batches=8, block_size=block, kernel_block_size=kernel, num_cpu_blocks=0, num_gpu_blocks=BLOCKS // block,
            enable_prefix_caching=prefix_caching, max_prefill_token_num=chunk, kv_transfer_config=transfer,
        )  # fmt: skip
        self.cache_config = pickle.loads(pickle.dumps(self.cache_config))  # as it reaches workers
        self.ranks = [Rank(i, self.cache_config) for i in range(RANKS)]
        self.connector = MooncakeConnector(KVConnectorRole.SCHEDULER, self.cache_config, tp_size=RANKS)
        self._aggregator = KVConnectorOutputAggregator(RANKS)
        self.scheduler = Scheduler(
            SchedulerConfig(max_batches=8, max_session_len=4096),
            self.cache_config,
            SequenceMeta(block, strategy=ARSequenceStrategy()),
            kv_connector=self.connector,
        )
        self.free_at_start = self.scheduler.block_manager.get_num_free_gpu_blocks()
        self.running: list[Any] = []
        self._sessions = 0
        self.settle()

    @property
    def half(self) -> Any:
        return self.connector._scheduler

    @property
    def client(self) -> Any:
        return self.connector._client

    def settle(self) -> None:
        """Until the node has granted slots and the ranks have mapped its memory."""
        until(lambda: self.client.ready and self.client.counters()["credits"] >= 32, DEADLINE_S)
        until(lambda: all(rank.connector._client.counters()["mapped_bytes"] for rank in self.ranks), DEADLINE_S)  # type: ignore[union-attr]

    def close(self) -> None:
        for rank in self.ranks:
            rank.connector.shutdown()
        self.scheduler.shutdown()

    def add(self, tokens: Sequence[int], **more: Any) -> Any:
        """A request in a session of its own: LMDeploy's sequence."""
        self._sessions += 1
        session = self.scheduler.add_session(self._sessions)
        return session.add_sequence(torch.tensor(list(tokens)), sampling_param=SamplingParam(max_new_tokens=1 << 20), **more)

    def end(self, sequence: Any) -> None:
        """The request is over or aborted."""
        if sequence in self.running:
            self.running.remove(sequence)
        self.scheduler.end_session(sequence.session_id)

    def table(self, sequence: Any) -> list[int]:
        return [int(b) for b in self.scheduler.block_manager.get_block_table(sequence)]

    # ---- steps -------------------------------------------------------------------------------------------------------------------

    def plan(self, decode: bool = False) -> Step:
        """(sequences, connector metadata, what to compute) of one step."""
        if decode:
            batch = [s for s in self.running if s.status == MessageStatus.RUNNING]
            assert not batch or all(self.scheduler.schedule_running(batch))
            lens: tuple[int, ...] = ()
            work = [Work(s, s.num_all_ids - 1, s.num_all_ids, self.table(s), True) for s in batch]
        else:
            batch = self.scheduler.schedule(is_prefill=True).running
            lens = tuple(min(s.num_all_ids, s.kv_token_limit or s.num_all_ids) for s in batch)
            work = [Work(s, s.num_history_ids, n, self.table(s), n == s.num_all_ids) for s, n in zip(batch, lens, strict=True)]
        metadata = self.scheduler.build_connector_meta(batch, connector_token_lens=lens)
        self.scheduler.activate_seqs(batch)
        return batch, metadata, work

    def plan_load(self) -> Step:
        """The step that begins to load for a request that was added; it is not executed yet."""
        return until(lambda: (step := self.plan())[1] is not None and step[1].plan.loads and step)  # type: ignore[no-any-return]

    def execute(self, metadata: Any, work: Sequence[Work], lazy: Sequence[int] = ()) -> Any:
        """What the workers do: load, compute, save (not the `lazy` ranks). Returns LMDeploy's aggregated connector output."""
        outputs = []
        for rank in self.ranks:
            if metadata is not None:
                rank.connector.bind_connector_metadata(pickle.loads(pickle.dumps(metadata)))
                rank.connector.start_load_kv()
            for sequence, first, last, table, _ in work:
                rank.compute(sequence.history_cache.get_real(), table, first, last)
            if metadata is not None:
                if work and rank.number not in lazy:
                    rank.connector.start_save_kv()
                outputs.append(rank.connector.get_finished())
                rank.connector.clear_connector_metadata()
        return self._aggregator.aggregate(outputs) if outputs else None

    def apply(self, output: Any, batch: Sequence[Any], work: Sequence[Work]) -> None:
        """What the engine does when it has a step's output."""
        self.scheduler.update_connector_output(output)
        for sequence, _, last, _, final in work:
            if sequence.status != MessageStatus.RUNNING:
                continue
            if not final:
                sequence.set_step(last)
                continue
            decoding = sequence in self.running
            mode = UpdateTokenMode.DECODE if decoding else UpdateTokenMode.PREFILL
            sequence.update_token_ids(np.array([7 + sequence.num_all_ids % 5]), mode=mode)
            if not decoding:
                self.running.append(sequence)
        self.scheduler.release_completed_prefill_reservations(list(batch))

    def step(self, *, decode: bool = False, lazy: Sequence[int] = ()) -> Any:
        """One step from planning to its output. Returns the metadata."""
        batch, metadata, work = self.plan(decode)
        self.apply(self.execute(metadata, work, lazy), batch, work)
        return metadata

    def prefill(self, *sequences: Any, lazy: Sequence[int] = (), timeout_s: float = DEADLINE_S) -> None:
        """Steps until all of them have their first token."""
        deadline = time.monotonic() + timeout_s
        while not all(s in self.running for s in sequences):
            self.step(lazy=lazy)
            assert time.monotonic() < deadline, [s.status for s in sequences]
            time.sleep(0.001)

    # ---- what is stored ----------------------------------------------------------------------------------------------------------

    def stored(self, tokens: Sequence[int]) -> int:
        """Leading pages that the node holds."""
        return self.pages(page_hashes(list(tokens)))

    def pages(self, hashes: Sequence[bytes]) -> int:
        """Leading pages of these that the node holds."""
        lookup = self.client.lookup(hashes)
        assert lookup is not None
        until(lambda: lookup.done)
        return int(lookup.pages)

    def store(self, tokens: Sequence[int]) -> None:
        """Compute a prompt, end its request, and wait until its whole pages can be found."""
        sequence = self.add(tokens)
        self.prefill(sequence)
        self.end(sequence)
        until(lambda: self.stored(tokens) == len(tokens) // SPACE.page_tokens)

    def right(self, sequence: Any, last: int) -> bool:
        """Is the KV of the first tokens what computing gives?"""
        reference = [int(BLOCKS // self.cache_config.block_size - 1 - i) for i in range(-(-last // self.cache_config.block_size))]
        taken = set(self.table(sequence))
        assert not taken & set(reference), "the test needs more blocks"
        for rank in self.ranks:
            rank.compute(sequence.history_cache.get_real(), reference, 0, last)
            if not np.array_equal(rank.read(self.table(sequence), last), rank.read(reference, last)):
                return False
        return True


def prompt(length: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 50000, length)]
