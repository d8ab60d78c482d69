"""The two flags on vLLM's real parsers: what they become, and how each mistake ends."""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from mooncake_kv.common.config import load_config
from mooncake_kv.common.errors import ConfigError, UnsupportedError
from mooncake_kv.vllm_plugin import compat, register

Parse = Callable[..., argparse.Namespace]


def parse_serve(*words: str) -> argparse.Namespace:
    """As `vllm serve MODEL ...` parses its command line."""
    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    return parser.parse_args(["serve", "some/model", *words])


def parse_module(*words: str) -> argparse.Namespace:
    """As `python -m vllm.entrypoints.openai.api_server --model MODEL ...` does."""
    return make_arg_parser(FlexibleArgumentParser(prog="api_server")).parse_args(["--model", "some/model", *words])


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    register()


@pytest.fixture(params=[parse_serve, parse_module], ids=["serve", "module"])
def parse(request: pytest.FixtureRequest) -> Parse:
    return request.param


def transfer_of(args: argparse.Namespace) -> Any:
    """What the engine gets, as vLLM makes it."""
    transfer = AsyncEngineArgs.from_cli_args(args).kv_transfer_config
    assert args.kv_transfer_config is transfer, "further API servers are spawned with this namespace"
    assert args.kv_connector is None and args.moon_cache_config is None
    return transfer


def test_flags_become_the_transfer_config(parse: Parse) -> None:
    args = parse("--kv-connector", "mooncake", "--moon-cache-config", '{"kind": "Store", "dram_size": "4g"}', "--enforce-eager")
    transfer = transfer_of(args)
    assert (transfer.kv_connector, transfer.kv_role) == ("mooncake", "kv_both")
    assert transfer.kv_connector_extra_config == {"kind": "Store", "dram_size": "4g"}
    again = pickle.loads(pickle.dumps(args))
    assert transfer_of(again).kv_connector == "mooncake"


def test_a_key_without_a_value_is_named(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse("--kv-connector", "mooncake", "--moon-cache-config.dram_size")
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith("error: --moon-cache-config.dram_size is given without a value\n")


def test_one_flag_is_enough(parse: Parse) -> None:
    assert transfer_of(parse("--kv-connector", "mooncake")).kv_connector_extra_config == {}


def test_without_flags_nothing_changes(parse: Parse) -> None:
    args = parse()
    assert EngineArgs.from_cli_args(args).kv_transfer_config is None


def test_vllms_own_flag_keeps_working(parse: Parse) -> None:
    given = {"kv_connector": "mooncake", "kv_role": "kv_both", "kv_connector_extra_config": {"dram_size": "1g"}}
    transfer = transfer_of(parse("--kv-transfer-config", json.dumps(given)))
    assert transfer.kv_connector_extra_config == {"dram_size": "1g"}


def test_other_connectors_pass_through(parse: Parse) -> None:
    transfer = transfer_of(parse("--kv-connector", "OffloadingConnector"))
    assert (transfer.kv_connector, transfer.kv_role) == ("OffloadingConnector", "kv_both")


@pytest.mark.parametrize("spelling", ["--moon-cache-config.dram_size=512m", "--moon_cache_config.dram_size=512M"])
def test_dotted_sizes_mean_what_they_mean_elsewhere(parse: Parse, spelling: str) -> None:
    both = [parse("--kv-connector", "mooncake", spelling), parse("--kv-connector", "mooncake", *spelling.split("="))]
    for args in both:
        assert load_config(transfer_of(args).kv_connector_extra_config, environ={}).dram_size == 512 << 20


def test_dotted_values_of_every_type(parse: Parse) -> None:
    words = ["--moon-cache-config.save_decode", "false", "--moon-cache-config.tenant", "007", "--moon-cache-config.idle_exit_s", "2.5"]
    config = load_config(transfer_of(parse("--kv-connector", "mooncake", *words)).kv_connector_extra_config, environ={})
    assert (config.save_decode, config.tenant, config.idle_exit_s) == (False, "007", 2.5)


def test_json_and_dotted_keys_add_up(parse: Parse) -> None:
    words = ["--moon-cache-config.node", "a", "--moon-cache-config", '{"dram_size": "1g", "node": "b"}', "--moon-cache-config.tenant", "t"]
    transfer = transfer_of(parse("--kv-connector", "mooncake", *words))
    assert transfer.kv_connector_extra_config == {"dram_size": "1g", "node": "a", "tenant": "t"}  # vLLM puts dotted keys last


def test_yaml_file(parse: Parse, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("kv-connector: mooncake\nmoon-cache-config:\n  dram_size: 512m\n  save_decode: false\nmoon-cache-config.tenant: 512m\n")
    args = parse("--config", str(file), "--moon-cache-config", '{"dram_size": "1g"}')
    assert transfer_of(args).kv_connector_extra_config == {"dram_size": "1g", "save_decode": False, "tenant": "512m"}


def refusal(capsys: pytest.CaptureFixture[str], parse: Parse, words: Sequence[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(*words)
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error, "one sentence"
    return error


MOONCAKE = ["--kv-connector", "mooncake"]
TRANSFER = ["--kv-transfer-config", '{"kv_connector": "mooncake", "kv_role": "kv_both"}']


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([*MOONCAKE, "--moon-cache-config", '{"dram_sizee": "1g"}'], ["dram_sizee", "--moon-cache-config", "dram_size"]),
        ([*MOONCAKE, "--moon-cache-config", '{"dram_size": -1}'], ["dram_size", "-1", "--moon-cache-config"]),
        ([*MOONCAKE, "--moon-cache-config", '{"dram_size": true}'], ["dram_size", "True", "--moon-cache-config"]),
        ([*MOONCAKE, "--moon-cache-config", '{"node": "a", "node": "b"}'], ["node", "twice"]),
        ([*MOONCAKE, "--moon-cache-config", "{kind: Store}"], ["--moon-cache-config", "JSON"]),
        ([*MOONCAKE, "--moon-cache-config", "[]"], ["--moon-cache-config", "object"]),
        ([*MOONCAKE, "--moon-cache-config.dram_size", "lots"], ["dram_size", "lots"]),
        (["--moon-cache-config", "{}"], ["--moon-cache-config", "--kv-connector mooncake"]),
        (["--kv-connector", "Mooncake"], ["'Mooncake'", "did you mean `mooncake`?"]),
        (["--kv-connector", "zzz"], ["'zzz'", "mooncake"]),
        (["--kv-connector", ""], ["''", "mooncake"]),
        (["--kv-connector", "OffloadingConnector", "--moon-cache-config", "{}"], ["OffloadingConnector", "--moon-cache-config"]),
        ([*MOONCAKE, *TRANSFER], ["--kv-connector", "--kv-transfer-config"]),
        (["--moon-cache-config", "{}", *TRANSFER], ["--moon-cache-config", "--kv-transfer-config"]),
        (
            ["--kv-transfer-config", '{"kv_connector": "mooncake", "kv_role": "kv_both", "kv_connector_extra_config": {"nod": "a"}}'],
            ["nod", "--kv-transfer-config"],
        ),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], parse: Parse, words: list[str], parts: list[str]) -> None:
    error = refusal(capsys, parse, words)
    assert all(part in error for part in parts), error


def test_environment_that_contradicts_the_flag(capsys: pytest.CaptureFixture[str], parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_DRAM_SIZE", "1g")
    error = refusal(capsys, parse, [*MOONCAKE, "--moon-cache-config", '{"dram_size": "2g"}'])
    assert all(part in error for part in ("dram_size", "MOONCAKE_DRAM_SIZE", "--moon-cache-config")), error
    parse()  # whoever does not ask for the cache is not bothered by its environment


def test_secret_is_not_shown_and_survives(parse: Parse) -> None:
    args = parse(*MOONCAKE, "--moon-cache-config", '{"pool_secret": "hush-hush", "tenant": "t"}')
    assert "hush" not in repr(args)
    transfer = pickle.loads(pickle.dumps(transfer_of(args)))
    assert "hush" not in f"{transfer} {transfer!r} {transfer.kv_connector_extra_config}"
    assert load_config(transfer.kv_connector_extra_config, environ={}).pool_secret.reveal() == "hush-hush"


def test_namespaces_made_by_hand_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="--kv-connector"):
        EngineArgs.from_cli_args(argparse.Namespace(kv_connector=None, moon_cache_config={"dram_size": 1}, model="m"))


def test_registering_again_changes_nothing() -> None:
    before = (EngineArgs.add_cli_args, FlexibleArgumentParser.parse_args, compat.connector_names())
    register()
    assert before == (EngineArgs.add_cli_args, FlexibleArgumentParser.parse_args, compat.connector_names())
    assert compat.connector_names().count("mooncake") == 1


def test_every_signature_fits_this_vllm() -> None:
    for table in (compat.FLAGS, compat.REGISTRY, compat.CONNECTOR, compat.CPU_LAYOUT):
        compat.require(table)


@pytest.mark.parametrize(
    ("name", "expected", "part"),
    [
        ("vllm.engine.arg_utils:EngineArgs.from_cli_args", ("other",), "from_cli_args(args) instead of (other)"),
        ("vllm.engine.arg_utils:EngineArgs.gone", ("args",), "has no EngineArgs.gone"),
        ("vllm.no_such_module:f", (), "has no f"),
    ],
)
def test_another_vllm_is_named(name: str, expected: tuple[str, ...], part: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        compat.require({name: expected})
    assert part in str(error.value) and compat.vllm_version() in str(error.value)


@pytest.mark.parametrize(
    "command", [["vllm", "serve", "some/model"], ["-m", "vllm.entrypoints.openai.api_server", "--model", "some/model"]]
)
def test_a_wrong_key_ends_the_real_command_at_once(command: list[str]) -> None:
    program = [str(Path(sys.executable).with_name("vllm"))] if command[0] == "vllm" else [sys.executable, *command[:2]]
    rest = command[1:] if command[0] == "vllm" else command[2:]
    began = time.monotonic()
    done = subprocess.run(
        [*program, *rest, *MOONCAKE, "--moon-cache-config", '{"knid": "Store"}'], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert "'knid' (--moon-cache-config) is no setting: did you mean kind?" in done.stderr.splitlines()[-1]
    assert time.monotonic() - began < 30, "most of it is vLLM's import"
