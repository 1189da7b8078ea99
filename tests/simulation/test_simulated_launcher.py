"""The real launcher in simulated time: it restarts, drains, scales and moves the processes of a cluster that serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from tandem.deploy.launch.hang_detector import MAX_SILENCE_S, MAX_WORKER_SILENCE_S
from tandem.deploy.launch.launcher import DRAIN_GRACE_S
from tandem.deploy.operations.cluster_client import LAUNCHER_TIMEOUT_S
from tandem.protocol.messages.operations import ScaleCluster
from tandem.simulator.scenario import FaultKind, SimulatedStepTimes
from tandem.simulator.site import LOST_S
from tests.simulation.simulated_site import ELASTIC, FIXED, DrivenCluster, simulated_site


def obey(site: DrivenCluster, look: Callable[[], object] = lambda: None) -> None:
    """Has the load of a request every 0.1 s until the operator's command is done. No request fails."""

    def is_done() -> bool:
        look()
        return site.cluster.operator.num_running == 0

    site.keep_asking(0.1, 60.0, is_done)
    assert set(site.finish()) == {"finished"}
    assert any(line.endswith(": done") for line in site.log), site.log[-1]


def pids(site: DrivenCluster) -> dict[str, int]:
    return {each.name: each.pid for each in site.cluster.launcher.launcher.processes}


def test_a_rolling_restart_replaces_each_process_and_loses_no_request() -> None:
    num_pairs: list[int] = []

    def look() -> None:
        site.ask(60, 120, proxy=len(site.requests) % 2)  # some always run on the worker that drains
        if not any("proxy-0 (" in line and "draining" in line for line in site.log):
            num_pairs.append(len(site.pairs()))

    with simulated_site(replace(FIXED, boot_s=2.0)) as site:
        before, epochs = pids(site), site.epochs()
        site.cluster.operator.restart()
        obey(site, look)
        assert min(num_pairs) == 2, "of four; one worker is away at a time"
        order = [line.split()[1] for line in site.log if line.endswith("is back")]
        assert order == ["decode-0", "decode-1", "prefill-0", "prefill-1", "proxy-0", "proxy-1"]
        assert pids(site).keys() == before.keys() and not set(pids(site).values()) & set(before.values())
        assert not set(site.epochs().values()) & set(epochs.values())
        assert site.num_migrated() == 0


def test_two_rolling_restarts_at_once_restart_each_process_once_and_cut_no_drain_short() -> None:
    with simulated_site(replace(FIXED, boot_s=2.0)) as site:
        site.cluster.operator.restart()
        site.cluster.operator.restart()
        obey(site)
        starts = {each.name: each.num_starts for each in site.cluster.launcher.launcher.processes}
        assert set(starts.values()) == {2}, starts
        assert site.num_migrated() == 0


def test_workers_move_before_others_start_or_stop() -> None:
    with simulated_site() as site:
        before = pids(site)
        site.cluster.operator.scale(ScaleCluster(prefill=1, decode=4))
        obey(site)
        assert site.cluster.launcher.launcher.counts == {"prefill": 1, "decode": 4, "any": 0}
        assert before.items() < pids(site).items() and pids(site).keys() - before.keys() == {"decode-2"}
        assert Counter(report.worker.role for report in site.reports().values()) == {"prefill": 1, "decode": 4}
        site.cluster.operator.scale(ScaleCluster(prefill=1, decode=1))
        obey(site)
        assert len(site.epochs()) == 2 and site.num_migrated() == 0
        starts = Counter(line.split()[1] for line in site.log if " starts as " in line)
        assert set(starts.values()) == {1}, "those that left are not started again"


ROLES_LATER = {"prefill": 1, "decode": 3, "any": 0}


def roles(site: DrivenCluster, proxy: int) -> dict[str, int]:
    """Number of workers by role, as a proxy knows them; nothing while it boots."""
    if not hasattr(site.cluster.proxies.get(f"proxy-{proxy}"), "table"):
        return {}
    found = Counter(report.worker.role for report in site.reports(proxy).values())
    return {role: found[role] for role in ROLES_LATER}  # type: ignore[index]


@pytest.mark.parametrize("fault", ["kill proxy", "freeze proxy"])
def test_roles_change_while_one_of_the_proxies_does_not_respond(fault: FaultKind) -> None:
    """The order went to the first proxy only, waited there, and took effect after the launcher had given it up."""
    with simulated_site(replace(FIXED, boot_s=8.0)) as site:
        site.pass_time(2.0)
        site.strike(fault, "proxy-0", MAX_SILENCE_S - 2)
        site.pass_time(0.3)
        site.cluster.operator.scale(ScaleCluster(prefill=1, decode=3))
        site.until(lambda: roles(site, 1) == ROLES_LATER, 5.0)
        assert site.cluster.launcher.launcher.counts == ROLES_LATER
        site.cluster.operator.scale(ScaleCluster(prefill=2, decode=2))  # another order before the proxy is back
        site.until(lambda: roles(site, 1)["prefill"] == 2, 5.0)
        changes_of_mind: list[str] = []

        def look() -> bool:
            if roles(site, 1)["prefill"] != 2 or site.cluster.launcher.launcher.counts["prefill"] != 2:
                changes_of_mind.append(f"{site.timeline.now:.3f}: {roles(site, 1)}")
            return bool(changes_of_mind)

        site.reaches(look, 15.0)
        assert not changes_of_mind, "what waited for the proxy is void"
        assert roles(site, 0)["prefill"] == 2, "it is back"


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_proxy_that_wakes_up_acts_on_no_order_that_another_proxy_has_got(frozen: int) -> None:
    """It was frozen for less than the 4 s after which it would count its workers as lost."""
    with simulated_site() as site:
        launcher, awake = site.cluster.launcher.launcher, 1 - frozen
        site.pass_time(2.0)
        site.strike("freeze proxy", f"proxy-{frozen}", 3.8)
        site.pass_time(0.05)
        site.cluster.operator.scale(ScaleCluster(prefill=1, decode=3))
        site.until(lambda: roles(site, awake) == ROLES_LATER, 3.0)
        site.pass_time(0.1)
        site.cluster.operator.scale(ScaleCluster(prefill=2, decode=2))
        site.until(lambda: roles(site, awake)["prefill"] == 2, 3.0)
        changed = site.reaches(lambda: roles(site, awake)["prefill"] != 2 or launcher.counts["prefill"] != 2, 10.0)
        assert not changed and roles(site, frozen)["prefill"] == 2


@pytest.mark.parametrize("fault", ["kill proxy", "freeze proxy"])
def test_a_role_changes_once_the_only_proxy_is_back_and_is_not_given_up_before(fault: FaultKind) -> None:
    with simulated_site(replace(FIXED.with_config(proxies=1), boot_s=6.0)) as site:
        site.pass_time(2.0)
        site.strike(fault, "proxy-0", MAX_SILENCE_S - 2)
        site.pass_time(0.3)
        site.cluster.operator.scale(ScaleCluster(prefill=1, decode=3))
        site.pass_time(0.2)
        counts: list[object] = []

        def is_done() -> bool:
            counts.append(site.cluster.launcher.launcher.counts)
            return roles(site, 0) == ROLES_LATER

        site.until(is_done, 15.0)
        site.reaches(lambda: not is_done(), 5.0)
        assert all(each == ROLES_LATER for each in counts)


def test_a_worker_that_hangs_while_it_leaves_is_killed() -> None:
    with simulated_site() as site:
        site.strike("freeze", "decode-1", 1_000.0)
        site.cluster.operator.scale(ScaleCluster(prefill=2, decode=1))
        drain_s = site.cluster.shape.config.drain_timeout_s + DRAIN_GRACE_S
        began = site.timeline.now
        site.keep_asking(0.5, drain_s + 5, lambda: "decode-1" not in site.cluster.launcher.site.children)
        assert site.timeline.now - began >= drain_s - 1, "it has its whole drain timeout before"
        assert set(site.finish()) == {"finished"} and len(site.epochs()) == 3


def test_a_drained_worker_is_not_started_again() -> None:
    with simulated_site() as site:
        site.cluster.operator.drain("decode-0")
        obey(site)
        assert site.epochs().keys() == {"prefill-0", "prefill-1", "decode-1"} and site.num_migrated() == 0


def test_proxies_learn_at_once_that_a_worker_has_crashed() -> None:
    with simulated_site() as site:
        site.strike("kill", "decode-0")
        site.until(lambda: "decode-0" not in site.epochs(0) | site.epochs(1), 0.1)
        site.finish()


def test_a_worker_that_fails_to_start_is_started_ever_more_rarely() -> None:
    with simulated_site() as site:
        starts_before = {each.name: each.num_starts for each in site.cluster.launcher.launcher.processes}
        site.strike("fail starts", "decode-0", 10.0)
        site.keep_asking(0.2, 60.0, lambda: len(site.epochs()) < 4)
        site.keep_asking(0.2, 60.0, lambda: len(site.epochs()) == 4)
        assert set(site.finish()) == {"finished"}
        starts = {each.name: each.num_starts for each in site.cluster.launcher.launcher.processes}
        changed = {name: starts[name] - number for name, number in starts_before.items() if starts[name] != number}
        assert changed.keys() == {"decode-0"} and 4 <= changed["decode-0"] <= 7


def test_a_cluster_ends_with_its_launcher_and_starts_with_the_next_one() -> None:
    with simulated_site() as site:
        before = pids(site)
        site.ask(200, 60)
        site.pass_time(0.1)
        site.strike("kill launcher", "launcher")
        site.pass_time(0.2)
        site.ask(200, 60)  # waits until a proxy accepts it
        assert site.finish() == ["request_aborted", "finished"]
        assert pids(site).keys() == before.keys() and not set(pids(site).values()) & set(before.values())


def test_a_worker_that_is_drained_while_a_cluster_starts_is_not_waited_for() -> None:
    """Found by `tandem simulate`: the cluster was never ready, and took no orders."""
    with simulated_site(replace(FIXED, boot_s=2.0)) as site:
        site.strike("kill launcher", "launcher")
        site.until(lambda: not site.cluster.workers)
        site.until(lambda: "decode-1" in site.cluster.workers)
        site.strike("freeze", "decode-1", 2.0 + 1.5 * LAUNCHER_TIMEOUT_S)
        site.pass_time(2.5)  # the boot of all but the frozen worker
        assert "prefill-0" in site.epochs()
        assert not site.cluster.launcher.is_ready
        site.cluster.operator.drain("prefill-0")
        site.until(lambda: site.cluster.launcher.is_ready, 2 * LAUNCHER_TIMEOUT_S)
        assert site.cluster.launcher.launcher.counts == {"prefill": 1, "decode": 2, "any": 0}
        assert site.cluster.operator.num_running == 0


def test_requests_are_served_while_the_launcher_is_frozen() -> None:
    with simulated_site() as site:
        epochs = site.epochs()
        site.strike("freeze launcher", "launcher", 20.0)
        site.strike("kill", "decode-0")
        site.keep_asking(0.5, 30.0, lambda: len(site.requests) == 30)
        assert "decode-0" not in site.epochs(), "nobody starts it"
        assert set(site.finish()) == {"finished"}
        assert site.epochs()["decode-0"] != epochs["decode-0"]


def test_a_proxy_that_hangs_is_replaced() -> None:
    with simulated_site() as site:
        before = pids(site)
        site.strike("freeze proxy", "proxy-0", 120.0)
        site.until(lambda: pids(site)["proxy-0"] != before["proxy-0"], MAX_SILENCE_S + 5)
        assert {name for name, pid in pids(site).items() if before[name] != pid} == {"proxy-0"}
        site.ask()
        assert site.finish(20.0) == ["finished"]


def test_a_worker_that_hangs_for_minutes_is_replaced() -> None:
    with simulated_site() as site:
        before = pids(site)
        site.strike("freeze", "decode-0", 100_000.0)
        site.strike("freeze", "decode-1", MAX_WORKER_SILENCE_S - 30)  # this one resumes
        site.strike("freeze proxy", "proxy-0", 60.0)
        site.keep_asking(2.0, MAX_WORKER_SILENCE_S + 60, lambda: pids(site)["decode-0"] != before["decode-0"])
        site.until(lambda: len(site.epochs()) == 4)
        assert {name for name, pid in pids(site).items() if before[name] != pid} == {"decode-0", "proxy-0"}
        site.ask()
        assert site.finish(20.0)[-1] == "finished"


@pytest.mark.parametrize("threshold", [0, 32])
@pytest.mark.parametrize("counts", [ScaleCluster(prefill=0), ScaleCluster(decode=0), ScaleCluster(0, 0, 1)])
def test_scaling_leaves_a_worker_for_each_phase(counts: ScaleCluster, threshold: int) -> None:
    """Decode workers compute prompts only if a threshold allows it."""
    with simulated_site(FIXED.with_config(decode_prefill_threshold=threshold)) as site:
        before = site.cluster.launcher.launcher.counts
        site.cluster.operator.scale(counts)
        site.until(lambda: not site.cluster.operator.num_running)
        is_served = bool(counts.any) or (bool(threshold) and counts.decode is None)
        assert (site.cluster.launcher.launcher.counts != before) == is_served
        site.ask()
        assert site.finish() == ["finished"]


def test_workers_of_a_lost_host_start_on_another_one_with_their_roles() -> None:
    shape = replace(ELASTIC.with_config(workers=4), num_hosts=2)
    with simulated_site(shape) as site:
        there = [name for name, worker in site.cluster.workers.items() if worker.host == 1]
        assert 0 < len(there) < 4
        site.cluster.operator.set_role(there[0], "decode")
        obey(site)
        before = site.epochs()
        site.strike("lose host", there[0], 60.0)
        site.keep_asking(0.2, LOST_S[1] + 10, lambda: len(site.epochs().items() - before.items()) == len(there))
        assert set(site.finish()) == {"finished"}
        assert {worker.host for worker in site.cluster.workers.values()} == {0}
        assert site.reports()[there[0]].worker.role == "decode"
        assert {name: epoch for name, epoch in site.epochs().items() if name not in there}.items() <= before.items()


@pytest.mark.parametrize("layout", [{"prefill": 1, "decode": 1}, {"prefill": 0, "decode": 0, "workers": 2}])
def test_the_planner_starts_workers_under_load_and_stops_them_afterwards(layout: dict[str, int]) -> None:
    config = FIXED.with_config(autoscale=True, autoscale_ttft_ms=300, autoscale_max_workers=4, **layout)
    shape = replace(config, step_times=SimulatedStepTimes(0.02, 0.002, 0.002), num_blocks=400)
    with simulated_site(shape) as site:
        site.keep_asking(0.4 if layout["prefill"] else 0.1, 60.0, lambda: len(site.epochs()) >= 3)
        assert set(site.finish()) == {"finished"}
        site.until(lambda: len(site.epochs()) < 3, 200.0)
        site.finish()
        assert site.num_migrated() == 0
