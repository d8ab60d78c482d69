"""vLLM plugin: the connector `mooncake` and the flags `--kv-connector` and `--moon-cache-config`.

Importing this package imports nothing of vLLM; `register` does only what the process it runs in needs.
"""

from __future__ import annotations

import sys

CONNECTOR = "mooncake"


def register() -> None:
    """Entry point of the group `vllm.general_plugins`. vLLM calls it in the API server, the engine core, every worker and every extra API
    server, sometimes more than once: idempotent, and it never raises for a vLLM it does not know (it logs, and the connector refuses)."""
    from .compat import register_connector

    register_connector(CONNECTOR, f"{__name__}.connector", "MooncakeKVConnector")
    # Only a process that parses a command line has this module by now, and it costs others most of a second.
    if "vllm.engine.arg_utils" in sys.modules:
        from . import flags, media

        flags.install()
        media.install()
