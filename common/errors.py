"""Errors that reach the user. Each message is one sentence that names the key or setting, its value and where it came from."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration value, or a combination of values, that we refuse."""


class UnsupportedError(ValueError):
    """A model or an engine setting that we refuse by name, because its KV could not be stored or shared correctly."""
