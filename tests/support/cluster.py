"""Starts a cluster as users do: `tandem up` in a process, on a free port, stopped by SIGTERM."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import httpx

from tandem.deploy.operations.cluster_client import ClusterClient
from tandem.deploy.processes.runtime_dir import log_dir, runtime_dir
from tandem.protocol.messages.membership import Role, SetWorkerRole, StatusReport, WorkerOrdered, WorkerReport
from tandem.runtime.errors import Overloaded
from tests.support.launchers import READ_WHEN_USED, Process, start_launcher
from tests.support.noise_model import ensure_noise_model
from tests.support.ports import free_port

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
WAIT_TIMEOUT_S = 120.0
COMMAND_TIMEOUT_S = 500.0
MODEL = "tandem-demo"

NOW = {"Cache-Control": "no-cache"}
"""Headers that make /metrics return current values instead of a cached response."""

OLDER_CPU = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Environment of a cluster without AVX-512, whose kernels round differently for each batch size."""


def tandem(*arguments: str, python: str = sys.executable) -> list[str]:
    return [python, "-m", "tandem.deploy.cli", *arguments]


def run_tandem(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end. env: further variables."""
    command, variables = tandem(*arguments), {**os.environ, **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, env=variables)


def refused_start(*arguments: str) -> str:
    """Returns what `tandem up` prints as it refuses to start: with exit code 2, and without a traceback."""
    arguments = ("up", "--port", str(free_port()), *arguments)
    started = start_launcher(arguments)
    if started is None:
        started = subprocess.Popen(tandem(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = started.communicate(timeout=COMMAND_TIMEOUT_S)
    assert started.wait() == 2, output
    assert "Traceback" not in output
    return output.strip()


@contextmanager
def joined(
    arguments: Sequence[str], env: Mapping[str, str] = MappingProxyType({}), within: Sequence[str] = ()
) -> Iterator[int]:
    """Runs `tandem worker`, which must join a cluster and end when it is told to. Yields its process id.

    within: a command that runs it, as its child or in its own place.
    """
    command, variables = [*within, *tandem("worker", *arguments)], {**os.environ, **env}
    with tempfile.TemporaryFile("w+") as output:
        started = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=variables)
        try:
            yield started.pid
        finally:
            for pid in (started.pid, *children_of(started.pid)):
                if command_line(pid)[0] == sys.executable:
                    os.kill(pid, signal.SIGTERM)
                    break
            try:
                started.wait(60)
            finally:
                started.kill()
        output.seek(0)
        text = output.read()
    assert started.returncode == 0 and "have joined" in text, text


class Cluster:
    """Context manager around a running cluster at `url`.

    Serves the noise model as MODEL unless the arguments name a --model. Every prompt goes to a prefill worker unless
    the arguments set --decode-prefill-threshold. Leaving the context asserts that all processes and files are gone.
    The launcher is forked from a process that has imported what it and workers need (`tests.support.launchers`), except
    with an interpreter, a folder or variables of its own that imports may read.
    """

    def __init__(
        self,
        *arguments: str,
        start_timeout_s: float = START_TIMEOUT_S,
        env: Mapping[str, str] = MappingProxyType({}),
        python: str = sys.executable,
        cwd: Path | None = None,
    ) -> None:
        if "--model" not in arguments:
            arguments = ("--model", str(ensure_noise_model()), "--served-model-name", MODEL, *arguments)
        self._start_timeout_s = start_timeout_s
        self._added, self._env = env, {**os.environ, **env}
        self._python, self._cwd = python, cwd
        self.port = free_port()
        shutil.rmtree(log_dir(self.port), ignore_errors=True)  # of an earlier cluster on the same port
        self.url = f"http://127.0.0.1:{self.port}"
        admin_port = free_port()
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        self._arguments = ("--admin-port", str(admin_port), *arguments)
        self._starts_cold = bool(env.keys() - READ_WHEN_USED) or python != sys.executable or cwd is not None
        self._process: Process | None = None

    def __enter__(self) -> Self:
        arguments = ("up", "--port", str(self.port), "--decode-prefill-threshold", "0", *self._arguments)
        if not self._starts_cold:
            self._process = start_launcher(arguments, self._added)
        if self._process is None:
            self._process = subprocess.Popen(
                tandem(*arguments, python=self._python),
                cwd=self._cwd,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=self._env,
            )
        try:
            self.wait_for(self.is_healthy, self._start_timeout_s)
            assert self._process.stdout is not None
            self.first_line = self._process.stdout.readline()
            while "Tandem serves" not in self.first_line:  # printed when all KV pairs are ready
                assert self.first_line, "the launcher exited"
                self.first_line = self._process.stdout.readline()
        except BaseException:
            self._process.kill()
            self._process.communicate()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process is not None
        pids = self.pids()
        assert pids
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        assert not (left := [describe(pid) for pid in pids if is_alive(pid)]), f"still running: {left}"
        assert not runtime_dir(self.port).exists(), "the runtime folder still exists"

    def complete(self, timeout_s: float = 120, **fields: Any) -> dict[str, Any]:
        """Returns the answer to a completion, which is greedy, ends at its length and has token ids by default."""
        body = {"model": MODEL, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=timeout_s)
        assert answer.status_code == 200, answer.text
        content: dict[str, Any] = answer.json()
        return content

    def token_ids(self, prompt: list[int], max_tokens: int, **fields: Any) -> list[int]:
        """Returns the token ids of one such completion."""
        [choice] = self.complete(prompt=prompt, max_tokens=max_tokens, **fields)["choices"]
        token_ids: list[int] = choice["token_ids"]
        return token_ids

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of `tandem` on this cluster."""
        return run_tandem(*arguments, "--port", str(self.port), **env)

    # ---- state as an operator sees it

    def is_healthy(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            assert self._process.stdout is not None
            raise AssertionError(f"tandem up exited with {self._process.returncode}: {self._process.stdout.read()}")
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def status(self) -> StatusReport:
        """Asks again where no proxy answers in the time that commands wait, as on a busy machine."""
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while True:
            try:
                return asyncio.run(ClusterClient(self.port).status())[0]
            except Overloaded:
                if time.monotonic() > deadline:
                    raise

    def worker(self, worker_id: str) -> WorkerReport:
        return next(report for report in self.status().workers if report.worker.worker_id == worker_id)

    def give_role(self, worker_id: str, role: Role) -> str:
        """Returns why a proxy refuses, or ""."""
        orders = ClusterClient(self.port).ask_proxies(SetWorkerRole(worker_id, role), WorkerOrdered)
        return next((answer.error for answer in asyncio.run(orders) if answer.error), "")

    @property
    def launcher_pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def pids(self) -> list[int]:
        """Process ids of the launcher's children."""
        return children_of(self.launcher_pid)

    def all_blocks_free(self) -> bool:
        report = self.status()
        return report.num_requests == 0 and all(
            r.load.num_free_blocks == r.load.num_blocks and not r.load.num_running and not r.load.num_waiting
            for r in report.workers
        )

    def num_migrations(self) -> float:
        """Sequences that have lost a worker and migrated to another, by all proxies."""
        text = httpx.get(f"{self.admin_url}/metrics", headers=NOW, timeout=120).text
        return float(re.findall(r"^tandem_migrations_total (\S+)", text, re.MULTILINE)[0])

    def ready_pairs(self) -> set[tuple[str, str]]:
        """Pairs in state "ready" between present workers, as (prefill epoch, decode epoch)."""
        workers = self.status().workers
        present = {report.worker.epoch for report in workers}
        return {
            (report.worker.epoch, pair.decode_epoch)
            for report in workers
            for pair in report.pairs
            if pair.state == "ready" and pair.decode_epoch in present
        }

    def logs(self) -> str:
        return "\n".join(file.read_text() for file in sorted(log_dir(self.port).glob("*.log")))

    @staticmethod
    def wait_for(condition: Callable[[], bool], timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Polls until `condition` holds. The deadline only ends a hopeless wait; it asserts no speed."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{condition} did not hold within {timeout_s} s"
            time.sleep(0.1)


def children_of(pid: int) -> list[int]:
    """Process ids of the children that the main thread of `pid` started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_copy(pid: int, of: int) -> bool:
    """Whether one of two processes was forked from the other, or both from a third, and none has run a program since.

    The kernel gives each program that it runs random addresses, which are in this vector.
    """
    one, other = (Path(f"/proc/{each}/auxv").read_bytes() for each in (pid, of))
    return one == other


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


def describe(pid: int) -> str:
    """Returns a process's name, state and command line."""
    try:
        stat, command = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("stat", "cmdline"))
    except OSError:
        return f"{pid}, which has just ended"
    return f"{pid} {stat.decode().rpartition(')')[2].split()[0]} {command.replace(bytes(1), b' ').decode()[:200]}"


_PF_EXITING = 0x4  # of Linux's include/linux/sched.h


def is_alive(pid: int) -> bool:
    """Whether a process runs. One that the kernel is ending or that its new parent has not waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    fields = stat.rpartition(")")[2].split()
    return fields[0] != "Z" and not int(fields[6]) & _PF_EXITING
