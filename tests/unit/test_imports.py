"""Imports point one way: plugins -> connectors -> common; the core knows no engine, and the node and the command line pay for no torch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
ENGINES = {"vllm", "sglang", "lmdeploy"}
HEAVY = {"torch", "transformers", "triton", "numba", "scipy", "pandas", "mooncake"}
ALLOWED = {
    "common": {"common"},
    "connectors": {"common", "connectors"},
    "vllm_plugin": {"common", "connectors", "vllm_plugin"},
    "sglang_plugin": {"common", "connectors", "sglang_plugin"},
    "lmdeploy_plugin": {"common", "connectors", "lmdeploy_plugin"},
}
FOLDERS = [folder for folder in ALLOWED if (CHECKOUT / folder / "__init__.py").exists()]


def imported(file: Path, folder: str) -> Iterator[tuple[str, bool]]:
    """(absolute module name, whether it is imported when the module is) of every import statement, also those inside functions."""
    package = ["mooncake_kv", *file.relative_to(CHECKOUT).with_suffix("").parts[:-1]]
    tree = ast.parse(file.read_text())
    lazy = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)}
    lazy |= {id(n) for i in ast.walk(tree) if isinstance(i, ast.If) and "TYPE_CHECKING" in ast.unparse(i.test) for n in ast.walk(i)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, id(node) not in lazy


@pytest.mark.parametrize("folder", FOLDERS)
def test_direction(folder: str) -> None:
    wrong = []
    for file in sorted((CHECKOUT / folder).rglob("*.py")):
        for name, at_import in imported(file, folder):
            top, _, rest = name.partition(".")
            where = f"{file.relative_to(CHECKOUT)} imports {name}"
            if top == "mooncake_kv" and rest.split(".")[0] not in ALLOWED[folder]:
                wrong.append(where)
            if top in ("tests", "benchmarks", "mooncake_kv_cpu_engines", *ALLOWED):
                wrong.append(where)
            if folder in ("common", "connectors") and top in ENGINES and "demo" not in file.parts:
                wrong.append(where)
            if folder in ("common", "connectors") and top in HEAVY and at_import:
                wrong.append(f"{where} at module level")
    assert not wrong, "\n".join(wrong)


def modules_after(code: str) -> set[str]:
    """Top-level modules loaded in a fresh interpreter after `code`."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_every_core_module_imports_without_engine_or_torch() -> None:
    modules = []
    for folder in ("common", "connectors"):
        for file in sorted((CHECKOUT / folder).rglob("*.py")):
            if file.name != "__main__.py":
                parts = file.relative_to(CHECKOUT).with_suffix("").parts
                modules.append(".".join(["mooncake_kv", *(parts[:-1] if parts[-1] == "__init__" else parts)]))
    assert "mooncake_kv.common.node.protocol" in modules
    loaded = modules_after("\n".join(f"import {m}" for m in modules))
    assert not loaded & (ENGINES | HEAVY)


@pytest.mark.parametrize("plugin", ["vllm_plugin", "sglang_plugin", "lmdeploy_plugin", "lmdeploy_plugin.autoload"])
def test_importing_a_plugin_imports_no_engine(plugin: str) -> None:
    loaded = modules_after(f"import mooncake_kv.{plugin}")
    assert not loaded & (ENGINES | HEAVY)


def test_command_line_starts_light() -> None:
    loaded = modules_after("import mooncake_kv.common.cli")
    assert not loaded & (ENGINES | HEAVY | {"aiohttp", "numpy", "uvloop", "rich.progress"})
