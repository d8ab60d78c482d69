"""The Mooncake pool as a tier: `open_tier` runs in the tier process, `keeper.Keeper` in the node.

Nothing here loads Mooncake when it is imported; `open_tier` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tier import PoolTier


def open_tier(settings: Mapping[str, Any]) -> PoolTier:
    """Join the pool. `settings` is what `Keeper.ensure` returned. Raises ConfigError (permanent) or TierDown (for now); after either, and
    after `close`, this process must not try again: Mooncake's client crashes."""
    from .tier import PoolTier

    return PoolTier(settings)
