"""The demo as a user starts it. It judges itself: its exit code is 0 only if every answer from the cache is the engine's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from mooncake_kv.common.demo import QUESTIONS, DemoFailed, Report, engines, run
from mooncake_kv.common.demo import _show as show
from mooncake_kv.common.demo.server import Answer
from tests.conftest import processes_of, wait_for_end

TIMEOUT_S = 600


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_demo(runtime_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    command = [str(Path(sys.executable).with_name("mooncake-kv")), "demo", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, "TMPDIR": str(runtime_dir)})
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report.keys() == {"model", "prompt_tokens", "runs"}
    assert 2500 < report["prompt_tokens"] < 3500
    assert [entry["name"] for entry in report["runs"]] == ["cold", "reset", "new_engine", "ssd", "pool"]
    assert all(entry.keys() == {"name", "ttft_s", "tokens_reused", "tier", "text"} for entry in report["runs"])
    cold, *loaded = report["runs"]
    assert (cold["tokens_reused"], cold["tier"]) == (0, "none")
    assert [entry["tier"] for entry in loaded] == ["dram", "dram", "ssd", "pool"]
    for entry in loaded:
        assert entry["tokens_reused"] == report["prompt_tokens"] // 64 * 64
        assert entry["ttft_s"] < cold["ttft_s"] or entry["tier"] != "dram", "times are for the benchmarks, but memory is ten times as fast"
    assert len({entry["text"] for entry in loaded}) == 1
    assert "DRINK ME" in loaded[0]["text"]
    assert not list(runtime_dir.glob("mooncake-kv-demo-*"))
    assert not processes_of(runtime_dir), "its engines and its node are gone"


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S + 30)
def test_demo_of_three_engines(runtime_dir: Path, tmp_path: Path) -> None:
    file, names = tmp_path / "demo.json", ("sglang", "vllm", "lmdeploy")
    command = [str(Path(sys.executable).with_name("mooncake-kv")), "demo", "--json", str(file), "--engines", ",".join(names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, "TMPDIR": str(runtime_dir)})
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    pairs = {entry["name"]: entry for entry in report["runs"] if "->" in entry["name"]}
    assert list(pairs) == [f"{writer}->{reader}" for writer in names for reader in names]
    cold = report["runs"][0]
    for name, entry in pairs.items():
        assert (entry["tokens_reused"], entry["tier"]) == (report["prompt_tokens"] // 64 * 64, "dram")
        if not name.endswith("->lmdeploy"):
            assert 0 < entry["load_s"] < 1
        assert "DRINK ME" in entry["text"]
        if name.endswith("->vllm"):
            assert entry["ttft_s"] < cold["ttft_s"]
    assert "loaded in" in done.stdout and "computes the whole prompt anew" in " ".join(done.stdout.split())
    assert not list(runtime_dir.glob("mooncake-kv-demo-*"))
    assert not processes_of(runtime_dir), "its engines and its nodes are gone"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing(runtime_dir: Path, tmp_path: Path, sign: signal.Signals) -> None:
    command = [str(Path(sys.executable).with_name("mooncake-kv")), "demo"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": str(runtime_dir)},
            # A shell's background jobs ignore Ctrl-C, and so would this one if the tests are one.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            deadline = time.monotonic() + 120
            while not list(runtime_dir.glob("mooncake-kv-demo-*/mooncake-kv/demo/pool-master")):
                assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.05)
            process.send_signal(sign)
            assert process.wait(60) != 0
        finally:
            process.kill()
            process.wait(10)
    assert not list(runtime_dir.glob("mooncake-kv-demo-*"))
    assert not wait_for_end(processes_of(runtime_dir), 5)


def test_without_mooncake_the_row_says_why() -> None:
    answer = Answer(ttft_s=1.0, prompt_tokens=100, tokens_reused=64, sources={"dram": 64}, text="t")
    rows = {"reset": [answer] * 3, "new_engine": [answer] * 3}
    report = Report(model="m", local=[answer] * 3, answers=rows, left_out={"pool": "Mooncake is not installed"})
    assert report.correct and report.to_json()["left_out"] == {"pool": "Mooncake is not installed"}


def test_a_row_from_another_tier_than_it_says_is_a_mistake() -> None:
    local = Answer(ttft_s=1.0, prompt_tokens=100, tokens_reused=64, sources={"engine": 64}, text="t")
    for sources, text in (({"dram": 64}, "t"), ({"ssd": 32, "dram": 32}, "t"), ({}, "t"), ({"ssd": 64}, "u")):
        answer = Answer(ttft_s=1.0, prompt_tokens=100, tokens_reused=64, sources=sources, text=text)
        report = Report(model="m", local=[local] * 3, answers={"ssd": [answer] * 3})
        assert len(report.mistakes) == 3, sources


def test_a_pair_that_reuses_less_or_answers_otherwise_is_a_mistake() -> None:
    def answer(reused: int, text: str = "t", **sources: int) -> Answer:
        return Answer(ttft_s=1.0, prompt_tokens=129, tokens_reused=reused, sources=sources, text=text)

    own = {"a": [answer(128)] * 3, "b": [answer(128)] * 3}
    good, other_text = answer(128, dram=128), answer(128, "u", dram=128)
    assert Report(model="m", pairs={"a->b": [other_text] * 3, "a->a": [good] * 3}, own=own).correct, "engines differ by rounding"
    for pair, wrong in {"a->b": answer(64, dram=128), "b->a": answer(128, dram=64, engine=64), "b->b": other_text}.items():
        report = Report(model="m", pairs={pair: [good, wrong, good]}, own=own)
        assert len(report.mistakes) == 1 and report.mistakes[0].startswith(f"{pair}, {QUESTIONS[1]!r}")


def test_an_engine_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None if name == "sglang" else object())
    with pytest.raises(DemoFailed, match="sglang is not installed"):
        run("model", ["vllm", "sglang"])
    monkeypatch.setattr(engines, "find_spec", lambda name: object())
    monkeypatch.setattr(engines, "entry_points", lambda group: ())
    with pytest.raises(DemoFailed, match="sglang does not run on a CPU by itself"):
        run("model", ["sglang"])


def test_an_answer_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer(ttft_s=1.0, prompt_tokens=100, tokens_reused=64, sources={"dram": 64}, text="[/INST] [bold]eat me")
    show(Console(width=200), Report(model="[m]", local=[answer] * 3, answers={"cold": [answer], "reset": [answer] * 3}))
    shown = capsys.readouterr().out
    assert shown.count("[/INST] [bold]eat me") == 4 and "[m], a text" in shown


def test_a_result_that_cannot_be_written_is_found_out_first(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("mooncake-kv")), "demo", "--json", str(tmp_path / "none" / "x.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "none/x.json" in done.stderr


def test_a_model_that_is_not_there(runtime_dir: Path) -> None:
    command = [str(Path(sys.executable).with_name("mooncake-kv")), "demo", "--model", "/no/such/model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "TMPDIR": str(runtime_dir)})
    assert done.returncode == 1
    assert done.stderr.strip().count("\n") == 0 and "the engine did not start" in done.stderr
