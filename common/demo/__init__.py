"""`mooncake-kv demo`: what one flag changes, shown on real engine processes through the API that users call.

One chapter of a book, three questions about it. Engine 1 answers without any cache, then from its own prefix cache (the oracle: a text
computed without a cache may differ from it by rounding), then with its own cache emptied. Engine 2, a fresh process, answers while the
node is still warm, then from disk, its node having been replaced by an empty one before each question. Engine 3 answers from Mooncake's
pool, through a node of another name, without disk, as empty before each question; the pages and the master are the first node's. With other
engines than vLLM, the rows of `pairs` follow.

Promises: `Report.correct` is True only if every answer of vLLM's from our cache equals its own local hit, skipped prefill, and came from
where its row says (for the rows of several engines see `pairs`). The demo uses nodes and folders of its own, leaves no process behind,
however it ends, and no folder but, after a failure, that with the logs. Where Mooncake cannot be used here, the row `pool` is left out and
`Report.left_out` says why.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from . import pairs
from .engines import ENGINES, PAGE_TOKENS, Engine
from .nodes import DISK_BYTES, POOL_BYTES, DemoNode, end_nodes
from .pairs import WARM_UP
from .server import Answer, DemoFailed, Server

__all__ = ["ENGINES", "DemoFailed", "Report", "Run", "run"]

QUESTIONS = (
    "What was written on the paper label of the bottle?",
    "What did Alice find in the glass box?",
    "What was written on the cake?",
)
LABELS = {
    "cold": "without a cache",
    "reset": "engine's own cache emptied",
    "new_engine": "fresh engine process",
    "ssd": "memory empty, from disk",
    "pool": "another node, from the pool",
}
# Where the answers of a row have to come from.
TIERS = {"reset": "dram", "new_engine": "dram", "ssd": "ssd", "pool": "pool"}
VLLM = "vllm"
# Its starts and rows.
VLLM_STEPS = 9


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`tier`: where the reused tokens' KV came from ("none", "engine", "dram", "ssd", "pool"). `load_s`: in rows of two engines, how long
    the reader took to load it, if it tells."""

    name: str
    ttft_s: float
    tokens_reused: int
    tier: str
    text: str
    load_s: float | None = None


class Report(msgspec.Struct, kw_only=True):
    """`answers[name]` has one answer per question ("cold": the first question only), `local` the oracle's; both are empty without vLLM.
    `pairs` and `own` are what run_pairs gave. `left_out`: why a row is missing, one sentence each."""

    model: str
    local: list[Answer] = []
    answers: dict[str, list[Answer]] = {}
    pairs: dict[str, list[Answer]] = {}
    own: dict[str, list[Answer]] = {}
    left_out: dict[str, str] = {}

    @property
    def rows(self) -> dict[str, list[Answer]]:
        return self.answers | self.pairs

    @property
    def prompt_tokens(self) -> int:
        return next(answers[0].prompt_tokens for answers in self.rows.values())

    @property
    def mistakes(self) -> list[str]:
        """What the answers from our cache got wrong, one sentence each."""
        found = []
        for name in self.answers.keys() & TIERS.keys():
            for question, answer, local in zip(QUESTIONS, self.answers[name], self.local, strict=True):
                where = f"{LABELS[name]}, {question!r}"
                came = answer.sources.get(TIERS[name], 0)
                if min(answer.tokens_reused, came) < local.tokens_reused:
                    why = f" ({answer.not_loaded})" if answer.not_loaded else ""
                    others = ", ".join(f"{tokens:,} from {source}" for source, tokens in answer.sources.items() if source != TIERS[name])
                    came_from = f"{came:,} tokens reused from {TIERS[name]}" + (f", {others}," if others else "")
                    found.append(f"{where}: {came_from} of {local.tokens_reused:,} that were there{why}")
                elif answer.text != local.text:
                    found.append(f"{where}: {answer.text!r} is not what the engine's own prefix hit gives: {local.text!r}")
        return sorted(found) + pairs.mistakes(self.pairs, self.own, QUESTIONS)

    @property
    def correct(self) -> bool:
        return not self.mistakes

    def to_json(self) -> dict[str, Any]:
        """The first question's runs."""
        runs = [
            Run(
                name=name,
                ttft_s=a.ttft_s,
                tokens_reused=a.tokens_reused,
                tier=a.tier,
                text=a.text,
                load_s=a.load_s or None if name in self.pairs else None,
            )
            for name, (a, *_) in self.rows.items()
        ]
        report = {"model": self.model, "prompt_tokens": self.prompt_tokens, "runs": msgspec.to_builtins(runs)}
        return report | ({"left_out": self.left_out} if self.left_out else {})


def run(model: str, engines: Sequence[str] = (VLLM,)) -> Report:
    """Run the demo, show its progress and the table on the terminal. With engines beside vLLM (keys of ENGINES) there is also a row for
    each pair of them. Raises DemoFailed with one sentence."""
    chosen = [ENGINES[name] for name in engines]
    for engine in chosen:
        if why := engine.missing():
            raise DemoFailed(why)
    console = Console()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with _own_folder() as folder:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            report = _Demo(model, folder.path, progress, chosen).run()
        folder.keep_logs = not report.correct
    _show(console, report)
    if folder.keep_logs:
        console.print(f"The engines' and the nodes' logs are in {folder.path}.", highlight=False, markup=False)
    return report


class _Demo:
    def __init__(self, model: str, folder: Path, progress: Progress, engines: Sequence[Engine]) -> None:
        self._model, self._folder, self._progress, self._engines = model, folder, progress, engines
        self._with_vllm, self._paired = any(engine.name == VLLM for engine in engines), [e.name for e in engines] != [VLLM]
        steps = VLLM_STEPS * self._with_vllm + pairs.steps(len(engines)) * self._paired
        self._task, self._begun = progress.add_task("", total=steps), 0
        self._chapter = files(__package__).joinpath("text.txt").read_text(encoding="utf-8")
        self._prompts = self._questions("Read this text.")

    def _questions(self, head: str) -> list[str]:
        return [f"{head}\n\n{self._chapter}\n\nQuestion: {question} Answer in a few words." for question in QUESTIONS]

    def run(self) -> Report:
        report = self._vllm() if self._with_vllm else Report(model=Path(self._model).name)
        if self._paired:
            node = DemoNode("pairs", self._folder, {})
            report.pairs, report.own = pairs.run_pairs(
                self._engines,
                node,
                lambda engine, name: Server(engine, self._model, self._folder / f"{name}.log", node.settings, node.hits),
                self._step,
                lambda name: self._questions(f"Read this text, which {name} knows."),
            )
        return report

    def _vllm(self) -> Report:
        pool = {"master_server_address": "embedded", "global_segment_size": POOL_BYTES}
        node = DemoNode("demo", self._folder, {"ssd_path": str(self._folder / "ssd"), "ssd_size": DISK_BYTES, **pool})
        answers, left_out = {}, {}
        with self._engine(1, node) as engine:
            self._step("Asking without a cache")
            engine.ask(WARM_UP, max_tokens=4)
            answers["cold"] = [engine.ask(self._prompts[0])]
            self._step("Asking again, with the engine's own cache")
            local = []
            for prompt in self._prompts:
                engine.ask(prompt)
                local.append(engine.ask(prompt))
            self._step("Asking with the engine's own cache emptied")
            answers["reset"] = self._ask(engine)
        pages = local[0].tokens_reused // PAGE_TOKENS
        with self._engine(2, node) as engine:
            self._step("Asking the fresh engine")
            engine.ask(WARM_UP, max_tokens=4)
            answers["new_engine"] = self._ask(engine)
            self._wait_written(node, "ssd", pages)
            self._step("Asking with an empty node, its pages on disk")
            answers["ssd"] = self._ask(engine, node.restart)
            if why := node.tier("pool"):
                left_out["pool"] = why
            else:
                # The pool's pages were in the memory of the nodes that have ended; used again, they are written again.
                self._ask(engine)
                self._wait_written(node, "pool", pages)
        if not left_out:
            other = DemoNode("other", self._folder, {"master_server_address": node.master(), "global_segment_size": 0})
            with self._engine(3, other) as engine:
                self._step("Asking through another node, the pages in the pool")
                engine.ask(WARM_UP, max_tokens=4)

                def empty() -> None:
                    other.restart()
                    if why := other.tier("pool"):
                        raise DemoFailed(f"the second node does not reach the pool: {why}")

                answers["pool"] = self._ask(engine, empty)
        return Report(model=Path(self._model).name, local=local, answers=answers, left_out=left_out)

    def _ask(self, engine: Server, before: Callable[[], object] | None = None) -> list[Answer]:
        """All questions, with the engine's own cache emptied before each. After `before`, which replaces the node, there is a warm-up, as
        in every engine."""
        answers = []
        for prompt in self._prompts:
            if before is not None:
                before()
                engine.ask(WARM_UP, max_tokens=4)
            engine.reset()
            answers.append(engine.ask(prompt))
        return answers

    def _engine(self, number: int, node: DemoNode) -> Server:
        self._step(f"Starting engine {number}")
        return Server(ENGINES[VLLM], self._model, self._folder / f"engine-{number}.log", node.settings, node.hits)

    def _step(self, what: str) -> None:
        self._progress.update(self._task, description=what, completed=self._begun)
        self._begun += 1

    def _wait_written(self, node: DemoNode, tier: str, pages: int) -> None:
        waiting = self._progress.add_task(f"Pages written to {tier}", total=pages)
        node.wait_written(tier, pages, lambda written: self._progress.update(waiting, completed=written))
        self._progress.remove_task(waiting)


def _show(console: Console, report: Report) -> None:
    title = f"{report.model}, a text of {report.prompt_tokens:,} tokens and {len(QUESTIONS)} questions about it"
    table = Table("", "first token", "reused", "from", Column("answer", overflow="fold"), title=Text(title), title_justify="left")
    for number, question in enumerate(QUESTIONS):
        table.add_row("", "", "", "", question, style="bold")
        for name, answers in report.rows.items():
            if number < len(answers):
                answer = answers[number]
                reused, text = f"{answer.tokens_reused:,}", " ".join(answer.text.split())
                # What a model says is no markup.
                table.add_row(LABELS.get(name, name), _first_token(name, answer), reused, answer.tier, Text(text))
        table.add_section()
    console.print(table)
    for name, why in report.left_out.items():
        console.print(f"No row {LABELS[name]!r}: {why}", highlight=False, markup=False)
    for mistake in report.mistakes:
        console.print(f"WRONG: {mistake}", style="bold red", markup=False)
    if report.correct:
        _show_success(console, report)


def _first_token(name: str, answer: Answer) -> str:
    """Or how long the load took, where the engine computes hits anew."""
    reader = ENGINES.get(name.partition("->")[2])
    return f"loaded in {answer.load_s:.3f} s" if reader is not None and not reader.ttft_tells else f"{answer.ttft_s:.3f} s"


def _show_success(console: Console, report: Report) -> None:
    said = []
    if report.answers:
        cold = report.answers["cold"][0].ttft_s
        sooner = [f"{cold / report.answers[name][0].ttft_s:.1f} times ({LABELS[name]})" for name in TIERS if name in report.answers]
        said.append(f"First token sooner: {', '.join(sooner)}. Every answer is the one that the engine gives from its own cache.")
    if report.pairs:
        said.append("WRITER->READER: every reader reused all full pages of what the writer had read.")
    for name in sorted({name.partition("->")[2] for name in report.pairs}):
        if not ENGINES[name].ttft_tells:
            said.append(
                f"{name} on a CPU computes the whole prompt anew for every hit, also one of its own; so its rows say how long loading took."
            )
    for text in said:
        console.print(text, highlight=False)


@dataclass
class _Folder:
    path: Path
    keep_logs: bool = False


@contextmanager
def _own_folder() -> Iterator[_Folder]:
    """A private folder, for logs and for all that the nodes have; also where engines find nodes (see server.environment). The nodes are
    gone afterwards, and so is the folder, but for the logs after a failure."""
    folder = _Folder(Path(tempfile.mkdtemp(prefix="mooncake-kv-demo-")))
    try:
        yield folder
    except DemoFailed:
        folder.keep_logs = True
        raise
    finally:
        end_nodes(folder.path)
        shutil.rmtree(folder.path / "ssd" if folder.keep_logs else folder.path, ignore_errors=True)
