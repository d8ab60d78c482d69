"""Which Mooncake is installed, and how this process loads it.

Promises: exactly one wheel is accepted, because all flavours install the same module and overwrite one another's files; a missing system
library is named together with the Debian package that has it. `load` sets Mooncake's variables before its first import, never one that
the operator has set.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from contextlib import suppress
from importlib import import_module
from importlib.metadata import distribution, distributions
from pathlib import Path
from typing import Any

from ...errors import ConfigError

PREFIX = "mooncake-transfer-engine"
# Distribution -> flavour, which is also the name of our extra where we have one.
FLAVOURS = {
    PREFIX: "cuda12",
    f"{PREFIX}-cuda13": "cuda13",
    f"{PREFIX}-non-cuda": "cpu",
    f"{PREFIX}-npu": "npu",
    f"{PREFIX}-rocm": "rocm",
    f"{PREFIX}-musa": "musa",
}
# Soname without version -> Debian package. The wheels need these three and bring the rest.
LIBRARIES = {"libibverbs": "libibverbs1", "libnuma": "libnuma1", "libcurl": "libcurl4", "librdmacm": "librdmacm1"}
_FATAL = 3
# Measured with 0.3.13.post1; see docs/operations.md.
ENVIRONMENT = {
    # A frozen master answers nothing for 30 s otherwise.
    "MC_RPC_TIMEOUT_MS": "2000",
    # Ends a transfer from or to a frozen process, which takes 62 s otherwise. Per object and connection.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    # 2.8 instead of 1.7 GB/s over loopback.
    "MC_TCP_SLICE_SIZE": "4194304",
    # The defaults refuse what is more than 1,024 fragments a peer.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "2000",
    "MC_LOG_LEVEL": "ERROR",
    "MC_STORE_CLIENT_METRIC": "0",
}


def installed_flavour() -> str:
    """Of the one Mooncake wheel: "cuda12", "cuda13", "cpu", "npu", "rocm", "musa" or "efa...". Raises ConfigError where none or several are
    installed. Looks at metadata only."""
    found = sorted({name for d in distributions() if (name := _canonical(d.metadata["Name"] or "")).startswith(PREFIX)})
    if not found:
        raise ConfigError(
            "the pool needs Mooncake, which is not installed: install one of the extras mooncake-kv[cuda12], [cuda13], [cpu], [npu], [rocm]"
        )
    if len(found) > 1:
        raise ConfigError(
            f"{len(found)} Mooncake wheels are installed, {' and '.join(found)}, which overwrite each other's files: "
            "uninstall all of them, then install one"
        )
    return FLAVOURS.get(found[0], found[0].removeprefix(f"{PREFIX}-"))


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def load(module: str = "mooncake.store") -> Any:
    """That module of the wheel. Raises ConfigError with one sentence."""
    flavour = installed_flavour()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(_explain(str(error), flavour)) from None


def _explain(message: str, flavour: str) -> str:
    if match := re.search(r"(lib[\w+-]+)\.so[.\d]*: cannot open shared object file", message):
        library = match[0].partition(":")[0]
        package = LIBRARIES.get(match[1].lower())
        how = f"install it (Debian, Ubuntu: apt-get install {package})" if package else f"it belongs to the {flavour} wheel's platform"
        return f"Mooncake ({flavour}) does not load because the system library {library} is missing: {how}"
    return f"Mooncake ({flavour}) does not load: {message[:300]}"


def silence() -> None:
    """No more lines on standard error, of which there is one for each object that is missing or not delivered: Mooncake's MC_LOG_LEVEL ends
    at ERROR, so this sets the variable of its logging library. Does nothing where that library is not there as a file of its own."""
    if os.environ.get("MC_LOG_LEVEL") != ENVIRONMENT["MC_LOG_LEVEL"]:
        return
    with suppress(OSError, ValueError):
        library = next((line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libglog" in line), None)
        if library is not None:
            ctypes.c_int32.in_dll(ctypes.CDLL(library), "_ZN3fLI17FLAGS_minloglevelE").value = _FATAL


@functools.cache
def master_program() -> Path:
    """The mooncake_master of the installed wheel, run directly: the command of that name is a Python wrapper, and a signal that kills a
    wrapper leaves the master behind. Raises ConfigError."""
    flavour = installed_flavour()
    name = next(name for name in (*FLAVOURS, f"{PREFIX}-{flavour}") if FLAVOURS.get(name, flavour) == flavour)
    program = Path(str(distribution(name).locate_file("mooncake/mooncake_master")))
    if not os.access(program, os.X_OK):
        raise ConfigError(f"the Mooncake wheel ({flavour}) has no program mooncake_master at {program}")
    return program
