"""Sets up the folder, site and sockets of a launcher, and runs it until a signal."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tandem.deploy.cluster_config import ClusterConfig, with_device_defaults
from tandem.deploy.demo_model import DEMO_MODEL
from tandem.deploy.launch.launcher import Launcher, OnProgress, worker_name
from tandem.deploy.processes.runtime_dir import create_runtime_dir, remove_runtime_dir
from tandem.deploy.processes.user_folders import user_folders
from tandem.deploy.sites.local import LocalSite
from tandem.deploy.sites.site import Site
from tandem.protocol.network import NetworkConfig
from tandem.protocol.sockets import new_context
from tandem.runtime.errors import ConfigError, TandemError
from tandem.runtime.files.private_folder import why_not_secret
from tandem.runtime.settings import with_values

log = logging.getLogger(__name__)


def with_model(config: ClusterConfig) -> ClusterConfig:
    """Returns the settings with the model's name, and with the demo model if they name none."""
    model = config.engine_settings.model or str(DEMO_MODEL)
    name = config.served_model_name or (Path(model).name if config.engine_settings.model else "tandem-demo")
    return with_values(config, {"model": model, "served_model_name": name})


def secret_files(config: ClusterConfig) -> list[tuple[str, str]]:
    """Returns the settings that name a file with a secret, and the files."""
    http = config.http
    key = ("ssl_keyfile", http.ssl_keyfile) if http.ssl_keyfile else ("ssl_certfile", http.ssl_certfile)
    named = [("api_keys_file", http.api_keys_file), ("admin_keys_file", http.admin_keys_file), key]
    return [(setting, file) for setting, file in named if file]


async def run_cluster(
    config: ClusterConfig,
    on_progress: OnProgress,
    on_ready: Callable[[Path, str], None],
    stops_on_signals: bool = True,
) -> None:
    """Runs a cluster until SIGINT, SIGTERM or SIGHUP, or until it is cancelled. on_ready: called with the folder of the
    logs, and the times of the stages. stops_on_signals: only possible on the main thread.

    Raises ConfigError for what the operator can correct, InternalError if the cluster does not start.
    """
    place: int | str = config.http.port if not config.join else worker_name(config, "worker")
    with ExitStack() as cleanup:
        folder = create_runtime_dir(place)
        cleanup.push(partial(_remove, folder))
        logs = cleanup.enter_context(user_folders(place, folder))
        # Only a launcher of joining workers or on Ray reaches proxies over tcp; others use local sockets.
        network = config.network if config.join or config.ray else NetworkConfig()
        context = new_context("worker" if config.join else "operator", network)
        cleanup.callback(context.destroy, linger=0)
        exposed = config.cluster_host or (config.ray and "the nodes' network")
        if exposed and config.insecure_network and not config.network_keys:
            log.warning("--insecure-network: anybody who can reach %s can control this cluster", exposed)
        for setting, file in secret_files(config):
            if reason := why_not_secret(Path(file)):
                log.warning("%s: %s", setting, reason)
        if not config.ray and not config.join:
            _check_port(config.http.host, config.http.port, "--port or --host")
            _check_port(*config.admin_address, "--admin-port or --admin-host")
        site: Site
        if config.ray:
            from tandem.deploy.sites.ray_site import RaySite  # optional, and slow to import

            site = RaySite(config, folder, logs)
        else:
            site = LocalSite(config, folder, logs)
        cleanup.callback(site.close)
        launcher = Launcher(with_device_defaults(config, site.on_gpus), site, context, folder)
        stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if stops_on_signals else ()
        for number in stops:  # after the site: Ray sets its own handlers
            asyncio.get_running_loop().add_signal_handler(number, launcher.stop)
        await launcher.run(on_progress, lambda stages: on_ready(logs, stages))


def _remove(folder: Path, kind: type[BaseException] | None, *_: Any) -> None:
    """Removes the cluster's folder; logs in it stay if the cluster has failed, because they say why."""
    remove_runtime_dir(folder, keeps_logs=kind is not None and issubclass(kind, TandemError))


def _check_port(host: str, port: int, flags: str) -> None:
    """Raises ConfigError if the port is taken. SO_REUSEPORT would let two clusters share it unnoticed."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = "another program uses the port" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another {flags}") from error
