"""`tandem role`: waits until every proxy reports the role, and shows why a proxy refuses."""

from __future__ import annotations

import asyncio

import pytest

from tandem.deploy.operations import changes
from tandem.deploy.operations.changes import set_role
from tandem.protocol.messages.membership import Role, SetWorkerRole, StatusReport, WorkerOrdered
from tandem.runtime.errors import ConfigError, InternalError
from tests.unit.deploy.test_scaling import report


class TwoProxies:
    """roles: of decode-0, as the two proxies report it, in turn."""

    def __init__(self, errors: tuple[str, str], roles: list[tuple[Role, Role]]) -> None:
        self._errors = errors
        self.roles = roles

    async def ask_proxies(self, message: SetWorkerRole, kind: object) -> list[WorkerOrdered]:
        return [WorkerOrdered(message.worker_id, error) for error in self._errors]

    async def status(self, detail: str) -> list[StatusReport]:
        return [report(0.0, ("decode-0", role, 0)) for role in self.roles.pop(0)]


def order(cluster: TwoProxies, timeout_s: float = 10.0) -> None:
    asyncio.run(set_role(cluster, "decode-0", "any", timeout_s))  # type: ignore[arg-type]


def test_it_waits_for_the_reports_of_all_proxies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(changes, "_POLL_S", 0.0)
    cluster = TwoProxies(
        ("", "no worker decode-0 is registered"), [("decode", "decode"), ("any", "decode"), ("any", "any")]
    )
    order(cluster)
    assert not cluster.roles and capsys.readouterr().out == "decode-0 has the role any\n"


def test_refusals_and_lateness_are_errors() -> None:
    with pytest.raises(ConfigError, match="decode-0 is draining"):
        order(TwoProxies(("decode-0 is draining", "decode-0 is draining"), []))
    with pytest.raises(InternalError, match="decode-0 has not taken the role any within -1 s"):
        order(TwoProxies(("", ""), [("decode", "decode")]), timeout_s=-1.0)
