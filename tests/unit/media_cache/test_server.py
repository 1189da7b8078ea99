"""The media cache over its socket: one round trip on a hit, two on a miss, and no leases of exited clients."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from tandem.engine.vision.media_tensors import open_tensors
from tandem.media_cache.media_cache_config import MediaCacheConfig
from tandem.media_cache.media_client import MediaCacheClient
from tandem.media_cache.media_segment import map_segment, write_segment
from tandem.media_cache.server import MediaCacheServer
from tandem.protocol.messages.media import MediaItem, MediaTensor
from tandem.protocol.messages.media_cache import HEADER_BYTES, CommittedMedia, GrantedMedia, MediaKey, WantedMedia
from tandem.protocol.sockets import new_context
from tandem.proxy.media.media_lease import MediaLease
from tandem.runtime.errors import InternalError, InvalidRequest, Overloaded, WorkerLost

KEYS = [MediaKey(bytes([number]) * 32, "input") for number in range(200)]


@asynccontextmanager
async def cache(folder: Path, capacity_bytes: int = 1 << 20) -> AsyncIterator[MediaCacheClient]:
    """Yields a client of a server that runs on this loop."""
    server = MediaCacheServer(MediaCacheConfig(f"ipc://{folder}/cache.sock", capacity_bytes))
    running = asyncio.create_task(server.run())
    context = new_context()
    client = MediaCacheClient(context, f"ipc://{folder}/cache.sock")
    try:
        async with asyncio.timeout(60):
            yield client
    finally:
        client.close()
        server.stop()
        await running
        context.destroy(linger=0)


def with_cache(
    folder: Path, test: Callable[[MediaCacheClient], Awaitable[None]], capacity_bytes: int = 1 << 20
) -> None:
    async def run() -> None:
        async with cache(folder, capacity_bytes) as client:
            await test(client)

    asyncio.run(run())


def num_memfds() -> int:
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum("memfd:media" in str(link) for link in links)


async def put(client: MediaCacheClient, lease_id: str, keys: list[MediaKey], data: bytes) -> list[GrantedMedia]:
    granted = [g for g in await client.acquire(lease_id, [WantedMedia(k, 64 + len(data)) for k in keys]) if g]
    done = []
    for key, item in zip(keys, granted, strict=True):
        assert not item.is_ready
        [offset], num_bytes = write_segment(item.segment, key, [data])
        assert offset == HEADER_BYTES
        done.append(CommittedMedia(key, num_bytes, b"what it is"))
    await client.commit(lease_id, done)
    return granted


async def test_leased_items_outlive_the_cache_process(tmp_path: Path) -> None:
    async with cache(tmp_path) as client:
        [granted] = await put(client, "written", KEYS[:1], b"pixels")
        before = num_memfds()
        lease = MediaLease(client, "held")
        tensor = MediaTensor("pixel_values", "uint8", (6,), HEADER_BYTES, 6)
        item = MediaItem(KEYS[0].digest, "image", ((0, 1),), granted.segment, (tensor,))
        held, again = lease.hold([item, item])
        assert num_memfds() == before + 1  # one descriptor for an image that is used twice
    assert open_tensors(held)["pixel_values"].numpy().tobytes() == b"pixels"
    with pytest.raises(WorkerLost, match="has exited"):
        open_tensors(item)
    with pytest.raises(WorkerLost, match="cannot be opened"):
        MediaLease(client, "late").hold([item])
    lease.release()
    assert again == held
    with pytest.raises(WorkerLost):
        open_tensors(held)


def test_without_descriptors_images_are_refused(tmp_path: Path) -> None:
    async def test(client: MediaCacheClient) -> None:
        [granted] = await put(client, "written", KEYS[:1], b"pixels")
        lease = MediaLease(client, "held")
        item = MediaItem(KEYS[0].digest, "image", ((0, 1),), granted.segment, ())
        read = msgspec.structs.replace(item, tensors=(MediaTensor("pixel_values", "uint8", (6,), HEADER_BYTES, 6),))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)  # its successor
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(Overloaded, match="ulimit -n"):
                lease.hold([item])
            with pytest.raises(Overloaded, match="ulimit -n"):
                open_tensors(read)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))  # for the segment, and none for its memory
            with pytest.raises(Overloaded, match="ulimit -n"):
                open_tensors(read)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert lease.hold([item])
        lease.release()

    with_cache(tmp_path, test)


async def test_calls_fail_when_the_cache_exits_and_later_ones_reach_its_successor(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/cache.sock"
    (tmp_path / "cache.json").write_bytes(msgspec.json.encode(MediaCacheConfig(endpoint, 1 << 20)))

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "tandem.media_cache", str(tmp_path / "cache.json")])

    context = new_context()
    client = MediaCacheClient(context, endpoint)
    process = start()
    try:
        await client.status()
        process.send_signal(signal.SIGSTOP)
        call = asyncio.create_task(client.status())
        await asyncio.sleep(0)  # it is in flight
        process.kill()
        with pytest.raises(WorkerLost, match="exited before it answered"):
            await call
        process.wait()
        process = start()
        assert (await client.status()).num_leases == 0
    finally:
        client.close()
        context.destroy(linger=0)
        process.kill()
        process.wait()


def test_bytes_are_written_once_and_read_by_all(tmp_path: Path) -> None:
    async def test(client: MediaCacheClient) -> None:
        await put(client, "a", KEYS[:2], b"pixels")
        client.release(["a"])
        [hit, _, again] = await client.acquire("b", [WantedMedia(k, 1) for k in (KEYS[0], KEYS[5], KEYS[0])])
        assert hit is not None and hit == again and hit.is_ready and hit.description == b"what it is"
        mapped = map_segment(hit.segment, KEYS[0])
        assert mapped[HEADER_BYTES : HEADER_BYTES + 6] == b"pixels"
        client.release(["b"])
        assert (await client.clear())[0] == 2
        status = await client.status()
        assert (status.num_items, status.used_bytes, status.num_leases) == (0, 0, 0)
        assert (status.num_hits, status.num_misses) == (1, 3)
        assert mapped[HEADER_BYTES : HEADER_BYTES + 6] == b"pixels", "a mapped item stays readable"
        with pytest.raises(WorkerLost):
            map_segment(hit.segment, KEYS[0])

    with_cache(tmp_path, test)
    assert num_memfds() == 0


def test_a_reused_descriptor_is_detected(tmp_path: Path) -> None:
    async def test(client: MediaCacheClient) -> None:
        [old] = await put(client, "a", KEYS[:1], b"one")
        client.release(["a"])
        await client.clear()
        for number in range(1, 200):  # until the descriptor number is reused
            [new] = await put(client, f"b {number}", KEYS[number : number + 1], b"two")
            if new.segment == old.segment:
                break
        assert new.segment == old.segment
        with pytest.raises(WorkerLost, match="evicted"):
            map_segment(old.segment, KEYS[0])

    with_cache(tmp_path, test)


def test_many_items_take_one_round_trip_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: MediaCacheClient) -> None:
        sent: list[str] = []
        send = client._socket.send
        monkeypatch.setattr(client._socket, "send", lambda m: (sent.append(type(m).__name__), send(m))[1])
        await put(client, "a", KEYS[:128], b"x")
        assert sent == ["AcquireMedia", "CommitMedia"]
        await client.acquire("b", [WantedMedia(k, 65) for k in KEYS[:128]])
        assert sent == ["AcquireMedia", "CommitMedia", "AcquireMedia"]

    with_cache(tmp_path, test)


def test_a_waiting_client_is_answered_when_the_item_is_written(tmp_path: Path) -> None:
    async def test(client: MediaCacheClient) -> None:
        [item] = await client.acquire("a", [WantedMedia(KEYS[0], 100)])
        waiting = asyncio.create_task(client.acquire("b", [WantedMedia(KEYS[0], 100)]))
        while (await client.status()).num_leases < 2:
            pass
        assert not waiting.done() and item is not None
        _, num_bytes = write_segment(item.segment, KEYS[0], [b"data"])
        await client.commit("a", [CommittedMedia(KEYS[0], num_bytes, b"")])
        [ready] = await waiting
        assert ready is not None and ready.is_ready and ready.segment == item.segment

    with_cache(tmp_path, test)


def test_impossible_calls_are_refused_with_a_reason(tmp_path: Path) -> None:
    async def test(client: MediaCacheClient) -> None:
        with pytest.raises(InvalidRequest, match="the media cache has 1000"):
            await client.acquire("a", [WantedMedia(KEYS[0], 1001)])
        await client.acquire("b", [WantedMedia(KEYS[0], 900)])
        with pytest.raises(Overloaded, match="full"):
            await client.acquire("c", [WantedMedia(KEYS[1], 200)])
        with pytest.raises(InvalidRequest, match="32 bytes"):
            await client.acquire("d", [WantedMedia(MediaKey(b"short", "input"), 1)])
        with pytest.raises(WorkerLost, match="does not know"):
            await client.commit("e", [CommittedMedia(KEYS[0], 1, b"")])
        with pytest.raises(InternalError, match=r"no answer within 0\.05 s"):
            await client.acquire("f", [WantedMedia(KEYS[0], 900)], timeout_s=0.05)  # is never written

    with_cache(tmp_path, test, capacity_bytes=1000)


def test_bytes_over_the_socket_for_other_hosts(tmp_path: Path) -> None:
    async def test(client: MediaCacheClient) -> None:
        data = os.urandom(5 << 20)
        buffer = bytearray(len(data))
        with pytest.raises(WorkerLost, match="evicted"):
            await client.read(KEYS[0], HEADER_BYTES, len(data), buffer)
        await put(client, "a", KEYS[:1], data)
        await client.read(KEYS[0], HEADER_BYTES, len(data), buffer)
        assert buffer == data

    with_cache(tmp_path, test, capacity_bytes=30 << 20)


def test_clear_is_ordered_with_what_is_in_flight(tmp_path: Path) -> None:
    """Held items stay with their holders, items being written are not kept, and later calls compute again."""

    async def test(client: MediaCacheClient) -> None:
        await put(client, "unused", KEYS[:1], b"u" * 64)
        client.release(["unused"])
        [held] = await put(client, "holder", KEYS[1:2], b"h" * 64)
        [written] = await client.acquire("writer", [WantedMedia(KEYS[2], 200)])
        assert written is not None
        waiting = asyncio.create_task(client.acquire("reader", [WantedMedia(KEYS[2], 200)]))
        while (await client.status()).num_leases < 3:
            pass
        sizes = (await client.status()).used_bytes
        assert await client.clear() == (3, sizes)
        assert await client.clear() == (0, 0)

        mapped = map_segment(held.segment, KEYS[1])
        assert mapped[HEADER_BYTES : HEADER_BYTES + 64] == b"h" * 64, "a holder keeps its item"
        mapped.close()
        wanted = [WantedMedia(key, 200) for key in KEYS[:3]]
        anew = await client.acquire("later", wanted)
        assert all(item is not None and not item.is_ready for item in anew)
        _, num_bytes = write_segment(written.segment, KEYS[2], [b"w"])
        await client.commit("writer", [CommittedMedia(KEYS[2], num_bytes, b"")])
        [read] = await waiting
        assert read is not None and read.is_ready and read.segment == written.segment
        client.release(["holder", "writer", "reader", "later"])
        status = await client.status()
        assert (status.num_items, status.used_bytes, status.num_leases) == (0, 0, 0)

    with_cache(tmp_path, test)
    assert num_memfds() == 0


def test_a_dead_clients_references_are_dropped(tmp_path: Path) -> None:
    async def test(client: MediaCacheClient) -> None:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
        context = new_context()
        other = MediaCacheClient(context, f"ipc://{tmp_path}/cache.sock", child.pid)
        try:
            await other.acquire("a", [WantedMedia(KEYS[0], 100)])
            assert (await client.status()).pinned_bytes == 100
            child.send_signal(signal.SIGKILL)
            await child.wait()
            while (await client.status()).num_items:
                pass
            with pytest.raises(
                InvalidRequest, match="does not exist"
            ):  # sent for the live process, read after its exit
                await other.acquire("b", [WantedMedia(KEYS[0], 100)])
        finally:
            other.close()
            context.destroy(linger=0)

    with_cache(tmp_path, test)
    assert num_memfds() == 0
