"""The launcher's preloaded process: workers are forked from it, and start plainly when it is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tandem.deploy.processes import preloaded
from tandem.deploy.processes.child_process import ChildProcess, Program
from tandem.deploy.processes.log_file import LogFile
from tandem.deploy.processes.preloaded import PreloadedWorker
from tandem.runtime.processes import forked_process
from tests.support import light_preload

ENV = {"CUDA_VISIBLE_DEVICES": "3"}


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloaded, "_RESTART_DELAY_S", 0.05)
    monkeypatch.setattr(forked_process, "FORK_TIMEOUT_S", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))


def run(
    tmp_path: Path,
    test: Callable[[PreloadedWorker], Awaitable[None]],
    module: str = light_preload.__name__,
    **variables: str,
) -> None:
    async def main() -> None:
        workers = PreloadedWorker(variables, True, tmp_path, module)
        workers.spawn_once()
        try:
            if not variables:
                await workers.until_loaded()
            await asyncio.wait_for(test(workers), 60)
        finally:
            workers.close()

    asyncio.run(main())


async def content(file: Path) -> str:
    while not (text := file.read_text()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return text


def test_a_worker_is_forked_with_its_own_variables_output_and_command_line(tmp_path: Path) -> None:
    async def test(workers: PreloadedWorker) -> None:
        output = LogFile(tmp_path / "decode-0.log")
        worker = await workers.start("decode-0.json", output, ENV)
        assert worker is not None
        assert await content(output.file) == "['decode-0.json'] 3 /dev/null\n"
        words = Path(f"/proc/{worker.pid}/cmdline").read_text().rstrip("\0").split("\0")
        assert words[1:] == ["-P", "-m", "tandem.worker", "decode-0.json"]
        assert os.getsid(worker.pid) == worker.pid, "Ctrl-C reaches only the launcher"
        worker.kill()
        assert await worker.wait() == -signal.SIGKILL

    run(tmp_path, test)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_process_running_workers_go_on_and_the_next_one_starts_plainly(
    tmp_path: Path, number: signal.Signals
) -> None:
    async def test(workers: PreloadedWorker) -> None:
        output = LogFile(tmp_path / "decode-0.log")
        worker = await workers.start("decode-0.json", output, ENV)
        assert worker is not None and workers._server is not None
        first = workers._server.pid
        os.kill(first, number)
        assert await workers.start("decode-1.json", output, ENV) is None
        while workers._server.pid == first:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await workers.until_loaded()
        another = await workers.start("decode-1.json", output, ENV)
        assert another is not None, "another process was made"
        assert worker.returncode is None and another.returncode is None
        for each in (worker, another):
            each.kill()
            await each.wait()

    run(tmp_path, test)


def test_code_that_changes_on_disk_is_that_of_workers_after_a_renewal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "upgraded_preload.py"
    code = Path(light_preload.__file__).read_text()
    file.write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}:{tmp_path}")

    async def test(workers: PreloadedWorker) -> None:
        started = []

        async def start(name: str) -> str:
            """Returns what the worker writes first."""
            output = LogFile(tmp_path / name)
            worker = await workers.start(name, output, ENV)
            assert worker is not None
            started.append(worker)
            return await content(output.file)

        before = await start("decode-0")
        file.write_text(code.replace("print(arguments, ", 'print("new code", arguments, '))
        crashed_and_back = await start("decode-1")
        workers.renew()
        await workers.until_loaded()
        assert "new code" in await start("decode-2")
        assert "new code" not in before + crashed_and_back
        assert all(worker.returncode is None for worker in started), "workers outlive the process they were forked from"
        for worker in started:
            worker.kill()
            await worker.wait()

    run(tmp_path, test, "upgraded_preload")


def test_a_process_that_has_started_a_thread_forks_no_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test(workers: PreloadedWorker) -> None:
        await workers.until_loaded()
        assert await workers.start("decode-0.json", LogFile(tmp_path / "decode-0.log"), ENV) is None
        assert "the fork server does not fork any more: it has 2 threads" in caplog.text

    run(tmp_path, test, THREAD="1")


def test_an_import_error_is_a_configuration_error_of_the_first_worker(tmp_path: Path) -> None:
    async def test(workers: PreloadedWorker) -> None:
        ended: list[int] = []

        def on_exit(name: str, pid: int, returncode: int) -> bool:
            ended.append(returncode)
            return False

        output = LogFile(tmp_path / "decode-0.log")
        pid_file = tmp_path / "decode-0.pid"
        program = Program("tandem.worker", tmp_path, ENV, preloaded=workers)
        child = ChildProcess("decode-0", program, output, on_exit, pid_file)
        await child.run()
        assert ended == [2]
        assert child.last_error() == "cannot import what workers need: ImportError: no torch"

    run(tmp_path, test, BROKEN="1")


def test_a_worker_can_be_stopped_before_the_imports_are_done(tmp_path: Path) -> None:
    async def test(workers: PreloadedWorker) -> None:
        output = LogFile(tmp_path / "decode-0.log")
        pid_file = tmp_path / "decode-0.pid"
        program = Program("tandem.worker", tmp_path, ENV, preloaded=workers)
        child = ChildProcess("decode-0", program, output, lambda *_: True, pid_file)
        running = asyncio.create_task(child.run())
        await asyncio.sleep(0.2)
        child.stop()
        async with asyncio.timeout(5):
            await running
        assert child.last_pid == 0, "nothing was started"

    run(tmp_path, test, SLOW="1")
