"""Runs a cluster's processes on a Ray cluster, each in its own actor and placement group.

Actors report their node's address, and the kernel chooses ports. A process that dies or whose node is lost is restarted
in a new placement group on any node with enough resources; a worker that crashes after a while, in its actor, which has
a preloaded process to fork it from. Reasons: docs/adr/0016-ray-placement.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from tandem.deploy.cluster_config import ClusterConfig, bracketed, ranks_per_gpu, with_device_defaults
from tandem.deploy.processes.engine_python import vllm_environment
from tandem.deploy.processes.gpu_environment import EXACT_PRODUCTS
from tandem.deploy.processes.preloaded import PRELOAD_MODULE
from tandem.deploy.processes.process_configs import ProcessConfigs, process_environment
from tandem.deploy.processes.runtime_dir import NETWORK_FILE, PROXIES_FILE
from tandem.deploy.processes.supervisor import RESTART_DELAY_S, OnExit, Supervised
from tandem.deploy.sites.ray_actor import NodePlace
from tandem.deploy.sites.site import VLLM_WORKER_MODULE, WORKER_MODULE, Site
from tandem.media_cache.media_cache_config import MediaCacheConfig
from tandem.protocol.messages.membership import Role
from tandem.protocol.network import NetworkConfig
from tandem.protocol.network_keys import NetworkKeys, Part, load_keys
from tandem.protocol.proxy_endpoints import write_endpoints
from tandem.proxy.http.api_keys import KeyFile, parse_keys
from tandem.proxy.text.model_files import takes_media
from tandem.runtime.errors import ConfigError, first_line
from tandem.runtime.files.whole_file import write_whole
from tandem.runtime.tasks import keep_running

try:
    import ray

    from tandem.deploy.sites.ray_process import RayHostMemory, RayProcess, RayProgram
except ImportError as error:
    raise ConfigError("--ray needs Ray: pip install 'tandem-serve[ray]'") from error

log = logging.getLogger(__name__)

PROXY_RESOURCE = "tandem_proxy"
"""Ray resource of the nodes that may run proxies, one each; without any such node, proxies run on all nodes."""
_WILDCARDS = ("0.0.0.0", "::")


class RaySite(Site):
    """folder: the launcher's, where commands on its host find the proxies. Raises ConfigError without a Ray cluster."""

    def __init__(self, cluster: ClusterConfig, folder: Path, logs: Path) -> None:
        super().__init__()  # its progress files are on the nodes, and each proxy has a media cache beside it
        self._cluster = cluster
        self._folder = folder
        self._logs = logs
        self._takes_media = takes_media(cluster.engine_settings.model)
        self._processes: dict[str, RayProcess] = {}
        self._proxies: list[str] = []
        self._api_keys = ""
        self._copying_keys: asyncio.Task[None] | None = None
        if cluster.http.api_keys_file:
            file = KeyFile(Path(cluster.http.api_keys_file))
            self._api_keys = file.read()
            self._copying_keys = keep_running(
                partial(self._copy_api_keys, file), "copying the API keys", RESTART_DELAY_S
            )
        write_whole(folder / NETWORK_FILE, msgspec.json.encode(cluster.network))
        try:
            # Ray lets actors import from the working folder of the process that connects: not from the operator's.
            with contextlib.chdir(folder):
                ray.init(address=cluster.ray, namespace="tandem", log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"--ray: cannot connect to the Ray cluster at {cluster.ray!r} ({first_line(error)}); start one with "
                "`ray start --head`"
            ) from error
        resources = ray.cluster_resources()
        num_gpus = int(resources.get("GPU", 0))
        self.on_gpus = cluster.engine_settings.device == "cuda" or (
            cluster.engine_settings.device == "auto" and num_gpus > 0
        )
        self._cluster = with_device_defaults(cluster, self.on_gpus)
        self._ranks_per_gpu = ranks_per_ray_gpu(cluster, num_gpus if self.on_gpus else 0)
        if self._ranks_per_gpu > 1:
            log.warning(
                "the Ray cluster has %d GPUs: up to %d workers share each, and new nodes do not change that",
                num_gpus, self._ranks_per_gpu,
            )  # fmt: skip
        keys = keys_to_hand_out(cluster.network)
        self._configs = ProcessConfigs(self._cluster, keys, self._ranks_per_gpu, self.on_gpus)
        self._proxy_bundle: dict[str, float] = {"CPU": 1}
        if resources.get(PROXY_RESOURCE, 0) > 0:
            self._proxy_bundle[PROXY_RESOURCE] = 1

    def http_hosts(self) -> list[str]:
        if self._cluster.http.host not in _WILDCARDS:
            return []
        return [p.place.host for p in self._processes.values() if p.name.startswith("proxy-") and p.place is not None]

    def make_proxy(self, name: str, on_exit: OnExit, on_endpoint: Callable[[str, str], None]) -> Supervised:
        env = process_environment(1) | {"CUDA_VISIBLE_DEVICES": ""}
        make_cache = self._media_cache if self._takes_media else None
        program = RayProgram("tandem.proxy", self._configs.proxy, self._proxy_bundle, env, make_media_cache=make_cache)
        process = RayProcess(name, program, self._logs / f"{name}.log", on_exit, on_endpoint)
        process.set_api_keys(self._api_keys)
        return self._add(process)

    def _media_cache(self, place: NodePlace) -> MediaCacheConfig:
        """Media cache beside a proxy. Prefill workers of other nodes read from it and do not share embeddings."""
        return self._configs.media_cache(
            f"ipc://{place.folder}/media-cache.sock",
            f"tcp://{bracketed(place.host)}:*",
            f"{place.folder}/media-cache.endpoint",
        )

    def make_worker(self, role: Role, name: str, on_exit: OnExit) -> Supervised:
        num_ranks, num_threads = self._cluster.num_ranks(role), self._cluster.num_threads(role)
        # The ranks share memory; one bundle for all of them keeps them on one node.
        bundle: dict[str, float] = {"CPU": num_threads * num_ranks}
        if self.on_gpus:
            bundle["GPU"] = num_ranks if self._ranks_per_gpu == 1 else gpu_share(self._ranks_per_gpu)
        env = process_environment(num_threads)
        log_file = self._logs / f"{name}.log"
        if self._cluster.engine == "vllm":
            env |= vllm_environment(self.on_gpus, self._cluster.engine_settings.exact)
            make_vllm, python = partial(self._configs.vllm_worker, role), self._cluster.engine_python
            program = RayProgram(VLLM_WORKER_MODULE, make_vllm, bundle, env, engine_python=python)
            return self._add(RayProcess(name, program, log_file, on_exit))
        if self.on_gpus and self._cluster.engine_settings.exact:
            env |= EXACT_PRODUCTS
        make = partial(self._configs.worker, role)
        num_bytes = self._cluster.host_bytes(role)
        memory = RayHostMemory(name, num_ranks, num_bytes) if num_bytes else None
        program = RayProgram(WORKER_MODULE, make, bundle, env, PRELOAD_MODULE)
        return self._add(RayProcess(name, program, log_file, on_exit, host_memory=memory))

    def _add(self, process: RayProcess) -> RayProcess:
        process.set_proxy_endpoints(self._proxies)
        self._processes[process.name] = process
        return process

    def forget(self, name: str) -> None:
        if (process := self._processes.pop(name, None)) is not None:
            process.release_host_memory()

    def set_proxy_endpoints(self, endpoints: list[str]) -> None:
        self._proxies = endpoints
        write_endpoints(self._folder / PROXIES_FILE, endpoints)
        for process in self._processes.values():
            process.set_proxy_endpoints(endpoints)

    def set_role(self, name: str, role: Role) -> None:
        self._processes[name].set_role(role)

    async def _copy_api_keys(self, file: KeyFile) -> None:
        """Passes the API keys to all proxies whenever the file has changed. A file without valid keys is not passed."""
        async for text in file.changes():
            try:
                parse_keys(text)
            except ConfigError as error:
                log.error("%s; the keys that were read before stay valid", error)
                continue
            self._api_keys = text
            for process in self._processes.values():
                process.set_api_keys(text)

    def close(self) -> None:
        if self._copying_keys is not None:
            self._copying_keys.cancel()
        ray.shutdown()


def ranks_per_ray_gpu(cluster: ClusterConfig, num_gpus: int) -> int:
    """Returns how many workers share each GPU of the Ray cluster. Workers of several ranks need whole ones."""
    if not num_gpus or any(cluster.num_ranks(role) > 1 for role, count in cluster.counts.items() if count):
        return 1
    return ranks_per_gpu(cluster, num_gpus)


def gpu_share(num_ranks: int) -> float:
    """Returns the share of a GPU that each of `num_ranks` asks Ray for. Ray counts in units of 1/10,000."""
    return 10_000 // num_ranks / 10_000


def keys_to_hand_out(network: NetworkConfig) -> dict[Part, NetworkKeys]:
    """Keys of the parts whose secrets are in the operator's folder; the others are on the nodes. Raises ConfigError."""
    folder = Path(network.keys_folder)
    parts: tuple[Part, ...] = ("proxy", "worker")
    return {
        part: load_keys(folder, part)
        for part in parts
        if network.keys_folder and (folder / f"{part}.key_secret").exists()
    }
