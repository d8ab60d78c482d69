"""LMDeploy's PD migration over Mooncake: `--role Prefill|Decode --migration-backend Mooncake`.

`backend` reads blocks, `engine` and `proxy` mend what around it would lose requests, engines or correct answers. See docs/lmdeploy.md.
"""

from __future__ import annotations

from .backend import MooncakeMigrationBackend

__all__ = ["MooncakeMigrationBackend"]
