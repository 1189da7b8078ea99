"""Kills, freezes and drains random processes of a cluster, and changes roles of its workers.

Used by `tests.faults.chaos` and `tests.integration.exam`.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any, get_args

from tandem.deploy.operations.cluster_client import ClusterClient
from tandem.deploy.processes.runtime_dir import runtime_dir
from tandem.protocol.messages.membership import (
    DECODE_ROLES,
    PREFILL_ROLES,
    Role,
    SetWorkerRole,
    StatusReport,
    WorkerOrdered,
)
from tandem.runtime.errors import Overloaded

RECOVERY_LIMIT_S = 300.0
FAULTS = ("SIGKILL", "SIGSTOP for 1 s", "SIGSTOP for 5 s", "SIGTERM")
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
CLUSTER_OPTIONS = ("--prefill", "2", "--decode", "2", "--worker-wait-s", "240")
"""Options of `tandem up` that the injector expects."""


class FaultInjector:
    """Injects one fault after the other and waits each time until the cluster has recovered.

    `names`: processes that may be hit. `log` gets a line per fault. `on_fault` gets process name and fault.
    """

    def __init__(
        self,
        port: int,
        num_proxies: int,
        names: tuple[str, ...],
        rng: random.Random,
        log: Callable[[str], None],
        on_fault: Callable[[str, str], None] = lambda name, fault: None,
    ) -> None:
        self._port, self._num_proxies = port, num_proxies
        self._names, self._rng = names, rng
        self._log, self._on_fault = log, on_fault
        self.injected: list[dict[str, Any]] = []
        self.num_role_changes = 0

    async def run_while(self, condition: Callable[[], bool]) -> None:
        """Raises RuntimeError when the cluster does not recover within RECOVERY_LIMIT_S."""
        while condition():
            name, fault = self._rng.choice(self._names), self._rng.choice(FAULTS)
            started_at = time.monotonic()
            await self._inject(name, fault)
            await self._wait_until_recovered(f"{fault} of {name}")
            recovered_s = round(time.monotonic() - started_at, 2)
            self.injected.append({"process": name, "fault": fault, "recovered_s": recovered_s})
            self._log(f"{name}: {fault}; recovered after {recovered_s:.1f} s")
            await asyncio.sleep(self._rng.uniform(1, 6))

    async def change_roles_while(self, condition: Callable[[], bool]) -> None:
        """Gives one worker another role every second. Returns at the end; refused changes are not counted."""
        while condition():
            await asyncio.sleep(1.0)
            if await self._give_role(self._rng.choice(WORKERS), self._rng.choice(get_args(Role))):
                self.num_role_changes += 1

    async def make_all_elastic(self) -> None:
        """Gives every worker the role any, which opens all pairs."""
        for name in WORKERS:
            await self._give_role(name, "any")
        await self._wait_until_recovered("roles were changed")

    async def _give_role(self, name: str, role: Role) -> bool:
        try:
            answers = await ClusterClient(self._port).ask_proxies(SetWorkerRole(name, role), WorkerOrdered)
        except Overloaded:
            return False
        return any(not answer.error for answer in answers)

    async def _wait_until_recovered(self, cause: str) -> None:
        """Raises RuntimeError after RECOVERY_LIMIT_S."""
        deadline = time.monotonic() + RECOVERY_LIMIT_S
        while not await self._is_recovered():
            await asyncio.sleep(0.2)
            if time.monotonic() > deadline:
                raise RuntimeError(f"no recovery within {RECOVERY_LIMIT_S:.0f} s after {cause}")

    async def _inject(self, name: str, fault: str) -> None:
        """Returns when the process has been replaced or resumed."""
        pid = self._pid(name)
        signal_name, _, seconds = fault.partition(" for ")
        os.kill(pid, getattr(signal, signal_name))
        self._on_fault(name, fault)
        if seconds:
            await asyncio.sleep(float(seconds.removesuffix(" s")))
            os.kill(pid, signal.SIGCONT)
            return
        deadline = time.monotonic() + RECOVERY_LIMIT_S
        while self._pid(name) == pid:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} was not restarted within {RECOVERY_LIMIT_S:.0f} s after {fault}")
            await asyncio.sleep(0.05)

    def _pid(self, name: str) -> int:
        return int((runtime_dir(self._port) / f"{name}.pid").read_text())

    async def _is_recovered(self) -> bool:
        """Tells whether every proxy lists every worker, none draining, and all pairs that roles need are ready."""
        try:
            reports = await ClusterClient(self._port).status()
        except Overloaded:
            return False
        return len(reports) == self._num_proxies and all(
            len(report.workers) == len(WORKERS)
            and not any(worker.draining for worker in report.workers)
            and _has_all_pairs(report)
            for report in reports
        )


def _has_all_pairs(report: StatusReport) -> bool:
    ready = {
        (source.worker.epoch, pair.decode_epoch)
        for source in report.workers
        for pair in source.pairs
        if pair.state == "ready"
    }
    sources, targets = (
        [each.worker.epoch for each in report.workers if each.worker.role in roles]
        for roles in (PREFILL_ROLES, DECODE_ROLES)
    )
    return all((source, target) in ready for source in sources for target in targets if source != target)
