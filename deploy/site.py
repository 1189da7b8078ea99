"""Where a cluster's processes run: on this host (here), or wherever Ray puts them (`deploy.ray_site`)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
from prometheus_client.multiprocess import mark_process_dead

from deploy.config import ClusterConfig
from deploy.gpus import least_used, visible_gpus
from deploy.process_configs import Place, ProcessConfigs, process_environment
from deploy.processes import ChildProcess
from protocol.membership import Role

OnExit = Callable[[str, int, int], bool]
"""(name, pid, returncode); True when it is to be started again."""

MODULES: dict[Role, str] = {"prefill": "prefill_worker", "decode": "decode_worker"}


class Supervised(Protocol):
    """One process, kept alive while `run` runs. log_file: where it is to be read what it said, for messages."""

    name: str
    num_starts: int

    @property
    def log_file(self) -> Path: ...

    @property
    def last_pid(self) -> int: ...

    async def run(self) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def last_error(self) -> str | None: ...


class Site(Protocol):
    """progress_files: of workers, where they can be read from here. http_hosts: where the proxies listen, as known."""

    progress_files: dict[str, Path]

    def http_hosts(self) -> list[str]: ...

    def make_proxy(self, name: str, on_exit: OnExit, on_endpoint: Callable[[str, str], None]) -> Supervised:
        """on_endpoint(name, control endpoint): whenever it is known, and again when it changes."""

    def make_worker(self, role: Role, name: str, on_exit: OnExit) -> Supervised:
        """Raises ConfigError when there is no room for it."""

    def forget(self, name: str) -> None:
        """A worker has been stopped for good."""

    def tell_proxies(self, endpoints: list[str]) -> None:
        """To all workers: where the proxies are now."""

    def close(self) -> None: ...


class LocalSite:
    """Processes of this host; sockets are files in `folder`, and GPUs are shared out by number."""

    def __init__(self, cluster: ClusterConfig, model: str, served_model_name: str, folder: Path, logs: Path) -> None:
        self._cluster = cluster
        self._num_threads: dict[Role, int] = {
            "prefill": cluster.num_threads("prefill"),
            "decode": cluster.num_threads("decode"),
        }
        self._configs = ProcessConfigs(cluster, model, served_model_name, self._num_threads)
        self._folder = folder
        self._logs = logs
        self._metrics_dir = folder / "metrics"
        self._metrics_dir.mkdir()
        self._gpus = visible_gpus(cluster.device, os.environ)
        self._gpus_of: dict[str, list[str]] = {}
        self.progress_files: dict[str, Path] = {}

    def http_hosts(self) -> list[str]:
        return [self._cluster.host]

    def make_proxy(self, name: str, on_exit: OnExit, on_endpoint: Callable[[str, str], None]) -> Supervised:
        place = Place(self._endpoint(name))
        env = process_environment(1)
        env["PROMETHEUS_MULTIPROC_DIR"] = str(self._metrics_dir)  # there the metrics of all proxies add up
        env["CUDA_VISIBLE_DEVICES"] = ""

        def exited(name: str, pid: int, returncode: int) -> bool:
            mark_process_dead(pid, str(self._metrics_dir))  # what it had under way is over
            return on_exit(name, pid, returncode)

        on_endpoint(name, place.endpoint)
        return self._child(name, "proxy", self._configs.proxy(name, place), env, exited)

    def make_worker(self, role: Role, name: str, on_exit: OnExit) -> Supervised:
        progress_file = self._folder / f"{name}.loading"
        proxies = [self._endpoint(f"proxy-{i}") for i in range(self._cluster.proxies)]
        place = Place(self._endpoint(name), proxy_endpoints=proxies, progress_file=str(progress_file))
        env = process_environment(self._num_threads[role])
        if self._gpus is not None:
            used = Counter(gpu for gpus in self._gpus_of.values() for gpu in gpus)
            self._gpus_of[name] = least_used(self._gpus, used, self._cluster.num_ranks(role))
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus_of[name])
        self.progress_files[name] = progress_file
        return self._child(name, MODULES[role], self._configs.worker(role, name, place), env, on_exit)

    def forget(self, name: str) -> None:
        self._gpus_of.pop(name, None)
        self.progress_files.pop(name).unlink(missing_ok=True)
        (self._folder / f"{name}.json").unlink(missing_ok=True)

    def tell_proxies(self, endpoints: list[str]) -> None:
        """They stay where they are."""

    def close(self) -> None:
        """The launcher removes the folder."""

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}.sock"

    def _child(
        self, name: str, module: str, config: msgspec.Struct, env: dict[str, str], on_exit: OnExit
    ) -> ChildProcess:
        config_file = self._folder / f"{name}.json"
        config_file.touch(mode=0o600)
        config_file.write_bytes(msgspec.json.encode(config))
        return ChildProcess(name, module, config_file, self._logs / f"{name}.log", env, on_exit)
