"""Runs a cluster's processes on a Ray cluster, each in its own actor and placement group.

Actors report their node's address, and the kernel chooses ports. A process that dies or whose node is lost is restarted
in a new placement group on any node with enough resources. Reasons: docs/adr/0016-ray-placement.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tandem.deploy.config import ClusterConfig, bracketed
from tandem.deploy.device_defaults import ranks_per_gpu, with_device_defaults
from tandem.deploy.processes.process_configs import Place, ProcessConfigs, process_environment
from tandem.deploy.processes.runtime_dir import NETWORK_FILE, PROXIES_FILE
from tandem.deploy.processes.supervisor import EXIT_LOST, RESTART_DELAY_S, OnExit, Supervised
from tandem.deploy.sites.ray_actor import NodePlace, ProcessActor, ProcessEnd
from tandem.deploy.sites.site import WORKER_MODULE
from tandem.media_cache.config import MediaCacheConfig
from tandem.protocol.messages.membership import Role
from tandem.protocol.network import NetworkConfig
from tandem.protocol.network_keys import NetworkKeys, Part, load_keys
from tandem.protocol.proxy_endpoints import write_endpoints
from tandem.proxy.http.api_keys import KeyFile, parse_keys
from tandem.proxy.text.model_files import takes_media
from tandem.runtime.errors import ConfigError, first_line
from tandem.runtime.tasks import keep_running
from tandem.runtime.whole_file import write_whole

try:
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from tandem.deploy.sites.ray_host_memory import RayHostMemory
except ImportError as error:
    raise ConfigError("--ray needs Ray: pip install 'tandem-serve[ray]'") from error

log = logging.getLogger(__name__)

PROXY_RESOURCE = "tandem_proxy"
"""Ray resource of the nodes that may run proxies, one each; without any such node, proxies run on all nodes."""
WAITING_LOG_AFTER_S = 10.0
_WILDCARDS = ("0.0.0.0", "::")

MakeConfig = Callable[[str, Place], msgspec.Struct]


class RaySite:
    """folder: the launcher's, where commands on its host find the proxies. Raises ConfigError without a Ray cluster."""

    def __init__(self, cluster: ClusterConfig, folder: Path, logs: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._logs = logs
        self._takes_media = takes_media(cluster.model)
        self._processes: dict[str, RayProcess] = {}
        self._proxies: list[str] = []
        self._api_keys = ""
        self._copying_keys: asyncio.Task[None] | None = None
        if cluster.api_keys_file:
            file = KeyFile(Path(cluster.api_keys_file))
            self._api_keys = file.read()
            self._copying_keys = keep_running(
                partial(self._copy_api_keys, file), "copying the API keys", RESTART_DELAY_S
            )
        self.progress_files: dict[str, Path] = {}  # always empty: the files are on the nodes
        self.media_cache_endpoint = ""
        write_whole(folder / NETWORK_FILE, msgspec.json.encode(cluster.network))
        try:
            ray.init(address=cluster.ray, namespace="tandem", log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"--ray: cannot connect to the Ray cluster at {cluster.ray!r} ({first_line(error)}); start one with "
                "`ray start --head`"
            ) from error
        resources = ray.cluster_resources()
        num_gpus = int(resources.get("GPU", 0))
        self.on_gpus = cluster.device == "cuda" or (cluster.device == "auto" and num_gpus > 0)
        self._cluster = with_device_defaults(cluster, self.on_gpus)
        self._ranks_per_gpu = ranks_per_ray_gpu(cluster, num_gpus)
        if self._ranks_per_gpu > 1:
            log.warning(
                "the Ray cluster has %d GPUs: up to %d workers share each, and new nodes do not change that",
                num_gpus, self._ranks_per_gpu,
            )  # fmt: skip
        keys = keys_to_hand_out(cluster.network)
        self._configs = ProcessConfigs(self._cluster, keys, self._ranks_per_gpu)
        self._proxy_bundle: dict[str, float] = {"CPU": 1}
        if resources.get(PROXY_RESOURCE, 0) > 0:
            self._proxy_bundle[PROXY_RESOURCE] = 1

    def http_hosts(self) -> list[str]:
        if self._cluster.host not in _WILDCARDS:
            return []
        return [p.place.host for p in self._processes.values() if p.name.startswith("proxy-") and p.place is not None]

    def make_proxy(self, name: str, on_exit: OnExit, on_endpoint: Callable[[str, str], None]) -> Supervised:
        env = process_environment(1) | {"CUDA_VISIBLE_DEVICES": ""}
        make_cache = self._media_cache if self._takes_media else None
        log_file, bundle = self._logs / f"{name}.log", self._proxy_bundle
        make = self._configs.proxy
        process = RayProcess(name, "tandem.proxy", make, bundle, env, log_file, on_exit, on_endpoint, make_cache)
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
        make = partial(self._configs.worker, role)
        log_file = self._logs / f"{name}.log"
        num_bytes = self._cluster.host_bytes(role)
        memory = RayHostMemory(name, num_ranks, num_bytes) if num_bytes else None
        return self._add(RayProcess(name, WORKER_MODULE, make, bundle, env, log_file, on_exit, host_memory=memory))

    def _add(self, process: RayProcess) -> RayProcess:
        process.set_proxy_endpoints(self._proxies)
        self._processes[process.name] = process
        return process

    def make_media_cache(self, on_exit: OnExit) -> Supervised | None:
        """Returns None: each proxy has a media cache beside it."""
        return None

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

    @property
    def is_preloaded(self) -> bool:
        return True  # each worker imports for itself

    def renew_preloaded(self) -> None:
        """Does nothing: each worker imports for itself."""

    def stop_listening(self) -> None:
        """Does nothing: each proxy binds its own socket on its node."""

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


class RayProcess(Supervised):
    """A process in a Ray actor. Each start gets a new placement group, actor and configuration.

    make_config(name, place): configuration for a start at `place`. bundle: Ray resources. on_endpoint: called with a
    proxy's control endpoint; None for workers. make_media_cache: configuration of a media cache beside the process.
    host_memory: of a worker, kept when it is started again.
    """

    def __init__(
        self,
        name: str,
        module: str,
        make_config: MakeConfig,
        bundle: dict[str, float],
        env: dict[str, str],
        log_file: Path,
        on_exit: OnExit,
        on_endpoint: Callable[[str, str], None] | None = None,
        make_media_cache: Callable[[NodePlace], MediaCacheConfig] | None = None,
        host_memory: RayHostMemory | None = None,
    ) -> None:
        super().__init__(name, log_file, on_exit)
        self.place: NodePlace | None = None
        """Place of the process that runs or ran last."""
        self._module = module
        self._make_config = make_config
        self._bundle = bundle
        self._env = env
        self._proxies: list[str] = []
        self._on_endpoint = on_endpoint
        self._make_media_cache = make_media_cache
        self._host_memory = host_memory
        self._api_keys = ""
        self._role = ""
        self._actor: Any = None
        self.log_file.write_bytes(b"")

    async def run_once(self) -> int | None:
        group = placement_group([self._bundle], strategy="STRICT_PACK", name=f"tandem {self.name}")
        try:
            return await self._run_in(group) if await self._until_placed(group) else None
        except (RayError, OSError) as error:  # the actor or its node is gone, and the process with it
            self._log(f"lost: {str(error).strip()}\n")
            return EXIT_LOST
        finally:
            if self._actor is not None:
                ray.kill(self._actor)
            self._actor = None
            remove_placement_group(group)

    async def _run_in(self, group: Any) -> int:
        """Runs the process in an actor of the placement group; returns its return code. Raises RayError."""
        self.num_starts += 1  # also counts actors that cannot start, for example where Tandem is not installed
        actor: Any = (
            ray.remote(ProcessActor)
            .options(
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0),
                resources={key: value for key, value in self._bundle.items() if key not in ("CPU", "GPU")},
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            )
            .remote(self.name)
        )
        self._actor = actor
        self.place = node = await actor.place.remote()
        place = Place(
            endpoint=f"tcp://{bracketed(node.host)}:0",
            host=node.host,
            endpoint_file=f"{node.folder}/endpoint",
            proxies_file=f"{node.folder}/proxies",
            role_file=f"{node.folder}/role",
            lora_file=f"{node.folder}/adapters.json",
            response_folder=f"{node.folder}/responses",
        )
        if self._role:
            await actor.set_role.remote(self._role)
        if self._make_media_cache is not None:
            cache = self._make_media_cache(node)
            tcp_endpoint: str = await actor.start_media_cache.remote(msgspec.json.encode(cache), self._env)
            place = replace(place, media_cache_endpoint=cache.endpoint, media_cache_tcp_endpoint=tcp_endpoint)
        if self._host_memory is not None:
            place = replace(place, host_files=await self._host_memory.files(node.node_id))
        if self._api_keys:
            await actor.set_api_keys.remote(self._api_keys)
            place = replace(place, api_keys_file=f"{node.folder}/api-keys")
        config = msgspec.json.encode(self._make_config(self.name, place))
        env = self._env
        if self._bundle.get("GPU"):
            env = env | await actor.nccl_environment.remote()
        self.last_pid = await actor.start.remote(self._module, config, env, self._proxies)
        if self._stopping.is_set():
            self.send_signal(signal.SIGINT)
        self.set_proxy_endpoints(self._proxies)  # they may have changed during the start
        log.info("%s runs on %s (process %d)", self.name, node.host, self.last_pid)
        if self._on_endpoint is not None and (endpoint := await actor.endpoint.remote()) is not None:
            self._on_endpoint(self.name, endpoint)
        end: ProcessEnd = await actor.wait.remote()
        self._log(f"on {node.host}, the last lines:\n{end.log}")
        await actor.close.remote()
        return end.returncode

    async def _until_placed(self, group: Any) -> bool:
        """Waits for a node with enough resources; False when the process is stopped before there is one."""
        loop = asyncio.get_running_loop()
        log_at = loop.time() + WAITING_LOG_AFTER_S
        while not self._stopping.is_set():
            if await loop.run_in_executor(None, group.wait, 1.0):
                return True
            if loop.time() > log_at:
                log_at = math.inf
                log.warning("%s waits for a node with %s free (`ray status` shows them)", self.name, self._bundle)
        return False

    def set_proxy_endpoints(self, endpoints: list[str]) -> None:
        self._proxies = endpoints
        if self._actor is not None and self._on_endpoint is None:
            self._actor.set_proxies.remote(endpoints)

    def release_host_memory(self) -> None:
        if self._host_memory is not None:
            self._host_memory.release()

    def set_role(self, role: Role) -> None:
        """Sets the role with which a worker begins at its next start: its own file may be on another node then."""
        self._role = role

    def set_api_keys(self, text: str) -> None:
        """Text of the operator's file of API keys, which a proxy reads from its node; empty if there is none."""
        self._api_keys = text
        if text and self._actor is not None and self._on_endpoint is not None:
            self._actor.set_api_keys.remote(text)

    def send_signal(self, number: signal.Signals) -> None:
        if self._actor is None:
            return
        if number is signal.SIGKILL:
            ray.kill(self._actor)  # the process ends with it
        else:
            self._actor.send_signal.remote(number)

    def log_tail(self) -> str:
        return self.log_file.read_text(errors="replace")

    def _log(self, text: str) -> None:
        with contextlib.suppress(OSError), self.log_file.open("a") as log_file:
            log_file.write(text)
