"""Run ruff and mypy over the checkout.

mypy follows no import hooks, so it cannot see the editable install, and the checkout has no folder called `mooncake_kv`: it is given a
temporary tree of links under that name, the same mapping as in setup.py.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent.parent


def main() -> int:
    python = [sys.executable, "-m"]
    failed = False
    for check in (["check", "."], ["format", "--check", "--diff", "--quiet", "."]):
        failed |= subprocess.run([*python, "ruff", *check], cwd=CHECKOUT).returncode != 0
    with tempfile.TemporaryDirectory(prefix="mkv-mypy-") as folder:
        package = Path(folder) / "mooncake_kv"
        package.mkdir()
        for marker in sorted(CHECKOUT.glob("*/__init__.py")):
            (package / marker.parent.name).symlink_to(marker.parent)
        step = [*python, "mypy", "--cache-dir", str(CHECKOUT / ".mypy_cache"), "--config-file", str(CHECKOUT / "pyproject.toml")]
        if subprocess.run([*step, "-p", "mooncake_kv"], cwd=folder).returncode:
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
