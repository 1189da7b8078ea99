"""Writes the records of requests to a folder that the proxies of a host share, and finds them for their clients.

A record is written on a thread after its answer, so a slow disk delays no request. What waits for the disk is limited:
beyond that, and on errors of the disk, records are dropped, counted and logged.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Literal

from tandem.proxy.admission.budgets import ByteBudget
from tandem.proxy.proxy_settings import RecordSettings
from tandem.proxy.records.record import MAX_FILE_BYTES, MAX_RECORD_BYTES
from tandem.proxy.records.recording import Recording
from tandem.runtime.errors import InvalidRequest, Overloaded, TandemError
from tandem.runtime.files.client_files import ClientFiles, FileLimits
from tandem.runtime.files.whole_file import whole_file
from tandem.runtime.tasks import start_job
from tandem.runtime.threads import Threads

log = logging.getLogger(__name__)

OWN_LIMITS = FileLimits(256 << 20, 10_000, 3600.0)
"""Of records that clients have asked for, in the cluster's own folder."""
MAX_FILES = 100_000
"""Records in the operator's folder, which are listed from time to time."""
MAX_PENDING_BYTES, MAX_PENDING = 64 << 20, 1024
"""Records that wait for the disk, on one proxy; three quarters of the bytes may be one client's."""
WRITE_WAIT_S = 2.0
"""Longest wait of a reader, and of a proxy that ends, for records that are being written."""
_LOG_INTERVAL_S = 60.0
_NUM_READERS = 4
_TOO_LARGE = f"it would have more than {MAX_RECORD_BYTES >> 20} MiB"
_SAFE_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")

Outcome = Literal["written", "too_large", "slow_disk", "disk_error"]


class RecordNotFound(InvalidRequest):
    """No record of this request is kept for this client."""

    code = "record_not_found"


class _TooLarge(Exception):
    """The file would be larger than MAX_FILE_BYTES."""


class RecordStore:
    """The records of all clients. Of one event loop.

    records_all: whether requests are recorded whose clients have not asked for it. on_outcome: counts records.
    """

    def __init__(
        self,
        folder: Path,
        limits: FileLimits = OWN_LIMITS,
        records_all: bool = False,
        on_outcome: Callable[[Outcome], object] = lambda _: None,
    ) -> None:
        self.records_all = records_all
        self.readers = Threads("reading records", _NUM_READERS)
        self._files = ClientFiles(folder, ".jsonl", limits)
        self._on_outcome = on_outcome
        self._writers = Threads("writing records", 1, MAX_PENDING)
        self._pending_bytes = ByteBudget(MAX_PENDING_BYTES)
        self._pending: dict[Path, asyncio.Task[None]] = {}
        self._num_dropped = 0
        self._logged_at = -math.inf

    def put(self, recording: Recording, outcome: str) -> None:
        """Writes a record soon, or drops it. Never waits or raises.

        outcome: of the request. A later record of an equal id replaces the earlier one.
        """
        if recording.is_empty:
            return
        if recording.is_too_large:
            self._drop("too_large", _TOO_LARGE)
            return
        owner, num_bytes = recording.owner, recording.num_bytes
        path = self._path(owner, recording.request_id)
        try:
            self._pending_bytes.take(owner, num_bytes)
        except TandemError:
            self._drop("slow_disk", "too many records wait for the disk")
            return
        task = start_job(self._write(path, recording, outcome), "writing a record")
        self._pending[path] = task

        def forget(_: object) -> None:
            self._pending_bytes.give_back(owner, num_bytes)
            if self._pending.get(path) is task:
                del self._pending[path]

        task.add_done_callback(forget)

    async def _write(self, path: Path, recording: Recording, outcome: str) -> None:
        try:
            await self._writers.run(lambda: self._write_now(path, recording, outcome))
        except Overloaded:
            self._drop("slow_disk", "too many records wait for the disk")
        except OSError as error:
            self._drop("disk_error", f"{error.filename or path.parent}: {error.strerror or error}")
        except _TooLarge:
            self._drop("too_large", _TOO_LARGE)
        else:
            self._on_outcome("written")

    def _write_now(self, path: Path, recording: Recording, outcome: str) -> None:
        self._files.make_room(path, recording.num_bytes)
        with whole_file(path) as file:
            for line in recording.lines(outcome):
                if file.tell() + len(line) > MAX_FILE_BYTES:
                    raise _TooLarge
                file.write(line)

    def _drop(self, outcome: Outcome, reason: str) -> None:
        self._on_outcome(outcome)
        self._num_dropped += 1
        if (now := time.monotonic()) - self._logged_at >= _LOG_INTERVAL_S:
            log.warning("%d records were dropped since the last such line; the last one: %s", self._num_dropped, reason)
            self._logged_at, self._num_dropped = now, 0

    async def open(self, owner: str, request_id: str) -> BinaryIO:
        """Opens a record for reading. Waits for one that this proxy is writing. Raises RecordNotFound."""
        path = self._path(owner, request_id)
        if (task := self._pending.get(path)) is not None:
            await asyncio.wait({task}, timeout=WRITE_WAIT_S)
        if (file := await self.readers.run(lambda: self._open_kept(path))) is None:
            raise RecordNotFound(
                f"There is no record of a request {request_id[:100]!r} of yours: it did not ask for one with "
                "X-Tandem-Record: 1, has not ended, was recorded too long ago, or its record was too large or was "
                "removed to make room for others.",
                "request_id",
            )
        return file

    def _open_kept(self, path: Path) -> BinaryIO | None:
        """Returns None for a record that is not there, or too old; other requests may remove it at any moment."""
        with suppress(FileNotFoundError):
            file = path.open("rb")
            if not self._files.is_too_old(os.fstat(file.fileno())):
                return file
            file.close()
        return None

    def _path(self, owner: str, request_id: str) -> Path:
        is_safe = _SAFE_ID.fullmatch(request_id) is not None
        return self._files.path(owner, request_id if is_safe else f"={sha256(request_id.encode()).hexdigest()}")

    async def close(self) -> None:
        """Waits a little for what is being written."""
        if self._pending:
            await asyncio.wait(self._pending.values(), timeout=WRITE_WAIT_S)
        self._writers.close()
        self.readers.close()


def record_store(settings: RecordSettings, folder: str, on_outcome: Callable[[Outcome], object]) -> RecordStore | None:
    """Returns the store of a proxy. folder: of records that clients ask for; empty for none."""
    if settings.record:
        limits = FileLimits(int(settings.record_gib * (1 << 30)), MAX_FILES, math.inf)
        return RecordStore(Path(settings.record), limits, True, on_outcome)
    return RecordStore(Path(folder), on_outcome=on_outcome) if folder else None
