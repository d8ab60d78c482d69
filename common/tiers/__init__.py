"""Tiers behind the node's memory: SSD and the Mooncake pool."""
