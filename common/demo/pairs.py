"""The demo's rows WRITER->READER: a text that one engine has read is not read again by another.

In the first pass each engine reads a text of its own (the chapter, headed by the engine's name, so that nobody's pages are another's) and
answers from the texts of those before it; in the second, in fresh processes, from its own and those after it. All use one node.

Promises: a row is right only if its reader reused every full page and all of them came from the node's memory; where writer and reader are
the same engine, also only if the answer is the one that the writer gave from its own cache. Two engines compute with other rounding, so the
answer on another's pages may part from the own one; such answers are shown and not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from .engines import PAGE_TOKENS, Engine
from .nodes import DemoNode
from .server import Answer, Server

Start = Callable[[Engine, str], AbstractContextManager[Server]]
WARM_UP = "Count the words of this line. " + "The quick brown fox jumps over the lazy dog. " * 60


def row_name(writer: str, reader: str) -> str:
    return f"{writer}->{reader}"


def steps(engines: int) -> int:
    """How many times `say` is called."""
    return 2 * engines + engines + engines**2


def run_pairs(
    engines: Sequence[Engine], node: DemoNode, start: Start, say: Callable[[str], None], prompts: Callable[[str], Sequence[str]]
) -> tuple[dict[str, list[Answer]], dict[str, list[Answer]]]:
    """Rows by name, and by engine the answers that it gave from its own cache. `start(engine, label)` starts a process, `prompts(engine)`
    are the questions about the engine's text."""
    rows: dict[str, list[Answer]] = {}
    own: dict[str, list[Answer]] = {}
    for number in (1, 2):
        for i, engine in enumerate(engines):
            say(f"Starting {engine.name}")
            with start(engine, f"{engine.name}-{number}") as server:
                server.ask(WARM_UP, max_tokens=4)
                if number == 1:
                    say(f"{engine.name} reads")
                    own[engine.name] = _read(server, node, prompts(engine.name))
                for writer in engines[:i] if number == 1 else engines[i:]:
                    say(f"{engine.name} answers from the pages of {writer.name}")
                    rows[row_name(writer.name, engine.name)] = [_ask_after_reset(server, prompt) for prompt in prompts(writer.name)]
    order = [row_name(a.name, b.name) for a in engines for b in engines]
    return {name: rows[name] for name in order}, own


def _read(server: Server, node: DemoNode, prompts: Sequence[str]) -> list[Answer]:
    """Ask each question twice, and wait until its pages are stored."""
    before, answers = node.pages(), []
    for prompt in prompts:
        server.ask(prompt)
        answers.append(server.ask(prompt))
    node.wait_stored(before + full_pages(answers[0]))
    return answers


def _ask_after_reset(server: Server, prompt: str) -> Answer:
    server.reset()
    return server.ask(prompt)


def full_pages(answer: Answer) -> int:
    """Pages of the prompt that can be reused: its last token is always computed."""
    return (answer.prompt_tokens - 1) // PAGE_TOKENS


def mistakes(rows: dict[str, list[Answer]], own: dict[str, list[Answer]], questions: Sequence[str]) -> list[str]:
    """What the rows got wrong, one sentence each."""
    found = []
    for name, answers in rows.items():
        writer, _, reader = name.partition("->")
        for question, answer, right in zip(questions, answers, own[writer], strict=True):
            wanted, came = full_pages(answer) * PAGE_TOKENS, answer.sources.get("dram", 0)
            if min(answer.tokens_reused, came) < wanted:
                why = f" ({answer.not_loaded})" if answer.not_loaded else ""
                found.append(f"{name}, {question!r}: {answer.tokens_reused:,} of {wanted:,} tokens reused, {came:,} from the node{why}")
            elif writer == reader and answer.text != right.text:
                found.append(f"{name}, {question!r}: {answer.text!r} is not what the engine's own prefix hit gives: {right.text!r}")
    return found
