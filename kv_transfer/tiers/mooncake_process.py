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
from typing import Any, Literal

import msgspec
import numpy as np

from tandem.kv_transfer.tiers.block_record import HEADER_BYTES, BlockFormat
from tandem.kv_transfer.tiers.mooncake_blocks import DistributedStore, Loaded, MooncakeBlocks, StoreFull, StoreLost
from tandem.protocol.codec import Codec
from tandem.protocol.rank_channel import RankChannel, open_channel
from tandem.runtime.errors import ProtocolError
from tandem.runtime.logs import LogSettings
from tandem.runtime.processes.command_line import python_command
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


class StoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Calls a method of `MooncakeBlocks`. The answer is one StoreAnswer."""

    method: Literal["find", "put", "get", "clear"]
    hashes: list[bytes] = []
    """Those to find, or that of the block in the staging memory."""


class StoreAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first one says that the store is connected. The process ends after an error other than `is_full`."""

    result: list[bool] | Loaded | None = None
    error: str | None = None
    is_full: bool = False


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
        except BaseException:
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
            self._channel: RankChannel[StoreAnswer] = RankChannel(ours, Codec(StoreAnswer))
            argument = msgspec.json.encode(ProcessConfig(self._config, theirs.fileno(), memory)).decode()
            self._process = subprocess.Popen(
                python_command("-m", "tandem.kv_transfer.tiers.mooncake_process", argument),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), memory),
                env=_ENVIRONMENT | os.environ,
            )

    def find(self, hashes: Sequence[bytes]) -> list[bool]:
        """Returns for each block whether the store holds it. Raises StoreLost."""
        is_there = self._ask(StoreRequest("find", list(hashes)))
        assert isinstance(is_there, list)
        return is_there

    def put(self, block_hash: bytes, block: memoryview) -> None:
        """Raises StoreFull and StoreLost."""
        np.copyto(self._staging[HEADER_BYTES:], np.frombuffer(block, np.uint8))
        self._ask(StoreRequest("put", [block_hash]))

    def get(self, block_hash: bytes, block: memoryview) -> Loaded:
        """Raises StoreLost."""
        outcome = self._ask(StoreRequest("get", [block_hash]))
        assert isinstance(outcome, str)
        if outcome == "loaded":
            np.copyto(np.frombuffer(block, np.uint8), self._staging[HEADER_BYTES:])
        return outcome

    def clear(self) -> None:
        """Raises StoreLost."""
        self._ask(StoreRequest("clear"))

    def close(self) -> None:
        """Kills the process: its client owns nothing in the store."""
        self._channel.close()
        self._process.kill()
        self._wait()

    def _ask(self, request: StoreRequest) -> list[bool] | Loaded | None:
        with contextlib.suppress(OSError):  # the process has exited, so there is no answer either
            self._channel.send(request)
        return self._receive(CALL_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> list[bool] | Loaded | None:
        if not self._channel.has_message(timeout_s):
            raise StoreLost(f"the Mooncake client for {self._config.master} did not answer within {timeout_s:.0f} s")
        try:
            answer = self._channel.receive()
        except ProtocolError as error:  # the next answer would be taken for another request's
            raise StoreLost(f"the Mooncake client for {self._config.master} cannot be understood: {error}") from error
        if answer is None:
            self._wait()
            code = self._process.returncode
            raise StoreLost(f"the Mooncake client for {self._config.master} ended with exit code {code}")
        if answer.error is not None:
            raise (StoreFull if answer.is_full else StoreLost)(answer.error)
        return answer.result

    def _wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT_S)


def main() -> None:
    config = msgspec.json.decode(sys.argv[1], type=ProcessConfig)
    run_to_exit("mooncake", LogSettings("warning"), lambda: _serve(config), SIGKILL)


def _serve(config: ProcessConfig) -> None:
    """Answers until the worker closes its end."""
    channel: RankChannel[StoreRequest] = RankChannel(Connection(config.channel_fd), Codec(StoreRequest))
    try:
        staging = np.frombuffer(mmap.mmap(config.staging_fd, 0), np.uint8)
        block_format = BlockFormat(config.store.identity, config.store.block_bytes)
        blocks = MooncakeBlocks(_connect(config.store.master), block_format, staging)
        channel.send(StoreAnswer())
        while (request := channel.receive()) is not None:
            channel.send(_answer(blocks, request))
    except StoreLost as error:
        channel.send(StoreAnswer(error=str(error)))


def _answer(blocks: MooncakeBlocks, request: StoreRequest) -> StoreAnswer:
    """Raises StoreLost."""
    match request.method:
        case "find":
            return StoreAnswer(blocks.find(request.hashes))
        case "get":
            return StoreAnswer(blocks.get(*request.hashes))
        case "put":
            try:
                blocks.put(*request.hashes)
            except StoreFull as error:
                return StoreAnswer(error=str(error), is_full=True)
        case "clear":
            blocks.clear()
    return StoreAnswer()


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
