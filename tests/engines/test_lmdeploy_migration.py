"""LMDeploy's prefill and decode servers and its proxy, with our migration backend over TCP: real processes, killed, frozen and restarted.

The right answer to a request is the decode server's own, computed from the prompt there; where they part, float32 says how close the
decision was (documents). MOONCAKE_KV_TEST_MIGRATIONS sets the number of requests of the long test. What the plugin mends in LMDeploy is
shown without it as well, on servers that have the backend only.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
import pytest

from tests.engines.documents import MAX_GAP, gap_at_fork, tokenizer
from tests.engines.lmdeploy_pd import Answer, Cluster, wait_for

pytestmark = pytest.mark.timeout(1800)

REQUESTS = int(os.environ.get("MOONCAKE_KV_TEST_MIGRATIONS", "18"))
TOKENS = 8
AT_ONCE = 6
# 40 blocks of 64 tokens: about four prompts.
PREFILL_BLOCKS = 40
# What LMDeploy does itself around a migration, without the plugin.
ALL = (
    "Engine.end_session,Engine._on_end_session,EngineLoop._send_resp,EngineLoop._migration_loop_process_ready,EngineLoop.drain_for_sleep,"
    "EngineP2PConnection.p2p_initialize,EngineP2PConnection.handle_zmq_recv,EngineP2PConnection.zmq_disconnect,NodeManager.generate,"
    "NodeManager.stream_generate,NodeManager.get_node_url,NodeManager.remove,PDConnectionPool.connect"
)


class Request(msgspec.Struct, frozen=True):
    chat: bool
    text: str
    tokens: int = TOKENS

    def ids(self) -> list[int]:
        if not self.chat:
            return list(tokenizer().encode(self.text))
        messages = [{"role": "user", "content": self.text}]
        return list(tokenizer().encode(tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)))

    def send(self, cluster: Cluster, role: str = "") -> Answer:
        """To the proxy, or to the server of a role."""
        ask = cluster.chat if self.chat else cluster.complete
        return ask(self.text, self.tokens, server=cluster.servers[role] if role else None)


@cache
def story() -> tuple[int, ...]:
    return tuple(tokenizer().encode(files("mooncake_kv.common.demo").joinpath("text.txt").read_text(encoding="utf-8")))


def piece(start: int, length: int) -> str:
    start %= 2000
    assert start + length < len(story())
    return str(tokenizer().decode(story()[start : start + length]))


def request(seed: int) -> Request:
    """A prompt of 65 to 600 tokens, or of a multiple of 64, that shares at most a few with others."""
    choose = random.Random(seed)
    length = choose.choice((64 * choose.randint(1, 8), choose.randint(65, 600)))
    return Request(seed % 2 == 0, piece(choose.randint(0, 1999), length), TOKENS + seed % 3)


class Judge:
    """Remembers the decode server's own answers."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._own: dict[Request, Answer] = {}
        self.forks = 0

    def check(self, asked: Request, answer: Answer) -> None:
        if asked not in self._own:
            self._own[asked] = asked.send(self._cluster, "Decode")
        own = self._own[asked]
        assert (answer.prompt, answer.completion > 0) == (own.prompt, True)
        if answer.text == own.text:
            assert answer.completion == own.completion
            return
        self.forks += 1
        ours, theirs = (tokenizer().encode(one.text) for one in (answer, own))
        assert gap_at_fork(asked.ids(), ours, theirs) < MAX_GAP, (asked, answer, own)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("pd"), prefill_blocks=PREFILL_BLOCKS, MOONCAKE_MIGRATION_HOLD_S="12") as cluster:
        request(1).send(cluster)
        yield cluster


@pytest.fixture(scope="module")
def judge(cluster: Cluster) -> Judge:
    return Judge(cluster)


@pytest.fixture(autouse=True)
def all_blocks_come_back(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cluster" in request.fixturenames and "plain" not in request.fixturenames:
        cluster: Cluster = request.getfixturevalue("cluster")
        whole = {"Prefill": PREFILL_BLOCKS - 1, "Decode": 399}
        for role, free in whole.items():
            wait_for(lambda role=role, free=free: cluster.state(role)["free"] == free, 20, f"{role}: {cluster.state(role)}")  # type: ignore[misc]


def migrated(cluster: Cluster) -> int:
    return int(cluster.state("Decode")["results"].get("migrated", 0))


def migrates(cluster: Cluster, judge: Judge, seeds: Sequence[int]) -> None:
    """All of these migrate and are answered right."""
    before = migrated(cluster)
    for seed in seeds:
        judge.check(request(seed), request(seed).send(cluster))
    wait_for(lambda: migrated(cluster) == before + len(seeds), 5, f"{cluster.state('Decode')}")


# ---- by hand: what the proxy does, with time between prefill and migration -----------------------------------------------------------


def prefill(cluster: Cluster, text: str) -> dict[str, Any]:
    body = {"model": "m", "prompt": text, "max_tokens": 1, "temperature": 0, "with_cache": True, "preserve_cache": True}
    reply: dict[str, Any] = cluster.servers["Prefill"].post("/v1/completions", body)
    return reply


def decode(cluster: Cluster, text: str, first: dict[str, Any], *, remote: str = "", tokens: int = TOKENS) -> Answer:
    migration = {
        "protocol": 2,
        "remote_engine_id": remote or f"http://127.0.0.1:{cluster.servers['Prefill'].port}",
        "remote_session_id": int(first["id"]),
        "remote_token_id": first["remote_token_ids"][-1],
        "remote_block_ids": first["cache_block_ids"],
    }
    return cluster.complete(text, tokens, server=cluster.servers["Decode"], migration_request=migration)


def churn(cluster: Cluster, seed: int) -> None:
    """Prompts for all of the prefill server's blocks and more, at once."""
    with ThreadPoolExecutor(8) as threads:
        texts = [piece(seed * 100 + 211 * i, 560) for i in range(8)]
        list(threads.map(lambda text: cluster.complete(text, 1, server=cluster.servers["Prefill"]), texts))


# ---- with the plugin -----------------------------------------------------------------------------------------------------------------


def test_every_request_is_answered_right(cluster: Cluster, judge: Judge) -> None:
    asked = [request(seed) for seed in range(2, 2 + REQUESTS)]
    before, began = migrated(cluster), time.monotonic()
    alone, together = asked[: REQUESTS // 3], asked[REQUESTS // 3 :]
    answers = [one.send(cluster) for one in alone]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers += threads.map(lambda one: one.send(cluster), together)
    took = time.monotonic() - began
    for one, answer in zip(asked, answers, strict=True):
        judge.check(one, answer)
    moved = migrated(cluster) - before
    print(f"\n{REQUESTS} requests in {took:.0f} s, {moved} migrated, {judge.forks} forked at a near tie; {cluster.state('Decode')}")
    assert moved >= 0.95 * REQUESTS


def test_streams(cluster: Cluster) -> None:
    text = piece(900, 400)
    body = {"model": "m", "prompt": text, "max_tokens": TOKENS, "temperature": 0}
    before = migrated(cluster)
    answer = "".join(event["choices"][0]["text"] for _, event in cluster.proxy.stream("/v1/completions", body))
    assert answer == Request(False, text).send(cluster, "Decode").text
    chat = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "temperature": 0}
    chat["stream_options"] = {"include_usage": True}
    events = [event for _, event in cluster.proxy.stream("/v1/chat/completions", chat)]
    answer = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    assert answer == Request(True, text).send(cluster, "Decode").text
    assert migrated(cluster) == before + 2


@pytest.mark.parametrize("more", [{"max_tokens": 1}, {"logprobs": True, "top_logprobs": 2}])
def test_what_a_migration_cannot_give_is_computed_by_the_decode_engine(cluster: Cluster, more: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": request(4).text}], "max_tokens": TOKENS, "temperature": 0, **more}
    before = migrated(cluster)
    answers = [server.post("/v1/chat/completions", body) for server in (cluster.proxy, cluster.servers["Decode"])]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert migrated(cluster) == before


def test_an_answer_that_ends_at_once_ends_at_once(cluster: Cluster) -> None:
    """LMDeploy decodes on after a first token that ends the answer."""
    text = Request(False, piece(100, 200))
    first = int(prefill(cluster, text.text)["remote_token_ids"][-1])
    stop = {"stop": [tokenizer().decode([first])]}
    answers = [cluster.complete(text.text, TOKENS, server=server, **stop) for server in (None, cluster.servers["Decode"])]
    assert answers[0] == answers[1]


def test_bad_requests_are_refused_as_by_the_decode_server(cluster: Cluster) -> None:
    body = {"model": "m", "prompt": "a " * 5000, "max_tokens": 4}
    own = cluster.servers["Decode"].send("POST", "/v1/completions", body)
    status, text = cluster.proxy.send("POST", "/v1/completions", body)
    assert own[0] == 400 and json.loads(own[1])["message"] == json.loads(text)["message"], (own, status, text)


def test_metrics(cluster: Cluster) -> None:
    """LMDeploy's server asks its engine every ten seconds."""
    line = 'lmdeploy:mooncake_kv_migrations_total{result="migrated"} '
    request(1).send(cluster)

    def shown() -> bool:
        text = cluster.servers["Decode"].get("/metrics/")
        return any(one.startswith(line) and float(one.removeprefix(line)) == migrated(cluster) for one in text.splitlines())

    wait_for(shown, 25, line)


def test_held_blocks_outlive_other_prompts(cluster: Cluster, judge: Judge) -> None:
    text = piece(5000, 400)
    first = prefill(cluster, text)
    churn(cluster, 1)
    before = migrated(cluster)
    judge.check(Request(False, text), decode(cluster, text, first))
    assert migrated(cluster) == before + 1


@pytest.mark.parametrize("fault", ["twice", "unknown number", "no number", "wrong block", "too few blocks", "another engine"])
def test_what_does_not_fit_costs_a_local_prefill(cluster: Cluster, judge: Judge, fault: str) -> None:
    text = piece(6000, 300)
    first = prefill(cluster, text)
    blocks = first["cache_block_ids"]
    remote = ""
    if fault == "twice":
        judge.check(Request(False, text), decode(cluster, text, first))
        churn(cluster, 2)
    elif fault == "unknown number":
        blocks[-1] -= 1
    elif fault == "no number":
        blocks.pop()
    elif fault == "wrong block":
        blocks[0] = 1 << 20
    elif fault == "too few blocks":
        del blocks[0]
    else:
        remote = "http://127.0.0.1:1"
    before = migrated(cluster)
    judge.check(Request(False, text), decode(cluster, text, first, remote=remote))
    assert migrated(cluster) == before
    migrates(cluster, judge, [7])


@pytest.mark.long
def test_nobody_comes_for_the_blocks(cluster: Cluster, judge: Judge) -> None:
    text = piece(7000, 300)
    first = prefill(cluster, text)
    wait_for(lambda: cluster.state("Prefill")["free"] == PREFILL_BLOCKS - 1, 20, "the hold does not end")
    assert cluster.state("Prefill")["results"]["not_fetched"] >= 1
    before = migrated(cluster)
    judge.check(Request(False, text), decode(cluster, text, first))
    assert migrated(cluster) == before


@pytest.mark.long
@pytest.mark.parametrize("role", ["Prefill", "Decode", ""])
def test_clients_that_leave(cluster: Cluster, judge: Judge, role: str) -> None:
    """At random moments; the fixture sees that all blocks come back."""
    server = cluster.servers[role] if role else cluster.proxy
    choose = random.Random(5)

    def leave(seed: int) -> None:
        body = {"model": "m", "prompt": request(seed).text, "max_tokens": 40, "with_cache": role == "Prefill", "stream": role != "Prefill"}
        body["preserve_cache"] = body["with_cache"]
        posted = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with suppress(OSError):
            urllib.request.urlopen(posted, timeout=choose.uniform(0.05, 1.5)).read(200)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(leave, range(100, 109)))
    time.sleep(2.5)  # a prefill server that gave no answer is left alone so long
    migrates(cluster, judge, [8])


@pytest.mark.long
def test_prefill_frozen_between_prefill_and_migration(cluster: Cluster, judge: Judge) -> None:
    text = piece(8000, 300)
    first = prefill(cluster, text)
    cluster.signal("Prefill", signal.SIGSTOP)
    try:
        began = time.monotonic()
        answer = decode(cluster, text, first)
        assert time.monotonic() - began < 12
        # Nothing else waits for it.
        request(11).send(cluster, "Decode")
        proxied = request(12).send(cluster)
    finally:
        cluster.signal("Prefill", signal.SIGCONT)
    judge.check(Request(False, text), answer)
    judge.check(request(12), proxied)
    wait_for(lambda: cluster.state("Prefill")["free"] == PREFILL_BLOCKS - 1, 30, "the hold does not end")
    before = migrated(cluster)
    deadline = time.monotonic() + 30
    while migrated(cluster) == before:
        assert time.monotonic() < deadline
        judge.check(request(13), request(13).send(cluster))


def test_prefill_killed_and_restarted(cluster: Cluster, judge: Judge) -> None:
    text = piece(900, 300)
    first = prefill(cluster, text)
    seeds = range(20, 25)
    with ThreadPoolExecutor(3) as threads:
        answers = threads.map(lambda seed: request(seed).send(cluster), seeds)
        time.sleep(1.5)
        cluster.kill("Prefill")
        for seed, answer in zip(seeds, answers, strict=True):
            judge.check(request(seed), answer)
    before, began = migrated(cluster), time.monotonic()
    answers = iter([request(26).send(cluster), decode(cluster, text, first)])
    assert time.monotonic() - began < 20
    assert migrated(cluster) == before
    judge.check(request(26), next(answers))
    judge.check(Request(False, text), next(answers))
    cluster.start("Prefill")
    migrates(cluster, judge, [27, 28])
    # The old process's blocks are nobody's now.
    before = migrated(cluster)
    judge.check(Request(False, text), decode(cluster, text, first))
    assert migrated(cluster) == before


def test_decode_killed_and_restarted(cluster: Cluster, judge: Judge) -> None:
    prefill(cluster, piece(950, 300))
    with ThreadPoolExecutor(3) as threads:
        sent = [threads.submit(request(seed).send, cluster) for seed in range(30, 33)]
        time.sleep(1.0)
        cluster.kill("Decode")
        for one in sent:
            with suppress(OSError, KeyError, TypeError, ValueError):
                one.result()
    cluster.start("Decode")
    migrates(cluster, judge, [33, 34, 35])


@pytest.mark.parametrize("part", ["ENGINE", "LOOP", "CONNECTION", "PROXY"])
def test_another_lmdeploy_is_left_alone_and_the_backend_refuses(part: str) -> None:
    module, owner, method = {
        "ENGINE": ("lmdeploy.pytorch.engine.engine", "Engine", "_on_end_session"),
        "LOOP": ("lmdeploy.pytorch.engine.engine_loop", "EngineLoop", "_send_resp"),
        "CONNECTION": ("lmdeploy.pytorch.disagg.conn.engine_conn", "EngineP2PConnection", "p2p_initialize"),
        "PROXY": ("lmdeploy.serve.proxy.proxy", "NodeManager", "generate"),
    }[part]
    script = f"""
import torch
from importlib import import_module
from mooncake_kv.lmdeploy_plugin import compat
name = next(iter(compat.MIGRATION_{part}))
compat.MIGRATION_{part}[name] = ("self", "something")
import_module("lmdeploy.pytorch.engine.engine")  # LMDeploy's modules import each other in a circle: this order works
print(hasattr(getattr(import_module({module!r}), {owner!r}).{method}, "__wrapped__"))
from lmdeploy.pytorch.disagg.backend.backend import MIGRATION_BACKENDS
try:
    MIGRATION_BACKENDS.module_dict["Mooncake"]()
    print("served")
except Exception as error:
    print(type(error).__name__)
"""
    environment = {**os.environ, "MOONCAKE_KV_STRICT": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.split()[-2:] == ["False", "served" if part == "PROXY" else "UnsupportedError"], (done.stdout, done.stderr)
    assert "is not in effect" in done.stdout + done.stderr


def test_switched_off() -> None:
    script = """
import torch
from importlib import import_module
print(hasattr(import_module("lmdeploy.pytorch.engine.engine").Engine._on_end_session, "__wrapped__"))
print(import_module("lmdeploy.pytorch.disagg.backend.backend").MIGRATION_BACKENDS.module_dict["Mooncake"].__module__)
"""
    environment = {**os.environ, "MOONCAKE_KV_MIGRATION": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.split()[-2:] == ["False", "lmdeploy.pytorch.disagg.backend.mooncake"], (done.stdout, done.stderr)


# ---- LMDeploy with the backend alone ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Iterator[Cluster]:
    cluster.close()
    with Cluster(tmp_path_factory.mktemp("plain"), prefill_blocks=PREFILL_BLOCKS, unmended=ALL) as plain:
        plain.proxy.post("/distserve/connection_warmup", {})
        yield plain


@pytest.mark.long
def test_plain_completions_migrate(plain: Cluster) -> None:
    """So what follows is not for want of a migration."""
    judge = Judge(plain)
    judge.check(request(3), decode(plain, request(3).text, prefill(plain, request(3).text), tokens=request(3).tokens))
    judge.check(request(5), request(5).send(plain))


@pytest.mark.long
def test_plain_chat_fails(plain: Cluster) -> None:
    status, _ = plain.proxy.send("POST", "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "Hello"}]})
    assert status == 500


@pytest.mark.long
def test_plain_blocks_are_not_freed_by_the_message_for_it(plain: Cluster) -> None:
    before = plain.state("Prefill")["free"]
    decode(plain, request(9).text, prefill(plain, request(9).text))
    time.sleep(2)
    assert plain.state("Prefill")["free"] < before


@pytest.mark.long
def test_plain_blocks_are_overwritten_before_they_are_read(plain: Cluster) -> None:
    """The same as test_held_blocks_outlive_other_prompts, on three prompts."""
    wrong = 0
    for i in range(3):
        asked = Request(False, piece(300 * i, 400))
        first = prefill(plain, asked.text)
        churn(plain, 1 + i)
        answer, own = decode(plain, asked.text, first), asked.send(plain, "Decode")
        ours, theirs = (tokenizer().encode(one.text) for one in (answer, own))
        wrong += gap_at_fork(asked.ids(), ours, theirs) >= MAX_GAP
    assert wrong


@pytest.mark.long
def test_plain_stale_link_ends_the_decode_engine(plain: Cluster) -> None:
    """After a restart of the prefill server; see test_prefill_killed_and_restarted."""
    plain.kill("Prefill")
    plain.start("Prefill")
    body = {"model": "m", "prompt": request(11).text, "max_tokens": TOKENS, "temperature": 0}
    for server in (plain.proxy, plain.proxy, plain.servers["Decode"]):
        reply: Any = {}
        with suppress(OSError):
            reply = server.post("/v1/completions", body, timeout_s=15)
        assert "choices" not in reply
