"""The process in which a Mooncake client runs, `python -m tandem.kv_transfer.tiers.mooncake_process CONFIG`, and its
worker's end.

Mooncake's client would endanger a worker: connecting and closing hold Python's lock until the master answers or a
time-out ends them (seconds), a call in the wrong state crashes, and it loads a Go runtime with signal handlers. In a
process of its own, a deadline holds for every call, and a crash costs only cached blocks. Blocks pass through memory
that both map.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from signal import SIGKILL
from typing import Any

import msgspec
import numpy as np

from tandem.kv_transfer.tiers.block_record import HEADER_BYTES, BlockFormat
from tandem.kv_transfer.tiers.mooncake_blocks import DistributedStore, Loaded, MooncakeBlocks, StoreFull, StoreLost
from tandem.protocol.codec import Codec
from tandem.protocol.rank_channel import RankChannel, open_channel
from tandem.runtime.logs import LogSettings
from tandem.runtime.processes.process import run_to_exit

OPEN_TIMEOUT_S = 15.0
"""Deadline of starting the process and connecting to the master."""
CALL_TIMEOUT_S = 10.0
"""Deadline of any other call. Mooncake's own time-outs end first, unless its process is frozen."""
_STOP_TIMEOUT_S = 5.0
_ENVIRONMENT = {
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_LOG_LEVEL": "ERROR",
}
"""Time-outs of Mooncake, whose defaults are 30 s, and its log level. Variables that are set already win."""


class MooncakeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's use of a store. master: HOST:PORT. identity: of the model, layout and rank."""

    master: str
    identity: bytes
    block_bytes: int


class ProcessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Argument of the process. channel_fd, staging_fd: its end of the channel and the shared memory, inherited."""

    store: MooncakeConfig
    channel_fd: int
    staging_fd: int


class FindRecords(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The answer is BlocksFound."""

    hashes: list[bytes]


class PutBlock(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Stores the block in the staging memory. The answer is StoreReady."""

    block_hash: bytes


class GetBlock(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Loads a block into the staging memory. The answer is BlockLoaded."""

    block_hash: bytes


class ClearBlocks(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The answer is StoreReady."""


class StoreReady(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The store is connected, or has done what was asked."""


class BlocksFound(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    is_there: list[bool]


class BlockLoaded(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    outcome: Loaded


class StoreFailed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The process ends after an error other than `is_full`."""

    error: str
    is_full: bool = False


Request = FindRecords | PutBlock | GetBlock | ClearBlocks
Answer = StoreReady | BlocksFound | BlockLoaded | StoreFailed


class MooncakeProcess:
    """Starts a client's process and calls it. It must be used by one thread, because it ends with the thread.

    After StoreLost the process is of no more use; close it.
    """

    def __init__(self, config: MooncakeConfig) -> None:
        """Blocks until the client is connected to the master. Raises StoreLost."""
        self._config = config
        try:
            self._start()
        except OSError as error:
            raise StoreLost(f"cannot start a Mooncake client: {error.strerror}") from error
        try:
            self._receive(OPEN_TIMEOUT_S)
        except StoreLost:
            self.close()
            raise

    def _start(self) -> None:
        with contextlib.ExitStack() as inherited:
            memory = os.memfd_create("tandem-mooncake")
            inherited.callback(os.close, memory)
            os.ftruncate(memory, HEADER_BYTES + self._config.block_bytes)
            self._staging = np.frombuffer(mmap.mmap(memory, 0), np.uint8)
            ours, theirs = open_channel()
            inherited.enter_context(theirs)
            self._channel: RankChannel[Answer] = RankChannel(ours, Codec(Answer))
            argument = msgspec.json.encode(ProcessConfig(self._config, theirs.fileno(), memory)).decode()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tandem.kv_transfer.tiers.mooncake_process", argument],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), memory),
                env=_ENVIRONMENT | os.environ,
            )

    def find(self, hashes: Sequence[bytes]) -> list[bool]:
        """Returns for each block whether the store holds it. Raises StoreLost."""
        answer = self._ask(FindRecords(list(hashes)))
        assert isinstance(answer, BlocksFound)
        return answer.is_there

    def put(self, block_hash: bytes, block: memoryview) -> None:
        """Raises StoreFull and StoreLost."""
        np.copyto(self._staging[HEADER_BYTES:], np.frombuffer(block, np.uint8))
        self._ask(PutBlock(block_hash))

    def get(self, block_hash: bytes, block: memoryview) -> Loaded:
        """Raises StoreLost."""
        answer = self._ask(GetBlock(block_hash))
        assert isinstance(answer, BlockLoaded)
        if answer.outcome == "loaded":
            np.copyto(np.frombuffer(block, np.uint8), self._staging[HEADER_BYTES:])
        return answer.outcome

    def clear(self) -> None:
        """Raises StoreLost."""
        self._ask(ClearBlocks())

    def close(self) -> None:
        """Kills the process: its client owns nothing in the store."""
        self._channel.close()
        self._process.kill()
        self._wait()

    def _ask(self, request: Request) -> Answer:
        with contextlib.suppress(OSError):  # the process has exited, so there is no answer either
            self._channel.send(request)
        return self._receive(CALL_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> Answer:
        if not self._channel.has_message(timeout_s):
            raise StoreLost(f"the Mooncake client for {self._config.master} did not answer within {timeout_s:.0f} s")
        answer = self._channel.receive()
        if answer is None:
            self._wait()
            code = self._process.returncode
            raise StoreLost(f"the Mooncake client for {self._config.master} ended with exit code {code}")
        if isinstance(answer, StoreFailed):
            raise (StoreFull if answer.is_full else StoreLost)(answer.error)
        return answer

    def _wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT_S)


def main() -> None:
    config = msgspec.json.decode(sys.argv[1], type=ProcessConfig)
    run_to_exit("mooncake", LogSettings("warning"), lambda: _serve(config), SIGKILL)


def _serve(config: ProcessConfig) -> None:
    channel: RankChannel[Request] = RankChannel(Connection(config.channel_fd), Codec(Request))
    try:
        staging = np.frombuffer(mmap.mmap(config.staging_fd, 0), np.uint8)
        block_format = BlockFormat(config.store.identity, config.store.block_bytes)
        blocks = MooncakeBlocks(_connect(config.store.master), block_format, staging)
        channel.send(StoreReady())
        _serve_requests(channel, blocks)
    except StoreLost as error:
        channel.send(StoreFailed(str(error)))


def _serve_requests(channel: RankChannel[Request], blocks: MooncakeBlocks) -> None:
    """Answers until the worker closes its end. Raises StoreLost."""
    while (request := channel.receive()) is not None:
        try:
            channel.send(_answer(blocks, request))
        except StoreFull as error:
            channel.send(StoreFailed(str(error), is_full=True))


def _answer(blocks: MooncakeBlocks, request: Request) -> Answer:
    match request:
        case FindRecords(hashes):
            return BlocksFound(blocks.find(hashes))
        case GetBlock(block_hash):
            return BlockLoaded(blocks.get(block_hash))
        case PutBlock(block_hash):
            blocks.put(block_hash)
        case ClearBlocks():
            blocks.clear()
    return StoreReady()


def _connect(master: str) -> DistributedStore:
    """Returns a client of the store that gives it no memory. Raises StoreLost."""
    try:
        library = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise StoreLost(f"Mooncake cannot be loaded: {error}") from error
    store: Any = library.MooncakeDistributedStore()
    # With P2PHANDSHAKE clients find each other through the master; there is no metadata server to run.
    code = store.setup(_own_address(master), "P2PHANDSHAKE", 0, 0, "tcp", "", master)
    if code:
        raise StoreLost(f"no Mooncake master answers at {master} (error {code})")
    return store  # type: ignore[no-any-return]


def _own_address(master: str) -> str:
    """Returns this host's address on the route to the master, by which Mooncake names the client."""
    host, _, port = master.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StoreLost(f"no route to the Mooncake master at {master}: {error}") from error


if __name__ == "__main__":
    main()
