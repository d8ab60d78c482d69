"""KV shared between real vLLM, SGLang and LMDeploy engines: a document that one of them has read is not prefilled by another.

One story for all tests, because an engine's start is dear: each engine in turn reads a document of its own, answers questions about all
three from its own prefix cache (computed by itself, under a salt, or for LMDeploy a tenant, whose pages nobody else loads), and then from
the pages of those before it; then fresh processes answer from their own engine's pages and from those of the engines after it.
MOONCAKE_KV_TEST_QUESTIONS sets the number of questions about each document, at most 10.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mooncake_kv.common.hashing import page_hashes, storage_namespace_seed
from mooncake_kv.common.identity import KVNamespace
from tests.engines import documents
from tests.engines.documents import MAX_GAP, PAGES, SHARED, gap_at_fork
from tests.engines.harness import ONE_THREAD, Engine
from tests.engines.judge import EXACT, MAX_ERROR, PageReader, worst_error
from tests.engines.lmdeploy_harness import LMDeployEngine
from tests.engines.sglang_harness import LOADED, SGLangEngine, namespace_in
from tests.models import SMOLLM2

pytestmark = pytest.mark.timeout(1200)  # seven engines; with ten questions, two hundred answers

# Room for all that is read, 47 MB a document, about thirty times.
SETTINGS = {"dram_size": "3gb", "fetch_timeout_ms": 10000}
QUESTIONS = int(os.environ.get("MOONCAKE_KV_TEST_QUESTIONS", "2"))
OWN = "own"
TOKENS = 16
ENGINES = ("sglang", "vllm", "lmdeploy")
PAIRS = [f"{writer}->{reader}" for writer, reader in product(ENGINES, ENGINES)]
# Per token and layer, measured at most 0.12 between engines; planted faults give 1.0 and more.
MAX_TOKEN_ERROR = 0.4


class Answer(msgspec.Struct, kw_only=True):
    """`stored`: tokens that came from the storage backend, where the engine tells."""

    output: list[int]
    cached: int
    ttft_s: float
    stored: int | None = None


class Story(msgspec.Struct, kw_only=True):
    """`answers`: by "writer->reader". `own`: by "writer->reader" too, the reader's answers on that document from its own prefix cache.
    `cold`: by "writer->reader" too, seconds to the first token of documents of the same length that nobody has read, in that process."""

    namespaces: dict[str, KVNamespace] = {}
    processes: dict[int, str] = {}
    patched: dict[int, list[str]] = {}
    answers: dict[str, list[Answer]] = {}
    own: dict[str, list[Answer]] = {}
    cold: dict[str, list[float]] = {}


def prompts(owner: str) -> Sequence[list[int]]:
    return documents.prompts(owner)[:QUESTIONS]


def own(kind: str) -> str:
    """The salt of an engine's own reading."""
    return f"{OWN} {kind}"


def hashes(owner: str, salt: str | None = None) -> list[bytes]:
    return page_hashes(prompts(owner)[0][:SHARED], seed=storage_namespace_seed(None, salt))


class Running:
    """One engine of any kind, with the few things that the story asks of it."""

    def __init__(self, kind: str, log: Path, *, tenant: str = "", environment: dict[str, str] | None = None) -> None:
        settings = {**SETTINGS, **({"tenant": tenant} if tenant else {})}
        self.kind = kind
        self.engine: Any
        if kind == "sglang":
            self.engine = SGLangEngine(SMOLLM2, log, settings=settings, environment=environment)
        elif kind == "vllm":
            insecure = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
            # Blocks as long as our pages: its own hit then has the same length.
            self.engine = Engine(SMOLLM2, log, settings=settings, environment={**EXACT, **ONE_THREAD, **insecure}, block_size=64)
        else:
            self.engine = LMDeployEngine(SMOLLM2, log, settings=settings, environment=environment, enable_prefix_caching=True)

    def ask(self, prompt: Sequence[int], tokens: int = TOKENS, salt: str | None = None) -> Answer:
        more = {"cache_salt": salt} if salt else {}
        result = self.engine.generate(prompt, tokens, **more)
        return Answer(output=result.output, cached=result.cached, ttft_s=result.ttft_s, stored=getattr(result, "stored", None))

    def ask_after_reset(self, prompt: Sequence[int]) -> Answer:
        if self.kind == "sglang":
            assert self.engine.flush()
        elif self.kind == "vllm":
            assert self.engine.reset_prefix_cache()
        else:
            self.engine.call("tests.engines.lmdeploy_probes:forget")
        return self.ask(prompt)

    def namespace(self, loaded: Path) -> KVNamespace:
        if self.kind == "sglang":
            return namespace_in(loaded)
        probe = {"vllm": "tests.engines.judge:namespace", "lmdeploy": "tests.engines.lmdeploy_probes:namespace"}[self.kind]
        return KVNamespace.decode(bytes.fromhex(self.engine.call(probe)))


def own_answers(told: Story, running: Running, salt: str | None) -> None:
    for owner in ENGINES:
        running.ask(prompts(owner)[0], 1, salt)
        told.own[f"{owner}->{running.kind}"] = [running.ask(prompt, salt=salt) for prompt in prompts(owner)]


def cold(running: Running, first_seed: int) -> list[float]:
    """After a first one, for the kernels' sake."""
    seeds = range(first_seed, first_seed + 3)
    texts = [[int(x) for x in np.random.default_rng(seed).integers(100, 40000, len(prompts("")[0]))] for seed in seeds]
    answers = [running.ask(text, 1) for text in texts]
    assert not any(a.cached for a in answers)
    return [a.ttft_s for a in answers[1:]]


@pytest.fixture(scope="module")
def story(module_runtime_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder, told = tmp_path_factory.mktemp("story"), Story()
    (folder / "loaded").mkdir()
    with ExitStack() as stack:
        reader: PageReader | None = None
        for number, (i, kind) in product((1, 2), enumerate(ENGINES)):
            environment = {LOADED: str(folder / "loaded")} if (number, kind) == (1, "sglang") else None
            running = Running(kind, folder / f"{kind}-{number}", environment=environment)
            with running.engine:
                if environment:
                    told.processes = {p.pid: "launcher" if p.pid == running.engine.pid else p.name() for p in running.engine.processes()}
                    told.patched = {int(file.name): json.loads(file.read_text()) for file in (folder / "loaded").glob("[0-9]*")}
                told.namespaces[kind] = running.namespace(folder / "loaded")
                reader = reader or stack.enter_context(PageReader(told.namespaces[kind]))
                computed = cold(running, 10 * i + 5 * number) if kind != "sglang" else []
                if number == 1:
                    running.ask(prompts(kind)[0], 1)
                    assert reader.wait_for(hashes(kind)) == PAGES
                    if kind != "lmdeploy":
                        own_answers(told, running, own(kind))
                for writer in ENGINES[:i] if number == 1 else ENGINES[i:]:
                    told.answers[f"{writer}->{kind}"] = [running.ask_after_reset(prompt) for prompt in prompts(writer)]
                    told.cold[f"{writer}->{kind}"] = computed
                if number == 2 and kind != "lmdeploy":
                    running.ask(prompts(kind)[0], 1, "again")
                    assert reader.wait_for(hashes(kind, "again")) == PAGES
                if number == 1 and kind != "lmdeploy":
                    assert [reader.wait_for(hashes(owner, own(kind))) for owner in ENGINES] == [PAGES] * 3
        running = Running("lmdeploy", folder / "lmdeploy-own", tenant=OWN)
        with running.engine:
            own_answers(told, running, None)
            told.namespaces[OWN] = running.namespace(folder / "loaded")
        yield told


@pytest.fixture(scope="module")
def pages(story: Story, module_runtime_dir: Path) -> Iterator[Callable[..., list[np.ndarray]]]:
    """`pages(engine, owner, salt)`: the document's pages that the engine has computed (as "own", in another process)."""
    with PageReader(story.namespaces["vllm"]) as shared, PageReader(story.namespaces[OWN], {"tenant": OWN}) as lmdeploy:

        def read(kind: str, owner: str, salt: str | None = None) -> list[np.ndarray]:
            if (kind, salt) == ("lmdeploy", OWN):
                found = lmdeploy.read(hashes(owner))
            else:
                found = shared.read(hashes(owner, own(kind) if salt == OWN else salt))
            assert len(found) == PAGES
            return found

        yield read


def test_plugin_and_shims_are_loaded_in_every_sglang_process(story: Story) -> None:
    ours = {pid: name for pid, name in story.processes.items() if name == "launcher" or name.startswith("sglang::")}
    assert {"launcher", "sglang::scheduler", "sglang::detokenizer"} <= set(ours.values())
    for pid, name in ours.items():
        found = " ".join(story.patched[pid])
        assert "StorageBackendFactory._do_create_backend" in found, f"the plugin is not loaded in {name}"
        assert "MHATokenToKVPoolHost.load_to_device_per_layer" in found, f"the shims are not loaded in {name}"


def test_all_engines_derive_the_same_namespace(story: Story) -> None:
    assert len({story.namespaces[kind].digest() for kind in ENGINES}) == 1
    assert story.namespaces[OWN].digest() != story.namespaces["lmdeploy"].digest()


@pytest.mark.parametrize("pair", PAIRS)
def test_every_full_page_is_reused(story: Story, pair: str) -> None:
    answers = story.answers[pair]
    assert [a.cached for a in answers] == [SHARED] * len(prompts(""))
    if pair.endswith("->sglang"):
        assert [a.stored for a in answers] == [SHARED] * len(answers)


@pytest.mark.parametrize("kind", ENGINES)
def test_an_engine_answers_from_its_pages_as_from_its_own_cache(story: Story, kind: str) -> None:
    local, stored = story.own[f"{kind}->{kind}"], story.answers[f"{kind}->{kind}"]
    assert [a.cached for a in local] == [SHARED] * len(local)
    assert [a.output for a in stored] == [a.output for a in local]


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if len(set(pair.split("->"))) == 2])
def test_answers_part_only_where_rounding_decides(story: Story, pair: str) -> None:
    owner = pair.partition("->")[0]
    ours, theirs = story.own[pair], story.answers[pair]
    gaps = [gap_at_fork(prompt, a.output, b.output) for prompt, a, b in zip(prompts(owner), ours, theirs, strict=True)]
    assert max(gaps) < MAX_GAP


def test_most_answers_are_the_same(story: Story) -> None:
    same = [a.output == b.output for pair in PAIRS for a, b in zip(story.own[pair], story.answers[pair], strict=True)]
    assert sum(same) >= len(same) / 2


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if len(set(pair.split("->"))) == 2])
def test_pages_of_two_engines_differ_by_rounding_only(pages: Callable[..., list[np.ndarray]], pair: str) -> None:
    """The writer's pages of its document against those that the reader computes."""
    owner, other = pair.split("->")
    ours, theirs = pages(owner, owner), pages(other, owner, OWN)
    assert max(worst_error(a, b) for a, b in zip(ours, theirs, strict=True)) < MAX_ERROR
    assert max(worst_token_error(a, b) for a, b in zip(ours, theirs, strict=True)) < MAX_TOKEN_ERROR


@pytest.mark.parametrize(("kind", "salt"), [("sglang", "again"), ("vllm", "again"), ("lmdeploy", OWN)])
def test_pages_of_two_processes_of_an_engine_are_bit_identical(pages: Callable[..., list[np.ndarray]], kind: str, salt: str) -> None:
    first, second = pages(kind, kind), pages(kind, kind, salt)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


FAULTS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "tokens shifted by one": lambda page, before: np.copyto(page, np.roll(page, 1, axis=2)),
    "the page before": lambda page, before: np.copyto(page, before),
    "last token zeroed": lambda page, before: page[:, :, -1].fill(0),
    "heads rotated": lambda page, before: np.copyto(page, np.roll(page, 1, axis=3)),
}


@pytest.mark.parametrize(("kind", "fault"), list(product(("sglang", "lmdeploy"), FAULTS)))
def test_a_planted_fault_is_seen(pages: Callable[..., list[np.ndarray]], kind: str, fault: str) -> None:
    """In a page that this engine wrote, with a matching checksum, against vLLM's: what an engine that writes nonsense would look like."""
    found, reference = pages(kind, kind), pages("vllm", kind, OWN)
    bad = found[-1].copy()
    FAULTS[fault](bad, found[-2])
    assert worst_token_error(bad, reference[-1]) > MAX_TOKEN_ERROR
    assert worst_error(bad, reference[-1]) > MAX_ERROR


@pytest.mark.parametrize("kind", ["vllm", "lmdeploy"])
def test_foreign_pages_are_much_faster_than_computing(story: Story, kind: str) -> None:
    """SGLang's attention on a CPU computes the whole prompt anew, also for its own hits."""
    for writer in ENGINES:
        if writer != kind:
            computed = statistics.median(story.cold[f"{writer}->{kind}"])
            loaded = statistics.median(a.ttft_s for a in story.answers[f"{writer}->{kind}"])
            print(f"\n{kind}'s first token: computed {computed:.3f} s, from {writer}'s pages {loaded:.3f} s")
            assert loaded <= computed / 5


def worst_token_error(page: np.ndarray, reference: np.ndarray) -> float:
    """Largest relative error of one token's vectors, over layers and over K and V, of two bf16 pages."""
    ours, theirs = ((p.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for p in (page, reference))
    axes = (3, 4)
    return float((np.sqrt(((ours - theirs) ** 2).sum(axes)) / np.sqrt((theirs**2).sum(axes))).max())
