"""What a prompt's images leave in a prefill worker goes with the prompt, also where something fails: they are megabytes
of memory and a descriptor each, and the collector seldom looks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import tandem.prefill_worker.media
from tandem.engine.batch import Batch, Encode
from tandem.engine.vision.embedding_cache import EmbeddingCache
from tandem.engine.vision.media_input import MediaInput
from tandem.engine.vision.prompt_media import EncodeUnit, PromptMedia
from tandem.prefill_worker.media import MediaIntake
from tandem.prefill_worker.shared_embeddings import SharedEmbeddings
from tandem.protocol.media_client import MediaCacheClient
from tandem.protocol.messages.media import MediaItem
from tandem.protocol.sockets import new_context
from tandem.runtime.errors import InvalidRequest, Overloaded, WorkerLost
from tests.support.garbage import kept_garbage
from tests.unit.engine.vision.test_prompt_media import AnyTower, Shared, a_request, stored


class Tower(AnyTower):
    """Wants all tensors, and takes what comes."""

    def needed(self, item: MediaItem, is_encoded: bool) -> list[str]:
        return [tensor.name for tensor in item.tensors]


class Broken(Shared):
    """Fails at once."""

    async def get(self, digests: Sequence[bytes]) -> dict[bytes, torch.Tensor]:
        raise WorkerLost("gone")


class Failing:
    """RemoteMedia that raises."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        self._error = error

    async def fetch(self, endpoint: str, item: MediaItem, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        await asyncio.sleep(0)
        raise self._error()


class Picky:
    """A vision tower that takes nothing."""

    def encode(self, unit: EncodeUnit, media: PromptMedia) -> None:
        raise InvalidRequest("not so")


async def opened(shared: Any = None, remote: Any = None, on_waiting: Callable[[], None] = lambda: None) -> None:
    """A prompt comes, its media are waited for, and it goes."""
    ready, tower = asyncio.Event(), Tower()
    intake = MediaIntake(tower, EmbeddingCache(1 << 20), 16, shared, ready.set, remote)  # type: ignore[arg-type]
    item = stored(("pixel_values", torch.zeros(4, 1)))
    request = a_request([item], 9)
    media = intake.open(msgspec.structs.replace(request, media_cache="tcp://x" if remote else ""))
    assert media is not None and not media.is_ready
    for _ in range(5):  # until it has asked
        await asyncio.sleep(0)
    on_waiting()
    async with asyncio.timeout(30):
        await ready.wait()
    assert media.is_ready and (media.error is not None) == (remote is not None)


async def looked_up_nowhere(cache: SharedEmbeddings) -> None:
    await opened(Broken())


async def looked_up_in_vain(cache: SharedEmbeddings) -> None:
    await opened(Shared())


async def the_cache_ended_meanwhile(cache: SharedEmbeddings) -> None:
    await opened(cache, on_waiting=cache._client._on_broken)


async def fetched_too_much(cache: SharedEmbeddings) -> None:
    await opened(remote=Failing(lambda: InvalidRequest("too large")))


async def fetched_when_full(cache: SharedEmbeddings) -> None:
    await opened(remote=Failing(lambda: Overloaded("full")))


async def fetched_by_a_defect(cache: SharedEmbeddings) -> None:
    await opened(remote=Failing(lambda: ValueError("a defect")))


async def refused_by_a_step(cache: SharedEmbeddings) -> None:
    media = PromptMedia([1] * 9, [stored(("pixel_values", torch.zeros(4, 1)))], 16, EmbeddingCache(0))
    vision: Any = Picky()
    MediaInput(vision, torch.nn.Linear(1, 1)).prepare(Batch([], encodes=[Encode(media, EncodeUnit(0, 1, 5, 0, 4))]))
    assert media.error is not None and media.error.message == "not so"


@pytest.mark.parametrize(
    "life",
    [
        looked_up_nowhere,
        looked_up_in_vain,
        the_cache_ended_meanwhile,
        fetched_too_much,
        fetched_when_full,
        fetched_by_a_defect,
        refused_by_a_step,
    ],
)
def test_nothing_refers_to_itself(
    life: Callable[[SharedEmbeddings], Awaitable[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        context = new_context()
        cache = SharedEmbeddings(MediaCacheClient(context, f"ipc://{tmp_path}/nobody.sock"))
        try:
            await life(cache)  # whatever is made once
            with kept_garbage() as garbage:
                await life(cache)
                await asyncio.sleep(0)
        finally:
            cache.close()
            context.destroy(linger=0)
        assert not garbage

    monkeypatch.setattr(tandem.prefill_worker.media, "LOOKUP_TIMEOUT_S", 0.1)
    logging.disable()  # pytest keeps what is logged
    try:
        asyncio.run(test())
    finally:
        logging.disable(logging.NOTSET)
