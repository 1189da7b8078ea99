"""Runs a cluster's processes on this host."""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
from prometheus_client.multiprocess import mark_process_dead

from tandem.deploy.cluster_config import ClusterConfig, bracketed, ranks_per_gpu, with_device_defaults
from tandem.deploy.processes.child_process import ChildProcess, Program
from tandem.deploy.processes.engine_python import EnginePython, find_engine_python, vllm_environment
from tandem.deploy.processes.gpu_environment import EXACT_PRODUCTS, gpu_environment, least_used, visible_gpus
from tandem.deploy.processes.host_memory import HostMemory
from tandem.deploy.processes.log_file import LogFile
from tandem.deploy.processes.preloaded import VLLM_PRELOAD_MODULE, PreloadedWorker
from tandem.deploy.processes.process_configs import Place, ProcessConfigs, process_environment
from tandem.deploy.processes.supervisor import OnExit, Supervised
from tandem.deploy.sites.site import VLLM_WORKER_MODULE, WORKER_MODULE, Site
from tandem.protocol.messages.membership import Role
from tandem.proxy.text.model_files import takes_media
from tandem.runtime.cores import num_cores
from tandem.runtime.errors import ConfigError
from tandem.runtime.files.whole_file import write_whole
from tandem.runtime.listen_socket import bind

log = logging.getLogger(__name__)


class LocalSite(Site):
    """Processes are children of the launcher, ZeroMQ sockets are files in `folder`, and workers get GPUs by number.

    The launcher binds one listening socket per proxy and keeps all of them open, so connections that wait at the socket
    of a proxy that crashed are served by its successor. It also keeps the workers' host memory for KV blocks. Raises
    ConfigError when it cannot bind the sockets, make the folder for KV blocks, or find the engine's interpreter.
    """

    def __init__(self, cluster: ClusterConfig, folder: Path, logs: Path) -> None:
        super().__init__()
        self._python: EnginePython | None = None  # of workers with another engine
        if cluster.engine == "vllm":
            self._python = find_engine_python(cluster.engine_python)
        self._gpus = visible_gpus(cluster.engine_settings.device, os.environ)
        self.on_gpus = cluster.engine_settings.device == "cuda" or bool(self._gpus)
        self._cluster = with_device_defaults(cluster, self.on_gpus)
        # Where the GPUs are not known, all workers use the first.
        self._ranks_per_gpu = ranks_per_gpu(cluster, len(self._gpus or [""]))
        self._configs = ProcessConfigs(self._cluster, ranks_per_gpu=self._ranks_per_gpu, on_gpus=self.on_gpus)
        self._folder = folder
        self._logs = logs
        self._metrics_dir = folder / "metrics"
        self._metrics_dir.mkdir()
        self._gpus_of: dict[str, list[str]] = {}
        self._host_memory = HostMemory()
        if (disk_folder := cluster.tiers.disk_folder) is not None:
            make_disk_folder(disk_folder)
        names = [f"proxy-{i}" for i in range(cluster.proxies)] if not cluster.join else []
        self._listeners = {name: bind(cluster.http.host, cluster.http.port) for name in names}
        self._admin_listeners = {name: bind(*cluster.admin_address) for name in names}
        self._preloaded: PreloadedWorker | None = None  # workers with vLLM's engine on GPUs are started plainly
        roles = [role for role, count in self._cluster.counts.items() if count] or ["decode"]
        environment = self._worker_environment(roles[0])
        if self._python is None:
            self._preloaded = PreloadedWorker(environment, not self.on_gpus, logs)
        elif not self.on_gpus:
            python = str(self._python.path)
            self._preloaded = PreloadedWorker(environment, True, logs, VLLM_PRELOAD_MODULE, python)
            num_ranks = self._cluster.num_all_ranks
            if num_ranks > max(num_cores(), sum(self._cluster.counts.values())):  # some worker has several
                log.warning(
                    "vLLM's %d ranks spin while they wait, and may use %d cores: requests may "
                    "wait for minutes; give --tensor-parallel-size 1 or fewer workers",
                    num_ranks,
                    num_cores(),
                )

    def http_hosts(self) -> list[str]:
        return [self._cluster.http.host]

    def make_proxy(self, name: str, on_exit: OnExit, on_endpoint: Callable[[str, str], None]) -> Supervised:
        endpoint = self._endpoint(name)
        tcp_endpoints = dict(zip(self._listeners, self._cluster.proxy_endpoints, strict=False))
        listen_fd, admin_listen_fd = self._listeners[name].fileno(), self._admin_listeners[name].fileno()
        place = Place(
            endpoint,
            control_tcp_endpoint=tcp_endpoints.get(name, ""),
            peer_endpoints=[self._endpoint(peer) for peer in self._listeners if peer != name],
            media_cache_endpoint=self.media_cache_endpoint,
            media_cache_tcp_endpoint=self._cluster.media_cache_endpoint if self.media_cache_endpoint else "",
            listen_fd=listen_fd,
            admin_listen_fd=admin_listen_fd,
            lora_file=str(self._folder / "adapters.json"),
            response_folder=str(self._folder / "responses"),
            record_folder=str(self._folder / "records"),
        )
        env = process_environment(1)
        env["PROMETHEUS_MULTIPROC_DIR"] = str(self._metrics_dir)  # shared by all proxies, whose metrics are added up
        env["CUDA_VISIBLE_DEVICES"] = ""

        def exited(name: str, pid: int, returncode: int) -> bool:
            mark_process_dead(pid, str(self._metrics_dir))  # removes its gauges of live requests
            return on_exit(name, pid, returncode)

        on_endpoint(name, endpoint)
        config = self._configs.proxy(name, place)
        program = Program("tandem.proxy", self._config_file(name), env, [listen_fd, admin_listen_fd])
        return self._child(name, program, config, exited)

    def make_worker(self, role: Role, name: str, on_exit: OnExit) -> Supervised:
        if self._preloaded is not None:
            self._preloaded.spawn_once()
        progress_file = self._folder / f"{name}.loading"
        host = self._cluster.cluster_host
        place = Place(
            f"tcp://{bracketed(host)}:*" if host else self._endpoint(name),
            host=host or "127.0.0.1",
            proxy_endpoints=self._cluster.join_endpoints or [self._endpoint(proxy) for proxy in self._listeners],
            progress_file=str(progress_file),
            role_file=str(self._folder / f"{name}.role"),
            media_cache_endpoint=self.media_cache_endpoint,
            host_files=self._host_files(role, name),
        )
        env = self._worker_environment(role)
        if self._gpus is not None:
            used = Counter(gpu for gpus in self._gpus_of.values() for gpu in gpus)
            self._gpus_of[name] = gpus = least_used(self._gpus, used, self._cluster.num_ranks(role))
            if not self._cluster.kv_cache_gib and any(used[gpu] >= self._ranks_per_gpu for gpu in gpus):
                del self._gpus_of[name]
                self._host_memory.release(name)
                raise ConfigError(
                    f"{name} would share a GPU with {self._ranks_per_gpu} or more ranks, but the memory was divided "
                    f"among {self._ranks_per_gpu} at the start: stop a worker first, or start the cluster with more "
                    "workers or with --kv-cache-gib"
                )
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus_of[name])
        self.progress_files[name] = progress_file
        if self._python is not None:
            if self.on_gpus and self._ranks_per_gpu > 1:
                numbers = [0] if self._gpus is None else map(self._gpus.index, self._gpus_of[name])
                place = replace(place, load_turns=[str(self._folder / f"gpu-{number}.load") for number in numbers])
            vllm_config, python = self._configs.vllm_worker(role, name, place), str(self._python.path)
            program = Program(
                VLLM_WORKER_MODULE, self._config_file(name), env, preloaded=self._preloaded, python=python
            )
            return self._child(name, program, vllm_config, on_exit)
        config = self._configs.worker(role, name, place)
        program = Program(WORKER_MODULE, self._config_file(name), env, preloaded=self._preloaded)
        return self._child(name, program, config, on_exit)

    def _worker_environment(self, role: Role) -> dict[str, str]:
        env, exact = process_environment(self._cluster.num_threads(role)), self._cluster.engine_settings.exact
        # Read when numba is imported, so it must be enough for all workers that are forked from one process.
        env["NUMBA_NUM_THREADS"] = str(max(map(self._cluster.num_threads, self._cluster.counts)))
        if self._python is not None:
            env |= vllm_environment(self.on_gpus, self._cluster.engine_settings.exact) | self._python.environment(
                self._folder
            )
        if self._gpus != []:  # there are GPUs, or it is not known
            env |= gpu_environment(self._cluster.cluster_host or "127.0.0.1", os.environ)
            if exact and self._python is None:
                env |= EXACT_PRODUCTS
        return env

    def _host_files(self, role: Role, name: str) -> list[str]:
        """Host memory of a worker, one file per rank; empty without --kv-host-gib. Raises ConfigError."""
        num_bytes = self._cluster.host_bytes(role)
        return self._host_memory.files(name, self._cluster.num_ranks(role), num_bytes) if num_bytes else []

    def make_media_cache(self, on_exit: OnExit) -> Supervised | None:
        if not takes_media(self._cluster.engine_settings.model):
            return None
        self.media_cache_endpoint = self._endpoint("media-cache")
        env = process_environment(1) | {"CUDA_VISIBLE_DEVICES": ""}
        config = self._configs.media_cache(self.media_cache_endpoint, self._cluster.media_cache_endpoint)
        program = Program("tandem.media_cache", self._config_file("media-cache"), env)
        return self._child("media-cache", program, config, on_exit)

    def forget(self, name: str) -> None:
        self._gpus_of.pop(name, None)
        self._host_memory.release(name)
        self.progress_files.pop(name).unlink(missing_ok=True)
        for suffix in ("json", "pid", "role"):
            (self._folder / f"{name}.{suffix}").unlink(missing_ok=True)

    @property
    def is_preloaded(self) -> bool:
        return self._preloaded is None or self._preloaded.is_loaded

    def renew_preloaded(self) -> None:
        if self._preloaded is not None:
            self._preloaded.renew()

    def stop_listening(self) -> None:
        for listener in (*self._listeners.values(), *self._admin_listeners.values()):
            listener.close()

    def close(self) -> None:
        self.stop_listening()  # the launcher removes the folder
        self._host_memory.close()
        if self._preloaded is not None:
            self._preloaded.close()

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}.sock"

    def _config_file(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _child(self, name: str, program: Program, config: msgspec.Struct, on_exit: OnExit) -> ChildProcess:
        write_whole(program.config_file, msgspec.json.encode(config))
        output = LogFile(self._logs / f"{name}.log")
        return ChildProcess(name, program, output, on_exit, self._folder / f"{name}.pid")


def make_disk_folder(folder: Path) -> None:
    """Makes the folder for KV blocks, with mode 0700 because they reveal prompts.

    An existing folder keeps its mode, but must belong to this user, and no other user may write to it. Raises
    ConfigError if the workers cannot use it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(f"kv_disk_dir: cannot make the folder {folder}: {error.strerror}; name another") from error
    if stat.S_ISLNK(status.st_mode):
        raise ConfigError(f"kv_disk_dir: {folder} is a symbolic link; name the folder itself")
    if status.st_uid != os.geteuid():
        raise ConfigError(f"kv_disk_dir: {folder} belongs to another user; name a folder of your own")
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise ConfigError(f"kv_disk_dir: other users may write to {folder}; run chmod 700 on it, or name a new folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"kv_disk_dir: cannot write to {folder}; run chmod 700 on it, or name a new folder")
