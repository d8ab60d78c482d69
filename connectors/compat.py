"""Checks that an engine's private calls, on which a plugin relies, are what the plugin was written for.

Promises: importing this imports no engine; a check imports only the modules that it is asked about.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..common.errors import UnsupportedError

# "module:dotted.path" -> names of the parameters
Signatures = dict[str, tuple[str, ...]]


def own_version() -> str:
    try:
        return version("mooncake-kv")
    except PackageNotFoundError:
        return "unknown"


def require(signatures: Signatures, engine: str, tested: str, found_version: str) -> None:
    """Raises UnsupportedError with one sentence if this engine lacks one of the calls, or takes other parameters for it. `tested` is the
    version the plugin was written for, such as "0.32.x"."""
    for name, expected in signatures.items():
        found = parameters(name)
        if found != expected:
            call = name.partition(":")[2]
            differs = f"has no {call}" if found is None else f"declares {call}({', '.join(found)}) instead of ({', '.join(expected)})"
            raise UnsupportedError(
                f"mooncake-kv {own_version()} is written for {engine} {tested}; this is {engine} {found_version}, which {differs}: "
                f"install {engine} {tested} or a mooncake-kv made for this {engine}."
            )


def parameters(name: str) -> tuple[str, ...] | None:
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return tuple(inspect.signature(found).parameters)
