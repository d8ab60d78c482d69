"""Identity of a LoRA adapter, which goes into the seed of the page hashes of the requests that use it.

Promises: two adapters that differ in their configuration, or broadly in a tensor, differ here, whatever they are called and wherever they
lie; an adapter that was overwritten in place is read again.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from .errors import UnsupportedError
from .weights import weights_digest

_CONFIG = "adapter_config.json"
# (path, mtime and size of every file) -> fingerprint. Adapters are few; a request must not read files again.
_known: dict[tuple[str, tuple[tuple[str, int, int], ...]], str] = {}


def adapter_fingerprint(folder: str | Path) -> str:
    """32 hex digits over the adapter's configuration and tensors. Reads the files once as long as they do not change; raises OSError or
    UnsupportedError where they cannot be read or identified."""
    path = Path(folder)
    if not path.is_dir():
        raise UnsupportedError(f"the LoRA adapter {str(folder)!r} is no local folder and cannot be identified")
    files = sorted(entry for entry in path.iterdir() if entry.name == _CONFIG or entry.suffix == ".safetensors")
    key = (str(path), tuple((entry.name, entry.stat().st_mtime_ns, entry.stat().st_size) for entry in files))
    if key not in _known:
        config = (path / _CONFIG).read_bytes()
        _known[key] = sha256(len(config).to_bytes(8, "little") + config + weights_digest(path, "sample")).hexdigest()[:32]
    return _known[key]
