"""The plugin is in effect in every process of LMDeploy, before the modules that it changes are used; and so are the tests' shims."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.engines.harness import engine_environment
from tests.engines.lmdeploy_harness import ENVIRONMENT, LOADED, LMDeployEngine, LMDeployServer
from tests.engines.test_vllm_hits import random_ids
from tests.models import SMOLLM2, TINY_LLAMA, generated_llama

pytestmark = pytest.mark.timeout(400)

IN_EFFECT = {
    "connector": "mooncake_kv.lmdeploy_plugin.registration",
    "migration": "mooncake_kv.lmdeploy_plugin.registration",
    "shims": "mooncake_kv_cpu_engines.lmdeploy",
}
LOOK = """
import sys
from lmdeploy.pytorch.disagg.backend.backend import MIGRATION_BACKENDS
from lmdeploy.pytorch.kv_connector import build_kv_connector, prepare_kv_connector_config
for function in (build_kv_connector, prepare_kv_connector_config, MIGRATION_BACKENDS.module_dict["Mooncake"]):
    print(function.__globals__["__name__"])
"""


def records(folder: Path) -> dict[int, dict[str, str]]:
    return {int(file.name): json.loads(file.read_text()) for file in folder.glob("[0-9]*")}


def test_in_a_plain_process_without_any_shim() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOONCAKE_KV_TEST_CUDA")}
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.split() == ["mooncake_kv.lmdeploy_plugin.registration"] * 3, done.stderr


@pytest.mark.parametrize("module", ["lmdeploy.pytorch.disagg.backend.mooncake", "lmdeploy.pytorch.kv_connector.factory"])
def test_whatever_is_imported_first(module: str) -> None:
    """LMDeploy imports torch before it imports any module that we change."""
    done = subprocess.run([sys.executable, "-c", f"import {module}\n{LOOK}"], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["mooncake_kv.lmdeploy_plugin.registration"] * 3, done.stderr


def test_in_a_spawned_process(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(f"def look():\n    exec({LOOK!r})\n")
    script = "import multiprocessing, child\nif __name__ == '__main__':\n"
    script += "    p = multiprocessing.get_context('spawn').Process(target=child.look); p.start(); p.join()\n"
    (tmp_path / "main.py").write_text(script)
    done = subprocess.run([sys.executable, str(tmp_path / "main.py")], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["mooncake_kv.lmdeploy_plugin.registration"] * 3, done.stderr


def test_on_the_command_line_and_in_the_engines_process(tmp_path: Path) -> None:
    with LMDeployServer(SMOLLM2, tmp_path / "log", environment={LOADED: str(tmp_path)}) as server:
        body = {"model": "m", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        assert "Paris" in server.post("/v1/completions", body)["choices"][0]["text"]
        found = records(tmp_path)
        names = {p.pid: p.name() for p in server.processes()}
        assert "ZMQMPEngine" in names.values()
        assert all(found[pid] == IN_EFFECT for pid, name in names.items() if name == "ZMQMPEngine")


def test_in_rays_actors(tmp_path: Path) -> None:
    with LMDeployEngine(generated_llama(TINY_LLAMA), tmp_path / "log", environment={LOADED: str(tmp_path)}, tp=2) as engine:
        answer = engine.generate(random_ids(300, 5), 4, sampling={"ignore_eos": True})
        assert len(answer.output) == 4
        found = records(tmp_path)
        actors = [pid for pid in found if "RayWorkerWrapper" in " ".join(psutil.Process(pid).cmdline())]
        assert len(actors) == 2 and found.keys() == {engine.pid, *actors}
        assert all(record == IN_EFFECT for record in found.values())


def test_the_command_is_refused_by_lmdeploy_where_autoload_is_off() -> None:
    """What a user sees with TORCH_DEVICE_BACKEND_AUTOLOAD=0."""
    script = (
        "import torch; from types import SimpleNamespace as N; from lmdeploy.messages import KVTransferConfig as C\n"
        "from lmdeploy.pytorch.kv_connector import build_kv_connector as b; b(None, N(kv_transfer_config=C('mooncake', 'kv_both')))"
    )
    environment = {**engine_environment(ENVIRONMENT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stderr.splitlines()[-1] == "ValueError: Unsupported KV connector: 'mooncake'"
