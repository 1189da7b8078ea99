"""What a worker computes with: its model, engine, KV blocks and grammars. Imports no torch.

`worker.engine_loading` makes it for Tandem's own engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem.engine.engine import Engine
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.loaded_model import LoadedModel
from tandem.kv_transfer.connector import KVConnector
from tandem.runtime.host import host_id
from tandem.runtime.processes.lifetime import WatchExit, watch_exit
from tandem.worker.tandem_worker_config import TandemWorkerConfig

if TYPE_CHECKING:
    from tandem.engine.lora.adapters import Adapters
    from tandem.engine.sampling.grammars import Grammars
    from tandem.engine.tensor_parallel import TensorParallelGroup
    from tandem.kv_transfer.ranks.fan_out import WorkerPools

STOP_TIMEOUT_S = 1.5
"""Time that a running step gets when the worker ends."""


@dataclass(eq=False)
class EngineHost:
    """The engine of one worker, and what belongs to it. Release it by `close`."""

    _ranks: TensorParallelGroup
    loaded: LoadedModel
    blocks: BlockManager
    block_bytes: int
    """Size of one block, summed over all ranks."""
    engine: Engine
    pools: WorkerPools
    connectors: Mapping[str, KVConnector]
    """Those that the worker offers its peers, in order of preference."""
    grammars: Grammars
    adapters: Adapters
    watch_exit: WatchExit = field(default=watch_exit)
    """Reports the exits of peers' processes on this host."""
    host_id: str = field(default_factory=host_id)

    @property
    def device(self) -> str:
        return self.loaded.device.type

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks, rank 0 first."""
        return self._ranks.pids

    def close(self) -> None:
        self.grammars.close()
        self.adapters.close()
        self.engine.stop(STOP_TIMEOUT_S)
        self._ranks.close()


LoadHost = Callable[[TandemWorkerConfig, Callable[[], None]], Awaitable[EngineHost]]
"""Loads what a worker computes with. The second argument is called when a grammar or an adapter is ready."""
