"""Configuration: one parser and one meaning for the JSON of a flag, a JSON file and environment variables.

Promises:
- Every key means the same in every place and in every engine. Names of Mooncake's own configuration (`master_server_address`, `tenant_id`,
  `MOONCAKE_MASTER`, ...) are accepted and mean the same.
- No source overrides another: two that give one key different values are refused, with the key, both values and both sources. So are
  unknown keys (with a guess at what was meant), values of a wrong type or out of range, and environment variables that look like a misspelt
  one of ours.
- A secret appears in no error message, repr, log or encoding.

`MOONCAKE_CONFIG_PATH` names the file, a JSON object. `MOONCAKE_KV_*` variables are no configuration.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, NoReturn

import msgspec

from .errors import ConfigError
from .secret import Secret
from .sizes import parse_size

log = logging.getLogger(__name__)

FILE_VARIABLE = "MOONCAKE_CONFIG_PATH"
MAX_FILE_BYTES = 1 << 20
MIN_EXTENT = 1 << 20
# Offsets within an extent have 40 bits in a slot number.
MAX_EXTENT = 1 << 40
MIN_SSD = 1 << 20
# Mooncake takes segments in units of this only (-600 otherwise).
SEGMENT_UNIT = 16 << 20
# What `master_server_address` says to have a master started by the node.
EMBEDDED = "embedded"


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings. Sizes are bytes. Made by `load_config`; docs/configuration.md describes every key for users."""

    # What kind of cache: "Store" is the only one.
    kind: str = "Store"
    # Name of the node process that the engines of one user on a machine share.
    node: str = "default"
    # Memory for pages; 0: the node takes a share of what is available.
    dram_size: int = 0
    # The node's memory grows and shrinks by about this much.
    extent_size: int = 1 << 30
    # The node ends itself so long after its last client has gone; 0: never.
    idle_exit_s: float = 1800.0
    # When a running node has other settings than these: run without cache, or fail.
    node_conflict: Literal["disable", "fail"] = "disable"
    # Where the node serves /metrics; port 0: any free port, -1: not at all.
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    # A fetch is a miss after so long without a word from the node.
    fetch_timeout_ms: int = 150
    # A fetch that waits for slower tiers than memory gets what is there after so long.
    fetch_deadline_ms: int = 2000
    # Prefill and decode engines (LMDeploy's roles): the decode engine computes a prompt itself when it has not read its KV after so long;
    # the prefill engine holds a prompt's KV so long for it; the proxy waits so long for the prefill engine.
    migration_timeout_ms: int = 5000
    migration_hold_s: float = 60.0
    migration_prefill_s: float = 60.0
    # Tokens of a page. Engines share pages only with equal values.
    page_tokens: int = 64
    # Separates keys; it does not protect them.
    tenant: str = "default"
    # The operator's own name for the weights, instead of a fingerprint of the files.
    model_id: str = ""
    # How much of the weight files is read to identify them: two windows of each tensor, or everything.
    fingerprint: Literal["sample", "full"] = "sample"
    # Any string; changing it changes every key.
    weights_epoch: str = ""
    # Keys digests and checksums; all members of a pool need the same.
    pool_secret: Secret = Secret()
    # Check pages again in the engine's worker: "auto" is "true" for CPU engines and "false" for CUDA.
    verify_on_load: Literal["auto", "true", "false"] = "auto"
    # What a model or engine setting does that the cache cannot serve: stop the engine's start, or run without cache.
    on_unsupported: Literal["error", "disable"] = "error"
    # Store pages filled by generated tokens too, for the next turn of a conversation.
    save_decode: bool = True
    # Layers of one stored object; 0: all.
    layers_per_group: int = 0
    # At most so many bytes are staged for waiting requests; 0: half of the node's memory.
    staging_window: int = 0
    # KV bytes that one step of an engine loads at most on each rank; 0: automatic.
    load_step_bytes: int = 0
    # Free slots held ahead by an engine for saving; 0: automatic.
    credits: int = 0
    # A folder for pages beyond memory, and how many bytes it may hold; neither: no such tier.
    ssd_path: str = ""
    ssd_size: int = 0
    # Mooncake's own names, for the pool. No master: no pool; "embedded": the node starts one. No hostname: the
    # machine's.
    master_server_address: str = ""
    metadata_server: str = "P2PHANDSHAKE"
    protocol: Literal["tcp", "rdma"] = "tcp"
    device_name: str = ""
    global_segment_size: int = 4 << 30
    local_buffer_size: int = 16 << 20
    local_hostname: str = ""
    # Which pages go to the pool: "auto" is those used a second time and those that end a request's prefix.
    write_policy: Literal["auto", "second_use", "prefix_end", "all"] = "auto"
    # Copies of each object in the pool, on different segments.
    replicas: int = 1
    # Ask the pool to evict our objects after others.
    soft_pin: bool = False
    # For each key: "--moon-cache-config", "file /x (MOONCAKE_CONFIG_PATH)", "environment MOONCAKE_X" or "default".
    sources: dict[str, str] = {}

    def node_settings(self) -> dict[str, int | float | str | bool]:
        """The keys that configure the node process, whose values must agree among all engines of a node."""
        return {key: getattr(self, key) for key in NODE_KEYS}


# Those of the Mooncake pool. Its secret is none: it belongs to a namespace, and never travels on a command line.
POOL_KEYS = (
    "master_server_address",
    "metadata_server",
    "protocol",
    "device_name",
    "global_segment_size",
    "local_buffer_size",
    "local_hostname",
    "write_policy",
    "replicas",
    "soft_pin",
)
NODE_KEYS = ("dram_size", "extent_size", "idle_exit_s", "metrics_host", "metrics_port", "ssd_path", "ssd_size", *POOL_KEYS)
# Keys that mean something only together.
_PAIRS = (("ssd_path", "ssd_size"),)

Parser = Callable[[object], Any]


class _Given(NamedTuple):
    """A parsed value and where it came from."""

    value: Any
    source: str


# ---- parsers: a value from JSON or the environment to its one form; ValueError says what would be right ----------------------------


def _text(pattern: str, what: str) -> Parser:
    compiled = re.compile(pattern)

    def parse(value: object) -> str:
        if not isinstance(value, str) or not compiled.fullmatch(value) or not value.isprintable():
            raise ValueError(f"it must be {what}")
        return value

    return parse


def _choice(*choices: str) -> Parser:
    """One of the choices in any case; JSON booleans count as "true" and "false"."""
    forms = {choice.lower(): choice for choice in choices}

    def parse(value: object) -> str:
        text = str(value).lower() if isinstance(value, bool | str) else ""
        if text not in forms:
            raise ValueError(f"it must be {' or '.join(repr(choice) for choice in choices)}")
        return forms[text]

    return parse


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else ""
    if text in ("true", "yes", "on", "1"):
        return True
    if text in ("false", "no", "off", "0"):
        return False
    raise ValueError("it must be true or false")


def _integer(low: int, high: int) -> Parser:
    def parse(value: object) -> int:
        if (isinstance(value, float) and value.is_integer()) or (isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,18}\s*", value)):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"it must be a whole number from {low} to {high}")
        return value

    return parse


def _seconds(value: object) -> float:
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,12}(\.\d{1,9})?\s*", value, re.ASCII):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e9:
        raise ValueError("it must be a number of seconds, at least 0")
    return float(value)


def _size(low: int = 0, high: int | None = None, *, multiple: int = 1, zero: bool = True) -> Parser:
    """A size from `low` to `high` and, with `zero`, also 0."""

    def parse(value: object) -> int:
        size = parse_size(value)
        if not (zero and size == 0) and (size < low or (high is not None and size > high)):
            limits = f"at least {low}" if high is None else f"{low} to {high}"
            raise ValueError(f"it must be {limits} bytes{' or 0' if zero else ''}")
        if size % multiple:
            raise ValueError(f"it must be a multiple of {multiple} bytes")
        return size

    return parse


def _address(value: object) -> str:
    """`host:port`, the URL of a highly available master, or "embedded"."""
    text = value if isinstance(value, str) and value.isprintable() else ""
    if text.lower() == EMBEDDED:
        return EMBEDDED
    if re.fullmatch(r"[a-z]+://\S+", text):
        return text
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/]+):(\d{1,5})", text, re.ASCII)
    if not match or not 1 <= int(match[2]) <= 65535:
        raise ValueError("it must be host:port, a URL such as etcd://host:port, or 'embedded'")
    return text


def _folder(value: object) -> str:
    """An absolute path; `~` is the home of the user who reads this."""
    text = os.path.expanduser(value) if isinstance(value, str) and value.isprintable() and len(value) <= 1024 else ""
    if not text.startswith("/") or ".." in text.split("/") or not text.strip("/"):
        raise ValueError("it must be an absolute path of a folder without '..', or begin with '~'")
    return text.rstrip("/")


def _secret(value: object) -> Secret:
    if not isinstance(value, str) or not value.isprintable() or value != value.strip() or not value:
        raise ValueError("it must be a string of printable characters that does not begin or end with a space")
    return Secret(value)


_LABEL = _text(r".{1,128}", "a string of 1 to 128 printable characters")
_NAME = _text(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", "1 to 64 letters, digits, '.', '_' or '-', not beginning with '.'")
_HOST = _text(r"\S{1,255}", "a host name or address")

_PARSERS: dict[str, Parser] = {
    "kind": _choice("Store"),
    "node": _NAME,
    "dram_size": _size(MIN_EXTENT),
    "extent_size": _size(MIN_EXTENT, MAX_EXTENT, multiple=4096, zero=False),
    "idle_exit_s": _seconds,
    "node_conflict": _choice("disable", "fail"),
    "metrics_host": _HOST,
    "metrics_port": _integer(-1, 65535),
    "fetch_timeout_ms": _integer(1, 3_600_000),
    "fetch_deadline_ms": _integer(1, 3_600_000),
    "migration_timeout_ms": _integer(1, 3_600_000),
    "migration_hold_s": _seconds,
    "migration_prefill_s": _seconds,
    "page_tokens": _integer(1, 4096),
    "tenant": _LABEL,
    "model_id": _LABEL,
    "fingerprint": _choice("sample", "full"),
    "weights_epoch": _LABEL,
    "pool_secret": _secret,
    "verify_on_load": _choice("auto", "true", "false"),
    "on_unsupported": _choice("error", "disable"),
    "save_decode": _boolean,
    "layers_per_group": _integer(0, 1024),
    "staging_window": _size(),
    "load_step_bytes": _size(),
    "credits": _size(),
    "ssd_path": _folder,
    "ssd_size": _size(MIN_SSD),
    "master_server_address": _address,
    "metadata_server": _text(r"\S{1,255}", "'P2PHANDSHAKE' or the address of a metadata server"),
    "protocol": _choice("tcp", "rdma"),
    # Mooncake's own files and examples spell "no device" as an empty string.
    "device_name": _text(r"\S{0,255}", "the name of a network device, or '' for none"),
    "global_segment_size": _size(SEGMENT_UNIT, multiple=SEGMENT_UNIT),
    "local_buffer_size": _size(1, zero=False),
    "local_hostname": _HOST,
    "write_policy": _choice("auto", "second_use", "prefix_end", "all"),
    "replicas": _integer(1, 16),
    "soft_pin": _boolean,
}
_SECRETS = frozenset({"pool_secret"})
_KEY_ALIASES = {"tenant_id": "tenant"}
_VARIABLES = {f"MOONCAKE_{name.upper()}": key for name, key in ({key: key for key in _PARSERS} | _KEY_ALIASES).items()} | {
    "MOONCAKE_MASTER": "master_server_address",
    "MOONCAKE_DEVICE": "device_name",
    "MOONCAKE_TE_META_DATA_SERVER": "metadata_server",
}

# Keys of Mooncake's own file (as Mooncake 0.3.13, vLLM 0.32, SGLang 0.5.23 and LMDeploy 0.18 read it) that mean nothing here: a file that
# already serves an engine's in-tree connector is accepted.
_MOONCAKE_ONLY = frozenset(
    {
        "check_server",
        "client_http_port",
        "client_server_address",
        "enable_client_http_server",
        "enable_offload",
        "enable_ssd_offload",
        "master_metrics_port",
        "mode",
        "ssd_offload_path",
        "standalone_storage",
    }
)

# Keys whose meaning we share with Mooncake and the engines' own use of it.
_SHARED = frozenset(
    {
        "device_name",
        "global_segment_size",
        "local_buffer_size",
        "local_hostname",
        "master_server_address",
        "metadata_server",
        "protocol",
        "tenant_id",
    }
)


def asks_for_us(flag: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None) -> bool:
    """Whether some source gives a key that only this project has. Where an engine has a backend of its own called mooncake, that tells
    whose settings these are. A file that cannot be read counts as none, with a warning."""
    environ = os.environ if environ is None else environ
    names = set(flag or ())
    if (path := environ.get(FILE_VARIABLE)) is not None:
        try:
            names |= set(_as_object(_parse_json(_read_file(path), path), path))
        except ConfigError as error:
            log.warning("%s", error)
    ours = (set(_PARSERS) | set(_KEY_ALIASES)) - _SHARED
    return bool(names & ours) or any(f"MOONCAKE_{key.upper()}" in environ for key in ours)


def load_config(
    flag: str | Mapping[str, Any] | None = None, *, flag_source: str = "--moon-cache-config", environ: Mapping[str, str] | None = None
) -> CacheConfig:
    """Read all sources. `flag` is JSON or what was parsed from it, `environ` is `os.environ` unless given.

    Raises ConfigError for anything that is refused, in one sentence that names the key, its value and its source.
    """
    environ = os.environ if environ is None else environ
    given: dict[str, _Given] = {}
    if flag is not None:
        _take_mapping(given, _parse_json(flag, flag_source) if isinstance(flag, str) else flag, flag_source)
    if (path := environ.get(FILE_VARIABLE)) is not None:
        source = f"file {path} ({FILE_VARIABLE})"
        _take_mapping(given, _parse_json(_read_file(path), source), source)
    _take_environment(given, environ)
    sources = {key: given[key].source if key in given else "default" for key in _PARSERS}
    for pair in _PAIRS:
        values = [given[key].value if key in given else "" for key in pair]
        if bool(values[0]) != bool(values[1]):
            there, lacking = pair if values[0] else pair[::-1]
            raise ConfigError(f"{there} is {_show(there, given[there].value)} ({sources[there]}) without {lacking}: give both or neither")
    return CacheConfig(**{key: item.value for key, item in given.items()}, sources=sources)


def _take_mapping(given: dict[str, _Given], mapping: Mapping[str, Any], source: str) -> None:
    for name, value in _as_object(mapping, source).items():
        key = _KEY_ALIASES.get(name, name)
        if key in _PARSERS:
            _put(given, key, value, source if key == name else f"{source}, as {name}")
        elif name in _MOONCAKE_ONLY:
            log.warning("%s (%s) is a setting of Mooncake that has no effect here", name, source)
        else:
            raise ConfigError(f"{str(name)[:80]!r} ({source}) is no setting{_guess(str(name), (*_PARSERS, *_KEY_ALIASES))}")


def _as_object(value: object, source: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{source} must be a JSON object, not {type(value).__name__}")
    return value


def _take_environment(given: dict[str, _Given], environ: Mapping[str, str]) -> None:
    for name in sorted(environ):
        if key := _VARIABLES.get(name):
            _put(given, key, environ[name], f"environment {name}")
        elif name.startswith("MOONCAKE_") and not name.startswith("MOONCAKE_KV_"):
            # The common prefix would make all names look alike.
            known = [variable.removeprefix("MOONCAKE_") for variable in _VARIABLES]
            if close := difflib.get_close_matches(name.removeprefix("MOONCAKE_"), known, n=1, cutoff=0.85):
                raise ConfigError(f"the environment variable {name} is no setting: did you mean MOONCAKE_{close[0]}?")


def _put(given: dict[str, _Given], key: str, value: object, source: str) -> None:
    try:
        parsed = _PARSERS[key](value)
    except ValueError as error:
        raise ConfigError(f"{key} is {_show(key, value)} ({source}): {error}") from None
    earlier = given.setdefault(key, _Given(parsed, source))
    if earlier.value != parsed:
        raise ConfigError(
            f"{key} is {_show(key, earlier.value)} ({earlier.source}) and {_show(key, parsed)} ({source}): give it once, or the same value"
        )


def _read_file(path: str) -> str:
    what = f"the configuration file {path!r} ({FILE_VARIABLE})"
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before opening it: a pipe would block
            raise ConfigError(f"{what} is no regular file")
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{what} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{what} is not UTF-8") from None


def _parse_json(text: str, source: str) -> Mapping[str, Any]:
    """An object without repeated keys. Error messages do not quote the text: it may hold a secret."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) < len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ConfigError(f"{twice[:80]!r} is given twice ({source})")
        return result

    def constant(name: str) -> NoReturn:
        raise ConfigError(f"{source} contains {name}, which is no JSON")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source} is no JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply") from None
    except ConfigError:
        raise
    except ValueError:  # Python reads no number of more than 4300 digits
        raise ConfigError(f"{source} contains a number that is too long") from None


def _show(key: str, value: object) -> str:
    if key in _SECRETS:
        return "***"
    shown = repr(value)
    return shown if len(shown) <= 100 else f"{shown[:97]}..."


def _guess(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f": did you mean {close[0]}?" if close else ""
