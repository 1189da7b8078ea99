"""Messages between the commands `tandem scale`, `status` and `restart` and the launcher, over its private socket."""

from __future__ import annotations

import msgspec


class ScaleCluster(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Start or stop workers until there are so many; None leaves a role as it is."""

    prefill: int | None = None
    decode: int | None = None


class GetPlan(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What does the autoscaling planner propose?"""


class ListProcesses(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Which processes does the launcher keep alive?"""


class RestartProcess(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Let it finish what is under way and end; it is then started anew. Answered by what there is now."""

    name: str


class LaunchedProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """pid: of the process that runs or ran last, on whatever host that is; 0 before the first."""

    name: str
    pid: int
    num_starts: int


class ProcessList(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    processes: list[LaunchedProcess]


class ClusterScaled(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """So many there are to be from now on. Workers come and go after this answer, not before it."""

    prefill: int
    decode: int


class ScaleRefused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Nothing has been changed, for this reason."""

    reason: str


class PlanReport(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """acts: whether proposals are carried out. prefill, decode: that there are to be at present.

    proposed_prefill, proposed_decode: by the planner; equal to these while nothing should change. prefill_reason and
    decode_reason: what is needed at this moment and why. predicted_ttft_s: of a prompt of mean length that came now.
    """

    acts: bool
    prefill: int
    decode: int
    proposed_prefill: int
    proposed_decode: int
    prefill_reason: str
    decode_reason: str
    predicted_ttft_s: float


ToLauncher = ScaleCluster | GetPlan | ListProcesses | RestartProcess
FromLauncher = ClusterScaled | ScaleRefused | PlanReport | ProcessList
