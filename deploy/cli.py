"""The `tandem` command: `up` starts a cluster and stays with it, `worker` adds workers on another host, `keys` makes
keys for the traffic between hosts; the other commands talk to a running cluster.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the working folder, in which a file may have the name of a module that is imported below

import argparse
import asyncio
import json
import logging
import math
import os
import shlex
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tandem.deploy.cluster_config import (
    ClusterConfig,
    bracketed,
    load_config,
    settings,
    unknown_name,
)
from tandem.deploy.commands.engine import add_engine_commands
from tandem.deploy.operations import changes
from tandem.deploy.operations.cluster_client import ClusterClient
from tandem.deploy.setting_flags import add_settings, given_settings
from tandem.engine.engine_config import Device
from tandem.protocol.messages.membership import Role
from tandem.protocol.network_keys import make_keys
from tandem.proxy.proxy_settings import HttpSettings
from tandem.runtime.errors import ConfigError, TandemError
from tandem.runtime.version import own_version

COMMON = (
    "model", "device", "max_model_len", "prefill", "decode", "workers", "tensor_parallel_size", "kv_cache_gib", "host",
    "port", "api_key", "cluster_host", "network_keys",
)  # fmt: skip
"""Settings that `tandem up --help` shows; `--help-all` shows all."""
COMMON_OF_WORKERS = ("model", "device", "join", "cluster_host", "network_keys", "tensor_parallel_size", "kv_cache_gib")
WORKER_ONLY = ("join", "name")
"""Settings that `tandem worker` takes and `tandem up` does not."""
NOT_OF_WORKERS = ("workers", "prefill", "decode", "proxies", "ray")
MAX_DOCTOR_S = 3600.0
SIMULATED = (
    "workers", "prefill", "decode", "proxies", "max_num_seqs", "max_num_batched_tokens", "decode_prefill_threshold",
    "device", "ttft_slo_ms", "itl_slo_ms",
)  # fmt: skip
"""Settings that `tandem simulate --trace` takes."""
UP_DESCRIPTION = """\
Start a cluster and keep it running until Ctrl-C. Without arguments it serves the demo model.

  a laptop:  tandem up --model ./my-model --port 8080
  GPUs:      tandem up --model ./my-model --device cuda --prefill 2 --decode 2
  hosts:     tandem up --model ./my-model --cluster-host 10.0.0.1 --network-keys ./keys
             and on other hosts the `tandem worker` line that it prints"""


def main() -> None:
    try:
        if len(sys.argv) == 1:
            _parser().print_help()
            sys.exit(0)
        arguments = _parser("--help-all" in sys.argv).parse_args()
        exit_code = arguments.run(arguments)
        sys.stdout.flush()
        sys.exit(exit_code)
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail
        sys.exit(1)
    except TandemError as error:
        print(f"tandem: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


class CommandParser(argparse.ArgumentParser):
    """Raises ConfigError with one line for wrong arguments, where argparse prints all flags and exits."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses all of `args`; unknown flags are refused with their replacement or a near match."""
        arguments, rest = self.parse_known_args(args, namespace)
        if not rest:
            return arguments
        flag = next((each for each in rest if each.startswith("--")), None)
        if flag is None:
            self.error(f"unexpected argument {rest[0]!r}")
        flag = flag.partition("=")[0]
        known = arguments.known_flags
        if arguments.command == "up" and flag.lstrip("-") in WORKER_ONLY:
            raise ConfigError(
                f"{flag} is a flag of `tandem worker ROLE`, which starts workers for a cluster on another host"
            )
        if arguments.command == "worker" and flag.lstrip("-") in NOT_OF_WORKERS:
            raise ConfigError(f"{flag} is a flag of `tandem up`; `tandem worker ROLE --count N` starts N workers")
        raise ConfigError(unknown_name(flag, "flag", known) if known else f"unknown flag {flag}")


def _parser(show_all: bool = False) -> CommandParser:
    """Returns the parser of all commands. show_all: whether the help of `up` and `worker` has all flags."""
    parser = CommandParser(
        prog="tandem",
        description="Serve large language models with prefill and decode on separate workers.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tandem {own_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def add(name: str, run: Any, help: str, **options: Any) -> CommandParser:
        command = commands.add_parser(name, help=help, allow_abbrev=False, **options)
        command.set_defaults(run=run, known_flags=())
        return command

    up = add(
        "up",
        _up,
        "start a cluster on this machine, or on a Ray cluster",
        description=UP_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="tandem up [FLAGS]",
        epilog="docs/configuration.md describes all flags, which are also the keys of --config's file.",
    )
    add_settings(up, COMMON, WORKER_ONLY, show_all)
    worker = add(
        "worker",
        _worker,
        "start workers for a cluster that runs on another host",
        usage="tandem worker prefill|decode|any --join ENDPOINTS --cluster-host ADDRESS [--count N] [FLAGS]",
        description="Start workers that join a running cluster. Settings that do not concern workers have no effect.",
    )
    worker.add_argument("role", choices=typing.get_args(Role), help="role of the workers")
    worker.add_argument("--count", type=int, default=1, metavar="N", help="number of workers (default: 1)")
    add_settings(worker, COMMON_OF_WORKERS, NOT_OF_WORKERS, show_all)
    keys = add("keys", _keys, "make the keys that protect traffic between hosts")
    keys.add_argument(
        "folder", type=Path, nargs="?", default=Path("tandem-keys"), metavar="FOLDER", help="new or empty folder"
    )
    status = add("status", _status, "show the workers of a running cluster")
    status.add_argument("--join", default="", metavar="ENDPOINTS", help="endpoints of proxies on another host")
    status.add_argument(
        "--network-keys", default="", metavar="FOLDER", help="folder of keys with the operator's secret, for --join"
    )
    status.add_argument("--insecure-network", action="store_true", help="ask without keys, for --join")
    how = status.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print JSON")
    how.add_argument("--watch", action="store_true", help="update until Ctrl-C")
    doctor = add("doctor", _doctor, "say why a running cluster, or one request, is slow")
    help_text = "X-Request-Id of a recent answer; explains this request instead of the cluster"
    doctor.add_argument("request_id", nargs="?", default="", metavar="REQUEST_ID", help=help_text)
    doctor.add_argument("--seconds", type=float, default=10.0, metavar="X", help="time to observe (default: 10)")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    scale = add("scale", _scale, "change the numbers of workers of a running cluster")
    scale.add_argument("counts", nargs="+", metavar="ROLE=N", help="prefill=N, decode=N, any=N, or several of them")
    drain = add("drain", _drain, "stop one worker after its requests have finished")
    drain.add_argument("worker", metavar="WORKER", help="name of the worker, such as decode-1")
    role = add("role", _role, "change the role of one worker while it serves")
    role.add_argument("worker", metavar="WORKER", help="name of the worker, such as decode-1")
    role.add_argument("role", choices=typing.get_args(Role), help="phases that the worker gets new requests for")
    restart = add("restart", _restart, "restart processes one at a time, without losing requests")
    restart.add_argument("names", nargs="*", metavar="NAME", help="such as decode-1 or proxy-0; default: all processes")
    simulation = add(
        "simulate",
        _simulate,
        "run workers and proxies in simulated time, with faults, or with a recorded trace",
        usage="tandem simulate [--seed N | --seeds A-B] [--time-s X] [--log FILE]\n"
        "       tandem simulate --trace FILE --step-times FILE [--json FILE] [--plot FILE] [FLAGS]",
        description="Run real workers and proxies in simulated time. Without --trace, seeds decide clusters, loads and "
        "faults, and what must always hold is checked. With --trace, print the latencies of a cluster that you plan.",
    )
    which = simulation.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, metavar="N", help="run one seed, which decides everything")
    which.add_argument("--seeds", default="", metavar="A-B", help="run these seeds (default: all, until --time-s)")
    time_help = "begin no seed later than after so many seconds (default: 60)"
    simulation.add_argument("--time-s", "--time", type=seconds, default=60.0, metavar="X", help=time_help)
    simulation.add_argument("--log", type=Path, metavar="FILE", help="write what happened in the last run")
    trace_help = (
        "play these requests: the log of a proxy with --log-format json, JSON lines with timestamp, input_length and "
        "output_length (Mooncake), or CSV with TIMESTAMP, ContextTokens and GeneratedTokens (Azure)"
    )
    simulation.add_argument("--trace", type=Path, metavar="FILE", help=trace_help)
    help_text = "what `tandem status --json` prints on a cluster under load, or the figures of a worker as JSON"
    simulation.add_argument("--step-times", type=Path, metavar="FILE", help=help_text)
    simulation.add_argument("--json", type=Path, metavar="FILE", help="write the figures of a trace")
    simulation.add_argument("--plot", type=Path, metavar="FILE", help="draw the latencies of a trace, as .svg or .png")
    add_settings(simulation, SIMULATED, [each.key for each in settings() if each.key not in SIMULATED], show_all)
    replay = add(
        "replay",
        _replay,
        "compute a recorded answer again, and compare it bit for bit",
        description="Compute a recorded answer again, each sequence by itself in this process, or on a cluster, and "
        "say whether every token and log-probability is equal. Exit status: 0 equal, 1 different, 2 not possible.",
    )
    replay.add_argument("record", metavar="RECORD", help="file of --record's folder or from a server; - reads stdin")
    replay.add_argument(
        "--model", default="", metavar="M", help="folder or hub id (default: the demo model); with --url, a served name"
    )
    devices = typing.get_args(Device)
    replay.add_argument("--device", choices=devices, default="auto", help="device that computes (default: auto)")
    help_text = "adapter that the record names; may be repeated"
    replay.add_argument("--lora", action="append", default=[], metavar="NAME=FOLDER", help=help_text)
    replay.add_argument("--url", default="", metavar="URL", help="HTTP endpoint of a cluster that computes instead")
    help_text = "another record of the same request; both are compared, and nothing is computed"
    replay.add_argument("--against", default="", metavar="FILE", help=help_text)
    _add_call_flags(replay)
    add_engine_commands(add("engine", None, "install another engine, or prove an engine on this host"), show_all)
    caches = _add_cache_commands(add("cache", None, "show, empty or fill the caches of a running cluster"))
    for command in (status, doctor, scale, drain, role, restart, *caches):
        help_text = "HTTP port of the cluster (default: 8000)"
        command.add_argument("--port", type=int, default=HttpSettings().port, metavar="N", help=help_text)
    for command, timeout_s in ((scale, 600.0), (drain, 60.0), (role, 10.0), (restart, 600.0)):
        zero = "; 0 does not wait" if command is scale else ""
        help_text = f"seconds to wait{' for each process' if command is restart else ''} (default: {timeout_s:g}{zero})"
        command.add_argument("--timeout-s", type=float, default=timeout_s, metavar="X", help=help_text)
    return parser


def _add_cache_commands(cache: CommandParser) -> list[CommandParser]:
    actions = cache.add_subparsers(required=True, metavar="ACTION", dest="action")
    show = actions.add_parser("show", allow_abbrev=False, help="show the cached KV blocks of each worker and tier")
    show.set_defaults(run=_cache_show)
    clear = actions.add_parser("clear", allow_abbrev=False, help="drop what no request uses")
    clear.set_defaults(run=_cache_clear)
    help_text = "media: processed images and videos; kv: KV blocks, in all tiers; default: both"
    clear.add_argument("kind", nargs="?", choices=["media", "kv"], help=help_text)
    fill = actions.add_parser("prefetch", allow_abbrev=False, help="compute a prompt's KV, or load it from a tier")
    fill.set_defaults(run=_cache_prefetch)
    fill.add_argument("file", metavar="FILE", help="JSON body of a chat or completion; - reads it from stdin")
    fill.add_argument("--url", default="", metavar="URL", help="HTTP endpoint (default: http://127.0.0.1 and --port)")
    _add_call_flags(fill)
    return [show, clear, fill]


def _add_call_flags(command: argparse.ArgumentParser) -> None:
    """Adds the flags of a command that calls the HTTP API."""
    key = os.environ.get("TANDEM_API_KEY", "")
    command.add_argument("--api-key", default=key, metavar="KEY", help="API key (default: TANDEM_API_KEY's value)")
    command.add_argument("--timeout-s", type=float, default=600.0, metavar="X", help="seconds to wait (default: 600)")


def _worker(arguments: argparse.Namespace) -> int:
    if arguments.count < 1:
        raise ConfigError(f"--count {arguments.count}: give 1 or more")
    arguments.proxies = 1  # none is started: the workers join the proxies of another host
    arguments.prefill = arguments.decode = arguments.workers = 0
    setattr(arguments, "workers" if arguments.role == "any" else arguments.role, arguments.count)
    return _up(arguments, must_join=True)


def _keys(arguments: argparse.Namespace) -> int:
    for file in make_keys(arguments.folder):
        print(file)
    print(
        "\nCopy the .key files to every host, and the .key_secret files to the hosts that need them: worker where "
        "workers run, proxy and worker where `tandem up` runs, operator where `tandem status --join` runs. Then start "
        "everything with --network-keys FOLDER."
    )
    return 0


def _up(arguments: argparse.Namespace, must_join: bool = False) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

    from tandem.deploy.engine_check.check_report import unproven_line
    from tandem.deploy.launch.run_cluster import run_cluster, with_model

    config = load_config(arguments.config, given_settings(arguments), serves_demo=True)
    if must_join and not config.join:
        raise ConfigError("--join is missing: give the proxies' endpoints, which `tandem up --cluster-host` prints")
    logging.basicConfig(level=config.logs.log_level.upper(), format="%(message)s", stream=sys.stderr)
    console = Console(stderr=True, highlight=False)
    config = with_model(config)
    name, unproven = config.served_model_name, unproven_line(config)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("Starting", total=None)

        def show_progress(text: str, loaded: float | None) -> None:
            progress.update(task, description=f"Starting {name}: {text}", total=loaded and 1, completed=loaded)

        def show_ready(logs: Path, stages: str) -> None:
            progress.stop()
            console.print(f"Ready: {stages}.", soft_wrap=True)
            _print_ready(console, config, logs)
            if unproven:
                console.print(unproven, soft_wrap=True)

        asyncio.run(run_cluster(config, show_progress, show_ready))
    console.print("Stopped.")
    return 0


def _print_ready(console: Any, config: ClusterConfig, logs: Path) -> None:
    from tandem.deploy.demo_model import DEMO_MODEL

    if config.join:
        print(f"Workers for {config.served_model_name} have joined {config.join}", flush=True)
        console.print(f"Logs: {logs}. Press Ctrl-C to stop them.", soft_wrap=True)
        return
    url = config.http_url
    messages = [{"role": "user", "content": "Hello!"}]
    options = {"max_tokens": 48, "temperature": 0, "stream": True}
    body = json.dumps({"model": config.served_model_name, "messages": messages, **options})
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.http.needs_api_key else ""
    print(f"Tandem serves {config.served_model_name} on {url}/v1", flush=True)
    print(f"\ncurl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n", flush=True)
    if config.proxy_endpoints:
        endpoints = ",".join(config.proxy_endpoints)
        model = f" --model {config.engine_settings.model}" if config.engine_settings.model != str(DEMO_MODEL) else ""
        keys = f" --network-keys {config.network_keys}" if config.network_keys else " --insecure-network"
        engine = f" --engine {config.engine}" if config.engine != "tandem" else ""
        engine += "".join(f" --engine-arg {shlex.quote(each)}" for each in config.engine_arg)
        if config.speculative_config:
            engine += f" --speculative-config {shlex.quote(config.speculative_config)}"
        command = f"tandem worker ROLE{model}{engine} --join {endpoints} --cluster-host ADDRESS{keys}"
        print(f"Workers on other hosts join with: {command}", flush=True)
    is_demo, is_split = config.engine_settings.model == str(DEMO_MODEL), config.prefill and not config.workers
    if is_demo and is_split and config.routing.decode_prefill_threshold == 0:
        console.print(
            "Every prompt is handed over from a prefill to a decode worker (--decode-prefill-threshold 0), as "
            f"`tandem status --port {config.http.port}` shows.",
            soft_wrap=True,
        )
    console.print(f"Chat: {url}/", soft_wrap=True)
    admin_host, admin_port = config.admin_address
    console.print(f"Dashboard: http://{bracketed(admin_host)}:{admin_port}/dashboard", soft_wrap=True)
    console.print(f"Logs: {logs}. Press Ctrl-C to stop the cluster.", soft_wrap=True)


def _status(arguments: argparse.Namespace) -> int:
    from tandem.deploy.commands.status import print_status, watch_status

    join, keys, insecure = arguments.join, arguments.network_keys, arguments.insecure_network
    config = ClusterConfig(join=join, network_keys=keys, insecure_network=insecure)
    cluster = ClusterClient(arguments.port, config.join_endpoints, config.network)
    if arguments.watch:
        asyncio.run(watch_status(cluster))  # until Ctrl-C
    return asyncio.run(print_status(cluster, arguments.json))


def _doctor(arguments: argparse.Namespace) -> None:
    from tandem.deploy.commands.doctor import doctor

    if not 1 <= arguments.seconds <= MAX_DOCTOR_S:
        raise ConfigError(f"--seconds {arguments.seconds:g}: give 1 to {MAX_DOCTOR_S:g}")
    asyncio.run(doctor(ClusterClient(arguments.port), arguments.request_id, arguments.seconds, arguments.json))


def _drain(arguments: argparse.Namespace) -> None:
    asyncio.run(changes.drain(ClusterClient(arguments.port), arguments.worker, arguments.timeout_s))


def _role(arguments: argparse.Namespace) -> None:
    asyncio.run(changes.set_role(ClusterClient(arguments.port), arguments.worker, arguments.role, arguments.timeout_s))


def _restart(arguments: argparse.Namespace) -> None:
    asyncio.run(changes.restart(ClusterClient(arguments.port), arguments.names, arguments.timeout_s))


def _scale(arguments: argparse.Namespace) -> None:
    asyncio.run(changes.scale(ClusterClient(arguments.port), arguments.counts, arguments.timeout_s))


def seconds(text: str) -> float:
    """Reads a time such as 60 or 60s."""
    return float(text.removesuffix("s"))


def _simulate(arguments: argparse.Namespace) -> int:
    from tandem.deploy.commands.simulate import simulate

    for name in ("log", "json", "plot"):
        if (file := getattr(arguments, name)) is not None and not file.parent.is_dir():
            raise ConfigError(f"--{name} {file}: there is no folder {file.parent}")
    if arguments.trace is not None:
        from tandem.deploy.commands.simulate import simulate_trace

        config = load_config(arguments.config, given_settings(arguments))
        simulate_trace(config, arguments.trace, arguments.step_times, arguments.json, arguments.plot)
        return 0
    of_trace = {
        **given_settings(arguments),
        **{name: getattr(arguments, name) for name in ("step_times", "json", "plot")},
    }
    for name, value in of_trace.items():
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} needs --trace: without it, seeds decide the cluster")
    limit_s = math.inf if arguments.seeds else arguments.time_s
    return simulate(arguments.seed, arguments.seeds, limit_s, arguments.log)


def _replay(arguments: argparse.Namespace) -> int:
    from tandem.deploy.commands.replay import check_computable, read_record, replay_against, replay_alone
    from tandem.deploy.commands.replay_cluster import replay_on_cluster

    record = read_record(arguments.record)
    if arguments.against:
        return replay_against(record, read_record(arguments.against))
    check_computable(record)
    if arguments.url:
        return replay_on_cluster(record, arguments.model, arguments.url, arguments.api_key, arguments.timeout_s)
    return replay_alone(record, arguments.model, arguments.device, arguments.lora)


def _cache_show(arguments: argparse.Namespace) -> None:
    from tandem.deploy.commands.cache import show_caches

    asyncio.run(show_caches(ClusterClient(arguments.port)))


def _cache_clear(arguments: argparse.Namespace) -> None:
    from tandem.deploy.commands.cache import clear_caches

    asyncio.run(clear_caches(ClusterClient(arguments.port), arguments.kind))


def _cache_prefetch(arguments: argparse.Namespace) -> None:
    from tandem.deploy.commands.prefetch import prefetch, read_request

    url = arguments.url or f"http://127.0.0.1:{arguments.port}"
    asyncio.run(prefetch(url, read_request(arguments.file), arguments.api_key, arguments.timeout_s))


if __name__ == "__main__":
    main()
