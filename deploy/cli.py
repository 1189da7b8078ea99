"""The `tandem` command: `up` starts a cluster and stays with it, `worker` adds workers on another host, `keys` makes
what protects the traffic between them; `status`, `scale`, `drain` and `restart` talk to a running cluster."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import typing
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from tandem.deploy.config import ClusterConfig, bracketed, field_descriptions, load_config
from tandem.protocol.messages.membership import Role
from tandem.protocol.network import NetworkConfig
from tandem.protocol.network_keys import make_keys
from tandem.runtime.errors import ConfigError, TandemError


def main() -> None:
    arguments = _parser().parse_args()
    try:
        exit_code = arguments.run(arguments)
        sys.stdout.flush()
        sys.exit(exit_code)
    except BrokenPipeError:  # whoever read what is printed, `head` for one, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        sys.exit(1)  # as rich, which prints tables, does
    except TandemError as error:
        print(f"tandem: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem", description="Serve large language models with prefill and decode on separate workers."
    )
    parser.add_argument("--version", action="version", version=f"tandem {version('tandem-serve')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser(
        "up", help="start a cluster on this machine", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    up.add_argument("--config", type=Path, metavar="FILE", default=None, help="TOML file with the same keys")
    _add_config_flags(up)
    up.set_defaults(run=_up)
    worker = commands.add_parser(
        "worker",
        help="start workers for a cluster that runs on another host",
        description="Start workers that join a running cluster. Settings that are not about workers do nothing here.",
    )
    worker.add_argument("role", choices=typing.get_args(Role), help="what they do")
    worker.add_argument("--count", type=int, default=1, metavar="N", help="how many (default: 1)")
    worker.add_argument("--config", type=Path, metavar="FILE", default=None, help="TOML file with the same keys")
    _add_config_flags(worker, left_out=("prefill", "decode", "proxies"))
    worker.set_defaults(run=_worker)
    keys = commands.add_parser("keys", help="make the keys that protect traffic between hosts")
    keys.add_argument(
        "folder", type=Path, nargs="?", default=Path("tandem-keys"), metavar="FOLDER", help="new or empty"
    )
    keys.set_defaults(run=_keys)
    status = commands.add_parser("status", help="show the workers and pairs of a running cluster")
    status.add_argument("--port", type=int, default=ClusterConfig().port, help="port of its HTTP endpoint")
    status.add_argument("--join", default="", metavar="S", help="endpoints of proxies on another host")
    status.add_argument("--network-keys", default="", metavar="S", help="folder of keys, with the operator's secret")
    status.add_argument("--insecure-network", action="store_true", help="ask without keys")
    how = status.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print JSON")
    how.add_argument("--watch", action="store_true", help="show it live, until Ctrl-C")
    status.set_defaults(run=_status)
    scale = commands.add_parser("scale", help="change the numbers of workers of a running cluster")
    scale.add_argument("counts", nargs="+", metavar="ROLE=N", help="prefill=N, decode=N or both")
    scale.add_argument("--port", type=int, default=ClusterConfig().port, help="port of its HTTP endpoint")
    scale.add_argument("--timeout-s", type=float, default=600.0, help="seconds to wait for the workers; 0: do not wait")
    scale.set_defaults(run=_scale)
    drain = commands.add_parser("drain", help="let a worker finish what it has and leave for good")
    drain.add_argument("worker", metavar="WORKER", help="its name, such as decode-1")
    restart = commands.add_parser("restart", help="start processes anew one at a time, losing nothing")
    restart.add_argument("names", nargs="*", metavar="NAME", help="such as decode-1 or proxy-0; none: all of them")
    restart.set_defaults(run=_restart)
    drain.set_defaults(run=_drain)
    for command, timeout_s in ((drain, 60.0), (restart, 600.0)):
        command.add_argument("--port", type=int, default=ClusterConfig().port, help="port of the HTTP endpoint")
        command.add_argument(
            "--timeout-s", type=float, default=timeout_s, metavar="X", help="give up after so long, for each process"
        )
    return parser


def _add_config_flags(parser: argparse.ArgumentParser, left_out: Sequence[str] = ()) -> None:
    descriptions = field_descriptions()
    hints = typing.get_type_hints(ClusterConfig)
    for field in msgspec.structs.fields(ClusterConfig):
        if field.name in left_out:
            continue
        flag = "--" + field.name.replace("_", "-")
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": field.name}
        kind = hints[field.name]
        choices = typing.get_args(kind)
        default = f" (default: {field.default!r})" if field.default not in ("", False) else ""
        options["help"] = descriptions[field.name] + default
        if choices:
            options["choices"] = choices
        elif kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = kind
            options["metavar"] = {int: "N", float: "X"}.get(kind, "S")
        if field.name == "ray":
            options |= {"nargs": "?", "const": "auto", "metavar": "ADDRESS"}
        parser.add_argument(flag, **options)


def _worker(arguments: argparse.Namespace) -> int:
    if arguments.count < 1:
        raise ConfigError(f"count: {arguments.count} workers cannot be started; give 1 or more")
    arguments.proxies = 1  # not started: it is the others' proxies that these workers join
    arguments.prefill, arguments.decode = 0, 0
    setattr(arguments, arguments.role, arguments.count)
    return _up(arguments, must_join=True)


def _keys(arguments: argparse.Namespace) -> int:
    for file in make_keys(arguments.folder):
        print(file)
    print(
        "\nGive every host the .key files, and the .key_secret of what runs there: worker, proxy (and worker) where "
        "`tandem up` runs, operator for `tandem status --join`. Then start everything with --network-keys FOLDER."
    )
    return 0


def _up(arguments: argparse.Namespace, must_join: bool = False) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

    from tandem.deploy.demo_model import DEMO_MODEL
    from tandem.deploy.launch.launcher import Launcher

    overrides = {name: value for name, value in vars(arguments).items() if name in ClusterConfig.__struct_fields__}
    config = load_config(arguments.config, overrides)
    if must_join and not config.join:
        raise ConfigError("join: name the proxies to join, as tcp://HOST:PORT; `tandem up --cluster-host` prints them")
    logging.basicConfig(level=config.log_level.upper(), format="%(message)s", stream=sys.stderr)
    console = Console(stderr=True, highlight=False)
    model = config.model or str(DEMO_MODEL)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("Starting", total=None)
        served_name = config.served_model_name or (Path(model).name if config.model else "tandem-demo")

        async def serve() -> None:
            launcher = Launcher(config, model, served_name)

            def show_progress(text: str, loaded: float | None) -> None:
                progress.update(
                    task, description=f"Starting {served_name}: {text}", total=loaded and 1, completed=loaded
                )

            def show_ready(logs: Path) -> None:
                progress.stop()
                _print_ready(console, config, served_name, logs)

            await launcher.run(show_progress, show_ready)

        asyncio.run(serve())
    console.print("Stopped.")
    return 0


def _print_ready(console: Any, config: ClusterConfig, served_name: str, logs: Path) -> None:
    if config.join:
        print(f"Workers for {served_name} have joined {config.join}", flush=True)
        console.print(f"Logs are in {logs}. Ctrl-C stops them.", soft_wrap=True)
        return
    url = f"{'https' if config.ssl_certfile else 'http'}://{bracketed(config.host)}:{config.port}"
    messages = [{"role": "user", "content": "Hello!"}]
    options = {"max_tokens": 48, "temperature": 0, "stream": True}
    body = json.dumps({"model": served_name, "messages": messages, **options})
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_key or config.api_keys_file else ""
    print(f"Tandem serves {served_name} on {url}/v1", flush=True)
    print(f"\ncurl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n", flush=True)
    if config.proxy_endpoints:
        print(f"Workers of other hosts join with: --join {','.join(config.proxy_endpoints)}", flush=True)
    admin_host, admin_port = config.admin_address
    console.print(f"Its page is http://{bracketed(admin_host)}:{admin_port}/dashboard", soft_wrap=True)
    console.print(f"Logs are in {logs}. Ctrl-C stops the cluster.", soft_wrap=True)


def _status(arguments: argparse.Namespace) -> int:
    from tandem.deploy.commands.status import print_status, watch_status

    network = NetworkConfig(arguments.network_keys, arguments.insecure_network)
    endpoints = [endpoint.strip() for endpoint in arguments.join.split(",") if endpoint.strip()]
    if arguments.watch:
        return watch_status(arguments.port, endpoints, network)
    return print_status(arguments.port, arguments.json, endpoints, network)


def _drain(arguments: argparse.Namespace) -> int:
    from tandem.deploy.commands.draining import drain

    drain(arguments.port, arguments.worker, arguments.timeout_s, _say)
    return 0


def _restart(arguments: argparse.Namespace) -> int:
    from tandem.deploy.commands.draining import restart

    restart(arguments.port, arguments.names, arguments.timeout_s, _say)
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


def _scale(arguments: argparse.Namespace) -> int:
    from tandem.deploy.commands.scale import run_scale

    return run_scale(arguments.port, arguments.counts, arguments.timeout_s)


if __name__ == "__main__":
    main()
