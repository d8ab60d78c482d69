"""Our LMDeploy migration backend against LMDeploy's own loop of one blocking read for each block: one context of 4,096 tokens.

Assignments are LMDeploy's, for its own layout, and LMDeploy's loop is its own method; only its constructor is left out, which wants RDMA.
Both read from one other process over TCP on loopback, each with a transfer engine of its own in this process, with the same variables of
Mooncake. Rounds are interleaved, medians reported. `fresh`: the prompt's blocks follow one another on both sides, as in an engine that
has just started; `churned`: they lie anywhere. `loop held`: for how long at most the event loop did nothing else. Every byte is compared.

    python benchmarks/lmdeploy_migration.py [--shape smollm2|8b] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.node.migration_peer import content

ROOT = Path(__file__).resolve().parent.parent
TOKENS, BLOCK = 4096, 64
# Layers; blocks; bytes of a block's row: K and V of 64 tokens in bf16 (3 heads of 64, 8 heads of 128).
SHAPES = {"smollm2": (30, 160, 2 * BLOCK * 3 * 64 * 2), "8b": (32, 96, 2 * BLOCK * 8 * 128 * 2)}
OURS, IN_TREE = "ours", "in-tree"
REMOTE, PROTOCOL = "http://127.0.0.1:1", "TCP"


def assignment(shape: tuple[int, int, int], pairs: list[tuple[int, int]]) -> Any:
    from lmdeploy.pytorch.disagg.conn.protocol import DistServeCachePoolInfo, MigrationProtocol
    from lmdeploy.pytorch.disagg.messages import MigrationAssignment
    from lmdeploy.pytorch.engine.cache_engine.migration import build_cache_pool_assignments

    pool = DistServeCachePoolInfo(shape=shape, dtype="torch.uint8", element_size=1, entry_axis=1)
    batch = build_cache_pool_assignments([pool], [pool], pairs)
    return MigrationAssignment(protocol=MigrationProtocol[PROTOCOL], remote_engine_id=REMOTE, batch=batch)


def ours(endpoint: str, memory: np.ndarray, blocks: int) -> Any:
    from lmdeploy.pytorch.disagg.config import DistServeEngineConfig
    from lmdeploy.pytorch.disagg.conn.protocol import DistServeInitRequest, DistServeKVTransferEndpointInfo, MigrationProtocol
    from lmdeploy.pytorch.disagg.messages import DistServeRegisterMRMessage

    from mooncake_kv.lmdeploy_plugin.migration import MooncakeMigrationBackend

    protocol = MigrationProtocol[PROTOCOL]
    same = DistServeEngineConfig(
        tp_size=1, ep_size=1, dp_size=1, pp_size=None, dp_rank=0, block_size=BLOCK, num_cpu_blocks=0, num_gpu_blocks=blocks
    )
    backend = MooncakeMigrationBackend()
    backend.p2p_initialize(
        DistServeInitRequest(
            local_engine_id="http://127.0.0.1:2",
            local_engine_config=same,
            remote_engine_id=REMOTE,
            remote_engine_config=same,
            protocol=protocol,
        )
    )
    backend.register_memory_region(
        DistServeRegisterMRMessage(
            protocol=protocol, remote_engine_id=REMOTE, mr_key=0, addr=memory.ctypes.data, offset=0, length=len(memory)
        )
    )
    backend.p2p_connect(REMOTE, DistServeKVTransferEndpointInfo(protocol=protocol, endpoint_info=endpoint))
    return backend


def in_tree(endpoint: str, memory: np.ndarray) -> Any:
    """After `ours`, which has set Mooncake's variables."""
    from lmdeploy.pytorch.disagg.backend.mooncake import MooncakeMigrationManagement
    from mooncake.engine import TransferEngine

    there = json.loads(endpoint)
    link = MooncakeMigrationManagement.__new__(MooncakeMigrationManagement)
    link.engine = TransferEngine()
    assert link.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert link.engine.register_memory(memory.ctypes.data, len(memory)) == 0
    link.local_engine_id, link.remote_engine_id, link.remote_url = "http://127.0.0.1:2", REMOTE, there["session"]
    link.local_kv_table = {"0": {"addr": memory.ctypes.data, "length": len(memory), "offset": 0}}
    link.remote_kv_table = {key: {"addr": one["address"], "length": one["length"], "offset": 0} for key, one in there["regions"].items()}
    return link


async def timed(call: Callable[[], Coroutine[Any, Any, None]]) -> tuple[float, float]:
    """Seconds of the call, and the longest time in which another task did not run."""
    done = False
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while not done:
            before = time.perf_counter()
            await asyncio.sleep(0)
            longest = max(longest, time.perf_counter() - before)
            await asyncio.sleep(0.0005)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.002)
    start = time.perf_counter()
    await call()
    took = time.perf_counter() - start
    done = True
    await ticking
    return took, longest


async def measure(shape: tuple[int, int, int], rounds: int, endpoint: str, there: np.ndarray) -> dict[str, Any]:
    blocks = shape[1]
    memory = np.zeros(math.prod(shape), np.uint8)
    view, there = memory.reshape(shape), there.reshape(shape)
    backends = {OURS: ours(endpoint, memory, blocks), IN_TREE: in_tree(endpoint, memory)}
    n = TOKENS // BLOCK
    orders = {
        "fresh": [(i, i + 3) for i in range(n)],
        "churned": list(zip(*(random.Random(s).sample(range(blocks), n) for s in (1, 2)), strict=True)),
    }
    result: dict[str, Any] = {}
    for order, pairs in orders.items():
        what = assignment(shape, pairs)
        untouched = sorted(set(range(blocks)) - {b for _, b in pairs})
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in backends}
        for round_ in range(rounds + 1):
            for name, backend in backends.items():
                memory[:] = 0
                taken = await timed(functools.partial(backend.p2p_migrate, what))
                assert all(np.array_equal(view[:, b], there[:, a]) for a, b in pairs), (name, order)
                assert not view[:, untouched].any(), (name, order)
                if round_:  # the first one connects
                    times[name].append(taken)
        medians = {name: [statistics.median(column) for column in zip(*one, strict=True)] for name, one in times.items()}
        result[order] = {
            **{f"{name}_s": medians[name][0] for name in backends},
            **{f"{name}_loop_held_s": medians[name][1] for name in backends},
            "gain": medians[IN_TREE][0] / medians[OURS][0],
            "rounds": {name: [took for took, _ in one] for name, one in times.items()},
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    length = math.prod(shape)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    peer = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/node/migration_peer.py"), str(length)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    try:
        assert peer.stdout
        endpoint = peer.stdout.readline()
        result = asyncio.run(measure(shape, arguments.rounds, endpoint, content(0, length)))
    finally:
        peer.kill()
        peer.wait(10)
    moved = length // shape[1] * TOKENS // BLOCK
    table = Table(title=f"{TOKENS} tokens of {arguments.shape}: {moved / 1e6:.0f} MB in {shape[0] * TOKENS // BLOCK} pieces")
    for column in ("blocks", "ours, ms", "in-tree, ms", "gain", "ours, GB/s", "loop held: ours, ms", "in-tree, ms"):
        table.add_column(column, justify="right")
    for order, one in result.items():
        table.add_row(
            order,
            f"{one['ours_s'] * 1e3:.1f}",
            f"{one['in-tree_s'] * 1e3:.1f}",
            f"{one['gain']:.2f}x",
            f"{moved / one['ours_s'] / 1e9:.2f}",
            f"{one['ours_loop_held_s'] * 1e3:.1f}",
            f"{one['in-tree_loop_held_s'] * 1e3:.1f}",
        )
    Console().print(table)
    if arguments.json:
        report = {"shape": arguments.shape, "tokens": TOKENS, "bytes": moved, "orders": result}
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
