"""Batches on disk. `<folder>/<client>/batches/<id>.json` is the batch; `.owner`, until the batch ends, says
for whom it runs.

The proxy that runs a batch holds a lock on its `.owner`. `.output` and `.error` have the results so far, `.cancel`
exists once it is to be cancelled, `.index` has what is known of its lines, `.lines` which of them are running. All
methods block on the disk: call them on a thread.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tandem.proxy.batches import file_store
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
)
from tandem.proxy.batches.batch_lines import CheckedLines, IndexedLine, finished_id
from tandem.proxy.batches.file_store import FileStore
from tandem.proxy.batches.json_files import DAMAGED_SUFFIX, ids_in, new_id, read_json, storage_errors, write_json
from tandem.runtime.errors import InvalidRequest
from tandem.runtime.files.private_folder import make_private_folder
from tandem.runtime.files.whole_file import ABANDONED_AFTER_S, remove_abandoned, write_whole

MAX_UNFINISHED = 64
"""Limit for the batches of one client that have not ended."""
MAX_BATCHES = 10_000
"""Batches of one client that are kept. Older ones are forgotten; their files stay."""
_INDEX_DECODER = msgspec.json.Decoder(IndexedLine)
_ID = re.compile(r"batch_[0-9a-f]{24}")
_FINAL_SUFFIXES = (".json", ".cancel")
"""Files of a batch that has ended."""
_RUN_SUFFIXES = (".output", ".error", ".cancel", ".lines", ".index", ".owner")
"""Files of a batch that has not ended, beside `.json`."""
_ROOM_INTERVAL_S = 10.0
"""Time between two looks at what the files of a client take while its batches run."""


class BatchNotFound(InvalidRequest):
    """The client has no batch with this id."""

    code = "batch_not_found"


class NoRoomForResults(InvalidRequest):
    """The client's files and results have reached their limit."""

    code = "storage_limit_exceeded"


class Owner(msgspec.Struct, frozen=True):
    """client: the API key's client; "" without keys. host: whose limits requests count towards without keys."""

    client: str
    host: str


class BatchFiles:
    """One batch, whose lock this process holds until `close`."""

    def __init__(self, folder: Path, batch: BatchObject, owner: Owner, lock: int, files: FileStore) -> None:
        self._folder, self._id, self._lock, self._files = folder, batch.id, lock, files
        self.owner = owner
        self.batch = batch
        self.journal = LineJournal(self._file(".lines"))
        self._room_checked_at = -_ROOM_INTERVAL_S
        self._num_room_bytes = 0  # left for the client at that time

    def close(self) -> None:
        os.close(self._lock)

    @property
    def is_cancelled(self) -> bool:
        return self._file(".cancel").exists()

    def save(self, batch: BatchObject, *, durable: bool = True) -> None:
        write_json(self._file(".json"), batch, durable=durable)
        self.batch = batch
        if batch.status in FINAL:
            for suffix in (".cancel", ".lines", ".index", ".owner"):
                self._file(suffix).unlink(missing_ok=True)

    @property
    def index(self) -> Path:
        """The file with an `IndexedLine` of each request, one after another as lines of JSON."""
        return self._file(".index")

    def input_file(self) -> Path:
        """Raises FileNotFound."""
        return self._files.path(self.batch.input_file_id)

    def save_check(self, checked: CheckedLines) -> None:
        """Saves the batch after its lines were checked: in progress or failed."""
        now = time.time()
        if checked.errors:
            self.save(self.batch.with_errors(now, checked.errors))
        elif self.batch.status == "validating":
            counts = RequestCounts(checked.num_requests)
            self.save(self.batch.became("in_progress", now, request_counts=counts))

    def lines(self) -> Iterator[IndexedLine]:
        """Yields the requests."""
        with self.index.open("rb") as lines:
            for line in lines:
                yield _INDEX_DECODER.decode(line)

    def read(self, line: IndexedLine) -> bytes:
        """Returns the body of a request. Raises FileNotFound."""
        with self._files.open(self.batch.input_file_id) as file:
            file.seek(line.offset)
            return file.read(line.num_bytes)

    def check_room(self) -> None:
        """Raises NoRoomForResults once the client's files and results have reached their limit."""
        now = time.monotonic()
        if now - self._room_checked_at >= _ROOM_INTERVAL_S:
            self._room_checked_at = now
            self._num_room_bytes = file_store.MAX_CLIENT_BYTES - self._files.used_bytes()
        if self._num_room_bytes <= 0:
            raise NoRoomForResults(
                f"Your files and results have reached the limit of {file_store.MAX_CLIENT_BYTES} bytes. The results so "
                "far are kept; delete files, and send the other requests in a new batch."
            )

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
        self._num_room_bytes -= len(data)
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
        self.files.check_room(1)  # for its results
        if sum(1 for _ in self._folder.glob("batch_*.owner")) >= MAX_UNFINISHED:
            raise InvalidRequest(f"You have {MAX_UNFINISHED} batches that have not ended, the limit; wait for one.")
        for old in self.ids()[: -MAX_BATCHES + 1]:
            if not (self._folder / f"{old}.owner").exists():
                for suffix in _FINAL_SUFFIXES:
                    (self._folder / f"{old}{suffix}").unlink(missing_ok=True)
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
        make_private_folder(self._folder, self._folder.parents[1])
        write_json(self._folder / f"{batch.id}.owner", owner)
        write_json(self._folder / f"{batch.id}.json", batch)
        return batch

    def find(self, batch_id: str) -> BatchObject | None:
        """Returns None for a batch that does not exist or is damaged."""
        if not _ID.fullmatch(batch_id):
            return None
        batch = read_json(self._folder / f"{batch_id}.json", BatchObject)
        if batch is not None and batch.status not in FINAL:
            with suppress(FileNotFoundError):  # it is not to be cancelled, or ends at this moment
                return batch.became("cancelling", (self._folder / f"{batch_id}.cancel").stat().st_mtime)
        return batch

    def get(self, batch_id: str) -> BatchObject:
        """Raises BatchNotFound."""
        if (batch := self.find(batch_id)) is None:
            raise BatchNotFound(f"There is no batch {batch_id[:100]!r}.", "batch_id")
        return batch

    def cancel(self, batch_id: str) -> BatchObject:
        """Raises BatchNotFound, InvalidRequest if it has ended."""
        batch = self.get(batch_id)
        if batch.status in FINAL:
            raise InvalidRequest(f"The batch {batch.id} is {batch.status} and cannot be cancelled.", "batch_id")
        with storage_errors():
            (self._folder / f"{batch_id}.cancel").touch(0o600)
        return self.get(batch_id)

    def ids(self) -> list[str]:
        """Returns the ids of all batches, oldest first."""
        return ids_in(self._folder, _ID)

    def hold_unfinished(self, max_held: int = MAX_UNFINISHED) -> Iterator[BatchFiles]:
        """Yields the batches that have not ended and no other process holds, oldest first. The caller closes each."""
        num_held = 0
        for file in sorted(self._folder.glob("batch_*.owner")):
            if num_held >= max_held:
                return
            try:
                lock = os.open(file, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:  # it ended meanwhile
                continue
            try:
                held = self._hold(file, lock)
            except BaseException:  # also of a disk that is full, which is met again and again
                os.close(lock)
                raise
            if held is None:
                os.close(lock)
                continue
            num_held += 1
            yield held

    def _hold(self, file: Path, lock: int) -> BatchFiles | None:
        """Locks an unfinished batch. Returns None if it is another proxy's, has ended, or is damaged.

        file: its `.owner`. lock: descriptor of that, which the caller closes if there is nothing to hold.
        """
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        owner = read_json(file, Owner)
        batch = read_json(self._folder / f"{file.stem}.json", BatchObject)
        if owner is None or batch is None:  # it is being created or ended, or a file is damaged
            if batch is not None and batch.status not in FINAL:
                error = LineError("damaged", "The server cannot read what it stored about this batch.")
                write_json(self._folder / f"{batch.id}.json", batch.with_errors(time.time(), [error]))
            return None
        held = BatchFiles(self._folder, batch, owner, lock, self.files)
        if batch.status in FINAL:  # a proxy ended between the two halves of `save`
            held.save(batch)
            return None
        return held

    def remove_orphans(self) -> None:
        """Removes what killed processes have left of files and batches."""
        remove_abandoned(self._folder)
        for suffix in _RUN_SUFFIXES:
            for file in self._folder.glob(f"batch_*{suffix}"):
                with suppress(FileNotFoundError):
                    batch = file.with_suffix(".json")
                    is_known = batch.exists() or batch.with_name(batch.name + DAMAGED_SUFFIX).exists()
                    if not is_known and time.time() - file.stat().st_mtime > ABANDONED_AFTER_S:
                        file.unlink()
        if not any(self._folder.glob("batch_*.owner")):
            self.files.remove_orphans()


_RUNNING = re.compile(rb"^\+(\d+)\.$", re.MULTILINE)  # an entry that a full disk has cut off has no point


class LineJournal:
    """Which lines of a batch were running when a proxy died, so that a line that kills proxies is not run for ever.

    A line of the file is `+N.` while the line N of the batch runs, and `-N.` when its run has ended in whatever way.
    Lines that are still running, when another proxy takes the batch over, were so when the last one died.

    Blocks on the disk. It need not survive a crash of the host, so it is not synchronised. Not for many threads.
    """

    def __init__(self, file: Path) -> None:
        self._path = file
        self._running: dict[int, int] = {}  # place of the sign in the file, by number of the line

    def deaths(self) -> Counter[int]:
        """Returns for each line how many proxies have died while it ran, and begins the journal anew with that.

        Raises StorageFull.
        """
        content = self._path.read_bytes() if self._path.exists() else b""
        found = Counter(map(int, _RUNNING.findall(content)))
        with storage_errors():
            write_whole(self._path, "".join(f"+{number}.\n" * count for number, count in sorted(found.items())))
        return found

    def begin(self, number: int) -> None:
        """Raises StorageFull."""
        with storage_errors(), self._opened() as fd:
            end = os.lseek(fd, 0, os.SEEK_END)
            os.pwrite(fd, b"\n+%d.\n" % number, end)  # a line of its own also after one that was cut off
        self._running[number] = end + 1

    def end(self, number: int) -> None:
        """Idempotent. Takes no room, so that a full disk blames no line."""
        if (place := self._running.pop(number, None)) is not None:
            with self._opened() as fd:
                os.pwrite(fd, b"-", place)

    def end_all(self) -> None:
        """Ends all lines that are running, because their runs were cancelled."""
        for number in sorted(self._running):
            self.end(number)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)
