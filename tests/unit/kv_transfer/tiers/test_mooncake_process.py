"""The process of a Mooncake client, with a library in place of Mooncake that is a dictionary and fails on demand."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.kv_transfer.tiers import mooncake_process
from tandem.kv_transfer.tiers.mooncake_blocks import StoreFull, StoreLost
from tandem.kv_transfer.tiers.mooncake_process import MooncakeConfig, MooncakeProcess
from tandem.protocol.rank_channel import RankChannel
from tandem.runtime.errors import ProtocolError

FIRST, SECOND, THIRD = (bytes([n]) * 16 for n in (1, 2, 3))
BLOCK = memoryview(bytes(range(64)))
LIBRARY = """
import ctypes, os, time

class MooncakeDistributedStore:
    values = {}

    def setup(self, hostname, metadata, segment_bytes, buffer_bytes, protocol, devices, master):
        assert (hostname, metadata, segment_bytes, protocol) == ("127.0.0.1", "P2PHANDSHAKE", 0, "tcp")
        return 0 if master == "localhost:50051" else -1

    def register_buffer(self, address, size):
        return 0

    def put_from(self, key, address, size):
        match key[-2:]:
            case "02":
                return -200
            case "03":
                time.sleep(60)
        self.values[key] = ctypes.string_at(address, size)
        return 0

    def get_into(self, key, address, size):
        if key.endswith("03"):
            os.abort()
        if key not in self.values:
            return -704
        ctypes.memmove(address, self.values[key], size)
        return size

    def batch_is_exist(self, keys):
        return [int(key in self.values) for key in keys]

    def remove_by_regex(self, pattern, force):
        self.values.clear()
        return 1
"""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeProcess]:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake/store.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    opened = open_client()
    yield opened
    opened.close()


def open_client(master: str = "localhost:50051") -> MooncakeProcess:
    return MooncakeProcess(MooncakeConfig(master, bytes(16), len(BLOCK)))


def test_calls_reach_the_store_and_blocks_come_back(client: MooncakeProcess) -> None:
    client.put(FIRST, BLOCK)
    loaded = bytearray(len(BLOCK))
    assert client.get(FIRST, memoryview(loaded)) == "loaded" and loaded == BLOCK
    assert client.get(SECOND, memoryview(loaded)) == "missing"
    with pytest.raises(StoreFull, match="full"):
        client.put(SECOND, BLOCK)
    assert client.find([FIRST, SECOND]) == [True, False]
    client.clear()
    assert client.find([FIRST]) == [False]


def test_a_crash_of_the_library_is_a_lost_store(client: MooncakeProcess) -> None:
    with pytest.raises(StoreLost, match=r"localhost:50051 ended with exit code -6"):
        client.get(THIRD, memoryview(bytearray(len(BLOCK))))
    with pytest.raises(StoreLost, match="exit code -6"):
        client.put(FIRST, BLOCK)


def test_a_call_without_end_has_a_deadline(client: MooncakeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_process, "CALL_TIMEOUT_S", 0.2)
    with pytest.raises(StoreLost, match="did not answer within"):
        client.put(THIRD, BLOCK)


def test_a_master_that_does_not_answer_is_named(client: MooncakeProcess) -> None:
    with pytest.raises(StoreLost, match="no Mooncake master answers at localhost:1"):
        open_client("localhost:1")
    with pytest.raises(StoreLost, match=r"no route to the Mooncake master at no-such-host\.invalid:1"):
        open_client("no-such-host.invalid:1")


def test_a_library_that_cannot_be_loaded_is_named(client: MooncakeProcess, tmp_path: Path) -> None:
    (tmp_path / "mooncake/store.py").write_text("raise ImportError('libibverbs.so.1 is missing')")
    with pytest.raises(StoreLost, match=r"Mooncake cannot be loaded: libibverbs\.so\.1 is missing"):
        open_client()


def test_an_answer_that_cannot_be_understood_is_a_lost_store(
    client: MooncakeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor would be taken for the answer to the next request."""

    def nonsense(channel: object) -> None:
        raise ProtocolError("not an expected message")

    monkeypatch.setattr(RankChannel, "receive", nonsense)
    with pytest.raises(StoreLost, match="cannot be understood"):
        client.find([bytes(16)])
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(StoreLost, match="cannot be understood"):
        open_client()
    [process] = started
    assert process.poll() is not None, "it is ended"
