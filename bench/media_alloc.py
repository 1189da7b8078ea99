"""What the media cache costs for many images at once: 4 to 128 JPEGs of 644x364, in one call and one by one.

A real cache process. `call`: the acquire alone. `whole`: hash the images, set room aside, place their bytes in shared
memory, commit; decoding is apart. `again`: the same when all are cached. `sequential`: whole, but each image by itself.
Two ablations: `one thread` makes one call for all, but hashes and writes one image after the other; `single calls` does
that on two threads, but makes two calls for each image. All calls go over a Unix socket, which has no delayed
acknowledgements: what is saved here is not a stall of the transport's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from bench.latency import Distribution
from bench.media_load import jpeg
from bench.report import Aim, Report, add_common_options, finish
from tandem.protocol.media_client import MediaCacheClient
from tandem.protocol.media_segment import write_segment
from tandem.protocol.messages.media_cache import HEADER_BYTES, CommittedMedia, GrantedMedia, MediaKey, WantedMedia
from tandem.protocol.sockets import new_context

COUNTS = (4, 8, 16, 32, 64, 128)
NUM_THREADS = 2
_CAPACITY_BYTES = 1 << 30
_START_TIMEOUT_S = 60.0
_CALL_AIM_MS, _WHOLE_AIM_MS = 1.0, 15.0


class CountFigures(msgspec.Struct, frozen=True):
    """Milliseconds. num_bytes: of all images."""

    num_bytes: int
    call_ms: Distribution
    call_again_ms: Distribution
    whole_ms: Distribution
    again_ms: Distribution
    sequential_ms: Distribution
    one_thread_ms: Distribution
    single_calls_ms: Distribution


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.media_alloc", description=__doc__)
    parser.add_argument("--num-rounds", type=int, default=40, help="of each measurement")
    add_common_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.num_rounds = 5
    with tempfile.TemporaryDirectory() as folder, cache(Path(folder)) as endpoint:
        figures = uvloop.run(measure(endpoint, options.num_rounds))
    print_table(figures)
    finish(Report.of("media_alloc", msgspec.to_builtins(figures), aims(figures)), options.json)


@contextmanager
def cache(folder: Path) -> Iterator[str]:
    endpoint = f"ipc://{folder}/cache.sock"
    file = folder / "cache.json"
    file.write_text(json.dumps({"endpoint": endpoint, "capacity_bytes": _CAPACITY_BYTES, "log_level": "warning"}))
    process = subprocess.Popen([sys.executable, "-m", "tandem.media_cache", str(file)])
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not (folder / "cache.sock").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the media cache did not start")
            time.sleep(0.05)
        yield endpoint
    finally:
        process.terminate()
        process.wait(10)


async def measure(endpoint: str, num_rounds: int) -> dict[str, CountFigures]:
    context = new_context()
    client = MediaCacheClient(context, endpoint)
    images = [jpeg(number) for number in range(max(COUNTS))]
    try:
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            allocation = Allocation(client, threads)
            return {str(count): await measure_count(client, allocation, images[:count], num_rounds) for count in COUNTS}
    finally:
        client.close()
        context.destroy(linger=0)


class Allocation:
    """The steps that a request's images take, batched."""

    def __init__(self, client: MediaCacheClient, threads: ThreadPoolExecutor) -> None:
        self._client = client
        self._threads = threads

    async def whole(self, images: list[bytes]) -> str:
        """The lease."""
        keys = await self._share_out(_key, images)
        lease_id = self._client.new_id()
        granted = await self._client.acquire(lease_id, wanted(keys, images))
        missing = [(k, g, i) for k, g, i in zip(keys, granted, images, strict=True) if g is not None and not g.is_ready]
        if missing:
            await self._client.commit(lease_id, await self._share_out(_write, missing))
        return lease_id

    async def one_by_one(self, images: list[bytes]) -> list[str]:
        lease_ids = []
        for image in images:
            key, lease_id = _key(image), self._client.new_id()
            [granted] = await self._client.acquire(lease_id, wanted([key], [image]))
            if granted is not None and not granted.is_ready:
                await self._client.commit(lease_id, [_write((key, granted, image))])
            lease_ids.append(lease_id)
        return lease_ids

    async def on_one_thread(self, images: list[bytes]) -> str:
        """`whole`, with one thread's hands."""
        keys = [_key(image) for image in images]
        lease_id = self._client.new_id()
        granted = await self._client.acquire(lease_id, wanted(keys, images))
        missing = [(k, g, i) for k, g, i in zip(keys, granted, images, strict=True) if g is not None]
        await self._client.commit(lease_id, [_write(item) for item in missing])
        return lease_id

    async def by_single_calls(self, images: list[bytes]) -> list[str]:
        """`whole`, with an acquire and a commit for each image, one after the other."""
        keys = await self._share_out(_key, images)
        lease_ids = [self._client.new_id() for _ in images]
        missing = []
        for lease_id, key, image in zip(lease_ids, keys, images, strict=True):
            [granted] = await self._client.acquire(lease_id, wanted([key], [image]))
            assert granted is not None
            missing.append((key, granted, image))
        for lease_id, written in zip(lease_ids, await self._share_out(_write, missing), strict=True):
            await self._client.commit(lease_id, [written])
        return lease_ids

    async def _share_out(self, work: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        """Each thread takes an equal part."""
        size = -(-len(items) // NUM_THREADS)
        parts = [items[first : first + size] for first in range(0, len(items), size)]
        loop = asyncio.get_running_loop()
        done = await asyncio.gather(
            *(loop.run_in_executor(self._threads, lambda part: [work(item) for item in part], part) for part in parts)
        )
        return [item for part in done for item in part]


def _key(image: bytes) -> MediaKey:
    return MediaKey(sha256(image).digest(), "input")


def _write(item: tuple[MediaKey, GrantedMedia, bytes]) -> CommittedMedia:
    key, granted, image = item
    _, num_bytes = write_segment(granted.segment, key, [image])
    return CommittedMedia(key, num_bytes, b"")


def wanted(keys: list[MediaKey], images: list[bytes]) -> list[WantedMedia]:
    return [WantedMedia(k, HEADER_BYTES + len(image) + HEADER_BYTES) for k, image in zip(keys, images, strict=True)]


async def measure_count(
    client: MediaCacheClient, allocation: Allocation, images: list[bytes], num_rounds: int
) -> CountFigures:
    names = ("call", "call again", "whole", "again", "sequential", "one thread", "single calls")
    times: dict[str, list[float]] = {name: [] for name in names}
    asked = wanted([_key(image) for image in images], images)

    async def timed(name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        begun = time.perf_counter()
        outcome = await work()
        times[name].append(time.perf_counter() - begun)
        return outcome

    async def end(lease_ids: list[str], clear: bool) -> None:
        client.release(lease_ids)
        if clear:
            await client.clear()

    for _ in range(num_rounds):
        lease_id = client.new_id()
        await timed("call", lambda lease_id=lease_id: client.acquire(lease_id, asked))  # type: ignore[misc]
        await end([lease_id], clear=True)
        lease_id = await timed("whole", lambda: allocation.whole(images))
        await end([lease_id], clear=False)
        lease_id = client.new_id()
        await timed("call again", lambda lease_id=lease_id: client.acquire(lease_id, asked))  # type: ignore[misc]
        await end([lease_id], clear=False)
        lease_id = await timed("again", lambda: allocation.whole(images))
        await end([lease_id], clear=True)
        await end(await timed("sequential", lambda: allocation.one_by_one(images)), clear=True)
        await end([await timed("one thread", lambda: allocation.on_one_thread(images))], clear=True)
        await end(await timed("single calls", lambda: allocation.by_single_calls(images)), clear=True)
    spreads = {name: spread for name, values in times.items() if (spread := Distribution.of_seconds(values))}
    return CountFigures(
        sum(map(len, images)),
        spreads["call"],
        spreads["call again"],
        spreads["whole"],
        spreads["again"],
        spreads["sequential"],
        spreads["one thread"],
        spreads["single calls"],
    )


def aims(figures: dict[str, CountFigures]) -> list[Aim]:
    found = [
        Aim.of(f"call, p50 of {count} images, ms", each.call_ms.p50, _CALL_AIM_MS, "lower")
        for count, each in figures.items()
    ]
    most = str(max(COUNTS))
    return [*found, Aim.of(f"whole, p50 of {most} images, ms", figures[most].whole_ms.p50, _WHOLE_AIM_MS, "lower")]


def print_table(figures: dict[str, CountFigures]) -> None:
    columns = ("call ms", "again", "whole ms", "again", "sequential ms", "one thread", "single calls")
    table = Table("images", "MiB", *columns, title="p50 (p99)")
    for count, each in figures.items():
        spreads = (
            each.call_ms,
            each.call_again_ms,
            each.whole_ms,
            each.again_ms,
            each.sequential_ms,
            each.one_thread_ms,
            each.single_calls_ms,
        )
        cells = [f"{spread.p50:.2f} ({spread.p99:.1f})" for spread in spreads]
        table.add_row(count, f"{each.num_bytes / 2**20:.1f}", *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
