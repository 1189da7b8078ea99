"""Embeddings are copied off the device, which waits for it, on a thread other than the event loop's."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import torch

from tandem.engine.vision.prompt_media import EmbeddingCache
from tandem.worker.media_intake import MediaIntake
from tandem.worker.shared_embeddings import SharedEmbeddings


class OnDevice:
    """An embedding that notes which thread asks for its bytes."""

    dtype, shape, nbytes = torch.float32, (1, 2, 3), 24

    def __init__(self) -> None:
        self.copied_on: list[threading.Thread] = []

    def cpu(self) -> torch.Tensor:
        self.copied_on.append(threading.current_thread())
        return torch.ones(self.shape)


class Client:
    """A media cache that grants nothing."""

    def __init__(self) -> None:
        self.has_asked = asyncio.Event()

    def new_id(self) -> str:
        return "lease"

    async def acquire(self, lease_id: str, wanted: list[Any]) -> list[None]:
        self.has_asked.set()
        return [None] * len(wanted)

    def release(self, lease_ids: list[str]) -> None: ...

    def close(self) -> None: ...


async def test_the_loop_does_not_wait_for_the_device(tmp_path: Path) -> None:
    embedding: Any = OnDevice()
    client: Any = Client()
    shared, cache = SharedEmbeddings(client, "model"), EmbeddingCache(1 << 20)
    cache.put_encoded(b"digest", embedding)
    MediaIntake(None, cache, 1, shared, lambda: None).share_encoded()
    async with asyncio.timeout(30):
        await client.has_asked.wait()
    shared.close()
    assert len(embedding.copied_on) == 1 and embedding.copied_on[0] is not threading.current_thread()
