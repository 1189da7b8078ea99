"""Checks the input file of a batch and writes the index of its lines, for large files in a sandbox."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tandem.proxy.batches.batch import LineError
from tandem.proxy.batches.batch_lines import CheckedLines, check_lines, read_lines
from tandem.runtime.errors import InternalError
from tandem.runtime.files.whole_file import whole_file
from tandem.runtime.processes.sandbox import Limits, Sandbox, SandboxLost

log = logging.getLogger("proxy")

MAX_CHECKED_HERE_BYTES = 256 * 1024
"""Size of a file that is checked on a thread, where it holds the interpreter's lock for at most about 10 ms a line."""
TIMEOUT_S = 120.0
"""For one file. The slowest of 200 MiB takes about 10 s on an idle machine."""
_MAX_MEMORY_BYTES = 1 << 30
_NICENESS = 10
_LINE_BYTES = 8
"""Size of a line's number, in the memory that a sandbox shares with its caller."""
NUM_ATTEMPTS = 3
"""Sandboxes that read one file, one after another, until one has checked it."""


class CheckLost(Exception):
    """A sandbox has ended before it had checked a file. line: the last one that it began."""

    def __init__(self, lost: SandboxLost, line: int) -> None:
        super().__init__(f"{lost} at line {line}")
        self.lost = lost
        self.line = line


async def check_file(
    input_file: Path, endpoint: str, index: Path, on_thread: Callable[[Callable[[], Any]], Any]
) -> CheckedLines:
    """Checks a file that exists. on_thread: runs a function on a thread.

    Raises OSError, also if the processes that read the file were ended by others. Then it can be checked later.
    """
    size = (await on_thread(input_file.stat)).st_size
    if size <= MAX_CHECKED_HERE_BYTES:
        checked: CheckedLines = await on_thread(partial(write_index, input_file, endpoint, index))
        return checked
    ends: list[CheckLost] = []
    while len(ends) < NUM_ATTEMPTS:
        try:
            return await _check_apart(input_file, endpoint, index)
        except TimeoutError:
            return _too_slow()
        except CheckLost as end:
            log.warning("checking %s: %s", input_file, end)
            if end.lost.is_over_time:
                return _too_slow()
            ends.append(end)
            if end.lost.status > 0 and not end.lost.is_out_of_memory:  # it could not even begin
                break
    if (error := error_of_file(ends)) is None:
        raise OSError(f"checking {input_file}: {ends[-1]}")
    return CheckedLines(0, [error])


def _too_slow() -> CheckedLines:
    message = f"Checking the file took more than {TIMEOUT_S:g} s; send several smaller files."
    return CheckedLines(0, [LineError("too_slow", message)])


def error_of_file(ends: Sequence[CheckLost]) -> LineError | None:
    """Returns what is wrong with a file, or None if it may not be its fault that no sandbox could check it.

    It is if each attempt ended by a fault of its own at the same line.
    """
    lines = {each.line for each in ends}
    is_own = all(each.lost.is_out_of_memory or each.lost.is_fault for each in ends)
    if len(ends) < NUM_ATTEMPTS or len(lines) > 1 or not is_own:
        return None
    [line] = lines
    if not line:
        return LineError("check_failed", "The file could not be checked; see the server's log.")
    needs_memory = all(each.lost.is_out_of_memory for each in ends)
    why = "needs too much memory" if needs_memory else f"has ended the process that reads it {len(ends)} times"
    return LineError("check_failed", f"Line {line} cannot be read: it {why}. Remove it, or make it simpler.", line)


async def _check_apart(input_file: Path, endpoint: str, index: Path) -> CheckedLines:
    """Checks a file in a sandbox. Raises TimeoutError, CheckLost, and OSError if that fails for another reason."""
    with contextlib.ExitStack() as opened:
        line = os.memfd_create("line")
        opened.callback(os.close, line)
        os.ftruncate(line, _LINE_BYTES)
        try:
            sandbox = await Sandbox.spawn()
        except OSError as error:  # no FileNotFoundError, which would say that the input is gone
            raise OSError(f"cannot start a process to check {input_file}: {error}") from error
        opened.callback(sandbox.close)
        paths = str(input_file), endpoint, str(index), f"/proc/{os.getpid()}/fd/{line}"
        try:
            return await sandbox.call(_write_index, b"", paths, Limits(TIMEOUT_S, _MAX_MEMORY_BYTES, TIMEOUT_S))
        except SandboxLost as lost:
            raise CheckLost(lost, int.from_bytes(os.pread(line, _LINE_BYTES, 0))) from lost
        except InternalError as error:  # such as that of a full disk, which is no better a moment later
            raise OSError(f"checking {input_file}: {error}") from error


def _write_index(_context: None, _data: bytes, input_file: str, endpoint: str, index: str, line: str) -> CheckedLines:
    """In the sandbox. line: file in memory for the number of the line that is read, which the caller reads later."""
    os.nice(_NICENESS)
    with Path(line).open("r+b") as file:
        shared = mmap.mmap(file.fileno(), _LINE_BYTES)

    def note(number: int) -> None:
        shared[:] = number.to_bytes(_LINE_BYTES)

    return write_index(Path(input_file), endpoint, Path(index), note)


def write_index(
    input_file: Path, endpoint: str, index: Path, on_begin: Callable[[int], object] = lambda line: None
) -> CheckedLines:
    """on_begin: called with the number of each line before it is decoded. Raises OSError."""
    encode = msgspec.json.Encoder().encode

    def each_line(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        for number, found in enumerate(read_lines(file), start=1):
            on_begin(number)
            yield found

    with input_file.open("rb") as lines, whole_file(index) as written:
        return check_lines(each_line(lines), endpoint, lambda line: written.write(encode(line) + b"\n"))
