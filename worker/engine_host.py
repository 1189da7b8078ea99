"""Owns what a worker computes with, from loading to exit: model, engine thread, KV blocks, grammars."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.engine.block_manager import BlockManager
from tandem.engine.engine_thread import EngineThread
from tandem.engine.kv_cache_size import fit_kv_cache
from tandem.engine.kv_pool import KVPool
from tandem.engine.loading.model_loader import LoadedModel
from tandem.engine.lora.adapters import Adapters, load_adapter
from tandem.engine.sampling.grammars import Grammars
from tandem.engine.tensor_parallel import TensorParallelGroup
from tandem.kv_transfer.connector import DataNetwork
from tandem.kv_transfer.connectors.process_group import disable_nccl_watchdog
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.kv_transfer.ranks.worker_pools import WorkerPools
from tandem.protocol.lora_files import InvalidAdapter
from tandem.protocol.tls_identity import tls_contexts
from tandem.runtime.errors import ConfigError
from tandem.runtime.exits import WatchExit, watch_exit
from tandem.runtime.garbage_collection import freeze_loaded_objects
from tandem.worker.config import WorkerConfig
from tandem.worker.follower import run_follower

STOP_TIMEOUT_S = 1.5
"""Time that a running step gets when the worker ends."""


@dataclass(eq=False)
class EngineHost:
    """The engine of one worker. Create it by `load`, release it by `close`.

    block_bytes: size of one block, summed over all ranks. watch_exit: reports the exits of peers' processes.
    """

    _ranks: TensorParallelGroup
    loaded: LoadedModel
    blocks: BlockManager
    block_bytes: int
    engine: EngineThread
    pools: WorkerPools
    grammars: Grammars
    adapters: Adapters
    watch_exit: WatchExit = field(default=watch_exit)

    @classmethod
    async def load(cls, config: WorkerConfig, on_prepared: Callable[[], None]) -> EngineHost:
        """Loads the model on all ranks and starts the engine thread. Raises ConfigError or InternalError.

        on_prepared: called on the loop when a grammar has been compiled or an adapter loaded.
        """
        loop = asyncio.get_running_loop()
        ranks = TensorParallelGroup(
            config.worker_id, config.engine, config.host, config.log_level, run_follower=run_follower
        )
        loaded: LoadedModel = await loop.run_in_executor(None, ranks.load)
        disable_nccl_watchdog()

        def post_prepared() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(on_prepared)

        grammars = Grammars(config.engine.model, loaded.vocab_size, post_prepared)
        adapters = Adapters(loaded.lora_modules, loaded.dtype, loaded.device, post_prepared)
        await loop.run_in_executor(None, _check_adapters, config, loaded)
        loaded, engine_config = await loop.run_in_executor(None, fit_kv_cache, loaded, config.engine)
        pool = await loop.run_in_executor(None, KVPool, loaded, engine_config)
        decodes = config.role != "prefill"
        engine = EngineThread(
            lambda: ranks.make_runner(loaded, pool, decodes),
            loop.call_soon_threadsafe,
            config.engine.num_threads,
            overlaps=may_overlap(loaded.device.type),
        )
        ready: asyncio.Future[None] = loop.create_future()
        engine.start(lambda error: ready.set_exception(error) if error else ready.set_result(None))
        await ready
        keys = config.network.keys_of("worker")
        network = DataNetwork(config.host, tls_contexts(keys) if keys is not None else None)
        own_pool = RankPool(0, loaded.layout, pool.as_blocks(), network)
        pools = WorkerPools(own_pool, pool.location(), ranks.transfer_connections, keys, config.tiers)
        await loop.run_in_executor(None, pools.wait_until_ready)
        freeze_loaded_objects()
        return cls(
            ranks,
            loaded,
            BlockManager(pool.num_blocks, loaded.layout.block_size),
            pool.block_bytes * config.engine.tensor_parallel_size,
            engine,
            pools,
            grammars,
            adapters,
        )

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


def may_overlap(device_type: str) -> bool:
    """Whether steps are submitted ahead. On a CPU the device is the host, so nothing would run meanwhile."""
    return device_type != "cpu"


def _check_adapters(config: WorkerConfig, loaded: LoadedModel) -> None:
    """Raises ConfigError for an adapter that this worker could not load."""
    for ref in config.adapters:
        try:
            load_adapter(ref, loaded.lora_modules, loaded.dtype, loaded.device)
        except InvalidAdapter as error:
            raise ConfigError(f"--lora: {ref.folder}: {error.message}") from error
