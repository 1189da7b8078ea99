"""What the vision tower made of items seen before, by digest: a worker's own, so that an image is encoded once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class EmbeddingCache:
    """Forgets the least recently used when it holds more than `capacity_bytes`; an item larger than that is not kept.

    An embedding is [1 + num_deepstack, num_tokens, hidden_size]. Used by the engine thread and by the loop. Who holds
    an embedding keeps it after it is forgotten here.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._embeddings: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._encoded: dict[bytes, torch.Tensor] = {}
        self.num_bytes = 0
        self.num_encoded = 0

    def get(self, digest: bytes) -> torch.Tensor | None:
        with self._lock:
            if digest in self._embeddings:
                self._embeddings.move_to_end(digest)
            return self._embeddings.get(digest)

    def put(self, embeddings: Mapping[bytes, torch.Tensor]) -> None:
        """Found elsewhere."""
        with self._lock:
            for digest, embedding in embeddings.items():
                self._put(digest, embedding)

    def put_encoded(self, digest: bytes, embedding: torch.Tensor) -> None:
        """Made here; told to others by way of `take_encoded`."""
        with self._lock:
            self.num_encoded += 1
            self._encoded[digest] = embedding
            self._put(digest, embedding)

    def take_encoded(self) -> dict[bytes, torch.Tensor]:
        """Those made here since the last call."""
        with self._lock:
            encoded, self._encoded = self._encoded, {}
        return encoded

    def _put(self, digest: bytes, embedding: torch.Tensor) -> None:
        if digest in self._embeddings or embedding.nbytes > self._capacity_bytes:
            return
        self._embeddings[digest] = embedding
        self.num_bytes += embedding.nbytes
        while self.num_bytes > self._capacity_bytes:
            _, forgotten = self._embeddings.popitem(last=False)
            self.num_bytes -= forgotten.nbytes
