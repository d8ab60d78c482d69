"""Our LMDeploy migration backend against LMDeploy's own loop of one blocking read for each block: one context of 4,096 tokens.

Assignments are LMDeploy's, for its own layout, and LMDeploy's loop is its own method; only its constructor is left out, which wants RDMA.
Each backend runs in a process of its own and reads from another process over TCP on loopback. `in-tree` has Mooncake's defaults, as where
LMDeploy runs without us; `in-tree, our variables` has those that our backend sets (common/tiers/pool/wheel.py), so it tells what the
batched reads alone are worth. Rounds are interleaved, medians reported. `fresh`: the prompt's blocks follow one another on both sides, as
in an engine that has just started; `churned`: they lie anywhere. `loop held`: for how long at most the event loop did nothing else. Every
byte is compared.

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

from mooncake_kv.common.tiers.pool import wheel
from tests.node.migration_peer import content

TOKENS, BLOCK = 4096, 64
# Layers; blocks; bytes of a block's row: K and V of 64 tokens in bf16 (3 heads of 64, 8 heads of 128).
SHAPES = {"smollm2": (30, 160, 2 * BLOCK * 3 * 64 * 2), "8b": (32, 96, 2 * BLOCK * 8 * 128 * 2)}
OURS, IN_TREE, TUNED = "ours", "in-tree", "in-tree, our variables"
ORDERS = ("fresh", "churned")
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


def serve(shape: tuple[int, int, int]) -> None:
    """Runs in a process of its own: memory to read from."""
    from mooncake.engine import TransferEngine

    memory = content(0, math.prod(shape))
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(memory.ctypes.data, len(memory)) == 0
    regions = {"0": {"address": memory.ctypes.data, "length": len(memory)}}
    print(json.dumps({"session": f"127.0.0.1:{engine.get_rpc_port()}", "regions": regions}), flush=True)
    sys.stdin.read()


def work(name: str, shape: tuple[int, int, int], endpoint: str) -> None:
    """Runs in a process of its own: for each line of its input, the name of an order, one migration."""
    n, blocks = TOKENS // BLOCK, shape[1]
    memory = np.zeros(math.prod(shape), np.uint8)
    view, there = memory.reshape(shape), content(0, len(memory)).reshape(shape)
    backend = ours(endpoint, memory, blocks) if name == OURS else in_tree(endpoint, memory)
    pairs = {
        "fresh": [(i, i + 3) for i in range(n)],
        "churned": list(zip(*(random.Random(s).sample(range(blocks), n) for s in (1, 2)), strict=True)),
    }
    what = {order: assignment(shape, pairs[order]) for order in ORDERS}

    async def main() -> None:
        for line in sys.stdin:
            order = line.strip()
            memory[:] = 0
            taken = await timed(functools.partial(backend.p2p_migrate, what[order]))
            assert all(np.array_equal(view[:, b], there[:, a]) for a, b in pairs[order]), (name, order)
            assert not view[:, sorted(set(range(blocks)) - {b for _, b in pairs[order]})].any(), (name, order)
            print(json.dumps(taken), flush=True)

    asyncio.run(main())


def child(variables: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    environ = {**os.environ, **variables, "MC_LOG_LEVEL": "ERROR"}
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)


def say(process: subprocess.Popen[str], line: str = "") -> str:
    """Its next line of output, after this one of input."""
    assert process.stdin and process.stdout
    if line:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"a process of the benchmark ended with code {process.wait(10)}")
    return answer


def measure(shape: str, rounds: int) -> dict[str, Any]:
    children = []
    try:
        variables = {OURS: wheel.ENVIRONMENT, IN_TREE: {}, TUNED: wheel.ENVIRONMENT}
        peers = {name: child(v, "--shape", shape, "--serve") for name, v in variables.items()}
        children += peers.values()
        workers = {name: child(v, "--shape", shape, "--work", name, "--endpoint", say(peers[name])) for name, v in variables.items()}
        children += workers.values()
        times: dict[str, dict[str, list[list[float]]]] = {order: {name: [] for name in workers} for order in ORDERS}
        for round_ in range(rounds + 1):
            for order in ORDERS:
                for name, worker in workers.items():
                    taken = json.loads(say(worker, order))
                    if round_:  # the first one connects
                        times[order][name].append(taken)
    finally:
        for process in children:
            process.kill()
            process.wait(10)
    result: dict[str, Any] = {}
    for order in ORDERS:
        medians = {name: [statistics.median(column) for column in zip(*one, strict=True)] for name, one in times[order].items()}
        result[order] = {
            "seconds": {name: one[0] for name, one in medians.items()},
            "loop_held_seconds": {name: one[1] for name, one in medians.items()},
            "gain": medians[IN_TREE][0] / medians[OURS][0],
            "gain_with_our_variables": medians[TUNED][0] / medians[OURS][0],
            "rounds": {name: [took for took, _ in one] for name, one in times[order].items()},
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    if arguments.serve:
        serve(shape)
        return
    if arguments.work:
        work(arguments.work, shape, arguments.endpoint)
        return
    result = measure(arguments.shape, arguments.rounds)
    moved = math.prod(shape) // shape[1] * TOKENS // BLOCK
    table = Table(title=f"{TOKENS} tokens of {arguments.shape}: {moved / 1e6:.0f} MB in {shape[0] * TOKENS // BLOCK} pieces")
    for column in ("blocks", "", "ms", "GB/s", "loop held, ms", "ours is faster by"):
        table.add_column(column, justify="right")
    for order, one in result.items():
        for name, took in one["seconds"].items():
            held = one["loop_held_seconds"][name]
            gain = f"{took / one['seconds'][OURS]:.2f}x"
            table.add_row(order, name, f"{took * 1e3:.1f}", f"{moved / took / 1e9:.2f}", f"{held * 1e3:.1f}", gain)
    Console().print(table)
    if arguments.json:
        report = {"shape": arguments.shape, "tokens": TOKENS, "bytes": moved, "orders": result}
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
