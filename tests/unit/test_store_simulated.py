"""The scheduler half under thousands of random schedules: nothing computed on a failed load may ever become visible.

The engine and the node are simulated here, because random schedules with failed loads, preemption, shared blocks and steps scheduled ahead
cannot be forced on real ones; the rules of the simulated engine are those of vLLM 0.32's scheduler. The KV of a token is a number computed
from its id and from the KV that lies in the block before it, so garbage spreads exactly as it does through attention.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from mooncake_kv.common.hashing import page_hashes
from mooncake_kv.connectors.store import Load, Plan, Report, Save, SchedulerHalf

PAGE = 4
GARBAGE = -1


def kv(previous: int, token: int) -> int:
    return GARBAGE if previous == GARBAGE else hash((previous, token)) & 0xFFFFFFFF


class Slots(NamedTuple):
    epoch: int
    generation: int
    slots: list[int]


@dataclass(eq=False)
class SimulatedFetch:
    slots: list[int]
    tiers: list[str]
    done: bool = False
    failed: bool = False
    epoch: int = 1
    generation: int = 1
    slow: bool = False
    started: float = 0.0

    def expired(self, now: float) -> bool:
        return False


@dataclass
class SimulatedLookup:
    pages: int
    done: bool = True
    failed: bool = False


class SimulatedNode:
    """Client and node in one. `content[slot][rank]` is a page of KV numbers."""

    ready, epoch, generation, dram_bytes = True, 1, 1, 1 << 30

    def __init__(self, rng: random.Random, slots: int, ranks: int) -> None:
        self.rng = rng
        self.free = list(range(slots))
        self.content: dict[int, list[list[int]]] = {slot: [[GARBAGE] * PAGE for _ in range(ranks)] for slot in range(slots)}
        self.pages: dict[bytes, int] = {}
        self.leases: dict[int, int] = {}
        self.granted: set[int] = set()
        self.fetches: list[SimulatedFetch] = []

    def lookup(self, hashes: list[bytes]) -> SimulatedLookup:
        return SimulatedLookup(self._lead(hashes))

    def _lead(self, hashes: list[bytes]) -> int:
        return next((i for i, h in enumerate(hashes) if h not in self.pages), len(hashes))

    def fetch(self, hashes: list[bytes], limit_bytes: int = 0, *, check: bool = True) -> SimulatedFetch:
        slots = [self.pages[h] for h in hashes[: self._lead(hashes)]]
        for slot in slots:
            self.leases[slot] = self.leases.get(slot, 0) + 1
        fetch = SimulatedFetch(slots, [self.rng.choice(["dram", "ssd"]) for _ in slots])
        self.fetches.append(fetch)
        return fetch

    def tick(self) -> None:
        for fetch in self.fetches:
            fetch.done = fetch.done or self.rng.random() < 0.6
        while len(self.free) < 4 and self.pages:
            unleased = [h for h, slot in self.pages.items() if not self.leases.get(slot)]
            if not unleased:
                break
            self.free.append(self.pages.pop(self.rng.choice(unleased)))

    def release(self, fetch: SimulatedFetch) -> None:
        self.fetches.remove(fetch)  # a second release fails here
        for slot in fetch.slots:
            self.leases[slot] -= 1
            assert self.leases[slot] >= 0

    def take(self, count: int) -> Slots:
        taken = [self.free.pop() for _ in range(min(count, len(self.free), self.rng.randint(0, 6)))]
        self.granted.update(taken)
        return Slots(1, 1, taken)

    def commit(self, generation: int, pages: list[tuple[bytes, int]]) -> None:
        for page_hash, slot in pages:
            self.granted.remove(slot)
            if page_hash in self.pages:
                self.free.append(slot)
            else:
                self.pages[page_hash] = slot

    def discard(self, generation: int, slots: list[int]) -> None:
        for slot in slots:
            self.granted.remove(slot)
            self.free.append(slot)

    def suspect(self, hashes: list[bytes]) -> None:
        return


@dataclass(eq=False)
class SimulatedRequest:
    id: str
    tokens: list[int]
    prompt: int
    max_tokens: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # advanced when a step is scheduled, as vLLM does
    flying: list[int] = field(default_factory=list)  # tokens sampled in steps whose output the scheduler does not know yet
    stale: int = 0  # steps in flight whose output does not count, because the request was preempted or failed
    in_flight: int = 0
    loading: str = ""  # "": no; "under way"; "ended": loaded before it is scheduled, blocks in hand

    @property
    def placeholders(self) -> int:
        return len(self.flying)


class Step(NamedTuple):
    plan: Plan
    scheduled: dict[SimulatedRequest, tuple[int, int]]  # first token, count
    sampled: set[SimulatedRequest]
    result: dict[str, Any]


class SimulatedEngine:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.ranks = rng.choice([1, 2])
        self.block = rng.choice([1, 2, 4, 8])
        self.ahead = rng.choice([0, 1])  # steps scheduled before the previous one's output is known
        self.fail_rate = rng.choice([0.0, 0.2, 0.5])
        self.node = SimulatedNode(rng, 48, self.ranks)
        self.half = SchedulerHalf(
            self.node,  # type: ignore[arg-type]
            "digest",
            page_tokens=PAGE, block_tokens=self.block, ranks=self.ranks, slot_bytes=1, save_decode=rng.random() < 0.8,
            load_step_bytes=rng.choice([1, 3, 100]),
        )  # fmt: skip
        self.memory: list[dict[tuple[int, int], int]] = [{} for _ in range(self.ranks)]
        self.free_blocks = list(range(160 // self.block))
        self.users: dict[int, int] = {}
        self.cached: dict[tuple[int, ...], int] = {}  # tokens of a prefix -> the block that ends it
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[SimulatedRequest] = []
        self.held: dict[str, SimulatedRequest] = {}
        self.steps: deque[Step] = deque()
        self.prefixes = [[rng.randrange(50) for _ in range(40)] for _ in range(3)]
        self.arrivals = 0
        self.references: dict[bytes, list[int]] = {}
        self.loads = self.failures = 0

    # ---- blocks
    def allocate(self, request: SimulatedRequest, tokens: int) -> bool:
        need = -(-tokens // self.block) - len(request.blocks)
        if need > len(self.free_blocks):
            return False
        for _ in range(need):
            block = self.free_blocks.pop(self.rng.randrange(len(self.free_blocks)))
            for prefix in [p for p, b in self.cached.items() if b == block]:
                del self.cached[prefix]
            self.users[block] = 1
            request.blocks.append(block)
        return True

    def free(self, request: SimulatedRequest) -> None:
        for block in request.blocks:
            self.users[block] -= 1
            if not self.users[block]:
                self.free_blocks.append(block)
        request.blocks = []

    def cache_blocks(self, request: SimulatedRequest, tokens: int) -> None:
        for i in range(min(tokens, len(request.tokens)) // self.block):
            self.cached.setdefault(tuple(request.tokens[: (i + 1) * self.block]), request.blocks[i])

    def local_hit(self, request: SimulatedRequest) -> list[int]:
        hit = []
        for i in range((len(request.tokens) - 1) // self.block):
            block = self.cached.get(tuple(request.tokens[: (i + 1) * self.block]))
            if block is None:
                break
            hit.append(block)
        return hit

    # ---- scheduling
    def arrive(self) -> None:
        self.arrivals += 1
        tokens = self.rng.choice(self.prefixes)[: self.rng.randint(1, 40)] + [self.rng.randrange(50) for _ in range(self.rng.randint(0, 6))]
        request = SimulatedRequest(f"r{self.arrivals}", tokens, len(tokens), self.rng.randint(1, 9))
        self.half.arrive(request.id, list(tokens))
        self.waiting.append(request)

    def preempt(self) -> None:
        request = self.running.pop()
        self.free(request)
        request.computed = 0
        request.flying.clear()
        request.stale = request.in_flight
        self.waiting.appendleft(request)

    def final(self, request: SimulatedRequest, count: int) -> int:
        past = min(request.computed - request.placeholders, len(request.tokens))
        return max(past, min(request.computed + count, request.prompt))

    def schedule(self) -> None:
        budget, scheduled = 12, {}
        for request in list(self.running):
            if request not in self.running:
                continue
            count = min(budget, len(request.tokens) + request.placeholders - request.computed)
            if count <= 0:
                continue
            while not self.allocate(request, request.computed + count):
                self.preempt()
                if request not in self.running:
                    break
            if request in self.running:
                scheduled[request] = (request.computed, count)
                budget -= count
        scheduled = {r: c for r, c in scheduled.items() if r in self.running}
        asked = 0
        while self.waiting and budget > 0 and asked < 8 and len(self.running) < 5:
            request = self.waiting[0]
            asked += 1
            if request.stale or request.loading == "under way":
                self.waiting.rotate(-1)
                continue
            if request.loading == "ended":
                request.loading = ""
                if request.computed:
                    self.cache_blocks(request, request.computed)
                    count = min(budget, len(request.tokens) - request.computed)
                    if not self.allocate(request, request.computed + count):
                        request.loading = "ended"
                        break
                    self.waiting.popleft()
                    self.half.start(request.id, 0, lambda: pytest.fail("nothing to load"))
                    self.running.append(request)
                    scheduled[request] = (request.computed, count)
                    budget -= count
                    continue
                self.free(request)
            blind = self.half.blind_ask(request.id)
            hit = [] if blind else self.local_hit(request)
            local = len(hit) * self.block
            external = self.half.match(request.id, local, len(request.tokens))
            if external is None:
                self.waiting.rotate(-1)
                continue
            assert not blind
            have = local + external
            count = 0 if external else min(budget, len(request.tokens) - have)
            request.blocks = list(hit)
            for block in hit:
                if not self.users.get(block):
                    self.free_blocks.remove(block)
                self.users[block] = self.users.get(block, 0) + 1
            if not self.allocate(request, have + count):
                self.free(request)
                break
            self.half.start(request.id, external, lambda r=request: list(r.blocks))
            request.computed = have
            if external:
                request.loading = "under way"
                self.waiting.rotate(-1)
                continue
            self.waiting.popleft()
            self.cache_blocks(request, have + count)
            self.running.append(request)
            scheduled[request] = (have, count)
            budget -= count
        for request, (_, count) in scheduled.items():
            final = self.final(request, count)
            known = self.half.known_tokens(request.id)
            if 0 <= known < final:
                self.half.extend(request.id, request.tokens[known:])
            self.half.scheduled(request.id, final, lambda r=request: list(r.blocks))
        plan = self.half.end_step()
        step = Step(plan, scheduled, set(), {})
        self.execute(step)
        self.steps.append(step)
        for request, (_, count) in scheduled.items():
            request.computed += count
            request.in_flight += 1
            if request.computed >= len(request.tokens) + request.placeholders:
                request.flying.append(self.rng.randrange(50))
                step.sampled.add(request)
            self.cache_blocks(request, request.computed)

    # ---- workers: run in order, at scheduling time or later makes no difference to them
    def execute(self, step: Step) -> None:
        report, invalid = Report(step.plan.step), set()
        tables = {r: list(r.blocks) for r in step.scheduled}
        for rank in range(self.ranks):
            memory, mine = self.memory[rank], Report(step.plan.step)
            for save in step.plan.last_saves:
                self.copy_out(rank, save, mine)
            for load in step.plan.loads:
                invalid |= self.copy_in(rank, load)
            for request, (first, count) in step.scheduled.items():
                tokens = request.tokens + request.flying
                for i in range(first, first + count):
                    table = tables[request]
                    before = memory.get((table[(i - 1) // self.block], (i - 1) % self.block), GARBAGE) if i else 7
                    memory[table[i // self.block], i % self.block] = kv(before, tokens[i])
            for save in step.plan.saves:
                self.copy_out(rank, save, mine)
            report.merge(mine)
        step.result.update(report=report, invalid=invalid)

    def copy_in(self, rank: int, load: Load) -> set[int]:
        self.loads += 1
        bad = self.rng.randrange(len(load.slots)) if self.rng.random() < self.fail_rate else len(load.slots)
        end = min((load.first_page + bad) * PAGE, load.last_token)
        for i in range(load.first_token, load.last_token):
            value = self.node.content[load.slots[i // PAGE - load.first_page]][rank][i % PAGE]
            assert self.node.leases[load.slots[i // PAGE - load.first_page]] > 0
            self.memory[rank][load.block_ids[i // self.block - load.first_block], i % self.block] = value if i < end else GARBAGE
        if end >= load.last_token:
            return set()
        self.failures += 1
        return set(load.block_ids[max(end, load.first_token) // self.block - load.first_block :])

    def copy_out(self, rank: int, save: Save, report: Report) -> None:
        if self.rng.random() < 0.05:
            return
        for n, slot in enumerate(save.slots):
            assert slot in self.node.granted
            for i in range(PAGE):
                token = (save.first_page + n) * PAGE + i
                block = save.block_ids[token // self.block - save.first_block]
                self.node.content[slot][rank][i] = self.memory[rank].get((block, token % self.block), GARBAGE)
        report.saved[save.op] = 1

    # ---- outputs
    def process(self) -> None:
        step = self.steps.popleft()
        invalid = step.result["invalid"]
        loading = [r for r in [*self.waiting, *self.held.values()] if r.loading == "under way"]
        for request in loading:
            blocks = request.blocks[: -(-request.computed // self.block)]
            if (bad := next((i for i, block in enumerate(blocks) if block in invalid), None)) is not None:
                request.computed = bad * self.block
        for request in step.scheduled:
            request.in_flight -= 1
            if request.stale:
                request.stale -= 1
                continue
            if request not in self.running:
                continue
            if request not in step.sampled:
                continue
            request.tokens.append(request.flying.pop(0))
            if len(request.tokens) - request.prompt >= request.max_tokens:
                self.finish(request)
        self.half.output(step.result["report"], invalid)
        for request in loading:
            if request.id in step.plan.loaded:
                request.loading = "ended"
        for name in [*step.plan.finished, *(r.id for r in loading if r.id in step.plan.loaded and r.id in self.held)]:
            self.free(self.held.pop(name))

    def finish(self, request: SimulatedRequest) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        final = min(self.final(request, 0), len(request.tokens) - 1)
        known = self.half.known_tokens(request.id)
        if 0 <= known < final:
            self.half.extend(request.id, request.tokens[known:final])
        if self.half.finish(request.id, final, list(request.blocks)) or request.loading == "under way":
            self.held[request.id] = request
        else:
            self.free(request)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.rng.random() < 0.4 and len(self.waiting) < 6:
                self.arrive()
            if self.running and self.rng.random() < 0.04:
                self.preempt()
            if self.running and self.rng.random() < 0.04:
                self.finish(self.rng.choice(self.running))  # abort
            if self.waiting and self.rng.random() < 0.02:
                self.finish(self.rng.choice(self.waiting))
            self.node.tick()
            self.schedule()
            while len(self.steps) > self.ahead:
                self.process()
            self.judge()
        while self.steps:
            self.process()
        self.schedule()
        while self.steps:
            self.process()
        self.judge()

    def judge(self) -> None:
        """Every visible page of every prompt and answer seen so far holds the right KV on every rank."""
        for request in [*self.running, *self.waiting, *self.held.values()]:
            self.reference(request.tokens)
        for page_hash, slot in self.node.pages.items():
            expected = self.references.get(page_hash)
            if expected is not None:
                assert all(page == expected for page in self.node.content[slot]), "a visible page holds garbage"

    def reference(self, tokens: list[int]) -> None:
        value, values = 7, []
        for token in tokens:
            values.append(value := kv(value, token))
        for i, page_hash in enumerate(page_hashes(tokens, PAGE)):
            self.references[page_hash] = values[i * PAGE : (i + 1) * PAGE]


@pytest.mark.parametrize("block", range(40))
def test_nothing_computed_on_a_failed_load_becomes_visible(block: int) -> None:
    loads = failures = saved = 0
    for seed in range(block * 10, block * 10 + 10):
        engine = SimulatedEngine(seed)
        engine.run(120)
        loads, failures = loads + engine.loads, failures + engine.failures
        saved += engine.half.counters["saved_pages"]
        while engine.running or engine.waiting:
            engine.finish((engine.running or list(engine.waiting))[0])
        engine.schedule()
        while engine.steps:
            engine.process()
        assert not any(engine.node.leases.values()), "a lease was never released"
        assert not engine.node.granted, "a slot was neither committed nor given back"
    assert loads > 20 and failures > 2 and saved > 100, "the schedules exercised too little to prove anything"
