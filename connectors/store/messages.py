"""What the scheduler half and the worker half of a connector tell each other, once a step.

Promises: plain data (ints, bytes, lists), so that any engine can carry it in its own metadata; a plan says everything the worker needs,
so that the worker keeps no state about requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Load:
    """Copy tokens [first_token, last_token) of staged pages into blocks of a request that is not computed before it is in `Plan.loaded`.

    `slots[i]` and `hashes[i]` belong to page `first_page + i`; `block_ids[i]` is entry `first_block + i` of the request's block table. The
    scheduler half holds the lease until the step's report has come back. `weights`: what the engine must have loaded beside the model's own
    weights for the pages to be what their keys say ('' for nothing).
    """

    request_id: str
    epoch: int
    generation: int
    first_page: int
    slots: list[int]
    hashes: list[bytes]
    first_token: int
    last_token: int
    first_block: int
    block_ids: list[int]
    weights: str


@dataclass(slots=True)
class Save:
    """Copy whole pages from engine blocks into slots that have no name yet. `op` is unique within an engine; the rest as in Load."""

    request_id: str
    op: int
    epoch: int
    generation: int
    first_page: int
    slots: list[int]
    first_block: int
    block_ids: list[int]
    weights: str


@dataclass(slots=True)
class Plan:
    """One step. `digest` names the namespace: a model that edits its configuration while it is built could look different to the workers,
    which build it, and to the scheduler. `last_saves` are the pages that requests completed in their last step: they are copied before
    the loads, and then the blocks of the requests in `finished` may be freed. `loaded` are the requests for which nothing is left to load
    after this step, whether it went well or not: they can be scheduled, or freed if they were aborted."""

    digest: str = ""
    step: int = 0
    last_saves: list[Save] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """What one worker, or after `merge` several workers, did in a step: for each save, how many ranks copied all of it. `unable`: why a
    rank will never copy anything ('' if all can). `refused`: the `weights` of loads and saves of which a rank has loaded others."""

    step: int
    saved: dict[int, int] = field(default_factory=dict)
    unable: str = ""
    refused: set[str] = field(default_factory=set)

    def merge(self, other: Report) -> Report:
        """Add another rank's report of the same step."""
        if other.step != self.step:
            raise ValueError(f"reports of steps {self.step} and {other.step} cannot be merged")
        for op, ranks in other.saved.items():
            self.saved[op] = self.saved.get(op, 0) + ranks
        self.unable = self.unable or other.unable
        self.refused |= other.refused
        return self
