"""Configuration: every spelling means the same everywhere; what is wrong is refused by key, value and source; secrets stay secret."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_kv.common import config as config_module
from mooncake_kv.common.config import NODE_KEYS, CacheConfig, asks_for_us, load_config
from mooncake_kv.common.errors import ConfigError
from mooncake_kv.common.secret import Secret
from mooncake_kv.common.sizes import parse_size

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"
KEYS = [field for field in CacheConfig.__struct_fields__ if field != "sources"]

# For each key a value that is not the default, as JSON and as the environment would spell it, and what it becomes.
VALUES: dict[str, tuple[Any, str, Any]] = {
    "kind": ("store", "STORE", "Store"),
    "node": ("gpu-0", "gpu-0", "gpu-0"),
    "dram_size": ("8gb", "8589934592", 8 << 30),
    "extent_size": ("64mb", "64MiB", 64 << 20),
    "idle_exit_s": (0, "0", 0.0),
    "node_conflict": ("fail", "Fail", "fail"),
    "metrics_host": ("::", "::", "::"),
    "metrics_port": (-1, "-1", -1),
    "fetch_timeout_ms": (200, "200", 200),
    "fetch_deadline_ms": (500, "500", 500),
    "migration_timeout_ms": (700, "700", 700),
    "migration_hold_s": (5, "5", 5.0),
    "migration_prefill_s": (2.5, "2.5", 2.5),
    "page_tokens": (128.0, "128", 128),
    "tenant": ("team a", "team a", "team a"),
    "model_id": ("org/model@3", "org/model@3", "org/model@3"),
    "fingerprint": ("full", "FULL", "full"),
    "weights_epoch": ("7", "7", "7"),
    "pool_secret": ("hunter2", "hunter2", Secret("hunter2")),
    "verify_on_load": (True, "true", "true"),
    "on_unsupported": ("disable", "disable", "disable"),
    "save_decode": (False, "no", False),
    "layers_per_group": (8, "8", 8),
    "staging_window": ("1.5gb", "1.5g", 3 << 29),
    "load_step_bytes": ("64mb", "64MiB", 64 << 20),
    "credits": ("256m", "256 MiB", 256 << 20),
    "ssd_path": ("/mnt/kv/", "/mnt/kv", "/mnt/kv"),
    "ssd_size": ("1.5tb", "1536g", 3 << 39),
    "master_server_address": ("10.0.0.1:50051", "10.0.0.1:50051", "10.0.0.1:50051"),
    "metadata_server": ("http://m:8080/metadata", "http://m:8080/metadata", "http://m:8080/metadata"),
    "protocol": ("RDMA", "Rdma", "rdma"),
    "device_name": ("mlx5_0,mlx5_1", "mlx5_0,mlx5_1", "mlx5_0,mlx5_1"),
    "global_segment_size": (3355443200, "3200mb", 3355443200),
    "local_buffer_size": ("1t", "1TB", 1 << 40),
    "local_hostname": ("node-1.local", "node-1.local", "node-1.local"),
    "write_policy": ("ALL", "all", "all"),
    "replicas": (2, "2", 2),
    "soft_pin": (True, "yes", True),
}
# Keys that are given together.
PARTNERS = {"ssd_path": "ssd_size", "ssd_size": "ssd_path"}


def load(flag: str | Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> CacheConfig:
    return load_config(flag, environ=environ or {})


def refused(flag: str | Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(flag, environ)
    return str(caught.value)


def test_defaults() -> None:
    config = load()
    assert config == msgspec.structs.replace(CacheConfig(), sources=dict.fromkeys(KEYS, "default"))
    assert load({}) == load("{}") == config
    assert config.node_settings() == {
        "dram_size": 0,
        "extent_size": 1 << 30,
        "idle_exit_s": 1800.0,
        "metrics_host": "127.0.0.1",
        "metrics_port": 0,
        "ssd_path": "",
        "ssd_size": 0,
        "master_server_address": "",
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": 4 << 30,
        "local_buffer_size": 16 << 20,
        "local_hostname": "",
        "write_policy": "auto",
        "replicas": 1,
        "soft_pin": False,
    }


def test_values_covers_every_key() -> None:
    assert set(VALUES) == set(KEYS) == set(config_module._PARSERS)
    assert set(NODE_KEYS) < set(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_means_the_same_in_every_place(key: str, tmp_path: Path) -> None:
    expected = VALUES[key][2]
    keys = [key, *([PARTNERS[key]] if key in PARTNERS else [])]
    as_json = {key: VALUES[key][0] for key in keys}
    as_text = {key: VALUES[key][1] for key in keys}
    variable = f"MOONCAKE_{key.upper()}"
    variables = {f"MOONCAKE_{key.upper()}": text for key, text in as_text.items()}
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps(as_json))
    file = {"MOONCAKE_CONFIG_PATH": str(path)}
    for config, source in (
        (load(as_json), "--moon-cache-config"),
        (load(json.dumps(as_json)), "--moon-cache-config"),
        (load(as_text), "--moon-cache-config"),
        (load(environ=file), f"file {path} (MOONCAKE_CONFIG_PATH)"),
        (load(environ=variables), f"environment {variable}"),
        (load(as_text, file | variables), "--moon-cache-config"),
        (load(environ=file | variables), f"file {path} (MOONCAKE_CONFIG_PATH)"),
    ):
        assert getattr(config, key) == expected
        assert expected != getattr(CacheConfig(), key) or key == "kind"
        assert type(getattr(config, key)) is type(expected)
        assert config.sources[key] == source
        assert set(config.sources) == set(KEYS)
        others = [k for k in KEYS if k not in keys]
        assert all(getattr(config, k) == getattr(CacheConfig(), k) and config.sources[k] == "default" for k in others)


@pytest.mark.parametrize(
    ("variable", "key"),
    [
        ("MOONCAKE_MASTER", "master_server_address"),
        ("MOONCAKE_PROTOCOL", "protocol"),
        ("MOONCAKE_DEVICE", "device_name"),
        ("MOONCAKE_TE_META_DATA_SERVER", "metadata_server"),
        ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "global_segment_size"),
        ("MOONCAKE_LOCAL_BUFFER_SIZE", "local_buffer_size"),
        ("MOONCAKE_LOCAL_HOSTNAME", "local_hostname"),
        ("MOONCAKE_TENANT_ID", "tenant"),
    ],
)
def test_mooncakes_variables(variable: str, key: str) -> None:
    config = load(environ={variable: VALUES[key][1]})
    assert getattr(config, key) == VALUES[key][2]
    assert config.sources[key] == f"environment {variable}"


def test_tenant_id_is_tenant() -> None:
    config = load({"tenant_id": "a"})
    assert (config.tenant, config.sources["tenant"]) == ("a", "--moon-cache-config, as tenant_id")
    assert load({"tenant_id": "a", "tenant": "a"}).tenant == "a"
    assert refused({"tenant_id": "a", "tenant": "b"}) == (
        "tenant is 'a' (--moon-cache-config, as tenant_id) and 'b' (--moon-cache-config): give it once, or the same value"
    )


def test_a_file_of_mooncake_is_accepted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The example in Mooncake's own documentation."""
    path = tmp_path / "mooncake.json"
    path.write_text(
        """{"local_hostname": "localhost", "metadata_server": "localhost:8080", "global_segment_size": 3355443200,
        "local_buffer_size": 1073741824, "protocol": "tcp", "device_name": "", "master_server_address": "localhost:8081",
        "enable_ssd_offload": true, "ssd_offload_path": "/nvme/mooncake_offload", "tenant_id": "default",
        "enable_client_http_server": false, "client_http_port": 9300}"""
    )
    config = load(environ={"MOONCAKE_CONFIG_PATH": str(path)})
    assert config.master_server_address == "localhost:8081"
    assert (config.device_name, config.tenant, config.global_segment_size) == ("", "default", 3355443200)
    assert "enable_ssd_offload" in caplog.text and str(path) in caplog.text


# ---- sizes ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("512mb", 512 << 20),
        ("1.5gb", 3 << 29),
        ("4g", 4 << 30),
        ("4GiB", 4 << 30),
        ("4 GiB", 4 << 30),
        (" 4G ", 4 << 30),
        ("1T", 1 << 40),
        ("1tib", 1 << 40),
        ("2k", 2048),
        ("2KB", 2048),
        ("0.1kb", 102),
        ("4096", 4096),
        ("4096b", 4096),
        (4096, 4096),
        (4096.0, 4096),
        (0, 0),
        ("0", 0),
    ],
)
def test_sizes(value: object, size: int) -> None:
    assert parse_size(value) == size


@pytest.mark.parametrize(
    "value",
    [
        -1,
        "-1",
        "-1gb",
        "+1",
        True,
        False,
        None,
        "",
        " ",
        "gb",
        "1 2",
        "1gbit",
        "1ib",
        "1e9",
        "1,5gb",
        "0x10",
        ".5g",
        "1.",
        "inf",
        "nan",
        float("inf"),
        float("nan"),
        1.5,
        [],
        {},
        b"1",
        "1" * 50,
        "9999999999t",
        1 << 61,
        "1_000",
        "\u0661",
    ],
)
def test_sizes_refused(value: object) -> None:
    with pytest.raises(ValueError, match="a size is"):
        parse_size(value)


@given(st.integers(0, 1 << 59), st.sampled_from(["", "b", "B"]))
def test_plain_numbers_are_exact(size: int, unit: str) -> None:
    assert parse_size(size) == parse_size(f"{size}{unit}") == size


# ---- refusals --------------------------------------------------------------------------------------------------------------------


NOTHING: list[Any] = ["", None, [], {}, "\n"]
WRONG: list[tuple[str, Any]] = [(key, value) for key in KEYS if key != "device_name" for value in NOTHING]
WRONG += [
    (key, True)
    for key in KEYS
    if key not in ("save_decode", "verify_on_load", "soft_pin")  # those that take booleans
]
WRONG += [
    ("kind", "PD"),
    ("node", "../x"),
    ("node", ".hidden"),
    ("node", "a/b"),
    ("node", "x" * 65),
    ("dram_size", "-1gb"),
    ("dram_size", -1),
    ("dram_size", 4096),
    ("dram_size", "lots"),
    ("extent_size", 0),
    ("extent_size", 1000),
    ("extent_size", (1 << 30) + 1),
    ("extent_size", "2t"),
    ("idle_exit_s", -1),
    ("idle_exit_s", "soon"),
    ("idle_exit_s", float("inf")),
    ("node_conflict", "ignore"),
    ("metrics_host", "a b"),
    ("metrics_port", 65536),
    ("metrics_port", -2),
    ("metrics_port", "80a"),
    ("metrics_port", 80.5),
    ("fetch_timeout_ms", 0),
    ("fetch_deadline_ms", 0),
    ("ssd_path", "relative/folder"),
    ("ssd_path", "/a/../b"),
    ("ssd_path", "/"),
    ("ssd_path", 5),
    ("ssd_size", 1000),
    ("page_tokens", 0),
    ("page_tokens", 5000),
    ("tenant", "x" * 129),
    ("tenant", "a\tb"),
    ("weights_epoch", 3),
    ("fingerprint", "none"),
    ("pool_secret", 12345),
    ("verify_on_load", "maybe"),
    ("verify_on_load", 1),
    ("save_decode", 1),
    ("save_decode", "maybe"),
    ("layers_per_group", -1),
    ("master_server_address", "host"),
    ("master_server_address", "host:0"),
    ("master_server_address", "host:70000"),
    ("master_server_address", "a b:1"),
    ("protocol", "tcpp"),
    ("device_name", "a b"),
    ("global_segment_size", "1mb"),
    ("global_segment_size", "17mb"),
    ("master_server_address", "embeded"),
    ("write_policy", "never"),
    ("replicas", 0),
    ("soft_pin", "perhaps"),
    ("local_buffer_size", 0),
]


@pytest.mark.parametrize(("key", "value"), WRONG, ids=str)
def test_wrong_values_are_named_with_key_value_and_source(key: str, value: Any) -> None:
    message = refused({key: value})
    shown = "***" if key == "pool_secret" else repr(value)[:97]
    assert message.startswith(f"{key} is {shown}")
    assert "(--moon-cache-config)" in message
    if isinstance(value, str):
        assert f"(environment MOONCAKE_{key.upper()})" in refused(environ={f"MOONCAKE_{key.upper()}": value})


@pytest.mark.parametrize("key", sorted(PARTNERS))
def test_one_of_a_pair_without_the_other_is_refused(key: str) -> None:
    value = VALUES[key][0]
    message = refused({key: value})
    assert message.endswith(f"(--moon-cache-config) without {PARTNERS[key]}: give both or neither") and message.startswith(f"{key} is ")


def test_a_home_is_that_of_the_reader() -> None:
    assert load({"ssd_path": "~/kv", "ssd_size": "1gb"}).ssd_path == os.path.expanduser("~/kv")


def test_long_values_are_cut() -> None:
    assert len(refused({"node": "x" * 10_000})) < 300


@pytest.mark.parametrize("address", ["h:1", "10.1.2.3:50051", "[::1]:50051", "a.b-c.d:65535", "etcd://10.0.0.1:2379;10.0.0.2:2379"])
def test_addresses(address: str) -> None:
    assert load({"master_server_address": address}).master_server_address == address
    assert load({"master_server_address": "Embedded"}).master_server_address == "embedded"


def test_unknown_keys_are_refused_with_a_guess() -> None:
    assert refused({"dram_sise": "1gb"}) == "'dram_sise' (--moon-cache-config) is no setting: did you mean dram_size?"
    assert refused({"tenantid": "x"}).endswith("did you mean tenant_id?")
    assert refused({"zzz": 1}) == "'zzz' (--moon-cache-config) is no setting"
    assert "'sources'" in refused({"sources": {}})


@pytest.mark.parametrize("name", ["MOONCAKE_DRAMSIZE", "MOONCAKE_TENNANT", "MOONCAKE_PROTOCL", "MOONCAKE_POOL_SECRETS", "MOONCAKE_MASTR"])
def test_misspelt_variables_are_refused_by_name(name: str) -> None:
    message = refused(environ={name: "hunter2"})
    assert name in message and "did you mean MOONCAKE_" in message and "hunter2" not in message


@pytest.mark.parametrize(
    "name",
    [
        "MOONCAKE_CHECK_SERVER",
        "MOONCAKE_CLIENT",
        "MOONCAKE_CLIENT_HTTP_PORT",
        "MOONCAKE_MASTER_METRICS_PORT",
        "MOONCAKE_MASTER_SERVICE_HOST",
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES",
        "MOONCAKE_PREFERRED_SEGMENT",
        "MOONCAKE_REQUESTER_LOCAL_HOSTNAME",
        "MOONCAKE_KV_NODES",
        "MOONCAKE_KV_DRAM_SIZE",
        "VLLM_MOONCAKE_BOOTSTRAP_PORT",
    ],
)
def test_variables_of_others_are_ignored(name: str) -> None:
    assert load(environ={name: "x"}) == load()


def test_sources_that_disagree_are_refused_with_both(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"tenant": "b", "dram_size": "2gb"}')
    file = {"MOONCAKE_CONFIG_PATH": str(path)}
    assert refused({"tenant": "a"}, file) == (
        f"tenant is 'a' (--moon-cache-config) and 'b' (file {path} (MOONCAKE_CONFIG_PATH)): give it once, or the same value"
    )
    message = refused(environ=file | {"MOONCAKE_DRAM_SIZE": "1gb"})
    assert message.startswith(
        f"dram_size is 2147483648 (file {path} (MOONCAKE_CONFIG_PATH)) and 1073741824 (environment MOONCAKE_DRAM_SIZE)"
    )
    assert "MOONCAKE_MASTER_SERVER_ADDRESS" in refused(environ={"MOONCAKE_MASTER": "a:1", "MOONCAKE_MASTER_SERVER_ADDRESS": "b:1"})
    assert load({"dram_size": "2048mb"}, file).dram_size == 2 << 30


def test_flag_source_is_named() -> None:
    with pytest.raises(ConfigError, match=r"node is '' \(--hicache-storage-backend-extra-config\)"):
        load_config({"node": ""}, flag_source="--hicache-storage-backend-extra-config", environ={})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ('{"tenant": "hunter2"', "is no JSON"),
        ("[]", "must be a JSON object"),
        ('"Store"', "must be a JSON object"),
        ("null", "must be a JSON object"),
        ('{"tenant": "hunter2", "tenant": "hunter2"}', "'tenant' is given twice"),
        ('{"idle_exit_s": NaN}', "contains NaN"),
        ('{"idle_exit_s": 1e999}', "idle_exit_s is inf"),
        ("[" * 100_000, "nested too deeply"),
        ('{"idle_exit_s": %s}' % ("9" * 400), "idle_exit_s is 999"),
        ('{"idle_exit_s": %s}' % ("9" * 5000), "a number that is too long"),
    ],
)
def test_bad_json_is_refused_without_quoting_it(text: str, why: str, tmp_path: Path) -> None:
    message = refused(text)
    assert why in message and "--moon-cache-config" in message and "hunter2" not in message
    path = tmp_path / "c.json"
    path.write_text(text)
    message = refused(environ={"MOONCAKE_CONFIG_PATH": str(path)})
    assert why in message and str(path) in message and "hunter2" not in message


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"node": "a"}', encoding="utf-8-sig")
    assert load_config(environ={"MOONCAKE_CONFIG_PATH": str(tmp_path / "c.json")}).node == "a"


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "big").write_text(" " * ((1 << 20) + 1))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, why in (
        ("missing", "cannot be read: No such file"),
        (".", "is no regular file"),
        ("pipe", "is no regular file"),
        ("big", "is larger than"),
        ("bytes", "is not UTF-8"),
    ):
        message = refused(environ={"MOONCAKE_CONFIG_PATH": str(tmp_path / name)})
        assert why in message and str(tmp_path / name) in message and "MOONCAKE_CONFIG_PATH" in message
    assert "cannot be read" in refused(environ={"MOONCAKE_CONFIG_PATH": ""})


# ---- secrets -----------------------------------------------------------------------------------------------------------------------


def test_secrets_do_not_show(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load({"pool_secret": "hunter2"})
    assert config.pool_secret.reveal() == "hunter2"
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("x").info("%s %r", config, config)
    shown = [repr(config), str(config), f"{config}", caplog.text, msgspec.json.encode(config, enc_hook=str).decode()]
    for encode in (msgspec.json.encode, msgspec.msgpack.encode, msgspec.to_builtins):
        with pytest.raises(TypeError) as caught:
            encode(config)
        shown.append(str(caught.value))
    shown.append(refused({"pool_secret": "hunter2"}, {"MOONCAKE_POOL_SECRET": "hunter3"}))
    shown.append(refused({"pool_secret": ["hunter2"]}))
    shown.append(refused({"pool_secrte": "hunter2"}))
    shown.append(refused(environ={"MOONCAKE_POOL_SECRETE": "hunter2"}))
    assert all("hunter" not in text for text in shown)
    assert "***" in repr(config)


# ---- documentation -----------------------------------------------------------------------------------------------------------------


def test_every_key_is_documented_with_its_default_and_variable() -> None:
    rows = {}
    for line in DOCS.read_text().splitlines():
        if match := re.match(r"\| `(\w+)` \|", line):
            rows[match[1]] = line
    assert set(rows) == set(KEYS)
    for key in KEYS:
        default = getattr(CacheConfig(), key)
        spelled = str(default)
        if isinstance(default, Secret) or default == "":
            spelled = "none"
        elif isinstance(default, bool):
            spelled = spelled.lower()
        elif isinstance(default, float):
            spelled = str(int(default))
        elif isinstance(default, int) and default >= 1 << 30:
            spelled = f"{default >> 30}gb"
        assert f"| {spelled} |" in rows[key].replace("`", ""), (key, spelled)
        assert f"`MOONCAKE_{key.upper()}`" in rows[key]
    text = DOCS.read_text()
    for variable in config_module._VARIABLES:
        assert f"`{variable}`" in text
    for name in config_module._MOONCAKE_ONLY:
        assert f"`{name}`" in text


def test_asks_for_us_only_with_a_key_that_nobody_else_has(tmp_path: Path) -> None:
    stock = {"master_server_address": "h:1", "tenant_id": "a", "check_server": True, "prefetch_threshold": 64}
    assert not asks_for_us(stock, {"MOONCAKE_MASTER": "h:1", "MOONCAKE_PROTOCOL": "tcp", "MOONCAKE_TENANT_ID": "a"})
    assert not asks_for_us(None, {})
    assert asks_for_us({**stock, "kind": "Store"}, {})
    assert asks_for_us(None, {"MOONCAKE_DRAM_SIZE": "1gb"})
    file = tmp_path / "config.json"
    file.write_text('{"master_server_address": "h:1"}')
    assert not asks_for_us(stock, {"MOONCAKE_CONFIG_PATH": str(file)})
    file.write_text('{"node": "a"}')
    assert asks_for_us(stock, {"MOONCAKE_CONFIG_PATH": str(file)})
    for text in ("{", "5", "null", '["kind"]', '[{"kind": 1}]'):
        file.write_text(text)
        assert not asks_for_us(stock, {"MOONCAKE_CONFIG_PATH": str(file)})
