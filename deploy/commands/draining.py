"""`tandem drain` lets one worker of a running cluster leave; `tandem restart` starts its processes anew, one at a time.

Both finish what is under way, within `--drain-timeout-s`; what is left goes on at other workers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from tandem.deploy.commands.status import fetch_status, own_network, proxy_endpoints
from tandem.deploy.launch.admin_socket import ask_launcher
from tandem.protocol.codec import Codec
from tandem.protocol.messages.membership import DrainAnswer, DrainWorker, FromProxyControl, StatusReport
from tandem.protocol.messages.operations import LaunchedProcess, ListProcesses, ProcessList, RestartProcess
from tandem.protocol.sockets import DealerSocket, new_context
from tandem.runtime.errors import ConfigError, InternalError, Overloaded

ANSWER_TIMEOUT_S = 3.0
_POLL_S = 0.2

Say = Callable[[str], None]


def drain(port: int, worker_id: str, timeout_s: float, say: Say) -> None:
    """Returns when the worker has left. Raises ConfigError for a name that nobody has, InternalError when it stays."""
    asyncio.run(_drain(port, worker_id, timeout_s, say))


def restart(port: int, names: list[str], timeout_s: float, say: Say) -> None:
    """Of all processes, or of those named. Raises ConfigError for a name that nobody has, InternalError when one does
    not come back within timeout_s.
    """
    asyncio.run(_restart(port, names, timeout_s, say))


async def _drain(port: int, worker_id: str, timeout_s: float, say: Say) -> None:
    process = await _launched(port, worker_id)
    answer = await _ask(port, DrainWorker(worker_id))
    if answer.error:
        raise ConfigError(answer.error)
    say(f"{worker_id} drains")

    async def has_left(reports: list[StatusReport]) -> bool:
        # With its process: until that has ended the launcher counts it, and `tandem scale` would start one too few.
        has_process = process is not None and (await _processes(port, ListProcesses())).get(worker_id) == process
        return worker_id not in _epochs(reports) and not has_process

    await _until(timeout_s, f"{worker_id} has not left", has_left, port)
    say(f"{worker_id} has left")


async def _launched(port: int, name: str) -> LaunchedProcess | None:
    """None for another host's, and while no launcher answers."""
    try:
        return (await _processes(port, ListProcesses())).get(name)
    except (ConfigError, Overloaded):
        return None


async def _ask(port: int, message: DrainWorker) -> DrainAnswer:
    """The answer of one proxy: a worker has to be told once."""
    endpoints = proxy_endpoints(port)
    if not endpoints:
        raise ConfigError(f"no cluster runs on port {port}; give its --port")
    context = new_context("operator", own_network(port))
    codec: Codec[FromProxyControl] = Codec(FromProxyControl)
    answers: asyncio.Queue[FromProxyControl] = asyncio.Queue()
    dealer: DealerSocket[FromProxyControl] | None = None
    try:
        dealer = DealerSocket(context, endpoints[0], codec, answers.put_nowait, peer="proxy")
        dealer.send(message)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while not isinstance(answer := await answers.get(), DrainAnswer):
                pass
        return answer
    except TimeoutError:
        raise Overloaded(f"the cluster on port {port} gave no answer within {ANSWER_TIMEOUT_S:.0f} s") from None
    finally:
        if dealer is not None:
            dealer.close()
        context.destroy(linger=0)


async def _restart(port: int, names: list[str], timeout_s: float, say: Say) -> None:
    known = await _processes(port, ListProcesses())
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"no process is called {unknown[0]}; there are {', '.join(known)}")
    # Workers first: the proxies wait for theirs.
    for name in sorted(names or known, key=lambda name: (name.startswith("proxy-"), name)):
        await _restart_one(port, known[name], timeout_s, say)


async def _restart_one(port: int, old: LaunchedProcess, timeout_s: float, say: Say) -> None:
    name = old.name
    before = await fetch_status(port)
    old_epoch, num_pairs = _epochs(before).get(name), _num_ready_pairs(before)
    old_proxy = next((report.proxy_id for report in before if report.proxy_id.startswith(f"{name}-")), None)
    say(f"{name} (process {old.pid}) drains")
    await _processes(port, RestartProcess(name))

    async def is_back(reports: list[StatusReport]) -> bool:
        now = (await _processes(port, ListProcesses())).get(name)
        if now is None or now.num_starts == old.num_starts or len(reports) < len(before):
            return False
        if _num_ready_pairs(reports) < num_pairs:
            return False
        if name.startswith("proxy-"):
            return all(report.proxy_id != old_proxy for report in reports)
        if old_epoch is None:  # neither a proxy nor a worker: nobody tells of it
            return True
        return _epochs(reports).get(name, old_epoch) != old_epoch

    await _until(timeout_s, f"{name} has not come back", is_back, port)
    say(f"{name} is back")


async def _processes(port: int, question: ListProcesses | RestartProcess) -> dict[str, LaunchedProcess]:
    """Of the launcher, by name. Raises ConfigError when no cluster runs on `port`."""
    answer = await ask_launcher(port, question)
    assert isinstance(answer, ProcessList)
    return {process.name: process for process in answer.processes}


async def _until(
    timeout_s: float, otherwise: str, holds: Callable[[list[StatusReport]], Awaitable[bool]], port: int
) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        with contextlib.suppress(Overloaded, ConfigError):  # no proxy answers just now
            if await holds(await fetch_status(port)):
                return
        if asyncio.get_running_loop().time() > deadline:
            raise InternalError(f"{otherwise} within {timeout_s:.0f} s; see `tandem status` and its log")
        await asyncio.sleep(_POLL_S)


def _epochs(reports: list[StatusReport]) -> dict[str, str]:
    return {each.worker.worker_id: each.worker.epoch for report in reports for each in report.workers}


def _num_ready_pairs(reports: list[StatusReport]) -> int:
    """As the proxy sees it that sees the fewest."""
    counts = [sum(p.state == "ready" for worker in report.workers for p in worker.pairs) for report in reports]
    return min(counts, default=0)
