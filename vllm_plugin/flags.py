"""`--kv-connector NAME` and `--moon-cache-config JSON` for every vLLM command that takes engine arguments.

Promises: whatever is wrong with the cache's configuration ends the command with one sentence and exit code 2 as soon as the command line
has been parsed, before a model is looked at. Afterwards nothing of these flags is left: they have become vLLM's own `kv_transfer_config`,
in place, because vLLM hands the parsed arguments to further API servers before those load plugins. A value means the same however it is
written: `--moon-cache-config '{"dram_size": "512m"}'`, `--moon-cache-config.dram_size 512m` or a YAML file. A flag given several times
adds up, and where it gives a key twice the later one wins, as it does for vLLM's own flags (the command line comes after a file).
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import re
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from ..common.config import load_config
from ..common.errors import ConfigError, UnsupportedError
from ..common.secret import Secret
from . import CONNECTOR, compat

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

CONNECTOR_FLAG = "--kv-connector"
CONFIG_FLAG = "--moon-cache-config"
_DOTTED = re.compile(r"--moon[-_]cache[-_]config\.[^=]+")
_KEY_SOURCE = "kv_connector_extra_config"


class HiddenText(str):
    """A secret on its way through vLLM, which logs its arguments and pickles them for its processes: an ordinary string that does not show
    itself in logs."""

    def __repr__(self) -> str:
        return "***"

    __str__ = __repr__


def install() -> None:
    """Wrap vLLM's argument handling; idempotent. With a vLLM that it does not fit: one warning, and the flags do not exist there."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if hasattr(EngineArgs.add_cli_args, "mooncake_kv"):
        return
    try:
        compat.require(compat.FLAGS)
    except UnsupportedError as error:
        compat.logger.warning("%s", error)
        return

    plain_add, plain_from = EngineArgs.add_cli_args, EngineArgs.from_cli_args.__func__
    plain_parse, plain_load = FlexibleArgumentParser.parse_args, FlexibleArgumentParser.load_config_file

    @functools.wraps(plain_add)
    def add_cli_args(parser: Any) -> Any:
        return _add_flags(plain_add(parser))

    @functools.wraps(plain_from)
    def from_cli_args(cls: type, args: argparse.Namespace) -> Any:
        apply(args)
        return plain_from(cls, args)

    @functools.wraps(plain_parse)
    def parse_args(self: Any, args: list[str] | None = None, namespace: argparse.Namespace | None = None) -> argparse.Namespace:
        try:
            parsed = plain_parse(self, _quoted(sys.argv[1:] if args is None else args), namespace)
            check(parsed)
        except ConfigError as error:
            self.exit(2, f"{self.prog}: error: {error}\n")
        return parsed

    @functools.wraps(plain_load)
    def load_config_file(self: Any, file_path: str) -> list[str]:
        return _quoted(plain_load(self, file_path))

    add_cli_args.mooncake_kv = True  # type: ignore[attr-defined]
    EngineArgs.add_cli_args = staticmethod(add_cli_args)
    EngineArgs.from_cli_args = classmethod(from_cli_args)
    FlexibleArgumentParser.parse_args = parse_args
    FlexibleArgumentParser.load_config_file = load_config_file


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError if the cache is asked for in a way that cannot work."""
    transfer = transfer_config(args)
    if transfer is not None and transfer.kv_connector == CONNECTOR:
        ours = getattr(args, "kv_connector", None) is not None
        load_config(transfer.kv_connector_extra_config, flag_source=CONFIG_FLAG if ours else f"--kv-transfer-config ({_KEY_SOURCE})")


def apply(args: argparse.Namespace) -> None:
    """Turn the two flags into `args.kv_transfer_config`, in place. Raises ConfigError; does nothing the second time."""
    check(args)
    args.kv_transfer_config = transfer_config(args)
    args.kv_connector = args.moon_cache_config = None


def transfer_config(args: argparse.Namespace) -> KVTransferConfig | None:
    """What the arguments ask vLLM to load, by our flags or by its own. Raises ConfigError where they contradict one another."""
    name, settings = getattr(args, "kv_connector", None), getattr(args, "moon_cache_config", None)
    transfer = getattr(args, "kv_transfer_config", None)
    if name is None and settings is None:
        return transfer
    given = " and ".join(flag for flag, value in ((CONNECTOR_FLAG, name), (CONFIG_FLAG, settings)) if value is not None)
    if transfer is not None:
        raise ConfigError(f"{given} cannot be given together with --kv-transfer-config: both choose a KV connector; keep one of them.")
    if name is None:
        raise ConfigError(f"{CONFIG_FLAG} is given but nothing uses it: add `{CONNECTOR_FLAG} {CONNECTOR}`.")
    known = compat.connector_names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5) or [k for k in known if k.lower() == name.strip().lower()]
        hint = f"did you mean `{near[0]}`?" if near else f"known connectors: {', '.join(known)}."
        raise ConfigError(f"{CONNECTOR_FLAG} {name!r} is no KV connector that this vLLM knows; {hint}")
    if name != CONNECTOR and settings is not None:
        raise ConfigError(f"{CONFIG_FLAG} configures `{CONNECTOR_FLAG} {CONNECTOR}` only; here {CONNECTOR_FLAG} is {name!r}.")

    from vllm.config import KVTransferConfig

    return KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=settings or {})


def _add_flags(parser: Any) -> Any:
    group = parser.add_argument_group(
        title="Mooncake KV cache", description="Keeps the KV cache of long prompts and shares it between requests, restarts and engines."
    )
    group.add_argument(
        CONNECTOR_FLAG,
        metavar="NAME",
        default=None,
        help=f"KV connector to load. `{CONNECTOR}` keeps and shares the KV cache of long prompts; vLLM's own connectors work by name too.",
    )
    group.add_argument(
        CONFIG_FLAG,
        metavar="JSON",
        default=None,
        action=_MergeSettings,
        help=f"Settings of `{CONNECTOR_FLAG} {CONNECTOR}`, for example "
        '\'{"kind": "Store", "dram_size": "16gb"}\'. The same keys work in a file ($MOONCAKE_CONFIG_PATH) or as MOONCAKE_* variables.',
    )
    return parser


class _MergeSettings(argparse.Action):
    """Collects the JSON objects of all occurrences, each checked by the common parser, into one mapping."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        try:
            config = load_config(values, flag_source=CONFIG_FLAG, environ={})
        except ConfigError as error:
            parser.exit(2, f"{parser.prog}: error: {error}\n")
        secrets = {value.reveal() for value in msgspec.structs.asdict(config).values() if isinstance(value, Secret)}
        settings = {k: HiddenText(v) if isinstance(v, str) and v in secrets else v for k, v in json.loads(values).items()}
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest) or {}), **settings})


def _quoted(args: list[str]) -> list[str]:
    """The values of `--moon-cache-config.KEY VALUE` as JSON strings. vLLM would read `512m` as 512,000,000 and `512M` as 536,870,912 there,
    and the tenant `007` as a number; as strings they mean what they mean in an environment variable. Raises ConfigError for a KEY without
    VALUE at the end."""
    result: list[str] = []
    pending = False
    for arg in args:
        if pending:
            arg, pending = _as_string(arg), False
        elif _DOTTED.match(arg):
            key, equals, value = arg.partition("=")
            arg, pending = (f"{key}={_as_string(value)}", False) if equals else (arg, True)
        result.append(arg)
    if pending:
        raise ConfigError(f"{args[-1]} is given without a value")
    return result


def _as_string(value: str) -> str:
    return value if value.startswith('"') else json.dumps(value)
