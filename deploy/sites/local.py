"""Where a cluster's processes run: on this host (here), or wherever Ray puts them (`deploy.sites.ray_site`)."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from prometheus_client.multiprocess import mark_process_dead

from tandem.deploy.config import ClusterConfig, bracketed
from tandem.deploy.processes.child_process import ChildProcess
from tandem.deploy.processes.gpus import least_used, visible_gpus
from tandem.deploy.processes.log_file import LogFile
from tandem.deploy.processes.process_configs import Place, ProcessConfigs, process_environment
from tandem.protocol.messages.membership import Role
from tandem.proxy.text.model_files import takes_media
from tandem.runtime.listen_socket import bind

OnExit = Callable[[str, int, int], bool]
"""(name, pid, returncode); True when it is to be started again."""

MODULES: dict[Role, str] = {"prefill": "tandem.prefill_worker", "decode": "tandem.decode_worker"}


class Supervised(Protocol):
    """One process, kept alive while `run` runs. log_file: where it is to be read what it said, for messages."""

    name: str
    num_starts: int

    @property
    def log_file(self) -> Path: ...

    @property
    def last_pid(self) -> int: ...

    async def run(self) -> None: ...

    def restart(self) -> None:
        """Let it finish what is under way and end, upon which it is started again."""

    def terminate(self) -> None:
        """For good, when it has finished what is under way."""

    def stop(self) -> None:
        """For good, at once."""

    def kill(self) -> None: ...

    def replace(self) -> None:
        """It hears nothing any more: end it, and start it again."""

    def last_error(self) -> str | None: ...


class Site(Protocol):
    """progress_files: of workers, where they can be read from here. http_hosts: where the proxies listen, as known.

    media_cache_endpoint: empty where there is none.
    """

    progress_files: dict[str, Path]
    media_cache_endpoint: str

    def http_hosts(self) -> list[str]: ...

    def make_proxy(self, name: str, on_exit: OnExit, on_endpoint: Callable[[str, str], None]) -> Supervised:
        """on_endpoint(name, control endpoint): whenever it is known, and again when it changes."""

    def make_worker(self, role: Role, name: str, on_exit: OnExit) -> Supervised:
        """Raises ConfigError when there is no room for it."""

    def make_media_cache(self, on_exit: OnExit) -> Supervised | None:
        """To be made first. None where the model takes text only, or the site has none."""

    def forget(self, name: str) -> None:
        """A worker has been stopped for good."""

    def tell_proxies(self, endpoints: list[str]) -> None:
        """To all workers: where the proxies are now."""

    def stop_listening(self) -> None:
        """The proxies are about to be stopped: nobody is to wait for them."""

    def close(self) -> None: ...


class LocalSite:
    """Processes of this host; sockets are files in `folder`, and GPUs are shared out by number.

    Raises ConfigError where it cannot listen.
    """

    def __init__(self, cluster: ClusterConfig, model: str, served_model_name: str, folder: Path, logs: Path) -> None:
        self._cluster = cluster
        self._model = model
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
        self.media_cache_endpoint = ""
        self.progress_files: dict[str, Path] = {}
        # By proxy, to be inherited; kept open here, so that what waits at one outlives its proxy.
        self._listeners: list[socket.socket] = []
        self._admin_listeners: list[socket.socket] = []
        if not cluster.join:
            self._listeners = [bind(cluster.host, cluster.port) for _ in range(cluster.proxies)]
            self._admin_listeners = [bind(*cluster.admin_address) for _ in range(cluster.proxies)]

    def http_hosts(self) -> list[str]:
        return [self._cluster.host]

    def make_proxy(self, name: str, on_exit: OnExit, on_endpoint: Callable[[str, str], None]) -> Supervised:
        own = [self._endpoint(f"proxy-{i}") for i in range(self._cluster.proxies)]
        endpoint = self._endpoint(name)
        place = Place(
            endpoint,
            control_tcp_endpoint=dict(zip(own, self._cluster.proxy_endpoints, strict=False)).get(endpoint, ""),
            peer_endpoints=[each for each in own if each != endpoint],
            media_cache_endpoint=self.media_cache_endpoint,
            media_cache_tcp_endpoint=self._cluster.media_cache_endpoint if self.media_cache_endpoint else "",
            listen_fd=_fd_of(self._listeners, own.index(endpoint)),
            admin_listen_fd=_fd_of(self._admin_listeners, own.index(endpoint)),
        )
        env = process_environment(1)
        env["PROMETHEUS_MULTIPROC_DIR"] = str(self._metrics_dir)  # there the metrics of all proxies add up
        env["CUDA_VISIBLE_DEVICES"] = ""

        def exited(name: str, pid: int, returncode: int) -> bool:
            mark_process_dead(pid, str(self._metrics_dir))  # what it had under way is over
            return on_exit(name, pid, returncode)

        on_endpoint(name, endpoint)
        inherited = [fd for fd in (place.listen_fd, place.admin_listen_fd) if fd is not None]
        return self._child(name, "tandem.proxy", self._configs.proxy(name, place), env, exited, inherited)

    def make_worker(self, role: Role, name: str, on_exit: OnExit) -> Supervised:
        progress_file = self._folder / f"{name}.loading"
        host = self._cluster.cluster_host
        own = [self._endpoint(f"proxy-{i}") for i in range(self._cluster.proxies)]
        place = Place(
            f"tcp://{bracketed(host)}:*" if host else self._endpoint(name),
            host=host or "127.0.0.1",
            proxy_endpoints=self._cluster.join_endpoints or own,
            progress_file=str(progress_file),
            media_cache_endpoint=self.media_cache_endpoint if role == "prefill" else "",
        )
        env = process_environment(self._num_threads[role])
        if self._gpus is not None:
            used = Counter(gpu for gpus in self._gpus_of.values() for gpu in gpus)
            self._gpus_of[name] = least_used(self._gpus, used, self._cluster.num_ranks(role))
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus_of[name])
        self.progress_files[name] = progress_file
        return self._child(name, MODULES[role], self._configs.worker(role, name, place), env, on_exit)

    def make_media_cache(self, on_exit: OnExit) -> Supervised | None:
        if not takes_media(self._model):
            return None
        self.media_cache_endpoint = self._endpoint("media-cache")
        env = process_environment(1) | {"CUDA_VISIBLE_DEVICES": ""}
        config = self._configs.media_cache(self.media_cache_endpoint, self._cluster.media_cache_endpoint)
        return self._child("media-cache", "tandem.media_cache", config, env, on_exit)

    def forget(self, name: str) -> None:
        self._gpus_of.pop(name, None)
        self.progress_files.pop(name).unlink(missing_ok=True)
        for suffix in ("json", "pid"):
            (self._folder / f"{name}.{suffix}").unlink(missing_ok=True)

    def tell_proxies(self, endpoints: list[str]) -> None:
        """They stay where they are."""

    def stop_listening(self) -> None:
        for listener in (*self._listeners, *self._admin_listeners):
            listener.close()

    def close(self) -> None:
        """The launcher removes the folder."""
        self.stop_listening()

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}.sock"

    def _child(
        self,
        name: str,
        module: str,
        config: msgspec.Struct,
        env: dict[str, str],
        on_exit: OnExit,
        pass_fds: Sequence[int] = (),
    ) -> ChildProcess:
        config_file = self._folder / f"{name}.json"
        config_file.touch(mode=0o600)
        config_file.write_bytes(msgspec.json.encode(config))
        output = LogFile(self._logs / f"{name}.log", self._cluster.log_file_mib << 20)
        pid_file = self._folder / f"{name}.pid"
        return ChildProcess(name, module, config_file, output, env, on_exit, pid_file, pass_fds)


def _fd_of(listeners: Sequence[socket.socket], number: int) -> int | None:
    """Returns None where there are no listeners."""
    return listeners[number].fileno() if listeners else None
