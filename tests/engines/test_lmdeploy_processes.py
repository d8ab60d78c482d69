"""The plugin is in effect in every process that imports LMDeploy, before the modules that it changes are used. (For its command line, its
servers' engines and Ray's actors see test_pd_store and test_lmdeploy_tp.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.harness import engine_environment
from tests.engines.lmdeploy_harness import ENVIRONMENT

LOOK = """
import sys
from lmdeploy.pytorch.disagg.backend.backend import MIGRATION_BACKENDS
from lmdeploy.pytorch.kv_connector import build_kv_connector, prepare_kv_connector_config
for function in (build_kv_connector, prepare_kv_connector_config, MIGRATION_BACKENDS.module_dict["Mooncake"]):
    print(function.__globals__["__name__"])
"""


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


def test_the_command_is_refused_by_lmdeploy_where_autoload_is_off() -> None:
    """What a user sees with TORCH_DEVICE_BACKEND_AUTOLOAD=0."""
    script = (
        "import torch; from types import SimpleNamespace as N; from lmdeploy.messages import KVTransferConfig as C\n"
        "from lmdeploy.pytorch.kv_connector import build_kv_connector as b; b(None, N(kv_transfer_config=C('mooncake', 'kv_both')))"
    )
    environment = {**engine_environment(ENVIRONMENT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stderr.splitlines()[-1] == "ValueError: Unsupported KV connector: 'mooncake'"
