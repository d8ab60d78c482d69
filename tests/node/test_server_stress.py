"""The node under random traffic of engines that come, go and misbehave: no slot is ever lost or given to two owners, no page is wrong."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mooncake_kv.common.node import protocol
from mooncake_kv.common.node.protocol import Rectangle
from tests.node.wire_client import WireClient, chain, running_node, small_namespace

SLOT = 8192
RARE = ["lookup", "reserve", "commit", "discard", "half", "suspect", "drop", "wrong", "die"]
ACTIONS = ["store"] * 6 + ["fetch"] * 6 + ["release"] * 5 + RARE
TOP_HALF, BOTTOM_HALF = Rectangle(0, 1, 0, 2), Rectangle(1, 2, 0, 2)


class Traffic:
    """One scheduler and one worker of an engine. The worker maps and fences; the scheduler writes, which the node cannot tell."""

    def __init__(self, folder: Path, rng: random.Random, engine: str, tag: str) -> None:
        self.folder = folder
        self.rng = rng
        self.engine = engine
        self.namespace = small_namespace(tag)
        self.prefixes = [chain(f"{tag}{i}", rng.randint(1, 40)) for i in range(12)]
        self.worker = self.connect("worker")
        self.scheduler = self.connect("scheduler")
        self.leases: list[tuple[int, list[bytes], list[int]]] = []
        self.reserved: list[tuple[bytes, int]] = []
        self.checked = 0

    def connect(self, role: protocol.Role) -> WireClient:
        client = WireClient(self.folder, role, engine=self.engine, namespace=self.namespace)
        if role == "scheduler":
            client.send(protocol.Want(self.rng.randint(1, 20)))
        return client

    def step(self) -> None:
        self.worker.settle(0.0005)
        self.scheduler.settle(0.0005)
        prefix = self.rng.choice(self.prefixes)
        getattr(self, self.rng.choice(ACTIONS))(prefix)

    def store(self, prefix: list[bytes]) -> None:
        client = self.scheduler
        found = client.lookup(prefix)
        missing = prefix[found : found + len(client.credits)]
        slots = [client.credits.pop() for _ in missing]
        for page, slot in zip(missing, slots, strict=True):
            client.fill(slot, page)
        client.commit(missing, slots)

    def fetch(self, prefix: list[bytes]) -> None:
        request, slots = self.scheduler.fetch(prefix, limit=self.rng.choice([0, 0, 5 * SLOT]))
        self.leases.append((request, prefix, slots))
        self.check()

    def release(self, prefix: list[bytes]) -> None:
        if self.leases:
            self.check()
            request, _, _ = self.leases.pop(self.rng.randrange(len(self.leases)))
            self.scheduler.release(request)

    def lookup(self, prefix: list[bytes]) -> None:
        assert 0 <= self.scheduler.lookup(prefix) <= len(prefix)

    def reserve(self, prefix: list[bytes]) -> None:
        part = prefix[:6]
        slots = self.worker.reserve(part)
        known = {slot for _, slot in self.reserved}
        self.reserved += [(page, slot) for page, slot in zip(part, slots, strict=True) if slot > 0 and slot not in known]

    def commit(self, prefix: list[bytes]) -> None:
        ready = [(page, slot) for page, slot in self.reserved if slot >> protocol.SLOT_SHIFT in self.worker.extents]
        for page, slot in ready:
            self.worker.fill(slot, page)
        if ready:
            self.worker.commit(*map(list, zip(*ready, strict=True)))  # type: ignore[arg-type]
            self.reserved = []

    def discard(self, prefix: list[bytes]) -> None:
        if self.reserved:
            _, slot = self.reserved.pop()
            self.worker.send(protocol.Discard([slot]))
        if self.scheduler.credits:
            self.scheduler.send(protocol.Discard([self.scheduler.credits.pop()]))

    def half(self, prefix: list[bytes]) -> None:
        if self.scheduler.credits:
            slot = self.scheduler.credits.pop()
            self.scheduler.fill(slot, prefix[0])
            self.scheduler.commit(prefix[:1], [slot], [TOP_HALF])
            if self.rng.random() < 0.7:
                self.scheduler.commit(prefix[:1], [slot], [BOTTOM_HALF])
            else:
                self.scheduler.send(protocol.Discard([slot]))

    def suspect(self, prefix: list[bytes]) -> None:
        self.scheduler.send(protocol.Suspect(b"".join(prefix)))

    def drop(self, prefix: list[bytes]) -> None:
        if self.rng.random() < 0.2:
            self.scheduler.send(protocol.Drop(self.scheduler.next_request()))
            self.scheduler.wait_for(protocol.Done)
            assert self.scheduler.lookup(prefix) == 0

    def wrong(self, prefix: list[bytes]) -> None:
        slots = [slot for _, _, slots in self.leases for slot in slots][:3]
        slots += [self.rng.getrandbits(60), -7]
        self.scheduler.send(protocol.Discard(slots))
        self.scheduler.commit(chain("wrong", len(slots)), slots)

    def die(self, prefix: list[bytes]) -> None:
        """The scheduler's connection ends, with everything it holds; or the worker's."""
        if self.rng.random() < 0.5:
            self.scheduler.close()
            self.scheduler = self.connect("scheduler")
            self.leases.clear()
        else:
            self.worker.close()
            self.worker = self.connect("worker")
            self.reserved.clear()

    def check(self) -> None:
        for _, prefix, slots in self.leases:
            for page, slot in zip(prefix, slots, strict=False):
                assert self.scheduler.holds(slot, page)
                self.checked += 1


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic(runtime_dir: Path, seed: int) -> None:
    rng = random.Random(seed)
    with running_node("--dram-size", "1mb") as node:
        # Two engines share a namespace, one has another of the same slot size.
        engines = [Traffic(node.paths.folder, rng, f"engine{i}", "ab"[i // 2]) for i in range(3)]
        tool = WireClient(node.paths.folder, "tool")
        for _ in range(700):
            rng.choice(engines).step()
        for engine in engines:
            engine.check()
            engine.scheduler.close()
            engine.worker.close()
        tool.until(lambda: tool.stats()["clients"] == 0 and not tool.stats()["sealing"] and not tool.stats()["checking"])
        stats = tool.stats()
        for left in ("leased_pages", "leased_bytes", "granted_slots", "quarantined_slots", "reserved_bytes", "bad_frees", "clients_failed"):
            assert stats[left] == 0, (left, stats)
        assert stats["free_bytes"] + stats["pages"] * SLOT == stats["arena_bytes"], stats
        assert stats["pages_evicted"] > 50 and stats["bad_slots"] > 10 and stats["pages_bad"] == 0, stats
        assert sum(engine.checked for engine in engines) > 1000
