"""SGLang plugin: the storage backend `mooncake` of its hierarchical cache, kept by mooncake-kv where its configuration asks for it.

Importing this package imports nothing of SGLang.
"""

from __future__ import annotations

BACKEND = "mooncake"
FLAG = "--hicache-storage-backend-extra-config"


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`. SGLang calls it in every process: idempotent, and it never raises for a SGLang it does
    not know (it logs, and the backend refuses)."""
    from .hooks import install

    install()
