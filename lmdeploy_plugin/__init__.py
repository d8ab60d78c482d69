"""LMDeploy plugin."""

from __future__ import annotations

CONNECTOR = "mooncake"
