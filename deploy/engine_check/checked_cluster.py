"""A cluster that a check starts, asks and hurts: its launcher runs in this process, on free ports of the loopback."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpcore
import msgspec

from tandem.deploy.cluster_config import load_config
from tandem.deploy.engine_check.answers import CheckedAnswer
from tandem.deploy.engine_check.check_settings import SETTLED
from tandem.deploy.engine_check.host_facts import without_names
from tandem.deploy.launch.launcher import OnProgress
from tandem.deploy.launch.run_cluster import run_cluster, with_model
from tandem.deploy.operations.cluster_client import ClusterClient
from tandem.deploy.processes.log_file import LogFile
from tandem.deploy.processes.runtime_dir import LOGS, log_dir, runtime_dir
from tandem.protocol.messages.membership import Role, StatusReport, WorkerReport
from tandem.runtime.errors import ConfigError, InternalError, Overloaded
from tandem.runtime.tasks import start

CHECKSUMS = "TANDEM_KV_CHECKSUMS"
_POLL_S = 0.1
SETTLING_S = 1.0
"""Several of the intervals at which workers report."""


class CheckFailed(Exception):
    """A step has not found what it must; the message is one line for the operator."""


class CheckedCluster:
    """port, admin_port: of the loopback."""

    def __init__(self, port: int, admin_port: int, pool: httpcore.AsyncConnectionPool) -> None:
        self._url, self._admin_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"
        self._pool = pool
        self._client = ClusterClient(port)

    async def tokenize(self, text: str) -> list[int]:
        answer = await self._post("/tokenize", {"prompt": text})
        tokens: list[int] = msgspec.json.decode(answer)["tokens"]
        return tokens

    async def complete(
        self, prompt: list[int], max_tokens: int, on_token: Callable[[int], None] = lambda number: None
    ) -> CheckedAnswer:
        """Streams a greedy completion. on_token: called with the number of tokens so far. Raises CheckFailed."""
        found = CheckedAnswer()
        body: dict[str, Any] = {
            "model": "checked", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        content, headers = msgspec.json.encode(body), [("Content-Type", "application/json")]
        async with self._pool.stream("POST", f"{self._url}/v1/completions", headers=headers, content=content) as stream:
            if stream.status != 200:
                raise CheckFailed(f"HTTP {stream.status}: {_reason(await stream.aread())}")
            async for event in _events(stream):
                if "error" in event:
                    raise CheckFailed(
                        f"a stream ended after {len(found.token_ids)} tokens: {event['error']['message']}"
                    )
                for choice in event["choices"]:
                    found.token_ids += choice.get("token_ids") or []
                    found.top += [_by_id(each) for each in (choice.get("logprobs") or {}).get("top_logprobs") or []]
                on_token(len(found.token_ids))
        if len(found.token_ids) != max_tokens:
            raise CheckFailed(f"a stream ended with {len(found.token_ids)} of {max_tokens} tokens")
        return found

    async def report(self) -> StatusReport:
        while True:
            with suppress(Overloaded):  # processes of a busy host answer late
                return (await self._client.status())[0]

    async def settled_report(self) -> StatusReport:
        """Returns a report with what workers have done until now: they say it every now and then."""
        report = await self.report()
        while True:
            await asyncio.sleep(SETTLING_S)
            before, report = report, await self.report()
            if all(each.load.num_blocks for each in report.workers) and _done(report) == _done(before):
                return report

    async def worker(self, role: Role) -> WorkerReport:
        return role_of(await self.report(), role)

    async def num_migrations(self) -> int:
        headers = [("Cache-Control", "no-cache")]
        answer = await self._pool.request("GET", f"{self._admin_url}/metrics", headers=headers)
        found = re.search(r"^tandem_migrations_total (\S+)", answer.content.decode(), re.MULTILINE)
        if found is None:
            raise CheckFailed("the proxy's metrics do not count migrations")
        return int(float(found[1]))

    @staticmethod
    def kill(victim: WorkerReport) -> None:
        with suppress(ProcessLookupError):
            os.kill(victim.worker.pid, signal.SIGKILL)

    async def until_replaced(self, victim: WorkerReport) -> None:
        """Waits until the launcher has started another worker in its place, and this one has its pair."""
        while True:
            report = await self.report()
            others = [each.worker for each in report.workers if each.worker.worker_id == victim.worker.worker_id]
            if report.num_ready_pairs and any(each.epoch != victim.worker.epoch for each in others):
                return
            await asyncio.sleep(_POLL_S)

    async def _post(self, path: str, body: dict[str, Any]) -> bytes:
        headers = [("Content-Type", "application/json")]
        content = msgspec.json.encode(body)
        answer = await self._pool.request("POST", self._url + path, headers=headers, content=content)
        if answer.status != 200:
            raise CheckFailed(f"{path} answers with HTTP {answer.status}: {_reason(answer.content)}")
        return answer.content


def role_of(report: StatusReport, role: Role) -> WorkerReport:
    """Returns the first worker of the role. Raises CheckFailed."""
    found = next((each for each in report.workers if each.worker.role == role), None)
    if found is None:
        raise CheckFailed(f"there is no {role} worker")
    return found


def _done(report: StatusReport) -> list[tuple[Any, ...]]:
    loads = [each.load for each in report.workers]
    return [(each.num_finished, each.num_received, each.num_compared_blocks, each.traffic) for each in loads]


@asynccontextmanager
async def running(
    name: str, file: Path | None, given: dict[str, Any], on_progress: OnProgress, logs: dict[str, str]
) -> AsyncIterator[CheckedCluster]:
    """Starts a cluster and stops it at the end, also of a task that is cancelled.

    name: of the cluster. file, given: settings, which must have the numbers of workers. logs: gets the last lines of
    each process's log. Raises ConfigError and InternalError if the cluster does not start or does not stay.
    """
    port, admin_port = _free_ports(2)
    settings = {**SETTLED, **given, "port": port, "admin_port": admin_port}
    config = with_model(load_config(file, settings))
    ready = asyncio.Event()
    launched = start(run_cluster(config, on_progress, lambda logs, stages: ready.set(), stops_on_signals=False))
    waiting = start(ready.wait())
    try:
        await asyncio.wait({launched, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if launched.done():
            launched.result()
            raise InternalError("the cluster has stopped while it started")
        async with httpcore.AsyncConnectionPool() as pool:
            yield CheckedCluster(port, admin_port, pool)
    finally:
        waiting.cancel()
        logs |= _tails(name, port)  # now too, as the cluster's own folder goes with it
        launched.cancel()
        await asyncio.wait({launched})
        logs |= _tails(name, port)
        for folder in _log_folders(port):
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(ConfigError, OSError):
            runtime_dir(port).rmdir()  # which a cluster that has failed leaves for its logs


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _log_folders(port: int) -> Iterator[Path]:
    """Yields where `user_folders` may have put the logs."""
    for find in (log_dir, _own_logs):
        with suppress(ConfigError, OSError):
            yield find(port)


def _own_logs(port: int) -> Path:
    return runtime_dir(port) / LOGS


def _tails(cluster: str, port: int) -> dict[str, str]:
    files = [file for folder in _log_folders(port) for file in sorted(folder.glob("*.log"))]
    found = {f"{cluster} {file.stem}": without_names(LogFile(file).tail()) for file in files}
    return {name: text for name, text in found.items() if text}


async def _events(stream: httpcore.Response) -> AsyncIterator[dict[str, Any]]:
    rest = b""
    async for piece in stream.aiter_stream():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield msgspec.json.decode(line.removeprefix(b"data: "))


def _by_id(top: dict[str, float]) -> dict[int, float]:
    """top: by token, as token_id:NUMBER."""
    return {int(token.removeprefix("token_id:")): logprob for token, logprob in top.items()}


def _reason(content: bytes) -> str:
    try:
        return str(msgspec.json.decode(content)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return content[:200].decode(errors="replace")
