"""Prefill and decode on different servers with nothing between them but the store: the way that docs/lmdeploy.md recommends.

A router sends each request to the prefill server for one token and then, whatever came of that, to the decode server. Both are ordinary
servers (LMDeploy's role is Hybrid) that save and load. Right answers are those that LMDeploy gives from its own prefix cache, up to forks
where rounding decides (documents).

A server answers without waiting for the node to hear that pages are complete, which takes its client's thread a moment. On a busy machine
the decode server's question can be faster than that, and then it computes. So the router here waits until the node has the pages.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import msgspec
import pytest

from mooncake_kv.common.config import load_config
from mooncake_kv.common.hashing import page_hashes, storage_namespace_seed
from mooncake_kv.common.node.client import NodeClient
from tests.engines.documents import MAX_GAP, gap_at_fork, messages, prompts, tokenizer
from tests.engines.harness import ONE_THREAD, HttpServer, Server
from tests.engines.lmdeploy_harness import IN_EFFECT, LOADED, LMDeployEngine, LMDeployServer, in_effect
from tests.engines.sglang_harness import namespace_in
from tests.models import SMOLLM2

pytestmark = pytest.mark.timeout(900)

SETTINGS = {"dram_size": "1gb", "fetch_timeout_ms": 10000, "fetch_deadline_ms": 20000}
SHARED = 1024
TOKENS = 12
SEQUENTIAL, TOGETHER, KILLS = 2, 3, 1
KINDS = ("vllm", "lmdeploy")
STORED_S = 10.0


class Answer(msgspec.Struct):
    text: str
    prompt: int
    cached: int


def owners(kind: str) -> list[str]:
    """One for each request, so that no two share a page."""
    return [f"{kind} {i}" for i in range(SEQUENTIAL + TOGETHER + 2 * KILLS)]


def full(answer: Answer) -> int:
    """Tokens of the full pages; the last token of a prompt is always computed."""
    return (answer.prompt - 1) // 64 * 64


def ask(server: HttpServer, owner: str, tokens: int = TOKENS) -> Answer:
    body = {"model": "m", "messages": [{"role": "user", "content": messages(owner, SHARED)[0]}], "max_tokens": tokens, "temperature": 0}
    reply = server.post("/v1/chat/completions", body)
    details = reply["usage"].get("prompt_tokens_details") or {}
    return Answer(reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens"], details.get("cached_tokens") or 0)


def start(kind: str, log: Path) -> HttpServer:
    if kind == "lmdeploy":
        return LMDeployServer(SMOLLM2, log, settings=SETTINGS, environment={LOADED: str(log.parent)})
    arguments = ["--model", str(SMOLLM2), "--served-model-name", "m", "--kv-connector", "mooncake", "--block-size", "64", "--enforce-eager"]
    arguments += ["--moon-cache-config", json.dumps(SETTINGS), "--max-model-len", "4096", "--enable-prompt-tokens-details"]
    return Server(arguments, log, module=True, environment=ONE_THREAD)


class Routed(msgspec.Struct):
    """`prefill` is None where the prefill server gave no answer; `prefill_s` is how long it took."""

    prefill: Answer | None
    prefill_s: float
    decode: Answer


def route(prefill: HttpServer, decode: HttpServer, owner: str, node: NodeClient | None) -> Routed:
    """`node`: to wait for the pages with; None where they may never come."""
    first, began = None, time.monotonic()
    with suppress(OSError, HTTPException):
        first = ask(prefill, owner, 1)
    prefill_s = time.monotonic() - began
    if node is not None:
        assert stored(node, owner), "prefill has answered and stored nothing"
    return Routed(first, prefill_s, ask(decode, owner))


def stored(node: NodeClient, owner: str) -> bool:
    """Wait until the node has all pages of the document, or for STORED_S."""
    hashes = page_hashes(prompts(owner, SHARED)[0][:SHARED], seed=storage_namespace_seed(None, None))
    deadline = time.monotonic() + STORED_S
    while time.monotonic() < deadline:
        lookup = node.lookup(hashes)
        while lookup is not None and not lookup.done:
            time.sleep(0.002)
        if lookup is not None and not lookup.failed and lookup.pages == len(hashes):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Answers of an engine that has no cache but its own."""
    found = {}
    with LMDeployEngine(SMOLLM2, tmp_path_factory.mktemp("right") / "log", enable_prefix_caching=True) as engine:
        for kind in KINDS:
            for owner in owners(kind):
                ids = prompts(owner, SHARED)[0]
                engine.generate(ids, 1)
                hit = engine.generate(ids, TOKENS)
                assert hit.cached == SHARED
                found[owner] = hit.output
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decode")


@pytest.fixture(scope="module")
def decode(module_runtime_dir: Path, folder: Path) -> Iterator[HttpServer]:
    with start("lmdeploy", folder / "log") as server:
        engines = [p.pid for p in server.processes() if p.name() == "ZMQMPEngine"]
        assert len(engines) == 1 and in_effect(folder)[engines[0]] == IN_EFFECT
        yield server


@pytest.fixture(scope="module")
def node(decode: HttpServer, folder: Path) -> Iterator[NodeClient]:
    """Asks only. A worker, because each scheduler takes a share of the slots."""
    client = NodeClient(load_config(SETTINGS), namespace_in(folder), engine="judge", role="worker", spawn=False)
    client.start()
    assert client.wait_ready(STORED_S), client.reason
    yield client
    client.close()


def judge(owner: str, answer: Answer, right: dict[str, list[int]]) -> float:
    """The gap of logits at which the answer leaves the right one; 0.0 if it does not."""
    ids = prompts(owner, SHARED)[0]
    assert answer.prompt == len(ids), "the servers see the same tokens"
    found, expected = tokenizer().encode(answer.text), right[owner]
    if answer.text == tokenizer().decode(expected, skip_special_tokens=True):
        return 0.0
    return gap_at_fork(ids, expected, found)


@pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.long)])
def test_pages_go_from_prefill_to_decode(
    kind: str, decode: HttpServer, node: NodeClient, right: dict[str, list[int]], tmp_path: Path
) -> None:
    todo, seed = owners(kind), random.randrange(1 << 30)
    delays = random.Random(seed)
    gaps: list[float] = []

    def transferred(routed: Sequence[Routed], names: Sequence[str]) -> None:
        """Every full page was computed once, by the prefill server, and loaded by the decode server."""
        for one, owner in zip(routed, names, strict=True):
            assert one.prefill is not None and one.prefill.cached == 0
            assert one.decode.cached == full(one.decode) == SHARED
            gaps.append(judge(owner, one.decode, right))

    prefill = start(kind, tmp_path / "prefill-0")
    try:
        names, todo = todo[:SEQUENTIAL], todo[SEQUENTIAL:]
        routed = [route(prefill, decode, owner, node) for owner in names]
        transferred(routed, names)
        prefill_s = max(one.prefill_s for one in routed)
        names, todo = todo[:TOGETHER], todo[TOGETHER:]
        with ThreadPoolExecutor(TOGETHER) as pool:
            transferred(list(pool.map(lambda owner: route(prefill, decode, owner, node), names)), names)
        for i in range(1, KILLS + 1):
            (owner, later), todo = todo[:2], todo[2:]
            delay = delays.uniform(0, prefill_s)
            killer = threading.Timer(delay, prefill.kill)
            killer.start()
            one = route(prefill, decode, owner, None)
            killer.join()
            assert one.decode.cached <= SHARED
            gaps.append(judge(owner, one.decode, right))
            print(f"\n{kind}: prefill killed after {delay:.2f} s (seed {seed}); decode loaded {one.decode.cached} tokens")
            # Without it everything is computed, and with a new one transferred again.
            prefill = start(kind, tmp_path / f"prefill-{i}")
            transferred([route(prefill, decode, later, node)], [later])
    finally:
        prefill.kill()
    assert max(gaps) < MAX_GAP
    assert sum(gap == 0 for gap in gaps) >= len(gaps) / 2
    assert not todo
