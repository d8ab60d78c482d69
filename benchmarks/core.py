"""Speed of the shared core: copies between engine KV and pages, the page hash chain, and the node (core_node.py).

Every copy is timed against a memcpy of the same bytes in the same round (`ratio`: memcpy's time on one thread over the copy's), cases
interleaved, medians over the rounds, threads pinned to one core each. Pages lie in a memfd as in the node's arena, engine tensors in
ordinary memory, blocks in random order.

    python benchmarks/core.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mooncake_kv.common.hashing import page_hashes
from mooncake_kv.common.identity import KVNamespace
from mooncake_kv.common.kv_views import PagedKVView, lmdeploy_rows, sglang_host, vllm_cpu, vllm_gpu
from mooncake_kv.common.page import PageLayout

PAGE = 64
# What a layout has to reach, as a ratio of memcpy on one thread.
TARGETS = {"lmdeploy": 0.7, "sglang page_first_direct": 0.7, "vllm cpu vec": 0.18, "vllm cpu amx": 0.18}


class Model(NamedTuple):
    name: str
    layers: int
    heads: int
    dim: int
    pages: int


MODELS = (Model("SmolLM2-135M, 2944 tokens", 30, 3, 64, 46), Model("8B-like, 1024 tokens", 32, 8, 128, 16))


class Case(NamedTuple):
    model: str
    layout: str
    block: int
    direction: str
    threads: int
    run: Callable[[], None]


def pages_of(layout: PageLayout, count: int) -> list[np.ndarray]:
    """Slots in shared memory, filled."""
    descriptor = os.memfd_create("benchmark")
    os.ftruncate(descriptor, count * layout.slot_bytes)
    arena = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8).reshape(count, layout.slot_bytes)
    os.close(descriptor)
    arena[...] = np.random.default_rng(0).integers(0, 256, layout.slot_bytes, dtype=np.uint8)
    return list(arena)


def views_of(model: Model) -> Iterator[tuple[str, int, PagedKVView]]:
    """(layout, tokens per block, view) over freshly allocated bf16 tensors, a little larger than what is copied."""
    layers, heads, dim = model.layers, model.heads, model.dim
    tokens = (model.pages + 4) * PAGE

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    for isa in ("vec", "amx"):
        for block in (32, 128):
            yield f"vllm cpu {isa}", block, vllm_cpu(list(zeros(layers, tokens // block, heads, block, 2 * dim)), block, isa)
    yield "vllm gpu LBNHC", 16, vllm_gpu(list(zeros(layers, tokens // 16, 16, heads, 2 * dim).transpose(2, 3)), 16)
    yield "vllm gpu BLHNC", 16, vllm_gpu(list(zeros(tokens // 16, layers, heads, 16, 2 * dim).transpose(0, 1)), 16)
    yield "sglang layer_first", PAGE, sglang_host(zeros(2, layers, tokens, heads, dim), "layer_first")
    yield "sglang page_first", PAGE, sglang_host(zeros(2, tokens, layers, heads, dim), "page_first")
    yield "sglang page_first_direct", PAGE, sglang_host(zeros(2, tokens // PAGE, layers, PAGE, heads, dim), "page_first_direct")
    yield "sglang page_head", PAGE, sglang_host(zeros(2, tokens // PAGE, heads, PAGE, layers, dim), "page_head")
    row = 2 * PAGE * heads * dim * 2
    pool = torch.zeros(layers, tokens // PAGE, row, dtype=torch.uint8)
    yield "lmdeploy", PAGE, lmdeploy_rows(list(pool), PAGE, heads, dim, 2)


def cases_of(model: Model, layout: PageLayout, pages: list[np.ndarray], threads: int) -> Iterator[Case]:
    rng = np.random.default_rng(1)
    for name, block, view in views_of(model):
        blocks = rng.permutation(view.token_slots // block)[: model.pages * PAGE // block]
        slots = (blocks[:, None] * block + np.arange(block)).ravel()
        for count in (1, threads) if threads > 1 and name.startswith("vllm cpu") else (1,):
            bound = view.bind(layout, 0, 0, threads=count)
            for direction, copy in (("gather", bound.gather), ("scatter", bound.scatter)):
                yield Case(model.name, name, block, direction, count, partial(copy, slots, 0, pages))


def seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def pin(cpus: list[int]) -> None:
    """This thread to the first CPU, each pool thread to the next one."""
    os.sched_setaffinity(0, {cpus[0]})
    for thread in threading.enumerate():
        if thread.name.startswith("mooncake-kv-copy") and thread.native_id:
            number = 1 + int(thread.name.rsplit("_", 1)[1])
            os.sched_setaffinity(thread.native_id, {cpus[number % len(cpus)]})


def copies(rounds: int, console: Console) -> list[dict[str, Any]]:
    allowed = sorted(os.sched_getaffinity(0))
    threads = min(2, len(allowed))
    torch.set_num_threads(1)
    rows = []
    for model in MODELS:
        layout = PageLayout(
            KVNamespace.build(
                model="benchmark",
                kv_dtype="bfloat16",
                num_layers=model.layers,
                num_kv_heads=model.heads,
                k_head_dim=model.dim,
                v_head_dim=model.dim,
                page_tokens=PAGE,
            )
        )
        pages = pages_of(layout, model.pages)
        source = np.concatenate([page[: layout.payload_bytes] for page in pages])
        target = np.zeros_like(source)
        cases = list(cases_of(model, layout, pages, threads))
        for case in cases:
            case.run()
        pin(allowed)
        times: list[list[float]] = [[] for _ in cases]
        ratios: list[list[float]] = [[] for _ in cases]
        memcpy: list[float] = []
        for _ in track(range(rounds), f"copies, {model.name}", console=console, transient=True):
            for case, spent, ratio in zip(cases, times, ratios, strict=True):
                memcpy.append(seconds(partial(np.copyto, target, source)))
                spent.append(seconds(case.run))
                ratio.append(memcpy[-1] / spent[-1])
        os.sched_setaffinity(0, allowed)
        size = len(source)
        rows.append(
            {"model": model.name, "layout": "memcpy", "block": 0, "direction": "", "threads": 1, "bytes": size, "ratio": 1.0, "target": 0}
            | {"ms": statistics.median(memcpy) * 1e3, "gb_per_s": size / statistics.median(memcpy) / 1e9}
        )
        for case, spent, ratio in zip(cases, times, ratios, strict=True):
            middle = statistics.median(spent)
            rows.append(
                {
                    **{field: getattr(case, field) for field in ("model", "layout", "block", "direction", "threads")},
                    "bytes": size,
                    "ms": middle * 1e3,
                    "gb_per_s": size / middle / 1e9,
                    "ratio": statistics.median(ratio),
                    "target": TARGETS.get(case.layout, 0) if case.threads == 1 else 0,
                }
            )
        del cases, pages
        gc.collect()
    return rows


def hash_chain(rounds: int) -> dict[str, float]:
    tokens = np.random.default_rng(0).integers(0, 150_000, 128 * 1024).tolist()
    return {
        "tokens": len(tokens),
        "ms": statistics.median(seconds(lambda: page_hashes(tokens)) for _ in range(rounds)) * 1e3,
        "target_ms": 6,
    }


def show(result: dict[str, Any], console: Console) -> None:
    table = Table("model", "layout", "block", "direction", "threads", "ms", "GB/s", "of memcpy", "target")
    for row in result["copies"]:
        text = (row["model"], row["layout"], str(row["block"] or ""), row["direction"], str(row["threads"]), f"{row['ms']:.1f}")
        missed = row["ratio"] < row["target"]
        table.add_row(
            *text, f"{row['gb_per_s']:.1f}", f"{row['ratio']:.2f}", str(row["target"] or ""), style="bold red" if missed else None
        )
    console.print(table)
    console.print(f"hash chain of {result['hash']['tokens']} tokens: {result['hash']['ms']:.1f} ms (target {result['hash']['target_ms']})")


def node_section(rounds: int, console: Console) -> Any:
    """What core_node.py next to this file measures: its `run(rounds, console)` returns the JSON of the section."""
    path = Path(__file__).with_name("core_node.py")
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("core_node", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.run(rounds, console)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure copies, hashes and the node.")
    parser.add_argument("--rounds", type=int, default=9, help="measurements per case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    console = Console()
    result: dict[str, Any] = {"cpus": len(os.sched_getaffinity(0)), "copies": copies(arguments.rounds, console)}
    result["hash"] = hash_chain(arguments.rounds)
    if (node := node_section(arguments.rounds, console)) is not None:
        result["node"] = node
    show(result, console)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
