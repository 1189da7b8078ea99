"""What the launcher answers to the commands that scale, list and restart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.launch.admin_socket import MAX_WORKERS, AdminSocket
from tandem.protocol.messages.membership import Role
from tandem.protocol.messages.operations import (
    ClusterScaled,
    GetPlan,
    LaunchedProcess,
    ListProcesses,
    ProcessList,
    RestartProcess,
    ScaleCluster,
    ScaleRefused,
)
from tandem.runtime.errors import ConfigError

PROCESSES = [LaunchedProcess("prefill-0", 7, 1)]


class FakeCluster:
    """error: why it cannot be scaled."""

    def __init__(self, prefill: int = 1, decode: int = 1) -> None:
        self.counts: dict[Role, int] = {"prefill": prefill, "decode": decode, "any": 0}
        self.error = ""
        self.scaled: list[dict[Role, int]] = []
        self.restarted: list[tuple[str, int]] = []
        self.processes = PROCESSES

    def scale(self, counts: Mapping[Role, int]) -> None:
        if self.error:
            raise ConfigError(self.error)
        self.scaled.append(dict(counts))
        self.counts |= counts

    def restart(self, name: str, num_starts: int) -> None:
        self.restarted.append((name, num_starts))


class Caller:
    """The admin socket's network and its only caller. plan: of the autoscaler."""

    def __init__(self, cluster: FakeCluster, plan: Any = None, *, decode_may_prefill: bool = False) -> None:
        self.answers: list[Any] = []
        self.endpoint = ""
        self.is_closed = False
        self._socket = AdminSocket(self, Path("/run"), cluster, self, decode_may_prefill)  # type: ignore[arg-type]
        self.plan = plan

    def router(self, endpoint: str, codec: object, on_message: Any) -> Caller:
        self.endpoint, self._on_message = endpoint, on_message
        return self

    def send(self, identity: bytes, message: object) -> None:
        assert identity == b"caller"
        self.answers.append(message)

    def close(self) -> None:
        self.is_closed = True

    def ask(self, message: object) -> Any:
        self.answers.clear()
        self._on_message(b"caller", message)
        return self.answers[0] if self.answers else None


@pytest.mark.parametrize(
    ("wanted", "now"),
    [
        (ScaleCluster(decode=3), (1, 3, 0)),
        (ScaleCluster(prefill=0, any=1), (0, 1, 1)),
        (ScaleCluster(prefill=MAX_WORKERS, decode=MAX_WORKERS, any=0), (MAX_WORKERS, MAX_WORKERS, 0)),
        (ScaleCluster(), (1, 1, 0)),
    ],
)
def test_only_the_roles_that_are_named_change(wanted: ScaleCluster, now: tuple[int, int, int]) -> None:
    cluster = FakeCluster()
    assert Caller(cluster).ask(wanted) == ClusterScaled(*now)
    [scaled] = cluster.scaled
    assert scaled == {
        role: count for role in ("prefill", "decode", "any") if (count := getattr(wanted, role)) is not None
    }


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (ScaleCluster(prefill=-1), "prefill=-1: give a number between 0 and 256"),
        (ScaleCluster(decode=MAX_WORKERS + 1), "decode=257: give a number between 0 and 256"),
        (ScaleCluster(decode=2, any=1000), "any=1000: give a number"),
        (ScaleCluster(decode=0), "no worker could decode any more"),
        (ScaleCluster(prefill=0), "no worker could prefill any more"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(wanted: ScaleCluster, why: str) -> None:
    cluster = FakeCluster()
    answer = Caller(cluster).ask(wanted)
    assert isinstance(answer, ScaleRefused) and why in answer.reason
    assert not cluster.scaled


def test_decode_workers_alone_serve_where_they_compute_prompts() -> None:
    cluster = FakeCluster()
    assert Caller(cluster, decode_may_prefill=True).ask(ScaleCluster(prefill=0)) == ClusterScaled(0, 1, 0)


def test_the_reason_of_the_launcher_is_passed_on() -> None:
    cluster = FakeCluster()
    cluster.error = "there is no free GPU"
    assert Caller(cluster).ask(ScaleCluster(decode=2)) == ScaleRefused("there is no free GPU")


def test_processes_are_listed_and_restarted() -> None:
    cluster = FakeCluster()
    caller = Caller(cluster)
    assert caller.endpoint == "ipc:///run/launcher.sock"
    assert caller.ask(ListProcesses()) == ProcessList(PROCESSES) and not cluster.restarted
    assert caller.ask(RestartProcess("prefill-0", 1)) == ProcessList(PROCESSES)
    assert cluster.restarted == [("prefill-0", 1)]


@pytest.mark.parametrize("plan", [None, object()])
def test_a_plan_is_answered_once_there_is_one(plan: object) -> None:
    assert Caller(FakeCluster(), plan).ask(GetPlan()) is plan
