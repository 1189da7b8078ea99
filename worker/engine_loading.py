"""Loads Tandem's own engine for a worker: model, followers, engine thread and KV pools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from tandem.engine.engine_thread import EngineThread
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.kv_cache.kv_cache_size import fit_kv_cache
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.lora.adapters import Adapters, load_adapter
from tandem.engine.sampling.grammars import Grammars
from tandem.engine.tensor_parallel import TensorParallelGroup
from tandem.kv_transfer.connector import DataNetwork
from tandem.kv_transfer.connectors.nccl_group import disable_nccl_watchdog
from tandem.kv_transfer.handshake import offered_connectors
from tandem.kv_transfer.ranks.fan_out import WorkerPools
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.kv_transfer.ranks.remote_rank import RemoteRank
from tandem.kv_transfer.ranks.worker_tiers import WorkerTiers
from tandem.protocol.tls_identity import tls_contexts
from tandem.runtime.errors import ConfigError
from tandem.runtime.files.lora_files import InvalidAdapter
from tandem.runtime.garbage_collection import freeze_loaded_objects
from tandem.runtime.threads import post
from tandem.worker.engine_host import EngineHost
from tandem.worker.follower import start_follower
from tandem.worker.tandem_worker_config import TandemWorkerConfig


async def load_engine_host(config: TandemWorkerConfig, on_prepared: Callable[[], None]) -> EngineHost:
    """Loads the model on all ranks and starts the engine thread. Raises ConfigError or InternalError.

    on_prepared: called on the loop when a grammar has been compiled or an adapter loaded.
    """
    loop = asyncio.get_running_loop()
    ranks = TensorParallelGroup(config.worker_id, config.engine, config.host, config.logs, start_follower)
    loaded: LoadedModel = await loop.run_in_executor(None, ranks.load)
    disable_nccl_watchdog()

    post_prepared = partial(post, loop, on_prepared)
    grammars = Grammars(config.engine.model, loaded.vocab_size, post_prepared)
    adapters = Adapters(loaded.lora_modules, loaded.dtype, loaded.device, post_prepared)
    await loop.run_in_executor(None, _check_adapters, config, loaded)
    loaded, engine_config = await loop.run_in_executor(None, fit_kv_cache, loaded, config.engine)
    pool = await loop.run_in_executor(None, KVPool, loaded, engine_config)
    decodes = config.role != "prefill"
    engine = EngineThread(
        lambda: ranks.make_runner(loaded, pool, decodes),
        partial(post, loop),
        config.engine.num_threads,
        overlaps=may_overlap(loaded.device.type),
    )
    ready: asyncio.Future[None] = loop.create_future()
    engine.start(lambda error: ready.set_exception(error) if error else ready.set_result(None))
    await ready
    keys = config.network.keys_of("worker")
    network = DataNetwork(config.host, tls_contexts(keys) if keys is not None else None)
    own_pool = RankPool(0, loaded.layout, pool.as_blocks(), network)
    followers = [RemoteRank(connection) for connection in ranks.transfer_connections]
    for follower in followers:
        await loop.run_in_executor(None, follower.wait_until_ready, keys)
    tiers = WorkerTiers.of(own_pool.tiers(config.tiers), followers, config.tiers)
    freeze_loaded_objects()
    return EngineHost(
        ranks,
        loaded,
        BlockManager(pool.num_blocks, loaded.layout.block_size),
        pool.block_bytes * config.engine.tensor_parallel_size,
        engine,
        WorkerPools(loaded.layout, [own_pool, *followers], tiers),
        offered_connectors(config.kv_connector, loaded.device.type, keys is not None),
        grammars,
        adapters,
    )


def may_overlap(device_type: str) -> bool:
    """Whether steps are submitted ahead. On a CPU the device is the host, so nothing would run meanwhile."""
    return device_type != "cpu"


def _check_adapters(config: TandemWorkerConfig, loaded: LoadedModel) -> None:
    """Raises ConfigError for an adapter that this worker could not load."""
    for ref in config.adapters:
        try:
            load_adapter(ref, loaded.lora_modules, loaded.dtype, loaded.device)
        except InvalidAdapter as error:
            raise ConfigError(f"--lora: {ref.folder}: {error.message}") from error
