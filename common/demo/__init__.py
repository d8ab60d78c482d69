"""`mooncake-kv demo`: what one flag changes, shown on real engine processes through the API that users call.

One chapter of a book, three questions about it. Engine 1 answers without any cache, then from its own prefix cache (the oracle: a text
computed without a cache may differ from it by rounding), then with its own cache emptied. Engine 2, a fresh process, answers while the
node is still warm. Promises: `Report.correct` is True only if every answer from our cache equals the engine's own local hit and skipped
prefill; the demo uses a node of its own, and leaves no process behind, however it ends.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..errors import ConfigError
from ..node.paths import node_paths
from ..node.spawn import NodeUnavailable
from ..node.tool import NodeTool
from .server import NODE, Answer, DemoFailed, Server

__all__ = ["DemoFailed", "Report", "Run", "run"]

QUESTIONS = (
    "What was written on the paper label of the bottle?",
    "What did Alice find in the glass box?",
    "What was written on the cake?",
)
WARM_UP = "Count the words of this line. " + "The quick brown fox jumps over the lazy dog. " * 60
LABELS = {
    "cold": "without a cache",
    "reset": "engine's own cache emptied",
    "new_engine": "fresh engine process",
}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """`tier`: where the reused tokens' KV came from ("none", "engine", "dram", ...)."""

    name: str
    ttft_s: float
    tokens_reused: int
    tier: str
    text: str


class Report(msgspec.Struct, kw_only=True):
    """`answers[name]` has one answer per question ("cold": the first question only), `local` the oracle's."""

    model: str
    local: list[Answer]
    answers: dict[str, list[Answer]]

    @property
    def mistakes(self) -> list[str]:
        """What (b) or (c) got wrong, one sentence each."""
        found = []
        for name in ("reset", "new_engine"):
            for question, answer, local in zip(QUESTIONS, self.answers[name], self.local, strict=True):
                where = f"{LABELS[name]}, {question!r}"
                if answer.tier in ("none", "engine") or answer.tokens_reused < local.tokens_reused:
                    why = f" ({answer.not_loaded})" if answer.not_loaded else ""
                    found.append(f"{where}: {answer.tokens_reused:,} tokens reused of {local.tokens_reused:,} that were there{why}")
                elif answer.text != local.text:
                    found.append(f"{where}: {answer.text!r} is not what the engine's own prefix hit gives: {local.text!r}")
        return found

    @property
    def correct(self) -> bool:
        return not self.mistakes

    def to_json(self) -> dict[str, Any]:
        """The first question's runs."""
        runs = [
            Run(name=name, ttft_s=a[0].ttft_s, tokens_reused=a[0].tokens_reused, tier=a[0].tier, text=a[0].text)
            for name, a in self.answers.items()
        ]
        return {"model": self.model, "prompt_tokens": self.local[0].prompt_tokens, "runs": msgspec.to_builtins(runs)}


def run(model: str) -> Report:
    """Run the demo, show its progress and the table on the terminal. Raises DemoFailed with one sentence."""
    console = Console()
    chapter = files(__package__).joinpath("text.txt").read_text(encoding="utf-8")
    prompts = [f"Read this text.\n\n{chapter}\n\nQuestion: {question} Answer in a few words." for question in QUESTIONS]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with _own_node() as folder, Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=5)

        def step(what: str) -> None:
            progress.update(task, description=what)

        step("Starting an engine")
        with Server(model, folder / "engine-1.log") as engine:
            progress.advance(task)
            step("Asking without a cache")
            engine.ask(WARM_UP, max_tokens=4)
            cold = engine.ask(prompts[0])
            progress.advance(task)
            step("Asking again, with the engine's own cache")
            local = []
            for prompt in prompts:
                engine.ask(prompt)
                local.append(engine.ask(prompt))
            step("Asking with the engine's own cache emptied")
            reset = _ask_after_reset(engine, prompts)
            progress.advance(task)
        step("Starting a fresh engine")
        with Server(model, folder / "engine-2.log") as engine:
            progress.advance(task)
            step("Asking the fresh engine")
            engine.ask(WARM_UP, max_tokens=4)
            new_engine = _ask_after_reset(engine, prompts)
            progress.advance(task)
    report = Report(model=Path(model).name, local=local, answers={"cold": [cold], "reset": reset, "new_engine": new_engine})
    _show(console, report)
    if report.correct:
        shutil.rmtree(folder)
    else:
        console.print(f"The engines' and the node's logs are in {folder}.", highlight=False)
    return report


def _ask_after_reset(engine: Server, prompts: list[str]) -> list[Answer]:
    answers = []
    for prompt in prompts:
        engine.reset()
        answers.append(engine.ask(prompt))
    return answers


def _show(console: Console, report: Report) -> None:
    title = f"{report.model}, a text of {report.local[0].prompt_tokens:,} tokens and {len(QUESTIONS)} questions about it"
    table = Table("", "first token", "reused", "from", "answer", title=title, title_justify="left")
    for number, question in enumerate(QUESTIONS):
        table.add_row("", "", "", "", question, style="bold")
        for name, answers in report.answers.items():
            if number < len(answers):
                answer = answers[number]
                took, reused = f"{answer.ttft_s:.3f} s", f"{answer.tokens_reused:,}"
                table.add_row(LABELS[name], took, reused, answer.tier, " ".join(answer.text.split()))
        table.add_section()
    console.print(table)
    for mistake in report.mistakes:
        console.print(f"WRONG: {mistake}", style="bold red", markup=False)
    if report.correct:
        cold, reset, fresh = (report.answers[name][0].ttft_s for name in LABELS)
        console.print(
            f"First token: {cold / reset:.1f} times sooner after the reset, {cold / fresh:.1f} times sooner in the fresh engine; "
            "every answer is the one that the engine gives from its own cache.",
            highlight=False,
        )


@contextmanager
def _own_node() -> Iterator[Path]:
    """A private folder, for logs and for the node, which is gone afterwards; also where engines find it (see server.environment)."""
    folder = Path(tempfile.mkdtemp(prefix="mooncake-kv-demo-"))
    try:
        yield folder
    finally:
        try:
            node = node_paths(NODE, environ={"XDG_RUNTIME_DIR": str(folder)})
            with NodeTool(node, version=version("mooncake-kv"), timeout_s=10) as tool:
                tool.stop()
        except (NodeUnavailable, ConfigError):
            pass  # it never started
