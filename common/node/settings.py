"""The node's settings and where each came from.

Promises: values pass the same parser as everywhere else (`common.config`). The first engine's settings win: `conflicts` says, for each
setting that a later client gave explicitly and that differs, the key, both values and both sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..config import NODE_KEYS, CacheConfig, load_config
from ..errors import ConfigError
from ..tiers.link import TierSpec
from ..tiers.pool.keeper import Keeper
from .paths import check_folder

DEFAULT = "default"
Setting = int | float | str | bool
# Why pages are written to the pool, by write_policy.
WRITES = {
    "auto": frozenset({"second_use", "prefix_end"}),
    "second_use": frozenset({"second_use"}),
    "prefix_end": frozenset({"prefix_end"}),
    "all": frozenset({"", "second_use", "prefix_end"}),
}


class NodeSettings:
    """`values` are those of CacheConfig.node_settings(); `sources` says for each where it came from."""

    def __init__(self, config: CacheConfig, sources: Mapping[str, str]) -> None:
        self.dram_size = config.dram_size
        self.extent_size = config.extent_size
        self.idle_exit_s = config.idle_exit_s
        self.metrics_host = config.metrics_host
        self.metrics_port = config.metrics_port
        self.ssd_path = config.ssd_path
        self.ssd_size = config.ssd_size
        self.values: dict[str, Setting] = config.node_settings()
        self.sources = {key: sources.get(key, DEFAULT) for key in NODE_KEYS}

    def tiers(self, folder: Path) -> list[TierSpec]:
        """The slow tiers, in the order in which they are asked. `folder` is the node's."""
        specs = []
        if self.ssd_path:
            everything = frozenset({"", "second_use", "prefix_end"})
            specs.append(TierSpec("ssd", lambda: {"path": self.ssd_path, "bytes": self.ssd_size}, everything, touches=True, awaited=True))
        if self.values["master_server_address"]:
            # Starts what this node gives to the pool, and joins it. A dead or frozen master is noticed by the tier itself within 2 s.
            keeper = Keeper(self.values, self.sources, folder)
            writes = WRITES[str(self.values["write_policy"])]
            specs.append(TierSpec("pool", keeper.ensure, writes, keeper.close, open_s=20.0, leading_s=3.0))
        return specs

    def prepare_folders(self) -> None:
        """Make the SSD tier's folder where it is missing, and check it. Raises ConfigError where it cannot be used."""
        if not self.ssd_path:
            return
        folder = Path(self.ssd_path)
        source = f"ssd_path is {self.ssd_path!r} ({self.sources['ssd_path']})"
        try:
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            check_folder(folder, source)
        except OSError as error:
            raise ConfigError(f"{source}: {error.strerror}") from None

    def conflicts(self, theirs: Mapping[str, Setting], sources: Mapping[str, str]) -> list[str]:
        """One sentence for each setting in which a client's wish differs. Its defaults are no wishes."""
        return [
            f"{key} is {value!r} ({sources[key]}) but the running node has {self.values[key]!r} ({self.sources[key]})"
            for key, value in theirs.items()
            if key in self.values and sources.get(key, DEFAULT) != DEFAULT and value != self.values[key]
        ]


def node_settings(given: Mapping[str, object], sources: Mapping[str, str]) -> NodeSettings:
    """Settings from the node's command line. Raises ConfigError for unknown keys and values out of range. A client spells a text that
    nobody gave as an empty one."""
    config = load_config({key: value for key, value in given.items() if value != ""}, flag_source="the node's command line", environ={})
    return NodeSettings(config, {key: sources.get(key, config.sources.get(key, DEFAULT)) for key in NODE_KEYS})
