"""Processes of a cluster that are killed, frozen and drained by chance, for `bench.chaos` and `bench.exam`."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

from tandem.deploy.commands.status import fetch_status
from tandem.deploy.processes.runtime_dir import runtime_dir
from tandem.runtime.errors import Overloaded

RECOVERY_LIMIT_S = 300.0
FAULTS = ("SIGKILL", "SIGSTOP for 1 s", "SIGSTOP for 5 s", "SIGTERM")
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
CLUSTER_OPTIONS = ("--prefill", "2", "--decode", "2", "--worker-wait-s", "240")
"""Of the cluster that is struck."""


class Faults:
    """One after the other, on whomever chance chooses; each waits until the cluster is whole again.

    num_proxies: of the cluster. names: who may be struck. say: is told of each. on_strike: told the name and the fault.
    """

    def __init__(
        self,
        port: int,
        num_proxies: int,
        names: tuple[str, ...],
        rng: random.Random,
        say: Callable[[str], None],
        on_strike: Callable[[str, str], None] = lambda name, fault: None,
    ) -> None:
        self._port, self._num_proxies = port, num_proxies
        self._names, self._rng = names, rng
        self._say, self._on_strike = say, on_strike
        self.told: list[dict[str, Any]] = []

    async def run_while(self, goes_on: Callable[[], bool]) -> None:
        """Raises RuntimeError when the cluster does not become whole again."""
        while goes_on():
            name, fault = self._rng.choice(self._names), self._rng.choice(FAULTS)
            began_at = time.monotonic()
            await self._strike(name, fault)
            while not await self._is_whole():
                await asyncio.sleep(0.2)
                if time.monotonic() - began_at > RECOVERY_LIMIT_S:
                    raise RuntimeError(f"the cluster was not whole {RECOVERY_LIMIT_S:.0f} s after {fault} of {name}")
            whole_after_s = round(time.monotonic() - began_at, 2)
            self.told.append({"struck": name, "fault": fault, "whole_after_s": whole_after_s})
            self._say(f"{name}: {fault}; whole after {whole_after_s:.1f} s")
            await asyncio.sleep(self._rng.uniform(1, 6))

    async def _strike(self, name: str, fault: str) -> None:
        """Returns when the process is gone or has been woken."""
        pid = self._pid(name)
        number, _, seconds = fault.partition(" for ")
        os.kill(pid, getattr(signal, number))
        self._on_strike(name, fault)
        if seconds:
            await asyncio.sleep(float(seconds.removesuffix(" s")))
            os.kill(pid, signal.SIGCONT)
            return
        deadline = time.monotonic() + RECOVERY_LIMIT_S
        while self._pid(name) == pid:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} was not started again within {RECOVERY_LIMIT_S:.0f} s after {fault}")
            await asyncio.sleep(0.05)

    def _pid(self, name: str) -> int:
        return int((runtime_dir(self._port) / f"{name}.pid").read_text())

    async def _is_whole(self) -> bool:
        """Every proxy knows every worker, and every pair is ready."""
        try:
            reports = await fetch_status(self._port)
        except Overloaded:
            return False
        return len(reports) == self._num_proxies and all(
            len(report.workers) == len(WORKERS)
            and not any(worker.draining for worker in report.workers)
            and sum(pair.state == "ready" for worker in report.workers for pair in worker.pairs) == 4
            for report in reports
        )
