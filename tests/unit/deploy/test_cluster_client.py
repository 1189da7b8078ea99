"""Questions of commands to a cluster: whose answers count, and for how long they are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tandem.deploy.operations.cluster_client import LAUNCHER_TIMEOUT_S, PROXY_TIMEOUT_S, ClusterClient, Questions
from tandem.protocol.messages.membership import StatusReport, WorkerOrdered
from tandem.protocol.messages.operations import (
    ClusterScaled,
    LaunchedProcess,
    ListProcesses,
    ProcessList,
    ScaleCluster,
    ScaleRefused,
)
from tandem.protocol.messaging import Network
from tandem.runtime.errors import ConfigError, Overloaded
from tests.support.clocked_loop import run_in_no_time

Answers = dict[str, list[tuple[float, Any]]]
"""By endpoint: (seconds after the question, message)."""


class FakeQuestions(Questions):
    """A cluster whose launcher and proxies answer at these times. It is its own network."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.num_open = 0
        self.is_ended = False

    @property
    def place(self) -> str:
        return "port 8000"

    def launcher_endpoint(self) -> str:
        return "launcher"

    def proxy_endpoints(self) -> list[str]:
        return [endpoint for endpoint in self._answers if endpoint != "launcher"]

    def not_running(self) -> ConfigError:
        return ConfigError("no cluster runs")

    def open_network(self, *, to_proxies: bool) -> Network:
        return self  # type: ignore[return-value]

    def dealer(self, endpoint: str, codec: object, on_message: Callable[[Any], None], peer: str) -> Any:
        self.num_open += 1
        fake = self

        class Dealer:
            def send(self, message: object) -> None:
                for delay_s, answer in fake._answers[endpoint]:
                    asyncio.get_running_loop().call_later(delay_s, on_message, answer)

            def close(self) -> None:
                fake.num_open -= 1

        return Dealer()

    def destroy(self, linger: float) -> None:
        self.is_ended = True


def report(proxy_id: str) -> StatusReport:
    return StatusReport(proxy_id, "m", True, 0, [])


def ask(cluster: FakeQuestions, question: Any) -> Any:
    """Returns the answer and the seconds until it came."""

    async def run() -> Any:
        began_at = asyncio.get_running_loop().time()
        return await question(cluster), asyncio.get_running_loop().time() - began_at

    try:
        return run_in_no_time(run())
    finally:
        assert cluster.num_open == 0 and (cluster.is_ended or not cluster.proxy_endpoints())


def test_all_proxies_are_asked_and_their_reports_sorted() -> None:
    cluster = FakeQuestions({"b": [(0.5, report("proxy-1"))], "a": [(1.0, report("proxy-0"))]})
    reports, seconds = ask(cluster, lambda cluster: cluster.status())
    assert [each.proxy_id for each in reports] == ["proxy-0", "proxy-1"] and seconds == pytest.approx(1.0)


def test_proxies_that_do_not_answer_in_time_are_left_out() -> None:
    late: Answers = {"a": [(PROXY_TIMEOUT_S + 1, report("proxy-0"))]}
    reports, seconds = ask(FakeQuestions({"b": [(0.5, report("proxy-1"))], **late}), lambda cluster: cluster.status())
    assert [each.proxy_id for each in reports] == ["proxy-1"] and seconds == pytest.approx(PROXY_TIMEOUT_S)
    with pytest.raises(Overloaded, match="the cluster on port 8000 did not answer within 3 s"):
        ask(FakeQuestions(late), lambda cluster: cluster.status())
    with pytest.raises(ConfigError, match="no cluster runs"):
        ask(FakeQuestions({}), lambda cluster: cluster.status())


def test_other_messages_are_no_answers() -> None:
    cluster = FakeQuestions({"a": [(0.1, WorkerOrdered("decode-0")), (0.2, report("proxy-0"))]})
    reports, _ = ask(cluster, lambda cluster: cluster.status())
    assert reports == [report("proxy-0")]


def test_the_launcher_lists_its_processes_by_name() -> None:
    processes = [LaunchedProcess("prefill-0", 7, 1), LaunchedProcess("decode-0", 8, 2)]
    cluster = FakeQuestions({"launcher": [(0.1, ProcessList(processes))], "a": []})
    found, seconds = ask(cluster, lambda cluster: cluster.processes(ListProcesses()))
    assert list(found.items()) == [("prefill-0", processes[0]), ("decode-0", processes[1])]
    assert seconds == pytest.approx(0.1)


def test_a_refusal_is_an_error_and_so_is_silence() -> None:
    refused = FakeQuestions({"launcher": [(0.1, ScaleRefused("there is no free GPU"))], "a": []})
    with pytest.raises(ConfigError, match="there is no free GPU"):
        ask(refused, lambda cluster: cluster.ask_launcher(ScaleCluster(decode=2), ClusterScaled))
    silent = FakeQuestions({"launcher": [(LAUNCHER_TIMEOUT_S + 1, ClusterScaled(1, 2))], "a": []})
    with pytest.raises(Overloaded, match="the launcher on port 8000 did not answer within 10 s"):
        ask(silent, lambda cluster: cluster.ask_launcher(ScaleCluster(decode=2), ClusterScaled))


def test_without_a_folder_the_error_names_the_command() -> None:
    client = ClusterClient(1)
    assert client.place == "port 1" and not client.proxy_endpoints()
    with pytest.raises(ConfigError, match="no cluster runs on port 1; start one with `tandem up`"):
        client.launcher_endpoint()
    remote = ClusterClient(1, ["tcp://a:1", "tcp://b:2"])
    assert (remote.place, remote.proxy_endpoints()) == ("tcp://a:1, tcp://b:2", ["tcp://a:1", "tcp://b:2"])
