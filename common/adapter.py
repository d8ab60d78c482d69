"""Identity of a LoRA adapter, which goes into the seed of the page hashes of the requests that use it.

Promises: two adapters that differ in their configuration, or broadly in a tensor, differ here, whatever they are called and wherever they
lie; an adapter that was overwritten in place is read again.
"""

from __future__ import annotations

import time
from hashlib import sha256
from pathlib import Path

from .errors import UnsupportedError
from .weights import SETTLED_NS, Mode, weights_digest

_CONFIG = "adapter_config.json"
# (mode, path, and of every file its name and what any write to it changes) -> fingerprint. Adapters are few; a request must not read files
# again.
_known: dict[tuple[str, str, tuple[tuple[str, int, int, int, int], ...]], str] = {}


def adapter_fingerprint(folder: str | Path, mode: Mode = "sample") -> str:
    """32 hex digits over the adapter's configuration and tensors, sampled or read in full as the model's. Reads the files once as long as
    they do not change; raises OSError or UnsupportedError where they cannot be read or identified."""
    path = Path(folder)
    if not path.is_dir():
        raise UnsupportedError(f"the LoRA adapter {str(folder)!r} is no local folder and cannot be identified")
    files = sorted(entry for entry in path.iterdir() if entry.name == _CONFIG or entry.suffix == ".safetensors")
    times = [(entry.name, entry.stat()) for entry in files]
    key = (mode, str(path), tuple((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in times))
    if key in _known:
        return _known[key]
    config = (path / _CONFIG).read_bytes()
    fingerprint = sha256(len(config).to_bytes(8, "little") + config + weights_digest(path, mode)).hexdigest()[:32]
    if all(time.time_ns() - max(s.st_mtime_ns, s.st_ctime_ns) > SETTLED_NS for _, s in times):
        _known[key] = fingerprint
    return fingerprint
