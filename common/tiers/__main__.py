"""`python -m mooncake_kv.common.tiers FD`: the process of one slow tier, started by the node; see host.py."""

from __future__ import annotations

import os

# Nothing here computes with numpy what OpenBLAS has threads for.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from ..node import child_side
from .host import run

child_side.main(0, run)
