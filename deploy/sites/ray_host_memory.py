"""Host memory for KV blocks on the nodes of a Ray cluster."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tandem.deploy.processes.host_memory import HostMemory


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
