"""Checks the input file of a batch and writes the index of its lines, for large files in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from tandem.proxy.batches.batch import LineError
from tandem.proxy.batches.batch_lines import CheckedLines, check_lines, read_lines
from tandem.runtime.files.whole_file import whole_file
from tandem.runtime.processes.lifetime import die_with_parent
from tandem.runtime.processes.python_command import python_command

log = logging.getLogger("proxy")

MAX_CHECKED_HERE_BYTES = 256 * 1024
"""Size of a file that is checked on a thread, where it holds the interpreter's lock for at most about 10 ms a line."""
TIMEOUT_S = 120.0
"""For one file. The slowest of 200 MiB takes about 10 s on an idle machine."""
_MAX_MEMORY_BYTES = 1 << 30
_NICENESS = 10
_LINE_BYTES = 8
"""Size of a line's number, in the memory that a process shares with its parent."""


NUM_ATTEMPTS = 3
"""Processes that read one file, one after another, until one has checked it."""
EXIT_NO_MEMORY = 3
"""Exit status of a process that has reached _MAX_MEMORY_BYTES."""
_OWN_FAULTS = {
    EXIT_NO_MEMORY,
    *(-each for each in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS)),
}
"""Statuses that come from what a process does. Other signals come from elsewhere: SIGKILL also from the kernel, when
memory is short for which another process is to blame."""


class CheckEnded(NamedTuple):
    """How a process that checks a file has ended. status: negative for a signal. line: the last one that it began."""

    status: int
    line: int
    output: bytes


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
    ends: list[CheckEnded] = []
    while len(ends) < NUM_ATTEMPTS:
        try:
            ended = await _check_apart(input_file, endpoint, index)
        except TimeoutError:
            message = f"Checking the file took more than {TIMEOUT_S:g} s; send several smaller files."
            return CheckedLines(0, [LineError("too_slow", message)])
        if not ended.status:
            return msgspec.json.decode(ended.output, type=CheckedLines)
        log.warning("the process that checks %s ended with status %d at line %d", input_file, *ended[:2])
        if ended.status > 0 and ended.status not in _OWN_FAULTS:  # an exception, such as that of a full disk
            break
        ends.append(ended)
    if (error := error_of_file(ends)) is None:
        raise OSError(f"the process that checks {input_file} ended with status {ended.status}")
    return CheckedLines(0, [error])


def error_of_file(ends: Sequence[CheckEnded]) -> LineError | None:
    """Returns what is wrong with a file, or None if it may not be its fault that no process could check it.

    It is if each attempt ended by a fault of its own at the same line.
    """
    lines = {each.line for each in ends}
    if len(ends) < NUM_ATTEMPTS or len(lines) > 1 or not all(each.status in _OWN_FAULTS for each in ends):
        return None
    [line] = lines
    if not line:
        return LineError("check_failed", "The file could not be checked; see the server's log.")
    needs_memory = all(each.status == EXIT_NO_MEMORY for each in ends)
    why = "needs too much memory" if needs_memory else f"has ended the process that reads it {len(ends)} times"
    return LineError("check_failed", f"Line {line} cannot be read: it {why}. Remove it, or make it simpler.", line)


async def _check_apart(input_file: Path, endpoint: str, index: Path) -> CheckEnded:
    """Checks a file in a process of its own. Raises TimeoutError, and OSError if it cannot be started."""
    line = os.memfd_create("line")
    try:
        os.ftruncate(line, _LINE_BYTES)
        try:
            process = await asyncio.create_subprocess_exec(
                *python_command(
                    "-m", "tandem.proxy.batches.line_check", str(input_file), endpoint, str(index), str(line)
                ),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, pass_fds=[line],
            )  # fmt: skip
        except OSError as error:  # no FileNotFoundError, which would say that the input is gone
            raise OSError(f"cannot start {sys.executable} to check {input_file}: {error}") from error
        try:
            async with asyncio.timeout(TIMEOUT_S):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return CheckEnded(process.returncode or 0, int.from_bytes(os.pread(line, _LINE_BYTES, 0)), output)
    finally:
        os.close(line)


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


def main(input_file: str, endpoint: str, index: str, line: str) -> None:
    """line: descriptor of shared memory for the number of the line that is read, which the parent reads afterwards."""
    die_with_parent()
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    shared = mmap.mmap(int(line), _LINE_BYTES)

    def note(number: int) -> None:
        shared[:] = number.to_bytes(_LINE_BYTES)

    try:
        checked = write_index(Path(input_file), endpoint, Path(index), note)
    except MemoryError:
        sys.exit(EXIT_NO_MEMORY)
    sys.stdout.buffer.write(msgspec.json.encode(checked))


if __name__ == "__main__":
    main(*sys.argv[1:])
