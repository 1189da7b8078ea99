"""Processed media for prefill workers of other hosts: read over tcp, limited in memory and time, released
explicitly."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tandem.engine.vision.prompt_media import EmbeddingCache, PromptMedia
from tandem.media_cache.media_cache_config import MediaCacheConfig
from tandem.media_cache.media_client import MediaCacheClient
from tandem.media_cache.media_segment import offsets_of, write_segment
from tandem.media_cache.server import MediaCacheServer
from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.media import MediaItem, MediaTensor
from tandem.protocol.messages.media_cache import CommittedMedia, MediaKey, WantedMedia
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions
from tandem.protocol.network import NetworkConfig
from tandem.protocol.network_keys import make_keys
from tandem.protocol.sockets import new_context
from tandem.runtime.errors import ClientShareExceeded, ConfigError, InvalidRequest, Overloaded, WorkerLost
from tandem.worker.media_intake import MediaIntake
from tandem.worker.remote_media import RemoteMedia
from tests.support.ports import free_port

GRID = torch.tensor([[1, 4, 4]])
NUM_PATCHES = 1 << 18
"""Four bytes each: an item takes several messages."""


class Hosts:
    """A cache with items on this host, and the fetches of a prefill worker of another host."""

    def __init__(self, server: MediaCacheServer, local: MediaCacheClient, remote: RemoteMedia, endpoint: str) -> None:
        self.server = server
        self.local = local
        self.remote = remote
        self.endpoint = endpoint
        self._prompts = ExitStack()

    async def fetch(self, endpoint: str, item: MediaItem, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Fetches for a new prompt."""
        return await self.remote.fetch(endpoint, item, names, self._prompts.callback)

    async def release(self) -> None:
        """Releases all prompts."""
        self._prompts.close()
        await asyncio.sleep(0)

    async def put(self, name: str) -> tuple[MediaItem, torch.Tensor]:
        """Returns the item, held by a lease of that name, and its pixels."""
        digest = name.encode().ljust(32)
        pixels = torch.randn(NUM_PATCHES, 1)
        tensors = {"pixel_values": pixels, "image_grid_thw": GRID}
        parts = [tensor.numpy().data for tensor in tensors.values()]
        offsets, end = offsets_of([part.nbytes for part in parts])
        key = MediaKey(digest, "input")
        [grant] = await self.local.acquire(name, [WantedMedia(key, end)])
        assert grant is not None
        _, num_bytes = write_segment(grant.segment, key, parts)
        await self.local.commit(name, [CommittedMedia(key, num_bytes, b"")])
        descriptions = tuple(
            MediaTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, part.nbytes)
            for (name, tensor), offset, part in zip(tensors.items(), offsets, parts, strict=True)
        )
        return MediaItem(digest, "image", ((1, 4),), grant.segment, descriptions), pixels


@asynccontextmanager
async def hosts(folder: Path, max_held_bytes: int = 1 << 30, timeout_s: float = 30.0) -> AsyncIterator[Hosts]:
    keys = NetworkConfig(str(folder / "keys"))
    make_keys(folder / "keys")
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    server = MediaCacheServer(MediaCacheConfig(f"ipc://{folder}/cache.sock", 64 << 20, endpoint, keys))
    running = asyncio.create_task(server.run())
    context, other_host = new_context(), new_context("worker", keys)
    local = MediaCacheClient(context, f"ipc://{folder}/cache.sock")
    remote = RemoteMedia(other_host, max_held_bytes, timeout_s)
    try:
        async with asyncio.timeout(60):
            yield Hosts(server, local, remote, endpoint)
    finally:
        remote.close()
        local.close()
        server.stop()
        await running
        context.destroy(linger=0)
        other_host.destroy(linger=0)


def with_hosts(folder: Path, test: Callable[[Hosts], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with hosts(folder, **options) as running:
            await test(running)

    asyncio.run(run())


def test_fetched_tensors_are_whole_and_shared_while_in_use(tmp_path: Path) -> None:
    async def test(hosts: Hosts) -> None:
        item, pixels = await hosts.put("a")
        names = ["pixel_values", "image_grid_thw"]
        one, other = await asyncio.gather(*(hosts.fetch(hosts.endpoint, item, names) for _ in range(2)))
        assert torch.equal(one["pixel_values"], pixels) and torch.equal(one["image_grid_thw"], GRID)
        assert one["pixel_values"].data_ptr() == other["pixel_values"].data_ptr()
        num_fetched = hosts.remote.num_fetched_bytes
        assert pixels.nbytes < num_fetched < pixels.nbytes + 200 and hosts.remote.held_bytes == num_fetched
        small = await hosts.fetch(hosts.endpoint, item, ["image_grid_thw"])
        assert list(small) == ["image_grid_thw"] and torch.equal(small["image_grid_thw"], GRID)
        assert hosts.remote.num_fetched_bytes == num_fetched + GRID.nbytes
        assert await hosts.fetch(hosts.endpoint, item, []) == {}
        await hosts.release()
        assert hosts.remote.held_bytes == 0

    with_hosts(tmp_path, test)


def test_leased_items_are_sent_after_a_clear_but_not_after_release(tmp_path: Path) -> None:
    async def test(hosts: Hosts) -> None:
        item, pixels = await hosts.put("a")
        await hosts.local.clear()
        found = await hosts.fetch(hosts.endpoint, item, ["pixel_values"])
        assert torch.equal(found["pixel_values"], pixels)
        await hosts.release()
        hosts.local.release(["a"])
        assert (await hosts.local.status()).num_items == 0
        with pytest.raises(WorkerLost, match="evicted"):
            await hosts.fetch(hosts.endpoint, item, ["pixel_values"])
        await hosts.release()
        assert hosts.remote.held_bytes == 0

    with_hosts(tmp_path, test)


def test_reads_past_the_items_end_are_refused(tmp_path: Path) -> None:
    async def test(hosts: Hosts) -> None:
        item, _ = await hosts.put("a")
        beyond = MediaTensor("pixel_values", "float32", (1 << 20,), 64, 4 << 20)
        wrong = MediaItem(item.digest, "image", item.spans, item.segment, (beyond,))
        with pytest.raises(WorkerLost):
            await hosts.fetch(hosts.endpoint, wrong, ["pixel_values"])

    with_hosts(tmp_path, test)


def test_held_bytes_are_limited(tmp_path: Path) -> None:
    async def test(hosts: Hosts) -> None:
        (one, _), (two, _) = await hosts.put("a"), await hosts.put("b")
        huge = MediaTensor("pixel_values", "uint8", (1 << 50,), 64, 1 << 50)
        with pytest.raises(InvalidRequest, match="more than the"):
            await hosts.fetch(hosts.endpoint, MediaItem(b"c" * 32, "image", ((1, 4),), "", (huge,)), ["pixel_values"])
        await hosts.fetch(hosts.endpoint, one, ["pixel_values"])
        with pytest.raises(Overloaded, match="in use"):
            await hosts.fetch(hosts.endpoint, two, ["pixel_values"])
        await hosts.release()
        await hosts.fetch(hosts.endpoint, two, ["pixel_values"])

    with_hosts(tmp_path, test, max_held_bytes=3 * NUM_PATCHES * 2)


def test_one_client_leaves_room_for_the_media_of_another(tmp_path: Path) -> None:
    async def test(hosts: Hosts) -> None:
        items = [(await hosts.put(name))[0] for name in "abc"]
        remote, names = hosts.remote, ["pixel_values"]
        callbacks: list[Callable[[], object]] = []

        async def fetch(item: MediaItem, client: str) -> None:
            await remote.fetch(hosts.endpoint, item, names, callbacks.append, client)

        await fetch(items[0], "one")
        with pytest.raises(ClientShareExceeded, match="that one client may hold"):
            await fetch(items[1], "one")
        await fetch(items[1], "other")
        for callback in callbacks:
            callback()
        await fetch(items[2], "one")

    with_hosts(tmp_path, test, max_held_bytes=9 * NUM_PATCHES)


def test_a_fetch_from_an_unresponsive_cache_times_out(tmp_path: Path) -> None:
    async def test(hosts: Hosts) -> None:
        item, _ = await hosts.put("a")
        nobody = f"tcp://127.0.0.1:{free_port()}"
        with pytest.raises(WorkerLost, match="did not send an image or video in time"):
            await hosts.fetch(nobody, item, ["pixel_values"])
        await hosts.release()
        assert hosts.remote.held_bytes == 0

    with_hosts(tmp_path, test, timeout_s=0.05)


def test_other_hosts_may_only_read(tmp_path: Path) -> None:
    """Other calls act for a process of this host and could evict what it uses."""

    async def test(hosts: Hosts) -> None:
        await hosts.put("a")
        context = new_context("worker", NetworkConfig(str(tmp_path / "keys")))
        refused: asyncio.Queue[str] = asyncio.Queue()
        hosts.server._context.refusals.on_refused = refused.put_nowait
        client = MediaCacheClient(context, hosts.endpoint, client_pid=os.getpid(), peer="proxy")
        try:
            calls: list[Awaitable[object]] = [
                client.clear(),
                client.acquire("z", [WantedMedia(MediaKey(b"z" * 32, "input"), 100)]),
                client.commit("z", []),
            ]
            pending = [asyncio.ensure_future(call) for call in calls]
            assert [await refused.get() for _ in calls] == ["not_a_message"] * 3
            for call in pending:
                call.cancel()
        finally:
            client.close()
            context.destroy(linger=0)
        assert (await hosts.local.status()).num_items == 1

    with_hosts(tmp_path, test)


def test_a_tcp_endpoint_requires_keys(tmp_path: Path) -> None:
    async def start() -> None:
        MediaCacheServer(MediaCacheConfig(f"ipc://{tmp_path}/cache.sock", 1 << 20, "tcp://127.0.0.1:1"))

    with pytest.raises(ConfigError, match="network-keys"):
        asyncio.run(start())


def test_a_port_in_use_ends_the_process_with_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        make_keys(tmp_path / "keys")
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        network = NetworkConfig(str(tmp_path / "keys"))
        config = MediaCacheConfig(f"ipc://{tmp_path}/cache.sock", 1 << 20, endpoint, network)
        file = tmp_path / "config.json"
        file.write_bytes(msgspec.json.encode(config))
        done = subprocess.run(
            [sys.executable, "-m", "tandem.media_cache", str(file)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2, done.stderr
    assert endpoint in done.stderr and "choose another --cluster-port" in done.stderr
    assert not (tmp_path / "cache.sock").exists()


async def test_a_cache_without_tcp_needs_no_keys(tmp_path: Path) -> None:
    """A host of workers has their secret key but not the proxy's."""
    make_keys(tmp_path / "keys")
    (tmp_path / "keys" / "proxy.key_secret").unlink()
    network = NetworkConfig(str(tmp_path / "keys"))
    server = MediaCacheServer(MediaCacheConfig(f"ipc://{tmp_path}/cache.sock", 1 << 20, network=network))
    server.stop()
    await server.run()


class Tower:
    """A model that needs pixels to encode, and the grid for positions."""

    def check(self, item: MediaItem, tensors: dict[str, torch.Tensor]) -> None:
        if "image_grid_thw" not in tensors:
            raise InvalidRequest("an item of this model must have one image_grid_thw")

    def needed(self, item: MediaItem, is_encoded: bool) -> list[str]:
        return [t.name for t in item.tensors if not is_encoded or t.name == "image_grid_thw"]

    def num_frames(self, kind: str, tensors: dict[str, torch.Tensor]) -> int:
        return 1


def a_request(item: MediaItem, endpoint: str) -> StartPrefill:
    return StartPrefill(
        "proxy", ["r"], "t", pack_token_ids(range(9)), SamplingParams(), [0], StopConditions(max_tokens=1), 1e9,
        decode_worker_id=None, decode_epoch=None, media=(item,), media_cache=endpoint,
    )  # fmt: skip


def test_a_prompts_media_are_fetched_before_it_is_scheduled(tmp_path: Path) -> None:
    async def opened(intake: MediaIntake, ready: asyncio.Event, item: MediaItem, endpoint: str) -> PromptMedia:
        ready.clear()
        media = intake.open(a_request(item, endpoint))
        assert media is not None and not media.is_ready
        await ready.wait()
        assert media.is_ready
        return media

    async def test(hosts: Hosts) -> None:
        item, pixels = await hosts.put("a")
        tower: Any = Tower()
        cache, ready = EmbeddingCache(1 << 20), asyncio.Event()
        intake = MediaIntake(tower, cache, 16, None, ready.set, hosts.remote)
        media = await opened(intake, ready, item, hosts.endpoint)
        assert media.error is None and torch.equal(media.tensors[0]["pixel_values"], pixels)
        [unit] = media.afford(0, 9, 32)[1]
        media.partial[0] = torch.zeros(1, 4, 1)
        media.on_encoded(unit)
        num_fetched = intake.num_fetched_bytes
        media.release()
        assert hosts.remote.held_bytes == 0 and not media.tensors
        media = await opened(intake, ready, item, hosts.endpoint)
        assert list(media.tensors[0]) == ["image_grid_thw"] and not media.afford(0, 9, 32)[1]
        assert intake.num_fetched_bytes == num_fetched + GRID.nbytes, "what is encoded is not fetched again"
        hosts.local.release(["a"])
        await hosts.local.clear()
        media.release()
        assert hosts.remote.held_bytes == 0
        media = await opened(intake, ready, item, hosts.endpoint)
        assert media.error is not None and isinstance(media.error.to_error(), WorkerLost)

    with_hosts(tmp_path, test)


def test_a_prompt_that_ends_during_its_fetch_releases_the_media(tmp_path: Path) -> None:
    """With the garbage collector disabled. A second prompt with the same image is served."""

    async def turns() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def test(hosts: Hosts) -> None:
        item, pixels = await hosts.put("a")
        ready = asyncio.Event()
        tower: Any = Tower()
        intake = MediaIntake(tower, EmbeddingCache(1 << 20), 16, None, ready.set, hosts.remote)
        aborted, served = (intake.open(a_request(item, hosts.endpoint)) for _ in range(2))
        assert aborted is not None and served is not None
        await turns()
        assert hosts.remote.held_bytes
        aborted.release()
        await ready.wait()
        assert served.error is None and torch.equal(served.tensors[0]["pixel_values"], pixels)
        served.release()
        assert hosts.remote.held_bytes == 0
        late = intake.open(a_request(item, f"tcp://127.0.0.1:{free_port()}"))
        assert late is not None
        await turns()
        assert hosts.remote.held_bytes
        late.release()
        await turns()
        assert hosts.remote.held_bytes == 0 and not intake._tasks

    gc.disable()
    try:
        with_hosts(tmp_path, test)
    finally:
        gc.enable()
