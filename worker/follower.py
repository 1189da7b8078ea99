"""A rank other than 0, which rank 0 forks, or starts as `python -m tandem.worker.follower CONFIG`.

CONFIG is JSON. The process inherits two channels, one for steps and one for KV transfers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn

import msgspec
import torch

from tandem.engine.cuda.step_graphs import GraphLimits
from tandem.engine.kv_cache.kv_cache_size import fit_kv_cache
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.model_runner import ModelRunner
from tandem.engine.tensor_parallel import FollowerConfig, FollowerProcess, follow, join_as_follower
from tandem.kv_transfer.connector import DataNetwork
from tandem.kv_transfer.connectors.nccl_group import disable_nccl_watchdog
from tandem.kv_transfer.ranks.rank_pool import RankPool
from tandem.kv_transfer.ranks.remote_rank import TransferServer
from tandem.runtime.garbage_collection import freeze_loaded_objects
from tandem.runtime.processes.command_line import python_command, show_command_line
from tandem.runtime.processes.fork_server import why_unsafe_to_fork
from tandem.runtime.processes.forked_child import fork_child
from tandem.runtime.processes.process import run_to_exit


def start_follower(config: FollowerConfig) -> FollowerProcess:
    """Forks a follower, or starts it as a program where a fork is not safe."""
    fds = (config.steps_fd, config.transfers_fd)
    variables = {"LOCAL_RANK": str(config.rank)}  # transformers selects the GPU by it
    if not why_unsafe_to_fork():
        return fork_child(partial(run_follower, config), fds, variables)
    command = python_command("-m", "tandem.worker.follower", msgspec.json.encode(config).decode())
    environment = {**os.environ, **variables}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, env=environment)


def main() -> None:
    run_follower(msgspec.json.decode(sys.argv[1], type=FollowerConfig))


def run_follower(config: FollowerConfig) -> NoReturn:
    show_command_line("tandem.worker.follower", config.name)
    # With rank 0 it ends also if it is stopped, when a signal other than SIGKILL would have no effect.
    run_to_exit(config.name, config.logs, lambda: serve(config), signal.SIGKILL)


def serve(config: FollowerConfig) -> None:
    """Loads the rank's share of the model; runs batches on this thread, transfers on others, until rank 0 exits."""
    torch.set_num_threads(config.engine.num_threads)
    loaded = join_as_follower(config)
    disable_nccl_watchdog()
    loaded, engine = fit_kv_cache(loaded, config.engine)
    pool = KVPool(loaded, engine)
    rank_pool = RankPool(config.rank, loaded.layout, pool.as_blocks(), DataNetwork(config.host))
    TransferServer(Connection(config.transfers_fd), rank_pool).start()
    runner = ModelRunner(loaded, pool, GraphLimits.of(config.engine))
    freeze_loaded_objects()
    follow(Connection(config.steps_fd), runner)


if __name__ == "__main__":
    main()
