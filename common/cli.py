"""The command `mooncake-kv`: run, stop and look at nodes, and the demo.

Promises: starts light (each command imports what it needs); a mistake ends with one sentence on stderr and exit code 2, something that is
not there or failed with exit code 1; `--json` prints or writes one JSON document and nothing else on stdout.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from .config import CacheConfig
    from .node.paths import NodePaths

# LMDeploy finds the plugin only where PyTorch may load extensions.
TORCH_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Keeps and shares the KV cache of LLM engines."
)
node_app = typer.Typer(invoke_without_command=True, help="The process that holds the cache for all engines of one user on this machine.")
app.add_typer(node_app, name="node")

Name = Annotated[str | None, typer.Argument(help="Name of the node; otherwise the configured one.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a text for people.")]
CacheSettings = Annotated[
    str | None, typer.Option("--moon-cache-config", metavar="JSON", help="Settings, as on an engine's command line.", show_default=False)
]


@contextmanager
def _errors_as_sentences() -> Iterator[None]:
    from .errors import ConfigError
    from .node.spawn import NodeUnavailable

    try:
        yield
    except (ConfigError, NodeUnavailable, OSError) as error:
        typer.echo(f"mooncake-kv: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None


@node_app.callback()
def node_default(context: typer.Context) -> None:
    """Without a command: run the configured node in the foreground."""
    if context.invoked_subcommand is None:
        node_run()


@node_app.command("run")
def node_run(name: Name = None, moon_cache_config: CacheSettings = None) -> None:
    """Run a node in the foreground, as a service manager does. Engines start one themselves when none is running."""
    with _errors_as_sentences():
        from .node import paths

        config, node = _node(name, moon_cache_config)
        paths.create(node)
    settings, sources = config.node_settings(), {key: config.sources[key] for key in config.node_settings()}
    command = [sys.executable, "-P", "-m", "mooncake_kv.common.node", "--name", node.name, "--folder", str(node.folder)]
    os.execv(sys.executable, [*command, "--settings", json.dumps(settings), "--sources", json.dumps(sources)])


@node_app.command("stop")
def node_stop(name: Name = None, as_json: Json = False) -> None:
    """End a running node. Engines go on without it; one that finds no node starts the next one, empty."""
    from rich.console import Console

    with _errors_as_sentences():
        from .node.tool import NodeTool

        _, node = _node(name)
        with Console(stderr=True).status(f"Stopping node {node.name!r} ..."), NodeTool(node, version=_version(), timeout_s=15) as tool:
            pid = tool.welcome.pid
            tool.stop()
    typer.echo(json.dumps({"node": node.name, "pid": pid, "stopped": True}) if as_json else f"Node {node.name!r} (pid {pid}) has ended.")


@app.command()
def status(name: Name = None, as_json: Json = False) -> None:
    """Show the running nodes of this user, or one of them."""
    from rich.console import Console

    with _errors_as_sentences():
        from .node.paths import known_nodes
        from .node.spawn import NodeUnavailable
        from .node.tool import NodeTool

        found: list[dict[str, Any]] = []
        for node in [_node(name)[1]] if name is not None else known_nodes():
            try:
                with NodeTool(node, version=_version()) as tool:
                    about = {"version": tool.welcome.version, "pid": tool.welcome.pid}
                    found.append({"node": node.name, "folder": str(node.folder), "running": True, **about, "stats": tool.stats()})
            except NodeUnavailable as error:
                found.append({"node": node.name, "folder": str(node.folder), "running": False, "reason": str(error)})
    if as_json:
        typer.echo(json.dumps({"nodes": found}))
    else:
        console = Console()
        if not found:
            console.print("No node is running. Engines start one when they need it.")
        for about in found:
            _print_status(console, about)
        if os.environ.get(TORCH_AUTOLOAD, "1") != "1" and find_spec("lmdeploy"):
            console.print(f"{TORCH_AUTOLOAD}={os.environ[TORCH_AUTOLOAD]}: LMDeploy, started like this, does not see mooncake-kv.")
    if not found or not all(about["running"] for about in found):
        raise typer.Exit(1)


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Folder or name of the chat model to serve; `make setup` brings a small one.", show_default=False),
    ] = None,
    engines: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="vllm, or several engines (vllm,sglang,lmdeploy): then each also answers from the others' pages."
        ),
    ] = "vllm",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the result there as JSON.", show_default=False)
    ] = None,
) -> None:
    """Ask a model about a long text: without the cache, after a reset of the engine's own cache, in a fresh engine, from disk, from
    Mooncake's pool; and, of several engines, each from what each of them has read."""
    import signal

    from .demo import ENGINES, DemoFailed, run

    shipped = Path(sys.prefix, "share", "mooncake-kv", "demo-model")
    if model is None and not shipped.exists():
        typer.echo("mooncake-kv: --model is missing, and this environment has no model of its own (that of `make setup` has one)", err=True)
        raise typer.Exit(2)
    names = list(dict.fromkeys(name.strip() for name in engines.split(",")))
    if unknown := [name for name in names if name not in ENGINES]:
        typer.echo(f"mooncake-kv: --engines has {unknown[0]!r}; known are {', '.join(ENGINES)}", err=True)
        raise typer.Exit(2)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends its processes and removes its folder then, too
    try:
        report = run(model or str(shipped.resolve()), names)
    except DemoFailed as error:
        typer.echo(f"mooncake-kv: {error}", err=True)
        raise typer.Exit(1) from None
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    if not report.correct:
        raise typer.Exit(1)


def _node(name: str | None, flag: str | None = None) -> tuple[CacheConfig, NodePaths]:
    """The configuration and the node it names, or the one named on the command line. Raises ConfigError where both name one."""
    from .config import load_config
    from .errors import ConfigError
    from .node.paths import node_paths

    config = load_config(flag)
    if name is not None and name != config.node and config.sources["node"] != "default":
        raise ConfigError(
            f"node is {name!r} (command line) and {config.node!r} ({config.sources['node']}): give it once, or the same value"
        )
    return config, node_paths(config.node if name is None else name)


def _version() -> str:
    from importlib.metadata import version

    return version("mooncake-kv")


def _print_status(console: Any, about: dict[str, Any]) -> None:
    """One table; counters that are still zero are left out. Long words are folded: an ellipsis would hide what was asked for, and not every
    terminal can show one."""
    from rich.table import Table
    from rich.text import Text

    stats = about.get("stats", {})
    rows = {key: str(about[key]) for key in ("folder", "pid", "version", "reason") if key in about}
    if about["running"]:
        rows |= {"memory": f"{_mebibytes(stats['arena_bytes'])} of at most {_mebibytes(stats['dram_bytes'])}"}
        if stats.get("host_pool_bytes"):  # a node of another version may not tell
            rows["engines' host pools"] = f"{_mebibytes(stats['host_pool_bytes'])}, beside the node's memory"
        rows |= {key: f"{stats[key]:,}" for key in ("pages", "namespaces", "engines", "clients")}
        rows |= {
            key: _shown(key, value)
            for key, value in stats.items()
            if value and key not in (*rows, "name", "arena_bytes", "dram_bytes", "host_pool_bytes", "tiers")
        }
    table = Table(title=f"Node {about['node']!r}", title_justify="left", show_header=False)
    for _ in range(2):
        table.add_column(overflow="fold")
    for key, value in rows.items():
        table.add_row(key, Text(value))
    console.print(table)
    if about["running"]:
        _print_tiers(console, stats["tiers"])


def _print_tiers(console: Any, tiers: dict[str, dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title="Tiers", title_justify="left")
    for column in ("tier", "state", "pages", "holds", "hit pages", "hit", "read", "written", "not written"):
        table.add_column(column, justify="left" if column in ("tier", "state") else "right", overflow="fold")
    for name, tier in tiers.items():
        holds = f"{_mebibytes(tier.get('bytes', 0))} of {_mebibytes(tier.get('limit_bytes', 0))}" if tier.get("limit_bytes") else ""
        unwritten = tier.get("pages_unwritten", 0) + tier.get("pages_failed", 0)
        table.add_row(
            name,
            tier.get("state", "up"),
            f"{tier['pages']:,}" if "pages" in tier else "",
            holds,
            f"{tier['hit_pages']:,}",
            _mebibytes(tier["hit_bytes"]),
            _flow(tier, "read"),
            _flow(tier, "write"),
            f"{unwritten:,} pages" if unwritten else "",
        )
    console.print(table)
    for name, tier in tiers.items():
        if tier.get("reason"):
            console.print(f"{name} is not used: {tier['reason']}", markup=False)


def _flow(tier: dict[str, Any], flow: str) -> str:
    """Bytes, rate while something was going on, and times of recent jobs."""
    count, busy = tier.get(f"{flow}_bytes", 0), tier.get(f"{flow}_busy_s", 0)
    if not count:
        return ""
    times = f"{tier[f'{flow}_p50_ms']:.3g} ms, p99 {tier[f'{flow}_p99_ms']:.3g} ms"
    return f"{_mebibytes(count)}, {count / max(busy, 1e-9) / 1e9:.2f} GB/s\n{times}"


def _shown(key: str, value: Any) -> str:
    if key.endswith("_bytes") or key.startswith("bytes_"):
        return _mebibytes(value)
    return f"{value:,}" if isinstance(value, int) and not key.endswith("pid") else str(value)


def _mebibytes(count: float) -> str:
    return f"{count / (1 << 20):,.1f} MiB"


if __name__ == "__main__":
    app()
