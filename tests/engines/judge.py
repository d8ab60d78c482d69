"""Read what a node holds, page by page, and judge it: the oracles of bytes.

Within one engine, prompt pages are bit-identical across processes and block sizes; across chunk sizes, batches and TP sizes too, as long
as the GEMMs do not depend on the number of rows. oneDNN's do on a CPU with AMX (0.027 measured, relative: norm of the difference over
norm, per page, layer, K or V); with the variables of EXACT they do not. Pages filled by decode differ by rounding, up to 0.022; the faults
that one can plant give 0.14 and more. So prompts are compared byte for byte where that holds, everything else with `worst_error` below
MAX_ERROR.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from mooncake_kv.common.config import load_config
from mooncake_kv.common.hashing import page_hashes, storage_namespace_seed
from mooncake_kv.common.identity import KVNamespace
from mooncake_kv.common.node.client import NodeClient
from mooncake_kv.common.page import PageLayout

if TYPE_CHECKING:
    from tests.engines.harness import Engine

MAX_ERROR = 0.06
# No AMX, neither in vLLM's attention nor in oneDNN. Nothing changes on a CPU that has none.
EXACT = {"MOONCAKE_KV_TEST_ISA": "vec", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
DEADLINE_S = 20.0


def namespace(llm: Any) -> str:
    """Runs in an engine's driver: the namespace of its first worker, in hex."""
    return str(llm.collective_rpc(_namespace_of_worker)[0])


def _namespace_of_worker(worker: Any) -> str:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    return str(connector._namespace.encode().hex())


class PageReader:
    """A client of the node that reads (and, to plant faults, rewrites) whole pages of one namespace. Page arrays are uint16 (bf16, fp16)
    or uint32, [layers, K and V, page tokens, KV heads, head dim], whatever objects the page is made of."""

    def __init__(self, namespace: KVNamespace, settings: dict[str, Any] | None = None) -> None:
        config = load_config(settings or {})
        self.namespace = namespace
        self.layout = PageLayout(namespace)
        self._digest = namespace.digest(config.pool_secret)
        engine = f"judge-{uuid.uuid4().hex}"  # a second scheduler of one engine ends the first
        self._scheduler = NodeClient(config, namespace, engine=engine, role="scheduler", credits=1, spawn=False)
        self._worker = NodeClient(config, namespace, engine=engine, role="worker", spawn=False)

    def __enter__(self) -> Self:
        for client in (self._scheduler, self._worker):
            client.start()
            assert client.wait_ready(DEADLINE_S), client.reason
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for client in (self._scheduler, self._worker):
            client.close()

    def read(self, hashes: Sequence[bytes]) -> list[np.ndarray]:
        """Copies of the leading pages that the node holds and finds intact."""
        found: list[np.ndarray] = []
        self._visit(hashes, lambda slot, page_hash: found.append(self._assemble(slot)))
        return found

    def rewrite(self, page_hash: bytes, change: Callable[[np.ndarray], None], *, seal: bool = True) -> None:
        """Change a stored page in place (the array is handed to `change`), with a matching checksum unless `seal` is False."""

        def apply(slot: np.ndarray, page_hash: bytes) -> None:
            page = self._assemble(slot)
            change(page)
            self._scatter(slot, page)
            if seal:
                self.layout.seal(slot, page_hash, self._digest)

        assert self._visit([page_hash], apply) == 1, "the page is not stored"

    def store(self, page_hash: bytes) -> None:
        """Store a page of zeros."""
        self._wait(lambda: self._scheduler.counters()["credits"] > 0)
        granted = self._scheduler.take(1)

        def write() -> bool:
            arena = self._worker.arena()
            assert arena is not None, self._worker.reason
            with arena.pin(granted.epoch, granted.generation) as pinned:
                slot = pinned.slot(granted.slots[0]) if pinned is not None else None
                if slot is not None:  # the worker may not have mapped it yet
                    slot[:] = 0
                return slot is not None

        self._wait(write)
        self._scheduler.commit(granted.generation, [(page_hash, granted.slots[0])])
        assert self.wait_for([page_hash]) == 1

    @property
    def node_pid(self) -> int:
        return self._scheduler.node_pid

    def count(self, hashes: Sequence[bytes]) -> int:
        """Leading pages that the node holds."""
        lookup = self._scheduler.lookup(hashes)
        assert lookup is not None, self._scheduler.reason
        self._wait(lambda: lookup.done)
        return lookup.pages

    def wait_for(self, hashes: Sequence[bytes]) -> int:
        """Wait until all are stored, at most DEADLINE_S; the number that are."""
        deadline = time.monotonic() + DEADLINE_S
        while (found := self.count(hashes)) < len(hashes) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _visit(self, hashes: Sequence[bytes], visit: Callable[[np.ndarray, bytes], None]) -> int:
        """Visit the leading pages that are intact. A page is staged for us only once our worker has mapped its extent, a moment after it
        joined: so look first until no more come, then visit."""
        deadline = time.monotonic() + DEADLINE_S / 4
        while self._visit_once(hashes, lambda slot, page_hash: None) < self.count(hashes) and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._visit_once(hashes, visit)

    def _visit_once(self, hashes: Sequence[bytes], visit: Callable[[np.ndarray, bytes], None]) -> int:
        fetch = self._scheduler.fetch(hashes)
        assert fetch is not None, self._scheduler.reason
        try:
            self._wait(lambda: fetch.done)
            arena = self._worker.arena()
            assert arena is not None, self._worker.reason
            with arena.pin(fetch.epoch, fetch.generation) as pinned:
                assert pinned is not None
                for slot, page_hash in zip(fetch.slots, hashes, strict=False):
                    self._wait(lambda slot=slot: pinned.slot(slot) is not None)
                    buffer = pinned.slot(slot)
                    assert buffer is not None
                    visit(buffer, page_hash)
            return len(fetch.slots)
        finally:
            self._scheduler.release(fetch)

    def _assemble(self, slot: np.ndarray) -> np.ndarray:
        space = self.namespace
        page = np.empty((space.num_layers, 2, space.page_tokens, space.num_kv_heads, space.k_head_dim), self.layout.item)
        for spec, part in zip(self.layout.objects, self.layout.arrays(slot), strict=True):
            page[spec.first_layer : spec.last_layer, :, :, spec.first_head : spec.last_head] = part
        return page

    def _scatter(self, slot: np.ndarray, page: np.ndarray) -> None:
        for spec, part in zip(self.layout.objects, self.layout.arrays(slot), strict=True):
            part[...] = page[spec.first_layer : spec.last_layer, :, :, spec.first_head : spec.last_head]

    @staticmethod
    def _wait(ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not ready():
            assert time.monotonic() < deadline, "the node did not answer"
            time.sleep(0.002)


class Judged(NamedTuple):
    """Distinct pages that were there, those that were not, how many of the former lie in a prompt and are not bit-identical to what they
    should be, and the largest worst_error."""

    pages: int
    missing: int
    different: int
    worst: float


def judge_pages(engine: Engine, reader: PageReader, answered: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Judged:
    """Every stored whole page of these (prompt, output) pairs, against the same tokens prefilled by the engine, one at a time, under a salt
    whose pages nobody loads. The last token of an output was never computed, so it does not count."""
    seed, seen, missing, different, worst = storage_namespace_seed(None, "reference"), set[bytes](), 0, 0, 0.0
    for prompt, output in answered:
        ids = [*prompt, *output]
        known = ids[:-1] if output else ids
        hashes, reference = page_hashes(known), page_hashes(known, seed=seed)
        if seen.issuperset(hashes):
            continue
        for i, (page_hash, right) in enumerate(zip(hashes, reference_pages(engine, reader, ids, reference), strict=True)):
            if page_hash in seen:
                continue
            seen.add(page_hash)
            found = reader.read([page_hash])
            missing += not found
            for page in found:
                worst = max(worst, worst_error(page, right))
                different += len(prompt) >= (i + 1) * reader.namespace.page_tokens and not np.array_equal(page, right)
    return Judged(len(seen) - missing, missing, different, worst)


def reference_pages(engine: Engine, reader: PageReader, ids: Sequence[int], hashes: Sequence[bytes]) -> list[np.ndarray]:
    """The pages of `ids`, computed now. Where a slow tier still has some of an earlier time, and faults have damaged them, they are found
    bad by reading them, and stored by computing them once more."""
    found: list[np.ndarray] = []
    for _ in range(3):
        engine.generate(ids, 1, cache_salt="reference", sampling={"skip_reading_prefix_cache": True})
        assert reader.wait_for(hashes) == len(hashes)
        found = reader.read(hashes)
        if len(found) == len(hashes):
            break
    return found


def worst_error(page: np.ndarray, reference: np.ndarray) -> float:
    """Largest relative error over layers and over K and V of two bf16 pages: norm of the difference over norm."""
    ours, theirs = ((p.astype(np.uint32) << 16).view(np.float32) for p in (page, reference))
    axes = (2, 3, 4)
    norm = np.sqrt((theirs.astype(np.float64) ** 2).sum(axes))
    return float((np.sqrt(((ours.astype(np.float64) - theirs) ** 2).sum(axes)) / norm).max())
