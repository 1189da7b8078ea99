"""The tier interface: where KV blocks are kept below the pool, by prefix-block hash (`protocol.prefix_hash`).

A tier is a cache. It may lose any block at any time, and a block that it returns is verified by its header and its
checksum before it is used. Each rank of a worker has its own objects, for its own heads of each block.

Tiered KV caches follow Mooncake (Qin et al., FAST 2025) and CachedAttention (Gao et al., ATC 2024).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from tandem.runtime.errors import ConfigError
from tandem.runtime.files.user_paths import expanded
from tandem.runtime.settings import setting


class TierFailed(Exception):
    """A tier could not be reached, or refused to store. Its blocks count as missing."""


class TiersConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tiers of one worker; the defaults are none."""

    # fmt: off
    kv_host_gib: Annotated[float, setting("KV cache", ge=0, description=
        "Host memory in GiB per worker for KV blocks that do not fit into its KV cache, divided among its tensor "
        "parallel processes; kept while a worker is restarted. 0 uses none.")] = 0.0
    kv_disk_dir: Annotated[str, setting("KV cache", description=
        "Folder for KV blocks, which survives restarts of the cluster; all workers on a host share it. Created with "
        "mode 0700, because KV blocks reveal prompts. Empty uses none.")] = ""
    kv_disk_gib: Annotated[float, setting("KV cache", ge=0, description=
        "Maximum size of --kv-disk-dir in GiB, on each host; required with it.")] = 0.0
    kv_store: Annotated[str, setting("KV cache", description=
        "Mooncake store for KV blocks, shared by the workers of all hosts: mooncake://HOST:PORT of its master. Empty "
        "uses none.")] = ""
    host_files: list[str] = []
    """Path of each rank's host memory, a memfd of the process that started the worker (`/proc/PID/fd/N`)."""
    # fmt: on

    def host_bytes(self, num_ranks: int) -> int:
        """Host memory of one of `num_ranks` ranks."""
        return int(self.kv_host_gib * (1 << 30)) // num_ranks

    @property
    def disk_bytes(self) -> int:
        """Limit on the size of the folder on disk."""
        return int(self.kv_disk_gib * (1 << 30))

    @property
    def disk_folder(self) -> Path | None:
        """Absolute path of the folder on disk; None without one."""
        return expanded(self.kv_disk_dir).absolute() if self.kv_disk_dir else None


_URL = re.compile(r"mooncake://(?P<host>[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})/?")


def parse_store_url(url: str) -> str:
    """Returns HOST:PORT of a Mooncake store's master, from mooncake://HOST:PORT as the command line takes it. Raises
    ConfigError."""
    found = _URL.fullmatch(url)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ConfigError(
            f"kv_store: {url!r} is not mooncake://HOST:PORT, the address of a Mooncake master (a name or an IPv4 "
            "address), such as mooncake://10.0.0.1:50051"
        )
    return f"{found['host']}:{found['port']}"


@dataclass(frozen=True)
class TierChanges:
    """Hashes of blocks that a tier has gained and lost."""

    added: list[bytes]
    removed: list[bytes]


class ChangeLog:
    """The changes of a tier between two answers, net: a block that was added and removed since the last `take`, or the
    reverse, is in neither list."""

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


@dataclass(frozen=True)
class TierAnswer:
    """Result of one job of a tier. num_blocks: leading blocks of the job that were stored, loaded or found.

    error: why it stopped early, if it failed. The other fields describe the tier after the job, see `KVTier`.
    """

    num_blocks: int = 0
    error: str | None = None
    changes: TierChanges = field(default_factory=lambda: TierChanges([], []))
    num_bytes: int = 0
    max_bytes: int = 0
    num_corrupt: int = 0


OnAnswer = Callable[[TierAnswer], None]
"""Called once for each job, on the tier's thread."""


class KVTier(Protocol):
    """One rank's blocks in one tier. Its methods may block, and are called on one thread of its own, `open` first.

    hashes: 16 bytes each. block: uint8 [block_bytes], contiguous, in the host's memory. Methods raise TierFailed.
    """

    name: str
    """"host", "disk" or "store"."""
    max_bytes: int
    """Limit on `num_bytes`; 0 if the tier itself knows none."""
    changes: ChangeLog
    """Blocks that this object or others have added and removed; the first are those that `open` finds."""
    num_corrupt: int
    """Number of blocks so far that were not whole, and were removed."""

    @property
    def num_bytes(self) -> int:
        """Bytes stored, including those of other workers that share the tier, as far as known."""

    def open(self) -> None:
        """Connects to the tier."""

    def find(self, hashes: Sequence[bytes]) -> int:
        """Returns how many of these blocks it holds before the first that it lacks."""

    def store(self, block_hash: bytes, block: memoryview) -> None:
        """Stores a block unless it is there. Evicts the least recently used ones if there is no room."""

    def load(self, block_hash: bytes, block: memoryview) -> bool:
        """Copies a block into `block`. Returns False if it is not there or is not whole; `block` is then undefined."""

    def refresh(self) -> None:
        """Looks for blocks that others have stored or removed. Called every few seconds."""

    def clear(self) -> None:
        """Removes all blocks of this model and layout."""

    def close(self) -> None:
        """Releases the resources that `open` acquired. Blocks stay if the tier outlives the process."""
