"""A forked process is like one that was started: status, signals, descriptors, environment, death with its parent."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tandem.runtime.processes import fork_server, forked_process
from tandem.runtime.processes.fork_server import Entry
from tandem.runtime.processes.forked_process import ForkedProcess, ForkServer, ForkServerLost, KeptForkServer
from tests.support.product import with_tests


def leave(arguments: list[str]) -> None:
    sys.exit(int(arguments[0]))


def fail(_: list[str]) -> None:
    raise ValueError("no")


def wait(_: list[str]) -> None:
    time.sleep(100)


def describe(arguments: list[str]) -> None:
    """Writes what the process sees to descriptor 1."""
    seen = {
        "arguments": arguments,
        "variables": {name: os.environ.get(name) for name in ("ADDED", "HOME")},
        "cwd": str(Path.cwd()),
        "leads": os.getsid(0) == os.getpid(),
        "parent": os.getppid(),
        "fds": sorted(int(fd.name) for fd in list(Path("/proc/self/fd").iterdir()) if fd.exists()),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "core": resource.getrlimit(resource.RLIMIT_CORE),
    }
    os.write(1, json.dumps(seen).encode())


ENTRIES: dict[str, Entry] = {"leave": leave, "fail": fail, "wait": wait, "describe": describe}


def run(test: Callable[[ForkServer], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with a server that is forked from the tests' process, whose threads hold no lock."""
    with monkeypatch.context() as patch:
        patch.setattr(forked_process, "why_unsafe_to_fork", lambda: "")
        server = ForkServer.fork_here(ENTRIES)

    async def main() -> None:
        try:
            await asyncio.wait_for(test(server), 30)
        finally:
            server.close()

    asyncio.run(main())


def test_exit_codes_and_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(server: ForkServer) -> None:
        for number in (0, 3):
            process = await server.start("leave", [str(number)])
            assert await process.wait() == number == process.returncode
        assert await (await server.start("fail")).wait() == 1
        waiting = [await server.start("wait") for _ in range(3)]
        for process, number in zip(waiting, (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1), strict=True):
            process.send_signal(number)
            assert await asyncio.gather(process.wait(), process.wait()) == [-number, -number]
            process.send_signal(number)  # it has ended

    run(test, monkeypatch)


def test_signals_are_those_of_a_new_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's handler in the server, or a blocked signal, must not keep a process alive."""

    async def test(server: ForkServer) -> None:
        process = await server.start("wait")
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == -signal.SIGTERM

    kept = signal.signal(signal.SIGTERM, lambda *_: None)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        run(test, monkeypatch)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGTERM, kept)


def test_what_the_process_sees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def test(server: ForkServer) -> None:
        file = (tmp_path / "output").open("wb+")
        with file:
            process = await server.start(
                "describe",
                ["a", "b"],
                fds={1: file.fileno(), 9: 0, 40: file.fileno()},
                environment={"ADDED": "yes"},
                cwd=str(tmp_path),
                new_session=True,
            )
            assert await process.wait() == 0
            file.seek(0)
            assert json.loads(file.read()) == {
                "arguments": ["a", "b"],
                "variables": {"ADDED": "yes", "HOME": os.environ.get("HOME")},
                "cwd": str(tmp_path),
                "leads": True,
                "parent": os.getpid(),
                "fds": [0, 1, 2, 9, 40],
                "interrupt": True,
                "core": list(resource.getrlimit(resource.RLIMIT_CORE)),
            }

    run(test, monkeypatch)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_processes_outlive_a_server_that_is_lost(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    async def test(server: ForkServer) -> None:
        process = await server.start("wait")
        monkeypatch.setattr(forked_process, "FORK_TIMEOUT_S", 0.2)  # for a server that is stopped
        os.kill(server.pid, number)
        with pytest.raises(ForkServerLost, match=f"the fork server {server.pid} "):
            await server.start("wait")
        with pytest.raises(ForkServerLost):
            await server.start("wait")
        await asyncio.sleep(0.05)
        assert process.returncode is None and os.getpgid(process.pid)
        process.end()

    run(test, monkeypatch)


def test_a_process_with_threads_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        end = threading.Event()
        thread = threading.Thread(target=end.wait)
        thread.start()
        with pytest.raises(ForkServerLost, match=r"cannot be forked: it has \d+ threads"):
            ForkServer.fork_here(ENTRIES)
        end.set()
        thread.join()
        # The server forks no more either; the requester is told why.
        patch.setattr(fork_server, "why_unsafe_to_fork", lambda: "it has 2 threads")

        async def test(server: ForkServer) -> None:
            with pytest.raises(ForkServerLost, match="does not fork any more: it has 2 threads"):
                await server.start("wait")

        run(test, monkeypatch)


def test_a_process_with_cuda_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_open_files", lambda: iter(["/dev/null", "/dev/nvidiactl"]))

    async def test(server: ForkServer) -> None:
        with pytest.raises(ForkServerLost, match="does not fork any more: it has initialised CUDA"):
            await server.start("wait")

    run(test, monkeypatch)


def test_the_end_of_a_cancelled_request_is_not_taken_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(server: ForkServer) -> None:
        await server.until_ready(5)
        request = asyncio.create_task(server.start("wait"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        request.cancel()
        await asyncio.wait([request])
        with pytest.raises(ForkServerLost):
            await server.start("wait")

    run(test, monkeypatch)


def test_bad_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(server: ForkServer) -> None:
        with pytest.raises(ForkServerLost, match="over the limit"):
            await server.start("wait", ["x" * 200_000])
        with pytest.raises(ForkServerLost, match="no entry 'nothing'"):
            await server.start("nothing")

    run(test, monkeypatch)


PARENT = """
import asyncio, os, time
from tandem.runtime.processes.forked_process import ForkServer
from tests.support.product import with_tests

def wait(arguments):
    time.sleep(100)

server = SERVER

async def main():
    await server.until_ready(60)
    process = await server.start("worker", fds={1: 2})  # standard output is for the line below
    print(server.pid, process.pid, flush=True)
    await process.wait()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "server",
    [
        'ForkServer.fork_here({"worker": wait})',
        'ForkServer.spawn("tests.support.light_preload", with_tests(os.environ))',
    ],
    ids=["forked", "spawned"],
)
def test_a_killed_parent_takes_all_with_it(server: str) -> None:
    program = PARENT.replace("SERVER", server)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() and "Z" not in state(pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def spawned(test: Callable[[ForkedProcess], Awaitable[None]], cwd: Path) -> None:
    """Runs a test with a process that was forked from a program, `tests.support.light_preload`, and sleeps there."""

    async def main() -> None:
        server = ForkServer.spawn("tests.support.light_preload", with_tests(os.environ))
        try:
            await server.until_ready(60)
            with (cwd / "output").open("wb+") as output:
                process = await server.start("worker", fds={1: output.fileno()}, cwd=str(cwd))
                while not output.seek(0, os.SEEK_END):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.wait_for(test(process), 60)
            process.end()
        finally:
            server.close()

    asyncio.run(main())


def test_limits_are_those_of_the_process_that_started_the_server(tmp_path: Path) -> None:
    async def test(process: ForkedProcess) -> None:
        for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_DATA, resource.RLIMIT_STACK):
            assert resource.prlimit(process.pid, number) == resource.getrlimit(number)

    kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(333, kept[1]), kept[1]))
    try:
        spawned(test, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, kept)


def test_a_forked_process_that_crashes_leaves_a_core_dump(tmp_path: Path) -> None:
    if Path("/proc/sys/kernel/core_pattern").read_text().strip() != "core":
        pytest.skip("the kernel writes core dumps elsewhere")
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if not hard:
        pytest.skip("this process may have no core dumps")

    async def test(process: ForkedProcess) -> None:
        process.send_signal(signal.SIGSEGV)
        assert await process.wait() == -signal.SIGSEGV

    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        spawned(test, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    (dump,) = tmp_path.glob("core*")
    assert dump.read_bytes()[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["py-spy", "dump", "--pid"], "run (tests/support/light_preload.py"),
        (["gdb", "-batch", "-nx", "-ex", "backtrace", "-p"], "_start ()"),
    ],
    ids=["py-spy", "gdb"],
)
def test_a_debugger_attaches_to_a_forked_process(command: list[str], shown: str, tmp_path: Path) -> None:
    tool = shutil.which(command[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if tool is None:
        pytest.skip(f"{command[0]} is not installed")

    async def test(process: ForkedProcess) -> None:
        arguments = [tool, *command[1:], str(process.pid)]
        attached = await asyncio.to_thread(subprocess.run, arguments, capture_output=True, text=True, timeout=50)
        if "ermission denied" in attached.stderr or "not permitted" in attached.stderr:
            pytest.skip("this system forbids ptrace")
        assert shown in attached.stdout, attached.stderr
        assert process.returncode is None

    spawned(test, tmp_path)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


async def test_a_server_that_cannot_load_is_lost() -> None:
    server = ForkServer.spawn("tandem.no_such_module", os.environ)
    with pytest.raises(ForkServerLost, match="died"):
        await server.until_ready(20)


def test_a_kept_server_that_was_closed_starts_no_other(caplog: pytest.LogCaptureFixture) -> None:
    num_spawned = 0

    async def test() -> None:
        def spawn() -> ForkServer:
            nonlocal num_spawned
            num_spawned += 1
            return ForkServer.spawn("tests.support.light_preload", {**with_tests(os.environ), "SLOW": "1"})

        kept = KeptForkServer(spawn, 1.0)
        waiting = asyncio.ensure_future(kept.start("worker", {}))
        while not num_spawned:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        kept.close()
        for start in (waiting, kept.start("worker", {})):
            with pytest.raises(ForkServerLost):
                await start

    asyncio.run(asyncio.wait_for(test(), 60))
    assert num_spawned == 1 and "starting another" not in caplog.text
