"""Messages between the commands `tandem scale`, `status`, `restart` and the launcher, over its private socket."""

from __future__ import annotations

import msgspec


class ScaleCluster(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Change roles, start or stop workers until there are this many by role; None leaves a role unchanged."""

    prefill: int | None = None
    decode: int | None = None
    any: int | None = None


class GetPlan(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ask for the autoscaling planner's proposal."""


class ListProcesses(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ask for the processes that the launcher keeps alive."""


class RestartProcess(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Drain this process and start it again. Answered by the current ProcessList.

    num_starts: of the process that is meant. One that was started again since is left alone.
    """

    name: str
    num_starts: int


class LaunchedProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """pid: of the current or last process, on its own host; 0 before the first start."""

    name: str
    pid: int
    num_starts: int


class ProcessList(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    processes: list[LaunchedProcess]


class ClusterScaled(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The new target. Workers start and stop after this answer."""

    prefill: int
    decode: int
    any: int = 0


class ScaleRefused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Nothing has changed, for this reason."""

    reason: str


class PlanReport(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What the planner sees and wants."""

    acts: bool
    """Whether proposals are executed."""
    prefill: int
    """Number of prefill workers at present."""
    decode: int
    """Number of decode workers at present."""
    proposed_prefill: int
    proposed_decode: int
    prefill_reason: str
    """Demand for prefill, and what follows from it."""
    decode_reason: str
    """Demand for decode, and what follows from it."""
    predicted_ttft_s: float
    """Time to first token of a prompt of mean length that arrives now."""
    any: int = 0
    """Number of elastic workers at present."""
    proposed_any: int = 0


ToLauncher = ScaleCluster | GetPlan | ListProcesses | RestartProcess
FromLauncher = ClusterScaled | ScaleRefused | PlanReport | ProcessList
