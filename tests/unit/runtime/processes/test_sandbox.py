"""Sandboxes: a call ends with an answer, or with the process and a reason, and never costs more than its limits."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tandem.runtime.errors import InternalError, InvalidRequest
from tandem.runtime.processes import sandbox as sandbox_module
from tandem.runtime.processes.sandbox import (
    EXIT_NO_MEMORY,
    ForkedSandbox,
    Limits,
    Sandbox,
    SandboxLost,
)

LIMITS = Limits(5.0, 64 << 20, 60.0)


def add(context: int, data: bytes, more: list[int], texts: dict[str, str]) -> tuple[int, str]:
    return context + len(data) + sum(more), "".join(texts.values())


def where(_context: object, _data: bytes) -> int:
    return os.getpid()


def spin(_context: object, _data: bytes) -> None:
    while True:
        pass


def power(_context: object, _data: bytes) -> int:
    """One instruction that takes minutes, during which no handler of Python runs."""
    return (7 ** int("40000000")).bit_length()


def sleep(_context: object, _data: bytes) -> None:
    time.sleep(100)


def allocate(_context: object, data: bytes) -> int:
    return len(bytearray(int(data)))


def crash(_context: object, _data: bytes) -> int:
    return ctypes.string_at(0)[0]


def kill(_context: object, _data: bytes) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(_context: object, data: bytes) -> None:
    raise InvalidRequest(f"no: {data.decode(errors='surrogatepass')}", "a")


def fail(_context: object, _data: bytes) -> None:
    raise ValueError("a secret")


def garbage(_context: object, _data: bytes) -> None:
    os.write(sandbox_module.CALLS_FD, b"\0\0\0\1\xc1")
    time.sleep(100)


@pytest.mark.parametrize(
    "name",
    [
        "answers_and_errors",
        "limits_end_it",
        "the_time_of_calls_is_known",
        "it_dies_with_its_parent",
        "deadlines_end_it",
    ],
)
def test_a_forked_sandbox(name: str) -> None:
    """In a new process, because one that forks must have one thread."""
    command = [sys.executable, "-m", __name__, name]
    done = subprocess.run(command, cwd=Path(__file__).parents[4], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def answers_and_errors() -> None:
    with ForkedSandbox(3) as sandbox:
        assert sandbox.call(add, b"1234", LIMITS, [1, 2], {"a": "b\N{SNOWMAN}"}) == (10, "b\N{SNOWMAN}")
        pid = sandbox.call(where, b"", LIMITS)
        for data, message in ((b"x", "no: x"), ("\ud800".encode(errors="surrogatepass"), "no: ?")):
            with pytest.raises(InvalidRequest) as refused:
                sandbox.call(refuse, data, LIMITS)
            assert (refused.value.message, refused.value.param) == (message, "a")
        with pytest.raises(InternalError) as failed:
            sandbox.call(fail, b"", LIMITS)
        assert "secret" not in failed.value.message
        assert sandbox.call(where, b"", LIMITS) == pid != os.getpid()
    assert not Path(f"/proc/{pid}").exists()


def limits_end_it() -> None:
    short = Limits(0.2, 64 << 20, 60.0)
    for function, expected in ((spin, "is_over_time"), (power, "is_over_time"), (crash, "is_fault"), (kill, "")):
        with ForkedSandbox() as sandbox, pytest.raises(SandboxLost) as lost:
            sandbox.call(function, b"", short)
        found = [each for each in ("is_over_time", "is_out_of_memory", "is_fault") if getattr(lost.value, each)]
        assert found == [expected] * bool(expected), (function, lost.value)
    with ForkedSandbox() as sandbox:
        assert sandbox.call(allocate, b"%d" % (32 << 20), LIMITS) == 32 << 20
        with pytest.raises(SandboxLost) as lost:
            sandbox.call(allocate, b"%d" % (512 << 20), LIMITS)
        assert lost.value.status == EXIT_NO_MEMORY


def the_time_of_calls_is_known() -> None:
    """Also of those that end the process."""
    with ForkedSandbox() as sandbox:
        with pytest.raises(SandboxLost):
            sandbox.call(spin, b"", Limits(0.2, None, 60.0))
        assert 0.15 < sandbox.cpu_s < 5


def deadlines_end_it() -> None:
    with ForkedSandbox() as sandbox:
        pid = sandbox.call(where, b"", LIMITS)
        with pytest.raises(TimeoutError):
            sandbox.call(sleep, b"", Limits(5.0, None, 0.1))
    assert not Path(f"/proc/{pid}").exists()


def it_dies_with_its_parent() -> None:
    read_fd, write_fd = os.pipe()
    parent = os.fork()
    if parent == 0:
        sandbox = ForkedSandbox()
        os.write(write_fd, b"%d" % sandbox.call(where, b"", LIMITS))
        signal.pause()
    child = int(os.read(read_fd, 20))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    while Path(f"/proc/{child}/exe").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text():
        time.sleep(0.01)


def run(test: Callable[[Sandbox], Awaitable[None]]) -> None:
    """Runs a test with a sandbox that is a program."""

    async def main() -> None:
        sandbox = await Sandbox.spawn()
        try:
            await asyncio.wait_for(test(sandbox), 60)
        finally:
            sandbox.close()
            await sandbox.process.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
        asyncio.run(main())


def test_a_sandbox_of_a_loop_answers_and_is_lost() -> None:
    async def test(sandbox: Sandbox) -> None:
        pid = await sandbox.call(where, b"", (), LIMITS)
        assert pid == sandbox.process.pid and not sandbox.has_ended
        with pytest.raises(InvalidRequest, match="no: x"):
            await sandbox.call(refuse, b"x", (), LIMITS)
        with pytest.raises(SandboxLost) as lost:
            await sandbox.call(kill, b"", (), LIMITS)
        assert lost.value.status == -signal.SIGKILL and lost.value.had_read and sandbox.has_ended
        with pytest.raises(SandboxLost) as lost:
            await sandbox.call(where, b"", (), LIMITS)
        assert not lost.value.had_read

    run(test)


@pytest.mark.parametrize("end", ["deadline", "cancelled", "garbage"])
def test_a_call_that_has_no_answer_ends_the_process(end: str) -> None:
    async def test(sandbox: Sandbox) -> None:
        if end == "garbage":
            with pytest.raises(InternalError, match="invalid answer"):
                await sandbox.call(garbage, b"", (), LIMITS)
        elif end == "deadline":
            with pytest.raises(TimeoutError):
                await sandbox.call(sleep, b"", (), Limits(5.0, None, 0.2))
        else:
            calling = asyncio.create_task(sandbox.call(sleep, b"", (), LIMITS))
            await asyncio.sleep(0.1)
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
        assert sandbox.has_ended and await sandbox.process.wait() == -signal.SIGKILL

    run(test)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
