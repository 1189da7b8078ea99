"""Runs a cluster from a Python program:

from tandem.deploy.embedding import running_cluster

with running_cluster(model="./my-model", prefill=2, port=8080) as url:
    ...  # url is http://127.0.0.1:8080
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from tandem.deploy.cluster_config import ClusterConfig, load_config, settings, unknown_name
from tandem.deploy.launch.run_cluster import run_cluster, with_model
from tandem.runtime.errors import ConfigError, InternalError
from tandem.runtime.tasks import start
from tandem.runtime.threads import post


@contextmanager
def running_cluster(**values: Any) -> Iterator[str]:
    """Starts a cluster as `tandem up` does, yields the URL of its HTTP API, and stops the cluster on leaving.

    values: settings as in a configuration file, such as `model="./my-model", prefill=2`; docs/configuration.md lists
    them. Without a model the cluster serves the demo model.

    The launcher runs on a thread of this program. Proxies and workers are processes, which end with the program even if
    it is killed. A lost process is replaced while the context is open.

    Raises ConfigError for a wrong setting or a port in use, InternalError if the cluster does not start. An error of
    the launcher itself is raised on leaving.
    """
    known = [setting.key for setting in settings()]
    for key in values:
        if key not in known:
            raise ConfigError(unknown_name(key, "setting", known))
    config = load_config(None, values, serves_demo=True)
    if config.ray or config.join:
        raise ConfigError("a program runs clusters of this host; use `tandem up --ray` or `tandem worker --join`")
    launcher = _LauncherThread(with_model(config))
    launcher.start()
    try:
        launcher.ready.result()
        yield config.http_url
    finally:
        launcher.stop()
    launcher.raise_error()


class _LauncherThread(threading.Thread):
    """Runs the launcher of one cluster on an event loop of its own.

    ready: done when the cluster serves, or when it has failed to start.
    """

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(name="tandem-launcher", daemon=True)
        self.ready: Future[None] = Future()
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._run_until_stopped())
        except Exception as error:
            self._error = error
        if not self.ready.done():
            self.ready.set_exception(self._error or InternalError("the cluster was stopped while it started"))

    async def _run_until_stopped(self) -> None:
        running = start(
            run_cluster(
                self._config,
                on_progress=lambda text, fraction: None,
                on_ready=lambda logs, stages: self.ready.set_result(None),
                stops_on_signals=False,  # they are the program's own
            )
        )
        stopping = start(self._stopping.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        running.cancel()
        await asyncio.wait({running})
        if not running.cancelled():
            running.result()

    def stop(self) -> None:
        """Stops the cluster and waits until its processes are gone."""
        post(self._loop, self._stopping.set)
        self.join()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error
