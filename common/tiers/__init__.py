"""Slow tiers behind the node's memory. `base` is what a tier does, `host` the process it runs in, `link` the node's end of that process."""
