"""Checks the input file of a batch and writes the index of its lines, for large files in a process of its own."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tandem.proxy.batches.batch import LineError
from tandem.proxy.batches.batch_lines import CheckedLines, check_lines, read_lines
from tandem.runtime.files.whole_file import whole_file
from tandem.runtime.processes.lifetime import die_with_parent

MAX_CHECKED_HERE_BYTES = 256 * 1024
"""Size of a file that is checked on a thread, where it holds the interpreter's lock for at most about 10 ms a line."""
TIMEOUT_S = 120.0
"""For one file. The slowest of 200 MiB takes about 10 s on an idle machine."""
_MAX_MEMORY_BYTES = 1 << 30
_NICENESS = 10


async def check_file(
    input_file: Path, endpoint: str, index: Path, on_thread: Callable[[Callable[[], Any]], Any]
) -> CheckedLines:
    """Checks a file that exists. on_thread: runs a function on a thread. Raises OSError."""
    status = await on_thread(input_file.stat)
    if status.st_size <= MAX_CHECKED_HERE_BYTES:
        checked: CheckedLines = await on_thread(partial(write_index, input_file, endpoint, index))
        return checked
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tandem.proxy.batches.line_check", str(input_file), endpoint, str(index),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        message = f"Checking the file took more than {TIMEOUT_S:g} s; send several smaller files."
        return CheckedLines(0, [LineError("too_slow", message)])
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode is not None and process.returncode < 0:  # a signal: it would happen again
        return CheckedLines(0, [LineError("check_failed", "The file could not be checked; see the server's log.")])
    if process.returncode:
        raise OSError(f"the process that checks {input_file} ended with status {process.returncode}")
    return msgspec.json.decode(output, type=CheckedLines)


def write_index(input_file: Path, endpoint: str, index: Path) -> CheckedLines:
    """Raises OSError."""
    encode = msgspec.json.Encoder().encode
    with input_file.open("rb") as lines, whole_file(index) as written:
        return check_lines(read_lines(lines), endpoint, lambda line: written.write(encode(line) + b"\n"))


def main(input_file: str, endpoint: str, index: str) -> None:
    die_with_parent()
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    sys.stdout.buffer.write(msgspec.json.encode(write_index(Path(input_file), endpoint, Path(index))))


if __name__ == "__main__":
    main(*sys.argv[1:])
