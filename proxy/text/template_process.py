"""Renders a client's chat template in a process of its own, which the kernel ends at a limit on CPU time or memory.

A timer in this process would not do: Python runs signal handlers between two of its instructions, and one instruction
of a template (`7 ** 4000000`, `'%999999999d' % 1`) may take minutes or gigabytes. A template is also compiled there,
because jinja computes constants when it compiles.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tandem.runtime.errors import InvalidRequest
from tandem.runtime.processes.forked_child import fork_child

TEMPLATE_CPU_S = 2
"""CPU time for a client's own template; a model's template takes milliseconds."""
TEMPLATE_MEMORY_BYTES = 256 << 20
"""Memory that rendering a client's own template may take."""
MAX_RENDERED_CHARACTERS = 16 << 20
"""Length of the text that a client's own template may render: as much as the largest body by default."""
_DEADLINE_S = 30.0
"""Elapsed time, much longer than the CPU time because the machine may be busy."""
_PIECE_BYTES = 1 << 20
_TEXT, _REFUSAL = b"t", b"r"
_PARAM = "chat_template"


def render_apart(render: Callable[[], str]) -> str:
    """Returns what `render` returns in a forked process. Blocks for 30 s at most.

    Raises InvalidRequest where `render` does, and if it exceeds a limit.
    """
    read_fd, write_fd = os.pipe()
    process = fork_child(partial(_run, render, write_fd), [write_fd], {})
    os.close(write_fd)
    try:
        answer, is_late = _read(read_fd)
    finally:
        os.close(read_fd)
        process.kill()  # it has ended, or must
        process.wait()
    kind, text = answer[:1], answer[1:].decode(errors="surrogatepass")
    if kind == _TEXT:
        return text
    if kind == _REFUSAL:
        raise InvalidRequest(text, _PARAM)
    limit = f"{_DEADLINE_S:g} s" if is_late else f"{TEMPLATE_CPU_S} s of CPU time"
    raise InvalidRequest(f"Rendering chat_template takes more than {limit}; send a simpler template.", _PARAM)


def _read(fd: int) -> tuple[bytes, bool]:
    """Returns what the process wrote until its end, and whether it did not end in time."""
    deadline = time.monotonic() + _DEADLINE_S
    pieces: list[bytes] = []
    while (left_s := deadline - time.monotonic()) > 0:
        if not select.select([fd], [], [], left_s)[0]:
            continue
        if not (piece := os.read(fd, _PIECE_BYTES)):
            return b"".join(pieces), False
        pieces.append(piece)
    return b"", True


def _run(render: Callable[[], str], fd: int) -> None:
    """In the forked process: writes one byte and a text; nothing if the kernel ends it."""
    with contextlib.suppress(BaseException):  # the parent reports that nothing came
        _write(fd, _limited(render))


def _limited(render: Callable[[], str]) -> bytes:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (TEMPLATE_CPU_S, TEMPLATE_CPU_S))
    max_bytes = _num_mapped_bytes() + TEMPLATE_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    try:
        text = render()
        if len(text) <= MAX_RENDERED_CHARACTERS:
            return _TEXT + text.encode(errors="surrogatepass")
        refusal = f"chat_template renders {len(text)} characters; the limit is {MAX_RENDERED_CHARACTERS}."
    except InvalidRequest as error:
        if not isinstance(error.__cause__, MemoryError):
            return _REFUSAL + error.message.encode(errors="surrogatepass")
        refusal = _too_much_memory()
    except MemoryError:
        refusal = _too_much_memory()
    return _REFUSAL + refusal.encode()


def _too_much_memory() -> str:
    limit = TEMPLATE_MEMORY_BYTES >> 20
    return f"Rendering chat_template takes more than {limit} MiB of memory; send a simpler template."


def _num_mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
