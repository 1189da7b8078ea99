"""Scaling without processes: which workers start and stop, the messages, and how moved proxies are followed."""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tandem.deploy.autoscale.autoscaler import Autoscaler
from tandem.deploy.cluster_config import ClusterConfig, load_config
from tandem.deploy.commands.status import plan_lines
from tandem.deploy.launch.launcher import Launcher
from tandem.deploy.operations.changes import is_scaled, parse_counts
from tandem.deploy.processes.supervisor import EXIT_LOST, OnExit, Supervised
from tandem.protocol.messages.membership import (
    ExitCause,
    PairStatus,
    Role,
    StatusReport,
    WorkerExited,
    WorkerInfo,
    WorkerLoad,
    WorkerReport,
)
from tandem.protocol.messages.operations import ClusterScaled, ScaleCluster
from tandem.protocol.proxy_endpoints import EndpointsFile, write_endpoints
from tandem.protocol.sockets import new_context
from tandem.runtime.errors import ConfigError
from tandem.runtime.processes.process import EXIT_BAD_CONFIG, EXIT_RETIRED
from tests.support.waiting import until


class FakeProcess(Supervised):
    """Runs until it is stopped; a restart takes no time."""

    def __init__(self, name: str) -> None:
        super().__init__(name, Path("/nowhere"), lambda *_: True)
        self.num_starts = 1
        self.last_pid = 7
        self.returncode = 0

    async def run_once(self) -> int:
        await self._stopping.wait()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if not self._stopping.is_set():
            self.num_starts += 1

    def log_tail(self) -> str:
        return ""


class FakeSite:
    """A site with room for `room` workers."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.names: list[str] = []
        self.progress_files: dict[str, Path] = {}
        self.media_cache_endpoint = ""
        self.num_renewals = 0
        self.is_preloaded = True

    def renew_preloaded(self) -> None:
        self.num_renewals += 1

    def http_hosts(self) -> list[str]:
        return []

    def stop_listening(self) -> None:
        pass

    def make_proxy(self, name: str, on_exit: OnExit, on_endpoint: Callable[[str, str], None]) -> Supervised:
        return FakeProcess(name)

    def make_media_cache(self, on_exit: OnExit) -> Supervised | None:
        return None

    def make_worker(self, role: Role, name: str, on_exit: OnExit) -> Supervised:
        if len(self.names) >= self.room:
            raise ConfigError("no room")
        self.names.append(name)
        return FakeProcess(name)

    def forget(self, name: str) -> None:
        self.names.remove(name)

    def set_role(self, name: str, role: Role) -> None: ...

    def set_proxy_endpoints(self, endpoints: list[str]) -> None: ...

    def close(self) -> None: ...


def with_launcher(room: int, body: Callable[[Launcher, FakeSite], Awaitable[None]]) -> None:
    async def main() -> None:
        site = FakeSite(room)
        with new_context() as context:
            launcher = Launcher(ClusterConfig(), cast(Any, site), context, Path("/nowhere"))
            launcher._start_all()
            launcher._ready = True
            await body(launcher, site)
            await launcher._stop_children()

    asyncio.run(main())


def test_the_highest_numbers_are_removed_and_names_reused() -> None:
    async def body(launcher: Launcher, site: FakeSite) -> None:
        launcher.scale({"prefill": 3, "decode": 2})
        assert sorted(site.names) == ["decode-0", "decode-1", "prefill-0", "prefill-1", "prefill-2"]
        launcher.scale({"prefill": 1})
        launcher.scale({"prefill": 2})  # the other two have not ended yet, so their names are taken
        assert launcher.counts == {"prefill": 2, "decode": 2, "any": 0}
        await until(lambda: sorted(site.names) == ["decode-0", "decode-1", "prefill-0", "prefill-3"])
        launcher.scale({"prefill": 3})
        assert "prefill-1" in site.names

    with_launcher(9, body)


def test_leaving_processes_are_not_restarted_or_listed() -> None:
    async def body(launcher: Launcher, site: FakeSite) -> None:
        launcher.scale({"decode": 2})
        launcher.restart("decode-0", 1)
        launcher.restart("nobody", 1)
        starts = {process.name: process.num_starts for process in launcher.processes}
        assert starts == {"proxy-0": 1, "prefill-0": 1, "decode-0": 2, "decode-1": 1}
        launcher.scale({"decode": 1})
        leaving = launcher._children["decode-1"]
        assert site.num_renewals == 1, "workers that are restarted get the code that is installed now"
        launcher.restart("decode-1", 1)
        assert leaving.num_starts == 1
        assert "decode-1" not in {process.name for process in launcher.processes}

    with_launcher(9, body)


def test_scaling_beyond_the_resources_changes_nothing() -> None:
    async def body(launcher: Launcher, site: FakeSite) -> None:
        with pytest.raises(ConfigError, match="no room"):
            launcher.scale({"prefill": 2, "decode": 3})
        assert launcher.counts == {"prefill": 1, "decode": 1, "any": 0}
        assert sorted(site.names) == ["decode-0", "prefill-0"]

    with_launcher(4, body)


def test_a_drained_worker_is_not_replaced() -> None:
    async def body(launcher: Launcher, site: FakeSite) -> None:
        launcher.scale({"decode": 2})
        assert not launcher._on_exit("decode-0", 7, EXIT_RETIRED)
        assert launcher.counts == {"prefill": 1, "decode": 1, "any": 0}
        assert sorted(site.names) == ["decode-1", "prefill-0"]

    with_launcher(9, body)


@pytest.mark.parametrize(
    ("returncode", "is_asked", "expected"),
    [
        (0, True, "order"),
        (0, False, "crash"),  # a library has called exit(0)
        (EXIT_BAD_CONFIG, False, "crash"),
        (EXIT_RETIRED, False, "order"),
        (EXIT_LOST, True, "unknown"),
        (-signal.SIGTERM, False, "order"),
        (1, True, "crash"),
        (-signal.SIGSEGV, True, "crash"),
    ],
)
def test_proxies_are_told_why_a_worker_has_exited(returncode: int, is_asked: bool, expected: ExitCause) -> None:
    async def body(launcher: Launcher, site: FakeSite) -> None:
        sent: list[object] = []
        control: Any = SimpleNamespace(send=sent.append, close=lambda: None)
        launcher._controls["proxy-0"] = control
        if is_asked:
            launcher._children["decode-0"].terminate()
        launcher._ready = True
        launcher._on_exit("decode-0", 7, returncode)
        assert sent == [WorkerExited("decode-0", 7, expected)]

    with_launcher(9, body)


@pytest.mark.parametrize(("returncode", "expected"), [(0, "order"), (-signal.SIGSEGV, "crash"), (EXIT_LOST, "unknown")])
def test_a_worker_that_crashes_while_it_drains_has_crashed(returncode: int, expected: ExitCause) -> None:
    """Else the prompt that makes it crash is excused, and goes on to the next worker."""

    async def body(launcher: Launcher, site: FakeSite) -> None:
        sent: list[object] = []
        control: Any = SimpleNamespace(send=sent.append, close=lambda: None)
        launcher._controls["proxy-0"] = control
        launcher.scale({"decode": 2})
        child = launcher._children["decode-1"]
        assert isinstance(child, FakeProcess)
        child.returncode = returncode
        launcher.scale({"decode": 1})
        await until(lambda: WorkerExited("decode-1", 7, expected) in sent)

    with_launcher(9, body)


def test_it_is_not_scaled_before_it_serves() -> None:
    with new_context() as context, pytest.raises(ConfigError, match="not up"):
        Launcher(ClusterConfig(), cast(Any, FakeSite(9)), context, Path("/nowhere")).scale({"prefill": 2})


def test_worker_counts_are_parsed_or_refused_by_name() -> None:
    assert parse_counts(["decode=3", "prefill=2"]) == ScaleCluster(2, 3)
    assert parse_counts(["decode=3", "any=0"]) == ScaleCluster(None, 3, 0)
    for wrong in ("decode", "decode=", "decode=-1", "decode=x", "proxy=2", "=3", "decode=²"):
        with pytest.raises(ConfigError, match="write prefill=N, decode=N or any=N"):
            parse_counts([wrong])
    with pytest.raises(ConfigError, match="twice"):
        parse_counts(["decode=1", "decode=2"])


def report(silence_s: float, *workers: tuple[str, Role, int], load: WorkerLoad | None = None) -> StatusReport:
    reports = []
    for name, role, num_pairs in workers:
        pairs = [PairStatus(f"decode-{i}", "e", "ready") for i in range(num_pairs)]
        reports.append(WorkerReport(WorkerInfo(name, f"{name}/1", role, "", 1), load or WorkerLoad(), pairs, silence_s))
    return StatusReport("p", "m", True, 0, reports)


def test_scaling_ends_when_new_workers_are_paired_and_removed_ones_gone() -> None:
    wanted = ClusterScaled(1, 2)
    prefill: tuple[str, Role, int]
    first: tuple[str, Role, int]
    second: tuple[str, Role, int]
    prefill, first, second = ("prefill-0", "prefill", 2), ("decode-0", "decode", 0), ("decode-1", "decode", 0)
    assert is_scaled(report(0, prefill, first, second), wanted)
    assert not is_scaled(report(0, ("prefill-0", "prefill", 1), first, second), wanted)
    assert not is_scaled(report(0, prefill, first), wanted)
    assert not is_scaled(report(0, prefill, first, second, ("decode-2", "decode", 0)), wanted)
    assert is_scaled(report(0, prefill, first, second, ("decode-0-far", "decode", 0)), wanted)


def test_scaling_waits_for_pairs_in_both_directions_of_elastic_workers() -> None:
    def elastic(*peers: str) -> list[PairStatus]:
        return [PairStatus(peer, "e", "ready") for peer in peers]

    def shown(first: list[PairStatus], second: list[PairStatus]) -> StatusReport:
        infos = [WorkerInfo(f"worker-{i}", f"{i}", "any", "", 1) for i in range(2)]
        loads = [
            WorkerReport(info, WorkerLoad(), pairs, 0.0) for info, pairs in zip(infos, (first, second), strict=True)
        ]
        return StatusReport("p", "m", True, 0, loads)

    wanted = ClusterScaled(0, 0, 2)
    assert is_scaled(shown(elastic("worker-1"), elastic("worker-0")), wanted)
    assert not is_scaled(shown(elastic("worker-1"), []), wanted)
    assert not is_scaled(shown(elastic("worker-1", "worker-2"), []), wanted)


class Recorded:
    """A cluster that records the calls that it gets."""

    def __init__(self) -> None:
        self.counts: dict[Role, int] = {"prefill": 1, "decode": 1, "any": 0}
        self.loads: list[tuple[WorkerInfo, WorkerLoad]] = []
        self.num_refused: int | None = None

    def scale(self, counts: dict[Role, int]) -> None:
        self.counts = dict(counts)


@pytest.mark.parametrize("acts", [False, True])
def test_the_planner_scales_and_logs_only_if_allowed(acts: bool, caplog: pytest.LogCaptureFixture) -> None:
    cluster: Any = Recorded()
    autoscaler = Autoscaler(ClusterConfig(autoscale=acts), cluster, boot_s=30.0)
    assert autoscaler.plan is None
    for second in range(6):
        tokens = 8000 * second
        load = WorkerLoad(num_prompt_tokens=tokens, num_finished=4 * second, prompt_tokens_per_s=4000.0)
        cluster.loads = [(WorkerInfo("prefill-0", "prefill-0/1", "prefill", "", 1), load)]
        autoscaler.observe(second)
    plan = autoscaler.plan
    assert plan is not None and plan.acts is acts
    assert bool(caplog.records) is acts
    if acts:
        assert cluster.counts["prefill"] >= 3
    else:
        assert cluster.counts == {"prefill": 1, "decode": 1, "any": 0}
        assert plan.proposed_prefill >= 3
        assert f"tandem scale prefill={plan.proposed_prefill} decode=1" in plan_lines(plan)


class WithoutRoom(Recorded):
    """A cluster that refuses to start workers. refusal: why; None if there is room."""

    refusal: str | None = "prefill-1 would share a GPU"

    def scale(self, counts: dict[Role, int]) -> None:
        if self.refusal is not None:
            raise ConfigError(self.refusal)
        super().scale(counts)


def test_a_refused_start_is_logged_once_until_something_changes(caplog: pytest.LogCaptureFixture) -> None:
    cluster: Any = WithoutRoom()
    autoscaler = Autoscaler(ClusterConfig(autoscale=True), cluster, boot_s=30.0)
    now, tokens = 0, 0

    def refusals() -> list[str]:
        nonlocal now, tokens
        caplog.clear()
        for _ in range(8):
            now += 1
            tokens += 8000
            load = WorkerLoad(num_prompt_tokens=tokens, num_finished=tokens // 2000, prompt_tokens_per_s=4000.0)
            cluster.loads = [(WorkerInfo("prefill-0", "prefill-0/1", "prefill", "", 1), load)]
            autoscaler.observe(now)
        return [each.getMessage() for each in caplog.records if "would share" in each.getMessage()]

    assert refusals() == ["autoscaling: prefill-1 would share a GPU"]
    assert refusals() == []
    cluster.refusal = "prefill-1 would share another GPU"
    assert refusals() == ["autoscaling: prefill-1 would share another GPU"]
    cluster.refusal = None
    refusals()
    cluster.refusal, cluster.counts = "prefill-1 would share another GPU", {"prefill": 1, "decode": 1, "any": 0}
    assert refusals() == ["autoscaling: prefill-1 would share another GPU"], "there was room in between"


def test_endpoints_are_reread_only_after_a_change(tmp_path: Path) -> None:
    file = tmp_path / "proxies"
    reader = EndpointsFile(file)
    assert reader.changed() is None
    write_endpoints(file, ["tcp://10.0.0.1:5000", "tcp://[::1]:5001"])
    assert reader.changed() == ["tcp://10.0.0.1:5000", "tcp://[::1]:5001"]
    assert reader.changed() is None
    write_endpoints(file, [])
    assert reader.changed() == []
    assert [path.name for path in tmp_path.iterdir()] == ["proxies"]


def test_invalid_ray_options_name_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("prefil = 2\n")
    with pytest.raises(ConfigError, match=r"unknown key prefil; did you mean prefill\?"):
        load_config(file, {})
    for wrong, says in (
        ({"autoscale": True, "autoscale_max_workers": 1}, "1 is too few"),
        ({"ray": "auto"}, "give --model with --ray"),
        ({"ray": "auto", "model": "m"}, "ray: traffic between hosts.*--insecure-network"),
        ({"ray": "auto", "model": "m", "cluster_host": "10.0.0.1"}, "leave out --cluster-host"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_config(None, wrong)


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "tandem.deploy.sites.ray_site", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'tandem-serve\[ray\]'"):
        importlib.import_module("tandem.deploy.sites.ray_site")
