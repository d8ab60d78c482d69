"""LMDeploy plugin: the KV connector `mooncake` and the PD migration backend `Mooncake`.

Importing this package imports nothing else: it happens at every `import torch` (see `autoload`).
"""

from __future__ import annotations

CONNECTOR = "mooncake"
# LMDeploy's command line knows two names, so ours takes over this one; in a process with the variable set to 0, it is LMDeploy's own.
MIGRATION_BACKEND = "Mooncake"
MIGRATION_SWITCH = "MOONCAKE_KV_MIGRATION"
