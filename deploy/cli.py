"""The `tandem` command: `up` starts a cluster and stays with it; `status` and `scale` talk to a running one."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import typing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from deploy.config import ClusterConfig, field_descriptions, load_config
from protocol.errors import ConfigError, TandemError


def main() -> None:
    arguments = _parser().parse_args()
    try:
        sys.exit(arguments.run(arguments))
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
    status = commands.add_parser("status", help="show the workers and pairs of a running cluster")
    status.add_argument("--port", type=int, default=ClusterConfig().port, help="port of its HTTP endpoint")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(run=_status)
    scale = commands.add_parser("scale", help="change the numbers of workers of a running cluster")
    scale.add_argument("counts", nargs="+", metavar="ROLE=N", help="prefill=N, decode=N or both")
    scale.add_argument("--port", type=int, default=ClusterConfig().port, help="port of its HTTP endpoint")
    scale.add_argument("--timeout-s", type=float, default=600.0, help="seconds to wait for the workers; 0: do not wait")
    scale.set_defaults(run=_scale)
    return parser


def _add_config_flags(parser: argparse.ArgumentParser) -> None:
    descriptions = field_descriptions()
    hints = typing.get_type_hints(ClusterConfig)
    for field in msgspec.structs.fields(ClusterConfig):
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


def _up(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

    from deploy.demo_model import ensure_demo_model
    from deploy.launcher import Launcher

    overrides = {name: value for name, value in vars(arguments).items() if name in ClusterConfig.__struct_fields__}
    config = load_config(arguments.config, overrides)
    logging.basicConfig(level=config.log_level.upper(), format="%(message)s", stream=sys.stderr)
    console = Console(stderr=True, highlight=False)
    model = config.model
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("Starting", total=None)
        if not model:
            model = str(ensure_demo_model(lambda text: progress.update(task, description=text)))
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
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"{'https' if config.ssl_certfile else 'http'}://{host}:{config.port}"
    body = json.dumps(
        {"model": served_name, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 48, "stream": True}
    )
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_key or config.api_keys_file else ""
    print(f"Tandem serves {served_name} on {url}/v1", flush=True)
    print(f"\ncurl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n", flush=True)
    console.print(f"Logs are in {logs}. Ctrl-C stops the cluster.", soft_wrap=True)


def _status(arguments: argparse.Namespace) -> int:
    from deploy.status import print_status

    return print_status(arguments.port, arguments.json)


def _scale(arguments: argparse.Namespace) -> int:
    from deploy.scale import run_scale

    return run_scale(arguments.port, arguments.counts, arguments.timeout_s)


if __name__ == "__main__":
    main()
