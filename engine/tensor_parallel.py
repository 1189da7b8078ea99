"""Tensor parallelism: rank 0 is the worker's process, the other ranks are follower processes on the same host.

Only rank 0 has a scheduler. It sends each batch to the followers, and all ranks run it on their own heads and their own
KV pools, with the same block ids. The model's collectives keep them in step; rank 0 samples. A step that is launched
before its tokens are known begins with one more collective, which brings rank 0's tokens to the other ranks' devices
(`engine.steps.launched_step.FedTokens`). If a rank fails, the others are out of step for good, so the worker exits and
the launcher restarts it.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore  # typed here, not where it is exported

from tandem.engine.batch import Batch, Sample
from tandem.engine.cuda.step_graphs import GraphLimits
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.loading.model_loader import check_model, load_model
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.launched_step import LaunchedStep
from tandem.protocol.codec import Codec
from tandem.protocol.messages.sampling import SamplingParams
from tandem.protocol.rank_channel import RankChannel, open_channel
from tandem.protocol.sockets import listen_on_free_port
from tandem.runtime.errors import ConfigError, first_line
from tandem.runtime.logs import LogSettings
from tandem.runtime.processes.forked_child import ForkedChild
from tandem.runtime.processes.lifetime import end_process

LOAD_TIMEOUT_S = 600.0
"""Deadline of collectives while the ranks load."""
STEP_TIMEOUT_S = 60.0
"""Deadline of collectives within a step. It detects frozen ranks; dead ones are noticed at once."""
STOP_TIMEOUT_S = 1.0
QUIET_S = 1.0
"""A follower that gets no batch for this long waits for its device, to notice a step that has failed there."""
_HOST = "127.0.0.1"
_GREEDY = Sample(SamplingParams(temperature=0.0))


class FollowerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of one follower. steps_fd, transfers_fd: its ends of the channels from rank 0, inherited.

    host: own address for KV data. store_port: port on loopback at which the ranks rendezvous.
    """

    name: str
    rank: int
    engine: EngineConfig
    host: str
    logs: LogSettings
    store_port: int
    steps_fd: int
    transfers_fd: int


FollowerProcess = subprocess.Popen[bytes] | ForkedChild
StartFollower = Callable[[FollowerConfig], FollowerProcess]


class TensorParallelGroup:
    """Rank 0's followers; none if the worker has one rank.

    Create it on the main thread, because a follower exits with the thread that started it, and before another thread
    starts, so that followers can be forked. start_follower: starts a process that calls `join_as_follower`.
    on_lost(reason, exit code): called on another thread when a follower has died; by default it ends the process.
    Raises ConfigError for a model that cannot be split this way.
    """

    def __init__(
        self,
        worker_id: str,
        engine: EngineConfig,
        host: str,
        logs: LogSettings,
        start_follower: StartFollower,
        on_lost: Callable[[str, int], None] = end_process,
    ) -> None:
        self._engine = engine
        self._on_lost = on_lost
        self._start_follower = start_follower
        self._closing = False
        self._serves = False
        self._processes: list[FollowerProcess] = []
        self._steps: list[RankChannel[Batch]] = []
        self.transfer_connections: list[Connection] = []  # one per follower, in order of rank
        if engine.tensor_parallel_size == 1:
            return
        listener, port = listen_on_free_port(_HOST)
        for rank in range(1, engine.tensor_parallel_size):
            self._start(f"{worker_id}/{rank}", rank, host, logs, port)
        try:
            check_model(engine)  # before the ranks wait for each other
        except BaseException:
            self.close()
            raise
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()
        self._store = TCPStore(
            _HOST, port, None, True, timedelta(seconds=LOAD_TIMEOUT_S), False, master_listen_fd=listener
        )

    def _start(self, name: str, rank: int, host: str, logs: LogSettings, store_port: int) -> None:
        steps, follower_steps = open_channel()
        transfers, follower_transfers = open_channel()
        fds = (follower_steps.fileno(), follower_transfers.fileno())
        config = FollowerConfig(name, rank, self._engine, host, logs, store_port, *fds)
        self._processes.append(self._start_follower(config))
        follower_steps.close()
        follower_transfers.close()
        self._steps.append(RankChannel(steps, Codec(Batch)))
        self.transfer_connections.append(transfers)

    def _watch(self, rank: int, process: FollowerProcess) -> None:
        returncode = process.wait()
        if not self._closing:
            reason = f"rank {rank} (process {process.pid}) exited with {returncode}; the worker ends with it"
            # Once it serves, a request may be the cause of any end, also of one that looks like a wrong configuration.
            is_passed_on = returncode > 0 and not self._serves
            self._on_lost(reason, returncode if is_passed_on else 1)

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks, in order."""
        return [os.getpid(), *(process.pid for process in self._processes)]

    def load(self) -> LoadedModel:
        """Loads the whole model, or rank 0's share. Blocks until every rank has loaded. Raises ConfigError."""
        if not self._processes:
            return load_model(self._engine)
        return load_share(self._engine, 0, self._store)

    def make_runner(self, loaded: LoadedModel, pool: KVPool, decodes: bool = True) -> ModelRunner:
        """decodes: see `GraphLimits`. Raises ConfigError if answers must be exact, but would not be on this GPU."""
        self._serves = True
        limits = GraphLimits.of(self._engine, decodes)
        if self._steps:
            runner: ModelRunner = LeadingRunner(loaded, pool, limits, self._steps)
        else:
            runner = ModelRunner(loaded, pool, limits)
        if problem := runner.gpu_problem:
            raise ConfigError(f"--exact: answers would not be exact: {problem}; leave out --exact")
        return runner

    def close(self) -> None:
        """Terminates the followers and closes the channels."""
        self._closing = True
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        for channel in self._steps:
            channel.close()


class LeadingRunner(ModelRunner):
    """Rank 0's runner: sends each batch to the followers before it launches it."""

    def __init__(
        self, loaded: LoadedModel, pool: KVPool, limits: GraphLimits, followers: list[RankChannel[Batch]]
    ) -> None:
        super().__init__(loaded, pool, limits)
        self._followers = followers

    def launch(self, batch: Batch, before: LaunchedStep | None = None) -> LaunchedStep:
        """See `ModelRunner.launch`. A batch that is launched again is sent again."""
        shared = without_sampling(batch)
        for follower in self._followers:
            follower.send(shared)
        return super().launch(batch, before)

    def why_lost(self, error: BaseException) -> str:
        """Returns a reason after every error, because it is unknown which collectives the other ranks have entered."""
        return f"the ranks are out of step; the worker ends: {first_line(error)}"


def without_sampling(batch: Batch) -> Batch:
    """Returns the batch for followers: the same rows of logits, which all ranks gather, but greedy sampling."""
    items = [msgspec.structs.replace(item, samples=[_GREEDY] * len(item.samples)) for item in batch.items]
    return Batch(items, batch.block_copies)


def load_share(engine: EngineConfig, rank: int, store: Store) -> LoadedModel:
    """Joins the process group and loads this rank's share of the model. Raises ConfigError."""
    on_gpu = engine.device != "cpu" and torch.cuda.is_available()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=engine.tensor_parallel_size,
        timeout=timedelta(seconds=LOAD_TIMEOUT_S),
        device_id=torch.device("cuda", rank) if on_gpu else None,
    )
    loaded = load_model(engine)
    dist.barrier()
    dist.set_timeout(timedelta(seconds=STEP_TIMEOUT_S))
    return loaded


def join_as_follower(config: FollowerConfig) -> LoadedModel:
    """Connects to rank 0's store and loads this rank's share of the model. Raises ConfigError."""
    store = TCPStore(_HOST, config.store_port, None, False, timedelta(seconds=LOAD_TIMEOUT_S), False)
    return load_share(config.engine, config.rank, store)


def follow(steps: Connection, runner: ModelRunner) -> None:
    """Launches every batch from rank 0 until rank 0 is gone. Raises the error of a step that fails.

    It does not wait for a step's end before it launches the next one. Rank 0 limits the number in flight, because its
    own steps end only after the other ranks have entered their collectives.
    """
    channel: RankChannel[Batch] = RankChannel(steps, Codec(Batch))
    while (batch := channel.receive()) is not None:
        runner.launch(batch)
        if not channel.has_message(QUIET_S):
            runner.wait()
