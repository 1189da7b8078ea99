"""The changes of a tier between two answers. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TierChanges:
    """Hashes of blocks that a tier has gained and lost."""

    added: list[bytes]
    removed: list[bytes]


class ChangeLog:
    """Net changes: a block that was added and removed since the last `take`, or the reverse, is in neither list."""

    def __init__(self) -> None:
        self._added: dict[bytes, None] = {}  # in order
        self._removed: dict[bytes, None] = {}

    def add(self, block_hash: bytes) -> None:
        """Notes that the tier has gained a block, which it did not hold."""
        if block_hash in self._removed:
            del self._removed[block_hash]
        else:
            self._added[block_hash] = None

    def remove(self, block_hash: bytes) -> None:
        """Notes that the tier has lost a block, which it held."""
        if block_hash in self._added:
            del self._added[block_hash]
        else:
            self._removed[block_hash] = None

    def take(self) -> TierChanges:
        """Returns the changes since the last call."""
        changes = TierChanges(list(self._added), list(self._removed))
        self._added, self._removed = {}, {}
        return changes
