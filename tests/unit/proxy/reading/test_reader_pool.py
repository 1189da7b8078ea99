"""Reader processes: what one job does to its process costs that job alone."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.proxy.admission.admission import ClientLimitExceeded
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading import reader_pool, sandbox_pool
from tandem.proxy.reading.body_reader import BodyKind, BodyReader, HasMedia
from tandem.proxy.reading.reader_pool import ReaderPool
from tandem.proxy.text.prompt import ContextLengthExceeded
from tandem.runtime.errors import InternalError, InvalidRequest, Overloaded
from tandem.runtime.processes.sandbox import CALLS_FD, Sandbox, result_decoder
from tests.support.fake_workers import make_tokenizer
from tests.support.reader_pools import fork_pool, run_with


def pid(_reader: Any, _body: bytes) -> int:
    return os.getpid()


def echo(_reader: Any, body: bytes, number: int = 0) -> tuple[bytes, int]:
    return body, number


def until(_reader: Any, body: bytes) -> int:
    """Begins by making the file BODY.PID, and ends when the file BODY exists."""
    file = Path(os.fsdecode(body))
    Path(f"{file}.{os.getpid()}").touch()
    while not file.exists():
        time.sleep(0.01)
    return os.getpid()


def crash(_reader: Any, _body: bytes) -> int:
    return ctypes.string_at(0)[0]


def loop(_reader: Any, _body: bytes) -> int:
    while True:
        pass


def compute(_reader: Any, _body: bytes) -> int:
    """Takes a second of CPU time."""
    end = time.process_time() + 1.0
    while time.process_time() < end:
        pass
    return 7


def allocate(_reader: Any, body: bytes) -> int:
    return len(bytearray(int(body)))


def refuse(_reader: Any, body: bytes) -> int:
    raise {b"media": HasMedia, b"long": ContextLengthExceeded, b"bad": InvalidRequest}[body]("no", "prompt")


def sleep(_reader: Any, _body: bytes) -> int:
    time.sleep(100)
    return 0


async def begun(folder: Path, *names: str) -> list[int]:
    """Waits until these jobs have begun, and returns the pids of their processes."""
    while True:
        found = [[int(file.suffix[1:]) for file in folder.glob(f"{name}.*")] for name in names]
        if all(found):
            return [max(pids) for pids in found]
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("victim", [0, *(pytest.param(each, marks=pytest.mark.extended) for each in (1, 2))])
def test_a_killed_process_costs_its_job_alone(tmp_path: Path, victim: int) -> None:
    pool = fork_pool(3)

    async def run() -> None:
        names = ["a", "b", "c"]
        running = [asyncio.create_task(pool.run(until, os.fsencode(tmp_path / name))) for name in names]
        pids = await begun(tmp_path, *names)
        waiting = [asyncio.create_task(pool.run(echo, b"x", i)) for i in range(20)]
        os.kill(pids[victim], signal.SIGKILL)
        while (again := await begun(tmp_path, *names)) == pids:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for name in names:
            (tmp_path / name).touch()
        assert await asyncio.gather(*waiting) == [(b"x", i) for i in range(20)]
        results = await asyncio.gather(*running, return_exceptions=True)
        repeated = results.pop(victim)
        assert isinstance(repeated, int) and repeated not in pids, "another process has read it"
        assert results == [each for i, each in enumerate(pids) if i != victim] and again

    run_with(pool, run)


def test_a_crash_in_a_library_costs_its_job_alone_and_a_storm_of_them_is_slowed() -> None:
    others = children()
    pool = fork_pool(2)

    async def run() -> None:
        began_at = time.monotonic()
        pids = set[int]()
        for _ in range(6):
            jobs = [pool.run(pid, b""), *(pool.run(crash, b"") for _ in range(2)), pool.run(pid, b"")]
            first, *crashed, last = await asyncio.gather(*jobs, return_exceptions=True)
            assert all(isinstance(each, InvalidRequest) and "SIGSEGV" in each.message for each in crashed)
            assert isinstance(first, int) and isinstance(last, int)
            pids |= {first, last}
            assert len(children() - others) <= 4, "never more than the fork server and its three readers"
        assert len(pids) > 2, "the processes were replaced"
        assert time.monotonic() - began_at > 5 * sandbox_pool._RESTART_DELAY_S

    run_with(pool, run)


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


def test_a_job_that_loops_is_ended_at_its_cpu_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_pool, "JOB_CPU_S", 0.3)
    pool = fork_pool(2)

    async def run() -> None:
        looping = asyncio.create_task(pool.run(loop, b""))
        assert await pool.run(echo, b"other") == (b"other", 0)
        with pytest.raises(InvalidRequest, match=r"more than 0 s of CPU time.*simpler schema"):
            await looping
        assert await asyncio.gather(*(pool.run(echo, b"", i) for i in range(3))) == [(b"", i) for i in range(3)]

    run_with(pool, run)


def test_the_cpu_limit_grows_with_the_body_and_waiting_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_pool, "JOB_CPU_S", 0.2)
    monkeypatch.setattr(reader_pool, "_DEADLINE_FACTOR", 1000)
    pool = fork_pool(1)

    async def run() -> None:
        waiting = asyncio.create_task(pool.run(sleep, b""))
        await asyncio.sleep(0.6)
        assert not waiting.done()
        waiting.cancel()

    run_with(pool, run)
    monkeypatch.setattr(reader_pool, "JOB_CPU_S_PER_MIB", 1000.0)
    pool = fork_pool(1)

    async def run_large() -> None:
        assert await pool.run(compute, b"x" * (1 << 20)) == 7
        with pytest.raises(InvalidRequest, match="CPU time"):
            await pool.run(compute, b"x")

    run_with(pool, run_large)


def test_a_job_that_only_waits_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_pool, "JOB_CPU_S", 0.5)
    monkeypatch.setattr(reader_pool, "_DEADLINE_FACTOR", 2)
    pool = fork_pool(1)

    async def run() -> None:
        with pytest.raises(Overloaded, match=r"not read in time.*try again"):
            await pool.run(sleep, b"")
        assert await pool.run(echo, b"next") == (b"next", 0)

    run_with(pool, run)


def test_a_job_that_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_pool, "JOB_MEMORY_BYTES", 64 << 20)
    pool = fork_pool(1)

    async def run() -> None:
        assert await pool.run(allocate, b"%d" % (32 << 20)) == 32 << 20
        with pytest.raises(InvalidRequest, match="more memory than its size allows"):
            await pool.run(allocate, b"%d" % (4 << 30))  # more than the heap of the tests has free
        assert await pool.run(allocate, b"%d" % (32 << 20)) == 32 << 20

    run_with(pool, run)


def test_errors_keep_their_class() -> None:
    pool = fork_pool(1)

    async def run() -> None:
        for body, error in ((b"media", HasMedia), (b"long", ContextLengthExceeded), (b"bad", InvalidRequest)):
            with pytest.raises(error) as raised:
                await pool.run(refuse, body)
            assert type(raised.value) is error and (raised.value.message, raised.value.param) == ("no", "prompt")

    run_with(pool, run)


def test_a_job_for_a_process_that_has_died_is_given_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while idle: the death is found by the job that the process never reads."""
    pool = fork_pool(1)

    async def run() -> None:
        for when in (0.0, 0.2):
            idle = await pool.run(pid, b"")
            os.kill(idle, signal.SIGKILL)
            await asyncio.sleep(when)
            jobs = [pool.run(pid, b"x" * size) for size in (1, 1_000_000)]
            assert idle not in await asyncio.gather(*jobs)

    run_with(pool, run)


def test_large_jobs_and_answers() -> None:
    pool = fork_pool(2)

    async def run() -> None:
        bodies = [os.urandom(5_000_000) for _ in range(3)]
        assert await asyncio.gather(*(pool.run(echo, body, 7) for body in bodies)) == [(body, 7) for body in bodies]

    run_with(pool, run)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.extended)])
def test_without_the_fork_server_running_processes_go_on_and_another_server_is_started(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one loads the model's text files by itself."""
    if number == signal.SIGSTOP:
        monkeypatch.setattr("tandem.runtime.processes.forked_process.FORK_TIMEOUT_S", 2.0)
    (tmp_path / "model").mkdir()
    make_tokenizer(tmp_path / "model")
    pool = fork_pool(1)
    pool._config = ProxyConfig("proxy-0", "", str(tmp_path / "model"), "m")

    async def run() -> None:
        server = pool._server._server
        assert server is not None
        names = ["a", "b"]  # of jobs and clients; there are two processes
        running = [asyncio.create_task(pool.run(until, os.fsencode(tmp_path / name), client=name)) for name in names]
        readers = await begun(tmp_path, *names)
        os.kill(server.pid, number)
        await asyncio.sleep(0.1)
        for name in names:
            (tmp_path / name).touch()
        assert await asyncio.gather(*running) == readers
        for reader in readers:
            os.kill(reader, signal.SIGKILL)
        # A new process has no functions of a test module that it cannot import; these are of an installed one.
        answer = await pool.run(BodyReader.tokenize, b'{"prompt": "abc"}', None)
        assert answer.startswith(b'{"count":')
        assert pool._server._server is not None and pool._server._server.pid != server.pid

    run_with(pool, run)


def test_jobs_that_run_or_wait_end_with_the_pool() -> None:
    pool = fork_pool(1)

    async def run() -> None:
        jobs = [asyncio.create_task(pool.run(sleep, b"")) for _ in range(3)]
        await asyncio.sleep(0.05)
        pool.close()
        assert [type(each) for each in await asyncio.gather(*jobs, return_exceptions=True)] == [InternalError] * 3

    run_with(pool, run)


def test_a_closed_pool_takes_no_job() -> None:
    """Nobody would answer it."""
    pool = fork_pool(1)

    async def run() -> None:
        await pool.run(pid, b"")
        pool.close()
        with pytest.raises(InternalError, match="is stopping"):
            await pool.run(pid, b"")

    run_with(pool, run)


def test_jobs_fail_when_no_process_can_be_started(tmp_path: Path) -> None:
    pool = ReaderPool(None, ProxyConfig("proxy-0", "", str(tmp_path / "nothing"), "m"), 2)  # type: ignore[arg-type]

    async def run() -> None:
        with pytest.raises(InternalError, match="cannot be started"):
            await pool.run(pid, b"")

    run_with(pool, run)


def test_jobs_fail_when_lost_processes_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their clients held the places of processes that had ended, for which other jobs would have waited for ever."""
    pool = fork_pool(1)

    async def fail(*_arguments: object) -> Sandbox:
        raise OSError("no memory")

    async def run() -> None:
        both = [asyncio.ensure_future(pool.run(until, os.fsencode(tmp_path / name), client=name)) for name in "ab"]
        await begun(tmp_path, "a", "b")  # else the second process may still be starting when the first one is lost
        for name in "ab":
            (tmp_path / name).touch()
        await asyncio.gather(*both)
        monkeypatch.setattr(Sandbox, "start", fail)
        for client in "ab":
            with pytest.raises(InvalidRequest):
                await pool.run(crash, b"", client=client)
        for client in "abc":
            with pytest.raises(InternalError, match="cannot be started"):
                await pool.run(echo, b"", client=client)

    run_with(pool, run)


def test_readers_inherit_only_their_socket_and_die_with_the_proxy(tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as secret:
        os.set_inheritable(secret.fileno(), True)
        pool = fork_pool(1)

        async def run() -> None:
            reader = await pool.run(pid, b"")
            fds = {int(fd.name): str(fd.readlink()) for fd in Path(f"/proc/{reader}/fd").iterdir()}
            assert set(fds) == {0, 1, 2, CALLS_FD} and "socket" in fds[CALLS_FD]
            status = Path(f"/proc/{reader}/status").read_text()
            assert f"PPid:\t{os.getpid()}" in status

        run_with(pool, run)


@pytest.mark.parametrize("kind", ["chat", "response"])
def test_integers_of_any_size_in_schemas_cross_the_socket(tmp_path: Path, kind: BodyKind) -> None:
    make_tokenizer(tmp_path)
    reader = BodyReader.load(ProxyConfig("proxy-0", "", str(tmp_path), "m"))
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"maximum": 10**30}}}}
    bodies: dict[str, dict[str, Any]] = {
        "chat": {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": function}]},
        "response": {"input": "x", "tools": [{"type": "function", **function}]},
    }
    request = reader.read(
        json.dumps({"model": "m", "tool_choice": "none", **bodies[kind]}).encode(), kind, ModelLimits(100, 500, "m", 64)
    )
    assert result_decoder(BodyReader.read).decode(msgspec.msgpack.encode(request)) == request


def signalled(_reader: Any, body: bytes) -> int:
    signal.raise_signal(signal.Signals(int(body)))
    return 0


def grow(_reader: Any, body: bytes) -> int:
    """Keeps as many bytes as the body says, like a library that does not return them."""
    KEPT.append(bytearray(int(body)))
    return os.getpid()


KEPT: list[bytearray] = []


async def ended(pid: int) -> None:
    while Path(f"/proc/{pid}").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_a_job_whose_caller_is_gone_is_ended_with_its_process(tmp_path: Path) -> None:
    pool = fork_pool(2)

    async def run() -> None:
        for start in (pool.run, pool.transform):
            running = asyncio.create_task(start(until, os.fsencode(tmp_path / start.__name__)))  # type: ignore[arg-type]
            [reader] = await begun(tmp_path, start.__name__)
            running.cancel()
            await ended(reader)
        assert len(set(await asyncio.gather(*(pool.run(pid, b"") for _ in range(20))))) <= 3

    run_with(pool, run)


@pytest.mark.parametrize("stays", [True, False])
def test_a_client_never_holds_the_last_process(tmp_path: Path, stays: bool) -> None:
    """Nor does its queue, nor do the places of processes that it had ended, keep another client's jobs waiting."""
    pool = fork_pool(1)

    async def run() -> None:
        for number in range(5):
            jobs = [asyncio.create_task(pool.run(sleep, b"", client="a")) for _ in range(30)]
            jobs += [asyncio.create_task(pool.transform(sleep, b"", client="a")) for _ in range(30)]  # type: ignore[arg-type]
            await asyncio.sleep(0.02)
            if not stays:
                for job in jobs:
                    job.cancel()
            assert await pool.run(echo, b"b", number, client="b") == (b"b", number)
        assert pool._sandboxes._slots._held["a"] <= 1

    run_with(pool, run)


def test_an_unexpected_error_of_a_connection_costs_no_client_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = fork_pool(1)
    call = Sandbox.call

    async def fail_once(self: Sandbox, *arguments: object) -> object:
        monkeypatch.setattr(Sandbox, "call", call)
        raise OSError("not expected")

    async def run() -> None:
        monkeypatch.setattr(Sandbox, "call", fail_once)
        with pytest.raises(OSError, match="not expected"):
            await pool.run(echo, b"", client="a")
        assert await pool.run(echo, b"next", client="a") == (b"next", 0)

    run_with(pool, run)


def test_one_clients_calls_without_a_worker_leave_processes_to_its_other_requests() -> None:
    pool = fork_pool(2)

    async def run() -> None:
        calls = [asyncio.create_task(pool.transform(sleep, b"")) for _ in range(5)]  # type: ignore[arg-type]
        assert await asyncio.gather(*(pool.run(echo, b"", i) for i in range(5))) == [(b"", i) for i in range(5)]
        assert not any(call.done() for call in calls)

    run_with(pool, run)


@pytest.mark.parametrize(
    "number",
    [signal.SIGSEGV, *(pytest.param(each, marks=pytest.mark.extended) for each in (signal.SIGABRT, signal.SIGBUS))],
)
def test_what_crashes_again_is_the_clients_error(number: signal.Signals) -> None:
    pool = fork_pool(1)

    async def run() -> None:
        with pytest.raises(InvalidRequest, match=rf"{number.name}.*too much memory.*Send a smaller"):
            await pool.run(signalled, b"%d" % number)
        with pytest.raises(InvalidRequest, match="Two processes that read this request were killed"):
            await pool.run(signalled, b"%d" % signal.SIGKILL)
        assert await pool.run(echo, b"next") == (b"next", 0)

    run_with(pool, run)


def test_a_process_that_has_grown_is_replaced_without_an_error(caplog: pytest.LogCaptureFixture) -> None:
    pool = fork_pool(1)

    async def run() -> None:
        first = await pool.run(grow, b"1000")
        assert await pool.run(grow, b"%d" % (256 << 20)) == first
        assert await pool.run(pid, b"") != first
        await ended(first)

    run_with(pool, run)
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_a_client_with_too_many_waiting_jobs_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_pool, "MAX_PENDING_JOBS", 8)
    pool = fork_pool(1)

    async def run() -> None:
        jobs = [asyncio.create_task(pool.run(sleep, b"", client="a")) for _ in range(1)]
        await asyncio.sleep(0.05)
        jobs += [asyncio.create_task(pool.run(sleep, b"", client="a")) for _ in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(ClientLimitExceeded, match="6 of your requests"):
            await pool.run(echo, b"", client="a")
        assert await pool.run(echo, b"", client="b") == (b"", 0)

    run_with(pool, run)
