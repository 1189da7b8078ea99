"""A process of the cluster in a Ray actor with a placement group of its own, kept alive by the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from tandem.deploy.cluster_config import bracketed
from tandem.deploy.processes.host_memory import HostMemory
from tandem.deploy.processes.process_configs import Place
from tandem.deploy.processes.supervisor import EXIT_LOST, STABLE_AFTER_S, OnExit, Supervised, has_crashed
from tandem.deploy.sites.ray_actor import NodePlace, ProcessActor, ProcessEnd
from tandem.media_cache.media_cache_config import MediaCacheConfig
from tandem.protocol.messages.membership import Role
from tandem.runtime.processes.process import EXIT_BAD_CONFIG

log = logging.getLogger(__name__)

WAITING_LOG_AFTER_S = 10.0

MakeConfig = Callable[[str, Place], msgspec.Struct]


@dataclass(frozen=True, slots=True)
class RayProgram:
    """A process that is started on whichever node has its resources."""

    module: str
    make_config: MakeConfig
    """Called with the process's name and place; returns the configuration for a start there."""
    bundle: dict[str, float]
    """Ray resources."""
    env: dict[str, str]
    preload_module: str | None = None
    """Module of the process from which a worker's actor forks it; None starts it plainly."""
    engine_python: str | None = None
    """Setting of a worker with another engine, see `deploy.processes.engine_python`; None for the actor's
    interpreter."""
    make_media_cache: Callable[[NodePlace], MediaCacheConfig] | None = None
    """Returns the configuration of a media cache that runs beside the process; None for no cache."""


class RayProcess(Supervised):
    """A process in a Ray actor. Each start gets a new placement group, actor and configuration; see `run_once`.

    on_endpoint: called with a proxy's control endpoint; None for workers. host_memory: of a worker, kept when it is
    started again.
    """

    def __init__(
        self,
        name: str,
        program: RayProgram,
        log_file: Path,
        on_exit: OnExit,
        on_endpoint: Callable[[str, str], None] | None = None,
        host_memory: RayHostMemory | None = None,
    ) -> None:
        super().__init__(name, log_file, on_exit)
        self.place: NodePlace | None = None
        """Place of the process that runs or ran last."""
        self._program = program
        self._proxies: list[str] = []
        self._on_endpoint = on_endpoint
        self._host_memory = host_memory
        self._api_keys = ""
        self._role = ""
        self._group: Any = None
        self._actor: Any = None
        self.log_file.write_bytes(b"")

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self._leave()

    async def run_once(self) -> int | None:
        """Starts the process. After a crash a worker keeps its actor, unless it ran for less than STABLE_AFTER_S."""
        clock = asyncio.get_running_loop().time
        keeps_actor = False
        try:
            if self._actor is None and not await self._until_placed():
                return None
            began_at = clock()
            returncode = await self._run_in(self._actor)
            lived_s = clock() - began_at
            keeps_actor = (
                self._program.preload_module is not None and has_crashed(returncode) and lived_s > STABLE_AFTER_S
            )
            if not keeps_actor:
                await self._actor.close.remote()
            return returncode
        except (RayError, OSError) as error:  # the actor or its node is gone, and the process with it
            self._log(f"lost: {str(error).strip()}\n")
            return EXIT_LOST
        finally:
            if not keeps_actor:
                self._leave()

    def _leave(self) -> None:
        """Ends the actor, and with it the process, and gives the resources back."""
        if self._actor is not None:
            ray.kill(self._actor)
        if self._group is not None:
            remove_placement_group(self._group)
        self._actor = self._group = None

    async def _run_in(self, actor: Any) -> int:
        """Runs the process in its actor; returns its return code. Raises RayError."""
        self.num_starts += 1  # also counts actors that cannot start, for example where Tandem is not installed
        self.place = node = await actor.place.remote()
        place = Place(
            endpoint=f"tcp://{bracketed(node.host)}:0",
            host=node.host,
            endpoint_file=f"{node.folder}/endpoint",
            proxies_file=f"{node.folder}/proxies",
            role_file=f"{node.folder}/role",
            lora_file=f"{node.folder}/adapters.json",
            response_folder=f"{node.folder}/responses",
            record_folder=f"{node.folder}/records",
        )
        if self._role:
            await actor.set_role.remote(self._role)
        if self._program.make_media_cache is not None:
            cache = self._program.make_media_cache(node)
            tcp_endpoint: str = await actor.start_media_cache.remote(msgspec.json.encode(cache), self._program.env)
            place = replace(place, media_cache_endpoint=cache.endpoint, media_cache_tcp_endpoint=tcp_endpoint)
        if self._host_memory is not None:
            place = replace(place, host_files=await self._host_memory.files(node.node_id))
        if self._api_keys:
            await actor.set_api_keys.remote(self._api_keys)
            place = replace(place, api_keys_file=f"{node.folder}/api-keys")
        config = msgspec.json.encode(self._program.make_config(self.name, place))
        env, on_gpus = self._program.env, bool(self._program.bundle.get("GPU"))
        if on_gpus:
            env = env | await actor.gpu_environment.remote()
        error = ""
        if self._program.preload_module is not None:
            error = await actor.preload.remote(self._program.preload_module, env, not on_gpus)
        elif self._program.engine_python is not None:
            error = await actor.find_engine_python.remote(self._program.engine_python)
        if error:
            self._log(f"on {node.host}:\nerror: {error}\n")
            return EXIT_BAD_CONFIG
        self.last_pid = await actor.start.remote(self._program.module, config, env, self._proxies)
        if self._stopping.is_set():
            self.send_signal(signal.SIGINT)
        self.set_proxy_endpoints(self._proxies)  # they may have changed during the start
        log.info("%s runs on %s (process %d)", self.name, node.host, self.last_pid)
        if self._on_endpoint is not None and (endpoint := await actor.endpoint.remote()) is not None:
            self._on_endpoint(self.name, endpoint)
        end: ProcessEnd = await actor.wait.remote()
        self._log(f"on {node.host}, the last lines:\n{end.log}")
        return end.returncode

    async def _until_placed(self) -> bool:
        """Starts an actor on a node with enough resources; False when the process is stopped before there is one."""
        self._group = group = placement_group(
            [self._program.bundle], strategy="STRICT_PACK", name=f"tandem {self.name}"
        )
        loop = asyncio.get_running_loop()
        log_at = loop.time() + WAITING_LOG_AFTER_S
        while not await loop.run_in_executor(None, group.wait, 1.0):
            if self._stopping.is_set():
                return False
            if loop.time() > log_at:
                log_at = math.inf
                log.warning(
                    "%s waits for a node with %s free (`ray status` shows them)", self.name, self._program.bundle
                )
        self._actor = (
            ray.remote(ProcessActor)
            .options(
                num_cpus=self._program.bundle["CPU"],
                num_gpus=self._program.bundle.get("GPU", 0),
                resources={key: value for key, value in self._program.bundle.items() if key not in ("CPU", "GPU")},
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            )
            .remote(self.name)
        )
        return True

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


class RayHostMemory:
    """Host memory of one worker, held by an actor of its own on the worker's node.

    The actor of the worker's process ends with the process; this one stays until `release`. If the worker is started on
    another node, it gets new memory there.
    """

    def __init__(self, worker: str, num_ranks: int, num_bytes: int) -> None:
        self._arguments = (worker, num_ranks, num_bytes)
        self._node_id = ""
        self._actor: Any = None

    async def files(self, node_id: str) -> list[str]:
        """See `HostMemory.files`; for a start on this node. Raises RayError, also when the node lacks the memory."""
        if node_id != self._node_id:
            self.release()
        if self._actor is None:
            here = NodeAffinitySchedulingStrategy(node_id, soft=False)
            self._actor = ray.remote(HostMemory).options(num_cpus=0, scheduling_strategy=here).remote()
            self._node_id = node_id
        try:
            files: list[str] = await self._actor.files.remote(*self._arguments)
        except BaseException:
            self.release()  # the next start asks a new actor
            raise
        return files

    def release(self) -> None:
        """Frees the memory once the worker has ended too."""
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = None
