"""SGLang's contract for storage backends, through its real HiCacheController: its threads, queues, batches of 128 pages and hashes, on our
backend and a real node. The scheduler's part (allocate, acknowledge) is played by the test; the thresholds of prompts are in
test_sglang_server. After every test SGLang's four storage threads are alive."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mooncake_kv.common.hashing import page_hashes
from mooncake_kv.common.node.tool import NodeTool
from tests.engines import sglang_parts
from tests.engines.test_sglang_backend import DIM, HEADS, LAYERS, SETTINGS, P, tokens
from tests.engines.test_sglang_server import DYNAMIC
from tests.node.scripted_peer import until
from tests.node.test_hicache import cut

PAGES = 300  # in batches of 128: two whole ones and a part
WAIT_S = 20.0
IDS = [int(x) for x in np.random.default_rng(5).integers(0, 1 << 32, PAGES * P)]
KEYS = [page_hash.hex() for page_hash in page_hashes(IDS, P)]
THREADS = ("prefetch_thread", "prefetch_io_aux_thread", "prefetch_sync_thread", "backup_thread")


class Bench:
    """One rank: SGLang's controller over a host pool of twice PAGES; the first half holds what was computed, loads go to the second."""

    def __init__(self, patch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
        from sglang.srt.managers import cache_controller

        patch.setattr(cache_controller, "is_dp_attention_enabled", lambda: False)
        names = ("tp", "pp", "attn_tp", "attn_cp", "attn_dp", "attn_dcp")
        ranks = {f"{name}_{what}": int(what == "size") for name in names for what in ("rank", "size")}
        patch.setattr(cache_controller, "get_parallel", lambda: SimpleNamespace(**ranks))
        self.pool = sglang_parts.host_pool(layout="page_first", pages=2 * PAGES, page_tokens=P, layers=LAYERS, heads=HEADS, dim=DIM)
        self.pool.kv_buffer.copy_(torch.randn(self.pool.kv_buffer.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16))
        device = SimpleNamespace(device="cpu", layer_num=LAYERS, register_layer_transfer_counter=lambda counter: None)
        self.controller = cache_controller.HiCacheController(
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: device),
            mem_pool_host=self.pool,
            page_size=P,
            tp_group=None,
            load_cache_event=threading.Event(),
            write_policy="write_through",
            io_backend="kernel",
            storage_backend="dynamic",
            model_name="m",
            storage_backend_extra_config={**DYNAMIC, **settings},
        )
        self.backend: Any = self.controller.storage_backend
        self.source = self.pool.alloc(PAGES * P)
        until(lambda: self.backend.counters()["mapped_bytes"] > 0)

    def write(self, first: int, last: int, prefix_keys: list[str] | None = None) -> int:
        """Pages [first, last) of the prompt, as the scheduler has them written; how many tokens SGLang takes to be stored."""
        self.controller.write_storage(self.source[first * P : last * P], IDS[first * P : last * P], KEYS[first:last], prefix_keys)
        operation = self.controller.ack_backup_queue.get(timeout=WAIT_S)
        return int(operation.completed_tokens)

    def stored(self, pages: int) -> None:
        until(lambda: sum(self.backend.batch_exists(KEYS[at : at + 128]) for at in range(0, pages, 128)) >= pages)

    def query(self, first: int = 0, last: int = PAGES, prefix_keys: list[str] | None = None) -> Any:
        """What SGLang finds of these pages, after a prefix that it has."""
        before = KEYS[first - 1] if first else None
        self.controller.prefetch(f"r{first}", IDS[first * P : last * P], before, prefix_keys)
        return self.controller.prefetch_hit_queue.get(timeout=WAIT_S)

    def load(self, operation: Any) -> int:
        """Loads what was found; how many pages SGLang takes to be there."""
        operation.host_indices = self.controller.alloc_prefetch_host_buffers(operation, len(operation.hash_value) * P)
        self.controller.prefetch_buffer.put(operation)
        done = 0
        while not (ack := self.controller.ack_prefetch_queue.get(timeout=WAIT_S)).completed_req:
            done = ack.completed_tokens // P
        return done

    def right(self, operation: Any, first: int, pages: int) -> bool:
        """Whether these pages were loaded as they were written."""
        taken, found = tokens(self.pool), np.asarray(operation.host_indices[: pages * P])
        return np.array_equal(taken[:, np.asarray(self.source[first * P : (first + pages) * P])], taken[:, found])

    def damage(self, page: int) -> None:
        """A bit of a stored page, behind the node's back."""
        store = self.backend._store
        fetch = store._client.fetch([bytes.fromhex(key) for key in KEYS[: page + 1]])
        until(lambda: fetch.done)
        with store._client.arena().pin(fetch.epoch, 0) as pinned:
            pinned.slot(fetch.slots[page])[100] ^= 1
        store._client.release(fetch)

    def alive(self) -> bool:
        return all(getattr(self.controller, name).is_alive() for name in THREADS)


@pytest.fixture
def make(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    config = SimpleNamespace(to_dict=lambda: {"num_hidden_layers": LAYERS})
    sglang_parts.pretend(sglang_parts.process(config, "/nowhere", layers=LAYERS, heads=HEADS), monkeypatch.setattr)
    made: list[Bench] = []

    def build(**more: Any) -> Bench:
        made.append(Bench(monkeypatch, {**SETTINGS, **more}))
        return made[-1]

    yield build
    for bench in made:
        assert bench.alive()
        bench.controller.detach_storage_backend()


def test_all_pages_in_batches_with_and_without_prefix_keys(make: Any) -> None:
    bench = make()
    assert bench.write(0, 200) == 200 * P
    # The next write tells the keys before it, as SGLang does with hicache_storage_pass_prefix_keys.
    assert bench.write(200, PAGES, KEYS[:200]) == (PAGES - 200) * P
    bench.stored(PAGES)
    for first, prefix_keys in ((0, None), (0, []), (37, KEYS[:37])):
        operation = bench.query(first, PAGES, prefix_keys)
        assert (operation.storage_hit_count, len(operation.hash_value)) == ((PAGES - first) * P, PAGES - first)
        assert bench.load(operation) == PAGES - first
        assert bench.right(operation, first, PAGES - first)
        bench.controller.mem_pool_host.free(operation.host_indices)


def test_only_consecutive_pages_are_hits(make: Any) -> None:
    bench = make()
    bench.write(0, 140)
    bench.write(141, PAGES)  # as if page 140 had been evicted
    bench.stored(140)
    until(lambda: bench.backend.batch_exists(KEYS[141:269]) == 128)
    operation = bench.query()
    assert operation.storage_hit_count == 140 * P
    assert bench.load(operation) == 140 and bench.right(operation, 0, 140)
    assert bench.query(140).storage_hit_count == 0, "the first page decides"
    assert bench.query(141).storage_hit_count == (PAGES - 141) * P


@pytest.mark.parametrize("bad", [0, 5, 127, 128, 250])
def test_a_damaged_page_ends_the_load_there_and_is_replaced(make: Any, bad: int) -> None:
    bench = make()
    bench.write(0, PAGES)
    bench.stored(PAGES)
    operation = bench.query()
    assert operation.storage_hit_count == PAGES * P
    bench.damage(bad)
    assert bench.load(operation) == bad
    assert bench.right(operation, 0, bad)
    until(lambda: bench.query().storage_hit_count == bad * P)
    assert bench.write(bad, PAGES) == (PAGES - bad) * P
    bench.stored(PAGES)
    bench.controller.mem_pool_host.free(operation.host_indices)
    again = bench.query()
    assert bench.load(again) == PAGES and bench.right(again, 0, PAGES)


def test_a_page_that_went_between_asking_and_loading(make: Any) -> None:
    bench = make()
    bench.write(0, 20)
    bench.stored(20)
    operation = bench.query(0, 20)
    bench.backend.clear()
    until(lambda: not bench.backend.exists(KEYS[0]))
    # It is staged, and the lease holds its memory: loading it is right, and so is a miss.
    assert (done := bench.load(operation)) in (0, 20) and bench.right(operation, 0, done)


def test_a_backend_that_has_lost_its_node(make: Any) -> None:
    """Cut in the middle of everything: misses and failed writes, each answered, then as before."""
    bench = make()
    bench.write(0, 50)
    bench.stored(50)
    operation = bench.query(0, 50)
    cut(Path(bench.backend._client._node.folder).parent.parent)
    done = bench.load(operation)
    assert done in (0, 50) and bench.right(operation, 0, done)
    assert bench.write(50, 60) in (0, 10 * P)
    until(lambda: bench.backend._client.ready and bench.query(0, 50).storage_hit_count == 50 * P, WAIT_S)
    until(lambda: bench.write(50, 60) == 10 * P, WAIT_S)
    bench.stored(60)


def test_a_prompt_that_the_node_has_no_room_for(make: Any) -> None:
    """Whole batches are taken or failed, older pages make room, and what is found is right."""
    bench = make(dram_size="2mb", extent_size="2mb", fetch_timeout_ms=300)
    assert PAGES * bench.backend._layout.slot_bytes > 2 * (2 << 20)
    assert bench.write(0, PAGES) % (128 * P) in (0, PAGES * P % (128 * P))
    operation = bench.query()
    assert operation.storage_hit_count < PAGES * P
    found = len(operation.hash_value)
    assert not found or ((done := bench.load(operation)) <= found and bench.right(operation, 0, done))
    assert bench.write(0, 10) == 10 * P
    bench.stored(10)
    operation = bench.query(0, 10)
    assert bench.load(operation) == 10 and bench.right(operation, 0, 10)


def test_writes_queries_and_loads_at_once(make: Any) -> None:
    bench = make()
    controller, began = bench.controller, time.monotonic()
    for number in range(20):
        first = 15 * number
        controller.write_storage(bench.source[first * P : (first + 15) * P], IDS[first * P : (first + 15) * P], KEYS[first : first + 15])
        controller.prefetch(f"r{number}", IDS)
    hits, right, loads, backups = [], [], 0, 0
    while (backups < 20 or len(hits) < 20 or loads) and time.monotonic() - began < WAIT_S:
        backups += _drained(controller.ack_backup_queue)
        try:
            operation = controller.prefetch_hit_queue.get(timeout=0.01)
        except Empty:
            continue
        hits.append(operation.storage_hit_count)
        if operation.hash_value:
            right.append(bench.load(operation) == len(operation.hash_value) and bench.right(operation, 0, len(operation.hash_value)))
            controller.mem_pool_host.free(operation.host_indices)
    assert backups == len(hits) == 20 and all(right)
    bench.stored(PAGES)
    assert bench.query().storage_hit_count == PAGES * P


def _drained(queue: Any) -> int:
    count = 0
    while not queue.empty():
        queue.get()
        count += 1
    return count


def _truncate(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 4
    file.write_bytes(data)


def _another(file: Path) -> None:
    """The bytes of another page, right in themselves."""
    other = next(f for f in file.parent.parent.rglob("*.*") if f != file and f.is_file() and f.stat().st_size == file.stat().st_size)
    file.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [Path.unlink, _truncate, _flip, _another], ids=["gone", "short", "flipped", "swapped"])
def test_a_damaged_file_ends_the_load_there_and_is_replaced(make: Any, tmp_path: Path, damage: Any) -> None:
    """In a node that has nothing in memory: the one before was killed."""
    bench, bad = make(ssd_path=str(tmp_path / "ssd"), ssd_size="64mb", fetch_deadline_ms=20000), 150
    bench.write(0, PAGES)
    on_disk(tmp_path / "ssd", PAGES)
    replace_node(bench)
    damage(next((tmp_path / "ssd").rglob(f"{KEYS[bad]}.*")))
    operation = bench.query()
    done = bench.load(operation)
    # The index, made anew, may know already that a file is missing or short; otherwise only reading it shows.
    assert done == min(bad, len(operation.hash_value)) and bench.right(operation, 0, done)
    bench.controller.mem_pool_host.free(operation.host_indices)
    until(lambda: bench.query().storage_hit_count == bad * P, WAIT_S)
    assert bench.write(bad, PAGES) == (PAGES - bad) * P
    bench.stored(PAGES)
    again = bench.query()
    assert bench.load(again) == PAGES and bench.right(again, 0, PAGES)


def test_a_disk_that_is_taken_away(make: Any, tmp_path: Path) -> None:
    folder = tmp_path / "ssd"
    bench = make(ssd_path=str(folder), ssd_size="64mb", fetch_deadline_ms=3000)
    bench.write(0, PAGES)
    on_disk(folder, PAGES)
    replace_node(bench)
    operation = bench.query(0, 100)
    folder.rename(tmp_path / "away")
    done = bench.load(operation)
    assert bench.right(operation, 0, done)
    until(lambda: bench.write(0, 20) == 20 * P, WAIT_S)
    bench.stored(20)
    again = bench.query(0, 20)
    assert bench.load(again) == 20 and bench.right(again, 0, 20)


@pytest.mark.parametrize("sign", [signal.SIGSTOP, signal.SIGKILL])
def test_the_process_of_the_disk_stops_or_dies_while_pages_are_read(make: Any, tmp_path: Path, sign: signal.Signals) -> None:
    bench = make(ssd_path=str(tmp_path / "ssd"), ssd_size="64mb", fetch_deadline_ms=3000)
    bench.write(0, PAGES)
    on_disk(tmp_path / "ssd", PAGES)
    replace_node(bench)
    pid = tiers(bench)["ssd"]["pid"]
    operation = bench.query()
    os.kill(pid, sign)
    done = bench.load(operation)
    assert bench.right(operation, 0, done)
    bench.controller.mem_pool_host.free(operation.host_indices)
    until(lambda: tiers(bench)["ssd"]["state"] == "up" and tiers(bench)["ssd"]["pid"] != pid, 60)
    until(lambda: bench.query().storage_hit_count == PAGES * P, WAIT_S)
    again = bench.query()
    assert bench.load(again) == PAGES and bench.right(again, 0, PAGES)


def on_disk(folder: Path, pages: int) -> None:
    until(lambda: all(list(folder.rglob(f"{key}.*")) for key in KEYS[:pages]), WAIT_S)


def replace_node(bench: Bench) -> None:
    """By an empty one, which the backend's client starts."""
    client = bench.backend._client
    before = client.node_pid
    os.kill(before, signal.SIGKILL)
    until(lambda: client.ready and client.node_pid != before and client.counters()["mapped_bytes"] > 0, WAIT_S)
    until(lambda: tiers(bench)["ssd"]["state"] == "up", WAIT_S)


def tiers(bench: Bench) -> dict[str, Any]:
    with NodeTool(bench.backend._client._node, version="test") as tool:
        return dict(tool.stats()["tiers"])
