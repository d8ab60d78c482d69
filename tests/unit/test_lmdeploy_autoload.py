"""The entry point that PyTorch calls at every `import torch`: light, harmless, and in effect before LMDeploy's modules are used.

LMDeploy is a stand-in with its module names and calls; tests/engines/test_lmdeploy_processes.py asks the real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from mooncake_kv.lmdeploy_plugin import autoload

OURS = {"mooncake_kv", "mooncake_kv.lmdeploy_plugin", "mooncake_kv.lmdeploy_plugin.autoload"}
# A connector and a backend by their names of old; one of ours that cannot be imported.
STAND_IN = {
    "__init__.py": "",
    "version.py": "__version__ = '0.18.0'",
    "pytorch/__init__.py": "",
    "pytorch/kv_connector/__init__.py": "from .factory import build_kv_connector, prepare_kv_connector_config",
    "pytorch/kv_connector/factory.py": """
def prepare_kv_connector_config(cache_config, *, model_path=None, dist_config=None, distributed_executor_backend=None):
    return "in-tree"

def build_kv_connector(role, cache_config, *, global_rank=0, tp_rank=0, tp_size=1, kv_head_replica_num=1):
    return "in-tree"
""",
    "pytorch/disagg/__init__.py": "",
    "pytorch/disagg/backend/__init__.py": "from . import mooncake",
    "pytorch/disagg/backend/backend.py": """
class Registry:
    def __init__(self):
        self.module_dict = {}

    def register_module(self, name, module, force=False):
        if name in self.module_dict and not force:
            raise KeyError(name)
        self.module_dict[name] = module

MIGRATION_BACKENDS = Registry()
""",
    "pytorch/disagg/backend/mooncake.py": """
from .backend import MIGRATION_BACKENDS
MIGRATION_BACKENDS.register_module("Mooncake", module=lambda: "in-tree")
""",
}
CONFIGS = """
from types import SimpleNamespace
ours, other, none = (SimpleNamespace(kv_transfer_config=t and SimpleNamespace(kv_connector=t)) for t in ("mooncake", "Other", None))
"""
FACTORY = "lmdeploy.pytorch.kv_connector.factory"


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    for name, text in STAND_IN.items():
        file = tmp_path / "lmdeploy" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def run(script: str, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables, **({"PYTHONPATH": str(path)} if path else {})}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)


def output(script: str, path: Path | None = None, **variables: str) -> str:
    done = run(script, path, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded_by(code: str, **variables: str) -> set[str]:
    return set(json.loads(output(f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))", **variables).splitlines()[-1]))


def test_import_torch_imports_only_the_entry_point() -> None:
    with_it, without = loaded_by("import torch"), loaded_by("import torch", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    more = {name for name in with_it - without if not name.startswith(("mooncake_kv_cpu_engines", "__editable__"))}
    assert more >= OURS
    assert {name for name in more if name.startswith("mooncake_kv.")} == OURS - {"mooncake_kv"}
    # What reading entry points takes, which PyTorch does whether there are any or not.
    reading = loaded_by("import torch; from importlib.metadata import entry_points; entry_points(group='torch.backends')")
    assert more - OURS <= reading
    assert "lmdeploy" not in with_it


def test_the_entry_point_imports_nothing() -> None:
    before = loaded_by("import logging, importlib, typing, mooncake_kv")
    after = loaded_by("import logging, importlib; import mooncake_kv.lmdeploy_plugin.autoload as a; a.load(); a.load()")
    assert after - before == OURS - {"mooncake_kv"}


def test_pytorch_finds_it() -> None:
    (found,) = [e for e in entry_points(group="torch.backends") if e.name == "mooncake_kv"]
    assert found.load() is autoload.load


def test_in_effect_by_import_torch_alone(stand_in: Path) -> None:
    script = "import torch\nfrom lmdeploy.pytorch.kv_connector import build_kv_connector as b; print(b.__globals__['__name__'])"
    assert output(script, stand_in) == "mooncake_kv.lmdeploy_plugin.registration"
    assert output(script, stand_in, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == FACTORY


@pytest.mark.parametrize("first", ["", "import lmdeploy.pytorch.kv_connector, lmdeploy.pytorch.disagg.backend"])
def test_our_names_lead_to_us_and_others_do_not(stand_in: Path, first: str) -> None:
    """Before LMDeploy's modules are imported, and, should somebody have been faster, after."""
    (stand_in / "fake.py").write_text(
        "import sys\nfrom types import ModuleType\nfor name in ('facts', 'connector', 'migration'):\n"
        "    m = sys.modules[f'mooncake_kv.lmdeploy_plugin.{name}'] = ModuleType(name)\n"
        "    m.prepare = m.MooncakeConnector = m.MooncakeMigrationBackend = lambda *a, n=name, **k: (n, *a[1:], k)\n"
    )
    script = f"""
{CONFIGS}
{first}
import mooncake_kv.lmdeploy_plugin.autoload as a; a.load()
import lmdeploy.pytorch.kv_connector as kv, lmdeploy.pytorch.disagg.backend.backend as backend
import mooncake_kv.lmdeploy_plugin.compat as compat
assert "mooncake_kv.lmdeploy_plugin.connector" not in __import__("sys").modules
for config in (other, none):
    assert kv.prepare_kv_connector_config(config, model_path="m") == kv.build_kv_connector(0, config, tp_size=2) == "in-tree"
for name in [name for name in vars(compat) if name.startswith("MIGRATION")]:
    setattr(compat, name, {{}})  # the stand-in has none of that
import fake
assert kv.prepare_kv_connector_config(ours, model_path="m") == ("facts", {{"model_path": "m"}})
assert kv.build_kv_connector(0, ours, tp_size=2) == ("connector", ours, {{"tp_size": 2}})
assert backend.MIGRATION_BACKENDS.module_dict["Mooncake"]() == ("migration", {{}})
assert kv.factory.build_kv_connector is kv.build_kv_connector
"""
    output(script, stand_in, MOONCAKE_KV_STRICT="1")


def test_the_migration_backend_can_be_left_to_lmdeploy(stand_in: Path) -> None:
    script = "import torch, lmdeploy.pytorch.disagg.backend.backend as b; print(b.MIGRATION_BACKENDS.module_dict['Mooncake']())"
    assert output(script, stand_in, MOONCAKE_KV_MIGRATION="0") == "in-tree"


def test_an_lmdeploy_of_other_calls_is_refused_by_name_when_it_is_asked_for_us(stand_in: Path) -> None:
    file = stand_in / "lmdeploy/pytorch/kv_connector/factory.py"
    file.write_text(file.read_text().replace("tp_size=1", "shards=1"))
    (stand_in / "lmdeploy/version.py").write_text("__version__ = '0.19.1'")
    script = f"{CONFIGS}\nimport torch; from lmdeploy.pytorch.kv_connector import *; print(build_kv_connector(0, CONFIG))"
    assert output(script.replace("CONFIG)", "other)"), stand_in) == "in-tree"
    refused = run(script.replace("CONFIG)", "ours)"), stand_in)
    assert "written for LMDeploy 0.18.0; this is LMDeploy 0.19.1, which declares build_kv_connector(role" in refused.stderr.splitlines()[-1]


def test_an_lmdeploy_without_those_calls_runs_and_says_so_once(stand_in: Path) -> None:
    (stand_in / "lmdeploy/pytorch/kv_connector/factory.py").write_text("")
    (stand_in / "lmdeploy/pytorch/kv_connector/__init__.py").write_text("")
    done = run("import torch, lmdeploy.pytorch.kv_connector.factory as f; print(f.__name__)", stand_in)
    assert (done.returncode, done.stdout.strip()) == (0, FACTORY)
    assert done.stderr.count("mooncake-kv:") == 1 and done.stderr.strip().count("\n") == 0
    assert FACTORY in done.stderr and "prepare_kv_connector_config" in done.stderr


PLANTED = {
    "load": "import mooncake_kv.lmdeploy_plugin.autoload as a; a.on_import = None; a.HOOKS = a.HOOKS[:1]",
    "hook": "import mooncake_kv.lmdeploy_plugin.autoload as a; a.HOOKS = (('lmdeploy.pytorch.kv_connector.factory', 'nothing:here'),)",
    "finder": "import mooncake_kv.lmdeploy_plugin.autoload as a; a._Finder._watch = lambda s: 1 / 0",
}


@pytest.mark.parametrize("planted", list(PLANTED))
def test_it_never_breaks_torch_or_lmdeploy(stand_in: Path, planted: str) -> None:
    script = f"{PLANTED[planted]}\nimport torch\nprint(torch.ones(2).sum().item())\nimport lmdeploy.pytorch.kv_connector; print('imported')"
    done = run(script, stand_in)
    assert done.returncode == 0 and done.stdout.split() == ["2.0", "imported"], done.stderr
    assert done.stderr.count("mooncake-kv:") == 1 and done.stderr.strip().count("\n") == 0
    strict = run(script, stand_in, MOONCAKE_KV_STRICT="1")
    assert strict.returncode == 1


def test_an_error_of_lmdeploy_is_its_own(stand_in: Path) -> None:
    (stand_in / "lmdeploy/pytorch/kv_connector/factory.py").write_text("raise ValueError('its own')")
    done = run("import torch, lmdeploy.pytorch.kv_connector", stand_in, MOONCAKE_KV_STRICT="1")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "ValueError: its own"


def test_a_reload_is_met_too_and_loaders_are_left_as_they_were(stand_in: Path) -> None:
    script = f"""
import importlib, mooncake_kv.lmdeploy_plugin.autoload as a; a.load()
import {FACTORY} as f
assert f.build_kv_connector.__wrapped__ and not hasattr(f.build_kv_connector.__wrapped__, "__wrapped__")
assert "exec_module" not in vars(f.__loader__) and f.__spec__.loader is f.__loader__
importlib.reload(f)
assert f.build_kv_connector.__wrapped__ and not hasattr(f.build_kv_connector.__wrapped__, "__wrapped__")
assert importlib.util.find_spec("lmdeploy.nothing") is None
"""
    output(script, stand_in, MOONCAKE_KV_STRICT="1")
