"""Fuzzes a media cache: every message type on its socket, with leases that their client never releases."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

from tandem.media_cache.media_client import MediaCacheClient
from tandem.media_cache.media_segment import write_segment
from tandem.protocol.messages.media_cache import (
    CommittedMedia,
    FromMediaCache,
    MediaKey,
    ToMediaCache,
    WantedMedia,
)
from tandem.protocol.sockets import new_context
from tests.security.fuzzing.fuzz_messages import MessageFuzzer, sender
from tests.support.processes import num_descriptors

_ROUND = 500
_CAPACITY_BYTES = 64 << 20
_TIMEOUT_S = 60.0

T = TypeVar("T")


def fuzz_cache(rng: random.Random, num_inputs: int) -> dict[str, Any]:
    """Returns inputs by kind and open descriptors. Raises AssertionError on a leak, a crash or a logged error."""
    with tempfile.TemporaryDirectory(prefix="fz") as folder:
        endpoint = f"ipc://{folder}/cache.sock"
        file, log = Path(folder) / "cache.json", Path(folder) / "log"
        file.write_text(json.dumps({"endpoint": endpoint, "capacity_bytes": _CAPACITY_BYTES}))
        with log.open("wb") as output:
            process = subprocess.Popen([sys.executable, "-m", "tandem.media_cache", str(file)], stderr=output)
        try:
            inputs: Counter[str] = Counter()
            expected, others = get_args(ToMediaCache), get_args(FromMediaCache)
            _use(endpoint)
            before = num_descriptors(process.pid)
            while inputs.total() < num_inputs:
                # The owner of all leases is a process that gets killed.
                client = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
                try:
                    fuzzer = MessageFuzzer(rng, expected, others, {"client_pid": client.pid})
                    _send(fuzzer, endpoint, min(_ROUND, num_inputs - inputs.total()), inputs)
                finally:
                    client.kill()
                    client.wait()
                _use(endpoint)
            deadline = time.monotonic() + _TIMEOUT_S
            while num_descriptors(process.pid) > before or _call(endpoint, MediaCacheClient.status).num_leases:
                assert time.monotonic() < deadline, "the media cache leaks descriptors or leases"
                time.sleep(0.2)
            assert process.poll() is None, f"the media cache ended with {process.returncode}"
            logged = log.read_text()
            assert "a message handler failed" not in logged and "Traceback" not in logged, logged
            return {"inputs": dict(sorted(inputs.items())), "descriptors": num_descriptors(process.pid)}
        finally:
            process.terminate()
            process.wait(10)


def _send(fuzzer: MessageFuzzer, endpoint: str, count: int, inputs: Counter[str]) -> None:
    with sender(endpoint) as send:
        for _ in range(count):
            kind, data = fuzzer.next()
            send([data])
            inputs[kind] += 1


def _use(endpoint: str) -> None:
    """Acquires, writes, reads, releases and clears an item, as a proxy does."""
    key, data = MediaKey(os.urandom(32), "input"), os.urandom(1000)

    async def use(client: MediaCacheClient) -> bytes:
        lease_id = client.new_id()
        [granted] = await client.acquire(lease_id, [WantedMedia(key, 2000)])
        assert granted is not None and not granted.is_ready
        [offset], num_bytes = write_segment(granted.segment, key, [data])
        await client.commit(lease_id, [CommittedMedia(key, num_bytes, b"")])
        found = bytearray(len(data))
        await client.read(key, offset, len(data), found)
        client.release([lease_id])
        await client.clear()
        return bytes(found)

    assert _call(endpoint, use) == data


def _call(endpoint: str, work: Callable[[MediaCacheClient], Awaitable[T]]) -> T:
    async def call() -> T:
        context = new_context()
        client = MediaCacheClient(context, endpoint)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await work(client)
        finally:
            client.close()
            context.destroy(linger=0)

    return asyncio.run(call())
