"""Batches on disk. `<folder>/<client>/batches/<id>.json` is the batch; `.owner`, until the batch ends, says
for whom it runs.

The proxy that runs a batch holds a lock on its `.owner`. `.output` and `.error` have the results so far, `.cancel`
exists once it is to be cancelled. All methods block on the disk: call them on a thread.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from tandem.proxy.batches.batch import (
    FINAL,
    WINDOW_S,
    BatchObject,
    BatchRequest,
    LineError,
    LineErrors,
    LineResult,
    RequestCounts,
    Status,
    check_lines,
    finished_id,
    read_lines,
)
from tandem.proxy.batches.file_store import FileStore, new_id, storage_errors, write_json
from tandem.runtime.errors import InvalidRequest

MAX_UNFINISHED = 64
"""Limit for the batches of one client that have not ended."""
MAX_BATCHES = 10_000
"""Batches of one client that are kept. Older ones are forgotten; their files stay."""
_ID = re.compile(r"batch_[0-9a-f]{24}")
_SUFFIXES = (".json", ".cancel")
"""Files of a batch that has ended."""


class BatchNotFound(InvalidRequest):
    """The client has no batch with this id."""

    code = "batch_not_found"


class Owner(msgspec.Struct, frozen=True):
    """client: the API key's client; "" without keys. host: whose limits requests count towards without keys."""

    client: str
    host: str


class BatchFiles:
    """One batch, whose lock this process holds until `close`."""

    def __init__(self, folder: Path, batch_id: str, lock: int, files: FileStore) -> None:
        self._folder, self._id, self._lock, self._files = folder, batch_id, lock, files
        self.owner = msgspec.json.decode(self._file(".owner").read_bytes(), type=Owner)
        self.batch = msgspec.json.decode(self._file(".json").read_bytes(), type=BatchObject)

    def close(self) -> None:
        os.close(self._lock)

    @property
    def is_cancelled(self) -> bool:
        return self._file(".cancel").exists()

    def save(self, batch: BatchObject) -> None:
        write_json(self._file(".json"), batch)
        self.batch = batch
        if batch.status in FINAL:
            self._file(".cancel").unlink(missing_ok=True)
            self._file(".owner").unlink(missing_ok=True)

    def check(self) -> BatchObject:
        """Returns the batch after its lines were checked: in progress or failed."""
        now = time.time()
        try:
            with self._files.path(self.batch.input_file_id).open("rb") as lines:
                num_requests, errors = check_lines(read_lines(lines), self.batch.endpoint)
        except InvalidRequest as error:
            return self.batch.with_errors(now, [LineError(error.code, error.message)])
        if errors:
            return self.batch.with_errors(now, errors)
        return self.batch.became("in_progress", now, request_counts=RequestCounts(num_requests))

    def lines(self) -> Iterator[bytes]:
        with self._files.path(self.batch.input_file_id).open("rb") as lines:
            yield from read_lines(lines)

    def finished(self) -> set[str]:
        """Returns the custom_ids that have results. A line that was cut off by a crash is removed."""
        found: list[set[str]] = []
        for kind in (".output", ".error"):
            ids: set[str] = set()
            if (file := self._file(kind)).exists():
                with file.open("r+b") as results:
                    num_bytes = 0
                    for line in results:
                        if not line.endswith(b"\n"):
                            results.truncate(num_bytes)
                            break
                        num_bytes += len(line)
                        ids.add(finished_id(line))
            found.append(ids)
        total = self.batch.request_counts.total
        self.batch = msgspec.structs.replace(self.batch, request_counts=RequestCounts(total, *map(len, found)))
        return found[0] | found[1]

    def append(self, result: LineResult) -> None:
        """Adds a result. Raises StorageFull and adds nothing."""
        file = self._file(".output" if result.is_success else ".error")
        data = msgspec.json.encode(result) + b"\n"
        with storage_errors(), os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb", 0) as out:
            before = os.fstat(out.fileno()).st_size
            try:
                num_written = out.write(data) or 0
                if num_written < len(data):
                    out.write(data[num_written:])
            except OSError:
                out.truncate(before)
                raise
        counts = self.batch.request_counts
        done, failed = counts.completed + result.is_success, counts.failed + (not result.is_success)
        self.batch = msgspec.structs.replace(self.batch, request_counts=RequestCounts(counts.total, done, failed))

    def finalize(self, error: LineError | None = None) -> None:
        """Moves the results to files of the client and ends the batch. error: why it fails.

        It may be called again after a crash.
        """
        batch = self.batch
        if error is not None:
            batch = msgspec.structs.replace(batch, errors=LineErrors([error]))
        status: Status = "completed"
        if batch.errors is not None:
            status = "failed"
        elif self.is_cancelled:
            status = "cancelled"
        elif time.time() >= batch.expires_at:
            status = "expired"
        if batch.status != "finalizing":
            has = [self._file(kind).exists() for kind in (".output", ".error")]
            output_id, error_id = (new_id("file-") if each else None for each in has)
            self.save(batch.became("finalizing", time.time(), output_file_id=output_id, error_file_id=error_id))
        for kind, file_id in ((".output", self.batch.output_file_id), (".error", self.batch.error_file_id)):
            if file_id is not None:
                self._files.take(self._file(kind), file_id, f"{self._id}_{kind.removeprefix('.')}.jsonl")
        self.save(self.batch.became(status, time.time()))

    def _file(self, suffix: str) -> Path:
        return self._folder / f"{self._id}{suffix}"


class BatchStore:
    """The batches of one client."""

    def __init__(self, folder: Path) -> None:
        """folder: of the client."""
        self._folder = folder / "batches"
        self.files = FileStore(folder)

    def create(self, request: BatchRequest, owner: Owner) -> BatchObject:
        """Raises InvalidRequest, StorageFull."""
        stored = self.files.get(request.input_file_id)
        if stored.purpose != "batch":
            raise InvalidRequest(f"The file {stored.id} was not uploaded with the purpose 'batch'.", "input_file_id")
        self.files.check_room()  # for its results
        known = self.all()
        if sum(each.status not in FINAL for each in known) >= MAX_UNFINISHED:
            raise InvalidRequest(f"You have {MAX_UNFINISHED} batches that have not ended, the limit; wait for one.")
        for old in known[MAX_BATCHES - 1 :]:
            if old.status in FINAL:
                for suffix in _SUFFIXES:
                    (self._folder / f"{old.id}{suffix}").unlink(missing_ok=True)
        now = int(time.time())
        batch = BatchObject(
            id=new_id("batch_"),
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=request.metadata,
        )
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(self._folder / f"{batch.id}.owner", owner)
        write_json(self._folder / f"{batch.id}.json", batch)
        return batch

    def get(self, batch_id: str) -> BatchObject:
        """Raises BatchNotFound."""
        if _ID.fullmatch(batch_id):
            try:
                batch = msgspec.json.decode((self._folder / f"{batch_id}.json").read_bytes(), type=BatchObject)
            except FileNotFoundError:
                pass
            else:
                if batch.status not in FINAL:
                    with suppress(FileNotFoundError):  # it is not to be cancelled, or ends at this moment
                        return batch.became("cancelling", (self._folder / f"{batch_id}.cancel").stat().st_mtime)
                return batch
        raise BatchNotFound(f"There is no batch {batch_id[:100]!r}.", "batch_id")

    def cancel(self, batch_id: str) -> BatchObject:
        """Raises BatchNotFound, InvalidRequest if it has ended."""
        batch = self.get(batch_id)
        if batch.status in FINAL:
            raise InvalidRequest(f"The batch {batch.id} is {batch.status} and cannot be cancelled.", "batch_id")
        with storage_errors():
            (self._folder / f"{batch_id}.cancel").touch(0o600)
        return self.get(batch_id)

    def all(self) -> list[BatchObject]:
        """Returns all batches, newest first."""
        found = []
        for about in self._folder.glob("batch_*.json"):
            try:
                found.append(self.get(about.stem))
            except BatchNotFound:
                continue
        return sorted(found, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def hold_unfinished(self) -> Iterator[BatchFiles]:
        """Yields the batches that have not ended and that no other process holds. The caller closes each."""
        for owner in self._folder.glob("batch_*.owner"):
            try:
                lock = os.open(owner, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:  # it ended meanwhile
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = BatchFiles(self._folder, owner.stem, lock, self.files)
            except (BlockingIOError, FileNotFoundError):  # another proxy runs it, or is creating or ending it
                os.close(lock)
                continue
            except BaseException:
                os.close(lock)
                raise
            if held.batch.status in FINAL:  # a proxy ended between the two halves of `save`
                held.save(held.batch)
                held.close()
                continue
            yield held
