"""Heartbeats that fail end the worker: it would otherwise run on, unknown to every proxy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import tandem.worker.registration
from tandem.protocol.messages.membership import PROTOCOL_VERSION, RegisterWorker, WorkerInfo, WorkerLoad, WorkerStatus
from tandem.protocol.sockets import new_context
from tandem.runtime.errors import ConfigError
from tandem.worker.registration import Registration

INFO = WorkerInfo("decode-0", "e", "decode", "tcp://127.0.0.1:1", 1)


def test_a_proxy_that_cannot_be_connected_to_ends_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tandem.worker.registration, "HEARTBEAT_INTERVAL_S", 0.01)
    file = tmp_path / "proxies"

    async def run() -> None:
        context = new_context()
        registration = Registration(
            context,
            [],
            RegisterWorker(PROTOCOL_VERSION, INFO, 100, 100, "model", 64),
            lambda: WorkerStatus(INFO.worker_id, INFO.epoch, INFO.role, WorkerLoad()),
            lambda view: None,
            lambda proxy_id: None,
            lambda: None,
            lambda: RegisterWorker(PROTOCOL_VERSION, INFO, 100, 100, "model", 64),
            lambda: None,
            lambda role: None,
            lambda: None,
            str(file),
        )
        await asyncio.sleep(0.05)
        registration.raise_if_failed()
        file.write_text("tcp://127.0.0.1:1\n")
        with pytest.raises(ConfigError, match="is not protected"):
            async with asyncio.timeout(30):
                while True:
                    await asyncio.sleep(0.01)
                    registration.raise_if_failed()
        registration.close()
        context.destroy(linger=0)

    asyncio.run(run())
