"""A worker's cache of vision embeddings by digest, so that each image is encoded once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class EmbeddingCache:
    """LRU cache of at most `capacity_bytes`; larger items are not stored. Thread-safe.

    An embedding is [1 + num_deepstack, num_tokens, hidden_size]. Users of an embedding may keep it after its eviction.
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
        """Stores embeddings from other workers."""
        with self._lock:
            for digest, embedding in embeddings.items():
                self._put(digest, embedding)

    def put_encoded(self, digest: bytes, embedding: torch.Tensor) -> None:
        """Stores an embedding that this worker has computed; `take_encoded` returns it for publication."""
        with self._lock:
            self.num_encoded += 1
            self._encoded[digest] = embedding
            self._put(digest, embedding)

    def take_encoded(self) -> dict[bytes, torch.Tensor]:
        """Returns the embeddings computed here since the last call."""
        with self._lock:
            encoded, self._encoded = self._encoded, {}
        return encoded

    def _put(self, digest: bytes, embedding: torch.Tensor) -> None:
        if digest in self._embeddings or embedding.nbytes > self._capacity_bytes:
            return
        self._embeddings[digest] = embedding
        self.num_bytes += embedding.nbytes
        while self.num_bytes > self._capacity_bytes:
            _, evicted = self._embeddings.popitem(last=False)
            self.num_bytes -= evicted.nbytes
