"""The node's settings and where each came from.

Promises: values pass the same parser as everywhere else (`common.config`). The first engine's settings win: `conflicts` says, for each
setting that a later client gave explicitly and that differs, the key, both values and both sources.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..config import NODE_KEYS, CacheConfig, load_config

DEFAULT = "default"
Setting = int | float | str | bool
_DEFAULTS = CacheConfig()


class NodeSettings:
    """`values` are those of CacheConfig.node_settings(); `sources` says for each where it came from."""

    def __init__(self, config: CacheConfig, sources: Mapping[str, str]) -> None:
        self.dram_size = config.dram_size
        self.extent_size = config.extent_size
        self.idle_exit_s = config.idle_exit_s
        self.metrics_host = config.metrics_host
        self.metrics_port = config.metrics_port
        self.values: dict[str, Setting] = config.node_settings()
        self.sources = {key: sources.get(key, DEFAULT) for key in NODE_KEYS}

    def conflicts(self, theirs: Mapping[str, Setting], sources: Mapping[str, str]) -> list[str]:
        """One sentence for each setting in which a client's wish differs. Its defaults are no wishes."""
        return [
            f"{key} is {value!r} ({sources[key]}) but the running node has {self.values[key]!r} ({self.sources[key]})"
            for key, value in theirs.items()
            if key in self.values and sources.get(key, DEFAULT) != DEFAULT and value != self.values[key]
        ]


def node_settings(given: Mapping[str, object], sources: Mapping[str, str]) -> NodeSettings:
    """Settings from the node's command line. Raises ConfigError for unknown keys and values out of range.

    Whoever starts a node passes all settings; those that are empty by default mean that nothing was given."""
    given = {key: value for key, value in given.items() if value != "" or getattr(_DEFAULTS, key, None) != ""}
    config = load_config(given, flag_source="the node's command line", environ={})
    return NodeSettings(config, {key: sources.get(key, config.sources.get(key, DEFAULT)) for key in NODE_KEYS})
