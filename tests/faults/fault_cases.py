"""Cases of the fault matrix and what came of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tests.faults.phases import LOCAL_PREFILL, PHASES

Role = Literal["prefill", "decode", "proxy", "media cache", "client"]
Layout = Literal["fixed", "any"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "proxy", "media cache")
FAULTS = ("SIGKILL", "SIGSTOP", "SIGSTOP then SIGCONT", "SIGTERM")
CLOSES = "closes"
"""The fault of a client: it disconnects."""
PLACED_PHASES = ("shipping", "first token", LOCAL_PREFILL)
"""Phases that need a transfer, or a worker that does both phases."""


@dataclass(frozen=True)
class Case:
    role: Role
    fault: str
    phase: str

    def __str__(self) -> str:
        return f"{self.role}, {self.fault}, {self.phase}"

    @property
    def may_fail(self) -> bool:
        """Whether the connection may break, because the client or its only proxy is gone."""
        return self.fault == CLOSES or (self.role == "proxy" and self.fault in ("SIGKILL", "SIGSTOP"))


@dataclass
class Result:
    """outcome: of the struck request, as `Stream.outcome`. is_same: whether its tokens are those of the undisturbed
    run. bystander: outcome of a stream on the other proxy. pause_s: longest time without a token after the fault.
    whole_s: from the fault, or the wake-up, until the cluster is complete again. num_attempts: of the request, as its
    proxy reports. woken_s: when the test woke a stopped process. problems: violated rules, in words."""

    case: Case
    outcome: str
    is_same: bool
    bystander: str
    pause_s: float
    whole_s: float
    num_attempts: int
    num_missed: int
    woken_s: float | None = None
    problems: list[str] = field(default_factory=list)


def all_cases(layout: Layout) -> list[Case]:
    """Elastic workers compute in LOCAL_PREFILL what they decode, so they have no phase of prefill alone."""
    phases = [phase for phase in PHASES if layout == "fixed" or phase != "prefilling"]
    cases = [Case(role, fault, phase) for role in ROLES for fault in FAULTS for phase in phases]
    cases += [Case("decode", fault, LOCAL_PREFILL) for fault in FAULTS]
    return cases + [Case("client", CLOSES, phase) for phase in (*phases, LOCAL_PREFILL)]
