"""A cluster's processes on a Ray cluster: each in an actor of its own, in a placement group of its own.

Nodes' addresses are found by the actors, ports by the kernel. A process that dies, or whose node is lost, is started
again in a new placement group, wherever there is room. docs/adr/0016-ray-placement.md has the reasons.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tandem.deploy.config import ClusterConfig, bracketed
from tandem.deploy.processes.child_process import MAX_RESTART_DELAY_S, RESTART_DELAY_S, STABLE_AFTER_S
from tandem.deploy.processes.process_configs import Place, ProcessConfigs, process_environment
from tandem.deploy.processes.runtime_dir import NETWORK_FILE, PROXIES_FILE
from tandem.deploy.sites.local import MODULES, OnExit, Supervised
from tandem.deploy.sites.ray_actor import NodePlace, ProcessActor, ProcessEnd
from tandem.media_cache.config import MediaCacheConfig
from tandem.protocol.messages.membership import Role
from tandem.protocol.network import NetworkConfig
from tandem.protocol.network_keys import NetworkKeys, Part, load_keys
from tandem.protocol.proxy_endpoints import write_endpoints
from tandem.proxy.text.model_files import takes_media
from tandem.runtime.errors import ConfigError

try:
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError("--ray needs Ray: pip install 'tandem-serve[ray]'") from error

log = logging.getLogger(__name__)

SAY_WAITING_AFTER_S = 10.0
_WILDCARDS = ("0.0.0.0", "::")

MakeConfig = Callable[[str, Place], msgspec.Struct]


class RaySite:
    """folder: of the launcher, for what commands on its host read. Raises ConfigError when there is no Ray cluster."""

    def __init__(self, cluster: ClusterConfig, model: str, served_model_name: str, folder: Path, logs: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._logs = logs
        self._num_threads: dict[Role, int] = {
            role: max(1, cluster.threads_per_worker // cluster.num_ranks(role)) for role in ("prefill", "decode")
        }
        self._configs = ProcessConfigs(
            cluster, model, served_model_name, self._num_threads, keys_to_hand_out(cluster.network)
        )
        self._takes_media = takes_media(model)
        self._processes: dict[str, RayProcess] = {}
        self._proxies: list[str] = []
        self.progress_files: dict[str, Path] = {}  # they are on the nodes
        self.media_cache_endpoint = ""
        (folder / NETWORK_FILE).write_bytes(msgspec.json.encode(cluster.network))
        try:
            ray.init(address=cluster.ray, namespace="tandem", log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"ray: cannot join {cluster.ray!r} ({reason}); start one with: ray start --head"
            ) from error
        self._uses_gpus = cluster.device == "cuda" or (
            cluster.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
        )

    def http_hosts(self) -> list[str]:
        """Those that can be reached from here."""
        if self._cluster.host not in _WILDCARDS:
            return []
        return [p.place.host for p in self._processes.values() if p.name.startswith("proxy-") and p.place is not None]

    def make_proxy(self, name: str, on_exit: OnExit, on_endpoint: Callable[[str, str], None]) -> Supervised:
        bundle: dict[str, float] = {"CPU": 1}
        if self._cluster.ray_proxy_resource:
            bundle[self._cluster.ray_proxy_resource] = 1
        env = process_environment(1) | {"CUDA_VISIBLE_DEVICES": ""}
        proxy = self._process(name, "tandem.proxy", self._configs.proxy, bundle, env, on_exit, on_endpoint)
        if self._takes_media:
            proxy.make_media_cache = self._media_cache
        return proxy

    def _media_cache(self, place: NodePlace) -> MediaCacheConfig:
        """Of a proxy, on its node. Prefill workers of other nodes read from it; each keeps its embeddings to itself."""
        return self._configs.media_cache(
            f"ipc://{place.folder}/media-cache.sock",
            f"tcp://{bracketed(place.host)}:*",
            f"{place.folder}/media-cache.endpoint",
        )

    def make_worker(self, role: Role, name: str, on_exit: OnExit) -> Supervised:
        num_ranks = self._cluster.num_ranks(role)
        # The ranks share memory, so one bundle holds them all: Ray cannot spread it over nodes.
        bundle: dict[str, float] = {"CPU": self._num_threads[role] * num_ranks}
        if self._uses_gpus:
            bundle["GPU"] = num_ranks
        env = process_environment(self._num_threads[role])
        make = partial(self._configs.worker, role)
        return self._process(name, MODULES[role], make, bundle, env, on_exit, None)

    def _process(
        self,
        name: str,
        module: str,
        make_config: MakeConfig,
        bundle: dict[str, float],
        env: dict[str, str],
        on_exit: OnExit,
        on_endpoint: Callable[[str, str], None] | None,
    ) -> RayProcess:
        process = RayProcess(
            name,
            module,
            make_config,
            bundle,
            env,
            self._logs / f"{name}.log",
            on_exit,
            on_endpoint,
            lambda: self._proxies,
            self._cluster.log_file_mib << 20,
        )
        self._processes[name] = process
        return process

    def make_media_cache(self, on_exit: OnExit) -> Supervised | None:
        """Each proxy has its own beside it."""

    def forget(self, name: str) -> None:
        self._processes.pop(name, None)

    def tell_proxies(self, endpoints: list[str]) -> None:
        self._proxies = endpoints
        write_endpoints(self._folder / PROXIES_FILE, endpoints)
        for process in self._processes.values():
            process.tell_proxies(endpoints)

    def stop_listening(self) -> None:
        """Each proxy listens for itself, on its node."""

    def close(self) -> None:
        ray.shutdown()


def keys_to_hand_out(network: NetworkConfig) -> dict[Part, NetworkKeys]:
    """Of the parts whose secrets are in the operator's folder; the others are on the nodes. Raises ConfigError."""
    folder = Path(network.keys_folder)
    parts: tuple[Part, ...] = ("proxy", "worker")
    return {
        part: load_keys(folder, part)
        for part in parts
        if network.keys_folder and (folder / f"{part}.key_secret").exists()
    }


class RayProcess:
    """One process, kept alive while `run` runs. make_config(name, place) is called for each start.

    proxies(): where the proxies are at the time of a start.
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
        on_endpoint: Callable[[str, str], None] | None,
        proxies: Callable[[], list[str]],
        max_log_bytes: int,
    ) -> None:
        self.name = name
        self.num_starts = 0
        self.log_file = log_file
        self.last_pid = 0
        self.make_media_cache: Callable[[NodePlace], MediaCacheConfig] | None = None
        """For one that needs a media cache on its node."""
        self.place: NodePlace | None = None
        """Of the process that runs or ran last."""
        self._module = module
        self._make_config = make_config
        self._bundle = bundle
        self._env = env
        self._on_exit = on_exit
        self._on_endpoint = on_endpoint
        self._proxies = proxies
        self._max_log_bytes = max_log_bytes
        self._actor: Any = None
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        delay = RESTART_DELAY_S
        loop = asyncio.get_running_loop()
        self.log_file.write_bytes(b"")
        while not self._stopping.is_set():
            started_at = loop.time()
            try:
                returncode = await self._live_once()
            except (RayError, OSError) as error:  # the actor or its node is gone, and the process with it
                returncode = -9
                with contextlib.suppress(OSError), self.log_file.open("a") as log_file:
                    log_file.write(f"lost: {str(error).strip()}\n")
            if self._stopping.is_set() or not self._on_exit(self.name, self.last_pid, returncode):
                return
            delay = RESTART_DELAY_S if loop.time() - started_at > STABLE_AFTER_S else delay
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
            delay = min(2 * delay, MAX_RESTART_DELAY_S)

    async def _live_once(self) -> int:
        """From placement to exit; its return code. Raises RayError when the node or the actor is lost."""
        group = placement_group([self._bundle], strategy="STRICT_PACK", name=f"tandem {self.name}")
        actor: Any = None
        try:
            if not await self._until_placed(group):
                return 0
            self.num_starts += 1  # before the actor is there: one that cannot come up (Tandem is missing) counts too
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            resources = {key: value for key, value in self._bundle.items() if key not in ("CPU", "GPU")}
            make = ray.remote(ProcessActor).options(
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0),
                resources=resources,
                max_restarts=0,
                scheduling_strategy=strategy,
            )
            actor = make.remote(self.name)
            place: NodePlace = await actor.place.remote()
            self.place = place
            told_place = Place(
                endpoint=f"tcp://{bracketed(place.host)}:0",
                host=place.host,
                endpoint_file=f"{place.folder}/endpoint",
                proxies_file=f"{place.folder}/proxies",
            )
            if self.make_media_cache is not None:
                cache = self.make_media_cache(place)
                told_cache = msgspec.json.encode(cache), self._env, self._max_log_bytes
                tcp_endpoint: str = await actor.start_media_cache.remote(*told_cache)
                told_place = replace(
                    told_place, media_cache_endpoint=cache.endpoint, media_cache_tcp_endpoint=tcp_endpoint
                )
            encoded = msgspec.json.encode(self._make_config(self.name, told_place))
            told = self._module, encoded, self._env, self._proxies(), self._max_log_bytes
            self.last_pid = await actor.start.remote(*told)
            self._actor = actor
            if self._stopping.is_set():
                await actor.stop.remote()
            self.tell_proxies(self._proxies())  # they may have moved meanwhile
            log.info("%s runs on %s (process %d)", self.name, place.host, self.last_pid)
            if self._on_endpoint is not None and (endpoint := await actor.endpoint.remote()) is not None:
                self._on_endpoint(self.name, endpoint)
            end: ProcessEnd = await actor.wait.remote()
            with self.log_file.open("a") as log_file:
                log_file.write(f"on {place.host}, the last lines:\n{end.log}")
            await actor.close.remote()
            return end.returncode
        finally:
            self._actor = None
            if actor is not None:
                ray.kill(actor)
            remove_placement_group(group)

    async def _until_placed(self, group: Any) -> bool:
        """False when told to stop before there was room."""
        loop = asyncio.get_running_loop()
        waits_since, said = loop.time(), False
        while not self._stopping.is_set():
            if await loop.run_in_executor(None, group.wait, 1.0):
                return True
            if not said and loop.time() - waits_since > SAY_WAITING_AFTER_S:
                said = True
                log.warning("%s waits for a node with %s free (`ray status` shows them)", self.name, self._bundle)
        return False

    def tell_proxies(self, endpoints: list[str]) -> None:
        if self._actor is not None and self._on_endpoint is None:
            self._actor.set_proxies.remote(endpoints)

    def restart(self) -> None:
        """It ends when it has finished what is under way, and is placed and started again."""
        if self._actor is not None:
            self._actor.terminate.remote()

    def terminate(self) -> None:
        self._stopping.set()
        if self._actor is not None:
            self._actor.terminate.remote()

    def stop(self) -> None:
        self._stopping.set()
        if self._actor is not None:
            self._actor.stop.remote()

    def kill(self) -> None:
        self._stopping.set()
        if self._actor is not None:
            ray.kill(self._actor)

    def replace(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)  # and its process with it, which counts as lost

    def last_error(self) -> str | None:
        lines = self.log_file.read_text(errors="replace").splitlines()
        return next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), None)
