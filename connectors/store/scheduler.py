"""Scheduler half: which pages to load and save, and when a saved page becomes visible.

Promises:
- No method waits, does I/O or calls the node: `NodeClient` answers from local state.
- A request is computed only after the reports of all steps that load for it: the engine must not schedule it before. So nothing is ever
  computed on a load that failed, and nothing that others could find lies above one. (Loading in the step that computes costs as much, and
  then one failed load stores pages computed on garbage with perfect checksums, unless they are found again in every step under way;
  measured on vLLM 0.32.)
- Only this half commits, and only when the report of a save's step says that every rank copied it.
- A step loads at most about `load_step_bytes`, so that running requests wait no longer than that takes.
- A slot is given back only after the report of the last step that may write it; a lease is released only after the report of the last
  step that reads it.
- `match` may be asked any number of times; asking changes nothing but the staging that it starts.
- Once a rank has reported that it cannot copy, nothing is planned any more: each hit would cost a failed load, each save a slot.

Engines call, in this order: `arrive`, `extend` (new token ids), `match` until it answers a number, `start`; then per step `scheduled` for
each request that is computed and `end_step`; `output` with each step's report; `finish`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence

from ...common.hashing import PageHasher
from ...common.node.client import Fetch, NodeClient
from .messages import Load, Plan, Report, Save
from .rates import PrefillRate
from .state import FailedKeys, PendingLoad, PendingSave, Request, Step

log = logging.getLogger("mooncake_kv.scheduler")

# How long a request may wait for room in the staging window before it is computed instead. Requests ahead of it leave the window as soon
# as they are scheduled, so a longer wait means that they cannot be, and then neither can this one.
ADMISSION_S = 2.0


class SchedulerHalf:
    """`digest`: of the namespace; `block_tokens`: tokens per block of the engine; `ranks`: workers whose reports are merged into one;
    `window_bytes`: how many bytes may be staged and not yet loaded (0: half of what the node may use); `load_step_bytes`: how many bytes
    the pages have that one step loads (at least one page); `checked_on_load`: all workers check pages as they copy them in, so that the
    node need not before."""

    def __init__(
        self,
        client: NodeClient,
        digest: str,
        *,
        page_tokens: int,
        block_tokens: int,
        ranks: int,
        slot_bytes: int,
        window_bytes: int = 0,
        load_step_bytes: int = 1 << 30,
        save_decode: bool = True,
        checked_on_load: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._client = client
        self._page = page_tokens
        self._block = block_tokens
        self._ranks = ranks
        self._slot_bytes = slot_bytes
        self._window_bytes = window_bytes
        self._load_step_pages = max(1, load_step_bytes // slot_bytes)
        self._save_decode = save_decode
        self._checked_on_load = checked_on_load
        self._clock = clock
        self._rate = PrefillRate()
        self._requests: dict[str, Request] = {}
        self._loads: deque[PendingLoad] = deque()
        self._failed = FailedKeys(clock)
        self._staged_bytes = 0
        self._unable = ""
        self._refused: set[str] = set()  # weights of which a rank has loaded others
        self._plan = Plan(digest, 1)
        self._steps: dict[int, Step] = defaultdict(Step)
        self._next_op = 0

    # ---- requests ----------------------------------------------------------------------------------------------------------------

    def arrive(
        self,
        request_id: str,
        tokens: Sequence[int],
        *,
        seed: bytes = b"",
        extras: Mapping[int, bytes] | None = None,
        skip: str = "",
        weights: str = "",
    ) -> None:
        """A request came in with these prompt tokens. `seed` starts its page hashes, `extras` go into the input of single pages (page
        index -> bytes), `skip` says in one word why it does not use the cache at all ('' if it does). `weights` names what the engine must
        have loaded beside the model's own weights for the hashes to be true; the workers check it."""
        skip = skip or self._barred(weights)
        request = Request(request_id, PageHasher(self._page, seed), len(tokens), skip, weights)
        self._requests[request_id] = request
        self.counters["requests"] += 1
        if skip:
            self.counters[f"skipped_{skip}"] += 1
            return
        request.hasher.extend(tokens, extras or {})
        if request.hasher.hashes and self._client.ready:
            request.lookup = self._client.lookup(request.hasher.hashes)

    def known_tokens(self, request_id: str) -> int:
        """How many token ids of the request were given so far; -1 if more would be of no use."""
        request = self._requests.get(request_id)
        return -1 if request is None or request.skip or not self._save_decode else request.hasher.tokens

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """Token ids after the known ones."""
        self._requests[request_id].hasher.extend(tokens)

    def match(self, request_id: str, local_tokens: int, total_tokens: int) -> int | None:
        """How many tokens beyond `local_tokens`, the engine's own prefix hit, can be loaded? None: ask again. The last of `total_tokens`
        must be computed, so it never counts."""
        request = self._requests.get(request_id)
        if request is None or request.skip:
            return 0
        if request.blind:
            request.blind = False
            return None
        if barred := self._barred(request.weights):
            if not request.gave_up:
                self.counters[f"skipped_{barred}"] += 1
            self._give_up(request)
            return 0
        request.local = local_tokens
        fetch = request.fetch
        if fetch is not None and (self._lost(fetch) or request.fetch_first * self._page > local_tokens):
            # The lease is gone with its connection, or the engine has evicted blocks that it had when staging began.
            self._drop_fetch(request)
            fetch = None
        if fetch is None:
            return self._stage(request, total_tokens)
        if self._waits(request, fetch):
            return None
        staged = len(fetch.slots)
        # What was staged before somebody else's load of it failed is the same dead copy.
        usable = self._failed.before(request.hasher.hashes[request.fetch_first : request.fetch_first + staged])
        if usable < staged or (fetch.done and not fetch.failed and staged * self._slot_bytes < request.reserved):
            request.proven = request.fetch_first + usable
        end = min((request.fetch_first + usable) * self._page, total_tokens - 1)
        if end > local_tokens:
            return end - local_tokens
        reason = "failed_keys_avoided" if usable < staged else "timeouts" if fetch.failed or not fetch.done else "misses"
        self.counters[reason] += 1
        self._give_up(request)
        return 0

    def blind_ask(self, request_id: str) -> bool:
        """Will `match` answer None whatever the local hit is? Then the engine need not compute that hit for the ask that follows (vLLM: 55
        us for 1,920 tokens, every step, for every waiting request)."""
        request = self._requests.get(request_id)
        if request is None or request.skip:
            return False
        now, fetch = self._clock(), request.fetch
        if fetch is not None:
            request.blind = not self._lost(fetch) and self._waits(request, fetch)
        else:
            request.blind = bool(request.waiting_since) and now - request.waiting_since < ADMISSION_S and self._room() < self._slot_bytes
        return request.blind

    def _barred(self, weights: str) -> str:
        """Why nothing is loaded or saved any more for a request with these weights, '' if nothing speaks against it."""
        return "worker_unable" if self._unable else "other_weights" if weights in self._refused else ""

    def _waits(self, request: Request, fetch: Fetch) -> bool:
        """Is it too early to go on with what is staged?"""
        now = self._clock()
        if fetch.done or fetch.expired(now):
            return False
        if self._rate.worth_waiting(fetch, request.reserved // self._slot_bytes * self._page, now):
            return True
        if not request.cut:
            request.cut = True
            self.counters["loads_cut"] += 1
        return False

    def _room(self) -> int:
        return (self._window_bytes or self._client.dram_bytes // 2) - self._staged_bytes

    def _lost(self, fetch: Fetch) -> bool:
        return (fetch.epoch, fetch.generation) != (self._client.epoch, self._client.generation)

    def _stage(self, request: Request, total_tokens: int) -> int | None:
        if request.gave_up:
            return 0
        now = self._clock()
        first = request.local // self._page
        last = min(len(request.hasher.hashes), -(-(total_tokens - 1) // self._page))
        hashes = request.hasher.hashes[first:last]
        if (usable := self._failed.before(hashes)) < len(hashes):
            hashes = hashes[:usable]
            self.counters["failed_keys_avoided"] += 1
        if not hashes:
            return 0
        if not self._client.ready:
            self.counters["node_away"] += 1
            request.gave_up = True
            return 0
        if request.lookup is not None and request.lookup.done and not request.lookup.failed and request.lookup.pages <= first:
            self.counters["misses"] += 1
            request.gave_up = True
            return 0
        room = self._room()
        if room < self._slot_bytes and self._staged_bytes > 0:
            request.waiting_since = request.waiting_since or now
            if now - request.waiting_since < ADMISSION_S:
                return None
            self.counters["window_full"] += 1
            request.gave_up = True
            return 0
        reserved = min(len(hashes) * self._slot_bytes, max(room, self._slot_bytes))
        fetch = self._client.fetch(hashes, reserved, check=not self._checked_on_load)
        if fetch is None:
            self.counters["node_away"] += 1
            request.gave_up = True
            return 0
        request.fetch, request.fetch_first, request.reserved = fetch, first, reserved
        self._staged_bytes += reserved
        return None

    def _drop_fetch(self, request: Request) -> None:
        if request.fetch is not None:
            self._end_lease(request.fetch, request.reserved)
            request.fetch = None

    def _end_lease(self, fetch: Fetch, reserved: int) -> None:
        self._client.release(fetch)
        self._staged_bytes -= reserved

    def _give_up(self, request: Request) -> None:
        self._drop_fetch(request)
        request.gave_up = True

    def start(self, request_id: str, external_tokens: int, block_table: Callable[[], list[int]]) -> None:
        """The engine has given blocks to the request. `external_tokens` beyond the local hit are to be loaded into them by the next steps,
        and a plan's `loaded` will say when that is over; with 0 the request can be computed now. `block_table()` gives its blocks."""
        request = self._requests.get(request_id)
        if request is None or request.skip:
            return
        request.gave_up = False
        request.waiting_since = 0.0
        request.cut = False
        self._rate.begin(request_id, request.local + max(external_tokens, 0))
        local_pages = request.local // self._page
        first_start, request.started = not request.started, True
        if first_start:
            # Pages that the engine had itself are stored too, as far as the node says so; where it has not answered, assume it.
            lookup = request.lookup
            request.mark = lookup.pages if lookup is not None and lookup.done and not lookup.failed else local_pages
            if request.proven is not None:
                request.mark = min(request.mark, request.proven)
            request.lookup = None
            self.counters["prompt_tokens"] += request.prompt_tokens
            self.counters["local_tokens"] += request.local
            self.counters["loaded_tokens"] += external_tokens
        if external_tokens <= 0:
            request.loaded = {}
            self._drop_fetch(request)
            return
        assert request.fetch is not None
        end = request.local + external_tokens
        request.loaded = self._by_tier(request.fetch, request.fetch_first, request.local, end)
        if first_start:
            for tier, tokens in request.loaded.items():
                self.counters[f"loaded_tokens_{tier}"] += tokens
        request.stored = (local_pages, -(-end // self._page))
        request.load = PendingLoad(request, request.fetch, request.reserved, block_table(), request.local, end)
        request.fetch = None
        self._loads.append(request.load)

    def loaded_tokens(self, request_id: str) -> Mapping[str, int]:
        """Tokens of the request's last load, by the tier they came from."""
        request = self._requests.get(request_id)
        return {} if request is None else request.loaded

    def _by_tier(self, fetch: Fetch, fetch_first: int, start: int, end: int) -> dict[str, int]:
        """Tokens [start, end), which begin and end anywhere in a page."""
        first, last = start // self._page, -(-end // self._page)
        tiers = fetch.tiers[first - fetch_first : last - fetch_first]
        tokens = Counter({tier: count * self._page for tier, count in Counter(tiers).items()})
        tokens[tiers[0]] -= start - first * self._page
        tokens[tiers[-1]] -= last * self._page - end
        return dict(tokens)

    # ---- steps -------------------------------------------------------------------------------------------------------------------

    def scheduled(self, request_id: str, final_tokens: int, block_table: Callable[[], list[int]]) -> None:
        """The request runs in the step that is being planned. `final_tokens`: tokens from the start whose ids are known and whose KV is
        final once the step has run. `block_table()` gives the request's blocks (called only when there is something to copy)."""
        request = self._requests.get(request_id)
        if request is None or request.skip:
            return
        self._rate.scheduled(request_id, final_tokens)
        limit = final_tokens if self._save_decode else min(final_tokens, request.prompt_tokens)
        if limit >= (request.mark + 1) * self._page:
            self._plan.saves += self._plan_saves(request, limit // self._page, block_table())

    def end_step(self) -> Plan:
        """The plan of this step; the next call of `scheduled` belongs to the next one."""
        plan = self._plan
        self._rate.end_step(self._clock())
        self._plan_loads(plan)
        self._plan = Plan(plan.digest, plan.step + 1)
        return plan

    def _plan_loads(self, plan: Plan) -> None:
        room = self._load_step_pages
        while self._loads and (room > 0 or self._loads[0].done):
            pending = self._loads[0]
            request = pending.request
            if not pending.done:
                first, last = pending.next_token // self._page, -(-pending.end_token // self._page)
                last = min(last, first + room)
                room -= last - first
                end = min(last * self._page, pending.end_token)
                first_block, last_block = pending.next_token // self._block, -(-end // self._block)
                load = Load(
                    request_id=request.id,
                    epoch=pending.fetch.epoch,
                    generation=pending.fetch.generation,
                    first_page=first,
                    slots=pending.fetch.slots[first - request.fetch_first : last - request.fetch_first],
                    hashes=request.hasher.hashes[first:last],
                    first_token=pending.next_token,
                    last_token=end,
                    first_block=first_block,
                    block_ids=pending.table[first_block:last_block],
                    weights=request.weights,
                )
                plan.loads.append(load)
                self._steps[plan.step].loads.append(load)
                pending.next_token = end
                pending.done = end == pending.end_token
            if pending.done:
                self._loads.popleft()
                plan.loaded.append(request.id)
                self._steps[plan.step].ended.append(pending)

    def _plan_saves(self, request: Request, last: int, table: list[int]) -> list[Save]:
        """Saves for the pages [mark, last) that are not stored yet, as far as there are slots; the mark moves behind what was planned."""
        saves: list[Save] = []
        if self._barred(request.weights):
            return saves
        last = min(last, len(request.hasher.hashes), len(table) * self._block // self._page)
        while request.mark < last:
            begin, end = request.stored
            if begin <= request.mark < end:
                request.mark = end
                continue
            until = min(last, begin) if request.mark < begin < end else last
            granted = self._client.take(until - request.mark)
            if not granted.slots:
                self.counters["saves_without_slot"] += 1
                break
            first, request.mark = request.mark, request.mark + len(granted.slots)
            first_block, last_block = first * self._page // self._block, -(-request.mark * self._page // self._block)
            self._next_op += 1
            saves.append(
                Save(
                    request_id=request.id,
                    op=self._next_op,
                    epoch=granted.epoch,
                    generation=granted.generation,
                    first_page=first,
                    slots=granted.slots,
                    first_block=first_block,
                    block_ids=table[first_block:last_block],
                    weights=request.weights,
                )
            )
            self._steps[self._plan.step].saves.append(
                PendingSave(
                    op=self._next_op,
                    generation=granted.generation,
                    request=request,
                    first_page=first,
                    hashes=request.hasher.hashes[first : request.mark],
                    slots=granted.slots,
                )
            )
        return saves

    def cancel(self, request_id: str) -> None:
        """The engine interrupts the request: what is staged is released, and a load under way ends with the next plan, as failed."""
        if (request := self._requests.get(request_id)) is not None:
            self._drop_fetch(request)
            self._end_load(request)

    def finish(self, request_id: str, final_tokens: int, block_table: list[int]) -> bool:
        """The request is over. True: its blocks must stay until a step's plan that names it in `finished` has been executed, because pages
        that it completed in its last step are still to be copied."""
        request = self._requests.pop(request_id, None)
        self._rate.finish(request_id)
        if request is None or request.skip:
            return False
        self._drop_fetch(request)
        if request.load is not None:
            self._end_load(request)  # the next plan says so, and the engine frees the blocks
            return False
        if not request.started or not self._save_decode:
            return False
        if final_tokens < (request.mark + 1) * self._page:
            return False
        saves = self._plan_saves(request, final_tokens // self._page, block_table)
        if not saves:
            return False
        self._plan.last_saves += saves
        self._plan.finished.append(request_id)
        return True

    # ---- reports -----------------------------------------------------------------------------------------------------------------

    def output(self, report: Report | None, invalid_blocks: Collection[int]) -> dict[str, bool]:
        """A step was executed by all ranks, and these blocks were not loaded. Commits what it saved, ends the leases it read last. Returns
        the requests whose loads have ended thereby, and whether all of it is in their blocks."""
        ended: dict[str, bool] = {}
        if report is None:
            return ended
        if report.unable:
            self.stop(f"a worker copies nothing: {report.unable}")
        self._refused |= report.refused
        # Steps are executed in order: an older step without a report will get none, and nobody writes to its slots any more.
        for number in [n for n in self._steps if n <= report.step]:
            step = self._steps.pop(number)
            if invalid_blocks:
                self._fail(step, invalid_blocks)
            if number < report.step:
                for load in step.loads:
                    self._end_load(self._requests.get(load.request_id))
            for pending in step.ended:
                pending.request.load = None
                self._end_lease(pending.fetch, pending.reserved)
                ended[pending.request.id] = not pending.failed
            self._settle(step.saves, report.saved if number == report.step else {})
        return ended

    def stop(self, reason: str) -> None:
        """Load and save nothing from now on."""
        if not self._unable:
            self._unable = reason
            log.error("the engine runs without the cache from now on: %s", reason)

    def _settle(self, saves: list[PendingSave], saved: Mapping[int, int]) -> None:
        for save in saves:
            if saved.get(save.op, 0) < self._ranks:
                self.counters["discarded_pages"] += len(save.slots)
                self._client.discard(save.generation, save.slots)
                save.request.mark = min(save.request.mark, save.first_page)
                continue
            self.counters["saved_pages"] += len(save.slots)
            self._client.commit(save.generation, list(zip(save.hashes, save.slots, strict=True)))
            self._failed.forget(save.hashes)

    def _fail(self, step: Step, invalid: Collection[int]) -> None:
        """Remember the keys that failed, so that the request is not told to load them again, and load nothing behind them."""
        for load in step.loads:
            bad = next((i for i, block in enumerate(load.block_ids) if block in invalid), None)
            if bad is None:
                continue
            self.counters["failed_loads"] += 1
            begin = max((load.first_block + bad) * self._block, load.first_token)
            end = min((load.first_block + bad + 1) * self._block, load.last_token)
            first, last = begin // self._page - load.first_page, -(-end // self._page) - load.first_page
            suspects = load.hashes[first:last]
            self._failed.add(suspects)
            self._client.suspect(suspects)
            request = self._requests.get(load.request_id)
            if request is None:
                continue
            page = begin // self._page
            request.mark = min(request.mark, page)
            request.stored = (request.stored[0], min(request.stored[1], page))
            self._end_load(request)

    @staticmethod
    def _end_load(request: Request | None) -> None:
        """Plan nothing more of the request's load, which was in vain."""
        if request is not None and request.load is not None:
            request.load.done = request.load.failed = True
