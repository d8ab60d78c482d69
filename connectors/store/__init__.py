"""The store connector in two halves that know no engine: `SchedulerHalf` plans loads and saves, `WorkerHalf` copies them.

Promises: a page becomes visible to others only after every rank has copied it and no block below it failed to load (two-phase commit);
no call waits for the node; every failure ends in recomputing.
"""

from .messages import Load, Plan, Report, Save
from .scheduler import SchedulerHalf
from .worker import WorkerHalf

__all__ = ["Load", "Plan", "Report", "Save", "SchedulerHalf", "WorkerHalf"]
