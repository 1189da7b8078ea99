"""One fault at a chosen moment, in simulated time: what it costs, and what it does not.

Drawn faults are in `test_cluster`; what only real processes, sockets and memory show is in `tests/faults`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import get_args

import pytest

from tandem.protocol.messages.membership import PROXY_SILENCE_S, Role, SetWorkerRole
from tandem.protocol.messages.transfer import ReserveKV
from tandem.proxy.cluster.worker_table import WORKER_SILENCE_S
from tandem.simulator import network
from tandem.simulator.network import Switch
from tandem.simulator.scenario import ClusterShape, SimulatedStepTimes
from tests.simulation.simulated_site import ELASTIC, FIXED, DrivenCluster, simulated_site

STEP_S = 0.06
"""Between two moments at which a fault strikes. A request takes about 0.3 s."""
TWO_SIDED = replace(FIXED.with_config(kv_connector="gloo"), overlaps=True)
SHAPES = (FIXED, TWO_SIDED, ELASTIC)
ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES, ids=["fixed", "two-sided", "elastic"])
PAIR = FIXED.with_config(prefill=1, decode=1)
"""Workers prefill-0 and decode-0, without a substitute."""


def moments(shape: ClusterShape, act: Callable[[DrivenCluster, int], None]) -> Counter[str]:
    """Has something happen at each moment of a request, each in a cluster of its own. Beside the request runs another
    one, by another proxy.

    act: gets the number of the request. Returns in which phases it was struck.
    """
    phases: Counter[str] = Counter()
    for number in count():
        with simulated_site(shape, number) as site:
            bystander = site.ask(60, 60, proxy=1)
            struck = site.ask(200, 30)
            site.pass_time(number * STEP_S)
            if site.outcome(struck):
                assert site.outcome(struck) == "finished"
                return phases
            phases[site.phase()] += 1
            act(site, struck)
            outcomes = site.finish()
            assert outcomes[bystander] == "finished"
    raise AssertionError("unreachable")


def is_replaced(site: DrivenCluster, name: str, epoch: str) -> bool:
    return site.epochs().get(name, epoch) != epoch


# ---- one process, at each moment of a request


@pytest.mark.parametrize(
    ("fault", "shape"),
    [
        *((fault, shape) for fault in ("kill", "freeze") for shape in SHAPES),
        *(("stall", SHAPES[1]), ("drain", SHAPES[2])),
    ],
    ids=lambda value: (
        value
        if isinstance(value, str)
        else value.config.kv_connector + "-" + ("any" if value.config.workers else "prefill")
    ),
)
@pytest.mark.parametrize("side", [0, 1], ids=["computes", "decodes"])
def test_a_worker_fails_at_each_moment_and_its_request_finishes(fault: str, side: int, shape: ClusterShape) -> None:
    """Others finish it when its worker is killed or frozen. A worker that drains or stalls for a second finishes it."""

    def act(site: DrivenCluster, struck: int) -> None:
        name, began_at, epochs = site.placement()[side], site.timeline.now, site.epochs()
        match fault:
            case "kill":
                site.strike("kill", name)
            case "freeze":
                site.strike("freeze", name, 8.0)
            case "stall":
                site.strike("freeze", name, 1.0)
            case "drain":
                site.strike("leave", name)
        site.until(lambda: bool(site.outcome(struck)))
        assert site.outcome(struck) == "finished"
        limit_s = {"kill": 2.0, "freeze": WORKER_SILENCE_S + 2.0, "stall": 3.0, "drain": 2.0}[fault]
        assert site.timeline.now - began_at < limit_s
        if fault in ("stall", "drain"):
            assert site.num_migrated() == 0
        if fault == "freeze":
            site.until(lambda: name not in site.epochs())
        elif fault != "stall":
            site.until(partial(is_replaced, site, name, epochs[name]))
        site.finish()
        others = {each: epoch for each, epoch in epochs.items() if each != name or fault == "stall"}
        assert others.items() <= site.epochs().items(), "the others stay"

    phases = moments(shape, act)
    assert phases["prefilling"] and phases["decoding"], phases


@pytest.mark.parametrize("fault", ["kill", "freeze", "stall"])
def test_a_proxy_fails_at_each_moment_and_requests_of_the_other_finish(fault: str) -> None:
    def act(site: DrivenCluster, struck: int) -> None:
        epochs = site.epochs(1)
        if fault == "kill":
            site.strike("kill proxy", "proxy-0")
        else:
            site.strike("freeze proxy", "proxy-0", 8.0 if fault == "freeze" else 1.0)
        site.finish()
        assert site.outcome(struck) == ("connection broke" if fault == "kill" else "finished")
        assert site.epochs(0) == site.epochs(1) == epochs

    phases = moments(FIXED, act)
    assert phases["prefilling"] and phases["decoding"], phases


@ALL_SHAPES
def test_a_client_leaves_at_each_moment(shape: ClusterShape) -> None:
    def act(site: DrivenCluster, struck: int) -> None:
        pairs = site.pairs()
        site.disconnect(struck)
        site.until(lambda: site.cluster.proxies["proxy-0"].dispatcher.num_running == 0, 0.1)
        site.finish(5.0)
        assert site.pairs() == pairs

    phases = moments(shape, act)
    assert phases["prefilling"] and phases["decoding"], phases


def test_a_deadline_passes_at_each_moment() -> None:
    for number in range(30):
        with simulated_site(FIXED, number) as site:
            timeout_s = 0.001 + number * STEP_S
            struck = site.ask(200, 30, timeout_s=timeout_s)
            asked_at = site.timeline.now
            site.until(site.has_ended)
            if site.outcome(struck) == "finished":
                assert number > 3
                return
            if site.outcome(struck) == "deadline_exceeded":
                assert site.timeline.now - asked_at == pytest.approx(timeout_s, abs=0.01)
            else:  # too late for a first token, as predicted
                assert site.outcome(struck) == "ttft_slo_unreachable" and site.timeline.now - asked_at < 0.01
            site.finish(5.0)
    raise AssertionError("no request finished")


# ---- workers without a substitute


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_wait_for_the_only_worker_of_a_role(role: str) -> None:
    with simulated_site(PAIR) as site:
        before, [name] = site.epochs(), [each for each in site.epochs() if each.startswith(role)]
        [other] = before.keys() - {name}
        site.ask(400, 60)
        site.until(lambda: site.phase() == ("decoding" if role == "decode" else "prefilling"))
        site.strike("kill", name)
        assert site.finish(20.0) == ["finished"]
        after = site.epochs()
        assert after[other] == before[other] and after[name] != before[name]


def test_requests_wait_when_every_decode_worker_is_lost() -> None:
    with simulated_site() as site:
        for number in range(6):
            site.ask(50, 100, proxy=number % 2, num_sequences=1 + number % 3)
        site.until(lambda: all(site.scheduler(name).decode.num_running for name in ("decode-0", "decode-1")))
        for name in ("decode-0", "decode-1"):
            site.strike("kill", name)
        assert site.finish(20.0) == ["finished"] * 6
        assert site.num_migrated() >= 6


def test_prompts_for_a_dead_worker_do_not_stay_with_its_successor() -> None:
    """No launcher reports the exit, so the proxy queues the prompt for the address where the next process listens."""
    with simulated_site(PAIR) as site:
        prefill, decode = site.cluster.workers
        site.cut("launcher", "proxy-0", "proxy-1")
        site.cut("proxy-0", prefill)
        site.cut_one_way(decode, "proxy-0")  # it is reached before it can register
        site.strike("kill", decode)
        site.pass_time(0.05)
        site.ask()
        site.pass_time(2.0)
        site.heal()
        assert site.finish() == ["finished"]


def test_a_request_without_workers_fails_at_its_deadline() -> None:
    with simulated_site(PAIR) as site:
        site.cut("proxy-0")
        site.until(lambda: not site.reports())
        asked_at = site.timeline.now
        site.ask(timeout_s=4.0)
        site.until(site.has_ended)
        assert site.outcome(0) == "deadline_exceeded" and site.timeline.now - asked_at == pytest.approx(4.0, abs=0.1)
        site.heal()
        site.ask()
        assert site.finish()[1] == "finished"


# ---- the network


def test_a_slow_network_costs_no_worker_and_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_site() as site:
        epochs, pairs = site.epochs(), site.pairs()
        monkeypatch.setattr(Switch, "latency_s", lambda self: self.timeline.rng.uniform(0.1, 0.3))
        for number in range(16):
            site.ask(proxy=number % 2)
        assert site.finish(60.0) == ["finished"] * 16
        assert (site.epochs(), site.pairs(), site.num_migrated()) == (epochs, pairs, 0)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_worker_rejoins_after_it_was_cut_off(name: str) -> None:
    with simulated_site() as site:
        before, pids = site.epochs(), site.cluster.workers[name].pids
        for number in range(8):
            site.ask(proxy=number % 2)
        site.pass_time(0.1)
        site.cut(name)
        site.until(lambda: name not in site.reports(0) and name not in site.reports(1), WORKER_SILENCE_S + 2)
        for number in range(8):
            site.ask(proxy=number % 2)
        site.until(site.has_ended, 10.0)
        site.heal()
        assert set(site.finish()) == {"finished"}
        assert site.cluster.workers[name].pids == pids
        assert site.epochs() == before


def test_a_worker_that_gave_requests_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy was too slow to be heard, but never still for long enough to know that itself."""
    monkeypatch.setattr(network, "SILENT_S", (60.0, 60.0))
    with simulated_site(replace(PAIR, step_times=SimulatedStepTimes(0.05))) as site:
        running = site.ask(200, 300)
        site.pass_time(0.5)
        site.cluster.orderly.disturb("silence")
        site.cluster.switch.silence("proxy-0", "decode-0")
        site.pass_time(PROXY_SILENCE_S + 0.6)
        site.cluster.switch.end_silence("proxy-0", "decode-0")
        assert site.finish()[running] == "finished"
        assert site.num_migrated() == 1


def test_only_the_pair_is_lost_whose_workers_are_cut_off_from_each_other() -> None:
    with simulated_site() as site:
        epochs, pairs = site.epochs(), site.pairs()
        cut = epochs["prefill-0"], epochs["decode-0"]
        for number in range(8):
            site.ask(proxy=number % 2)
        site.pass_time(0.1)
        site.cut("prefill-0", "decode-0")
        site.until(lambda: site.pairs() == pairs - {cut}, 10.0)
        for number in range(8):
            site.ask(proxy=number % 2)
        site.until(site.has_ended, 20.0)
        site.heal()
        assert set(site.finish()) == {"finished"}
        assert site.pairs() == pairs and site.epochs() == epochs


def test_no_blocks_are_reserved_for_a_pair_that_is_not_open() -> None:
    """Nothing would report that its peer has stopped writing."""
    with simulated_site(PAIR) as site:
        process = site.cluster.workers["decode-0"]
        decode = process.worker
        process.loop.call_soon(decode._traffic.on_message, ReserveKV("a pair of nobody", "t", 100), 50_000)
        site.pass_time(0.01)
        assert len(decode._scheduler.decode.transfers) == 0
        site.finish()


def test_a_proxy_recovers_after_it_was_cut_off_from_every_worker() -> None:
    with simulated_site() as site:
        epochs = site.epochs()
        for number in range(8):
            site.ask(proxy=number % 2)
        site.pass_time(0.1)
        site.cut("proxy-0")
        site.until(lambda: not site.reports(0))
        site.ask()
        site.heal()
        assert site.finish() == ["finished"] * 9
        assert site.epochs(0) == epochs, "the other proxy has known them all the time"


# ---- pairs, blocks and leases


@ALL_SHAPES
def test_requests_are_served_after_idleness(shape: ClusterShape) -> None:
    """Two minutes, i.e. longer than any time-out: no lease, deadline, connection or pair expires."""
    with simulated_site(shape) as site:
        epochs, pairs = site.epochs(), site.pairs()
        site.pass_time(120.0)
        for number in range(4):
            site.ask(proxy=number % 2)
        assert site.finish(2.0) == ["finished"] * 4
        assert (site.epochs(), site.pairs(), site.num_migrated()) == (epochs, pairs, 0)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_blocks_of_a_frozen_worker_are_free_or_in_quarantine(name: str) -> None:
    """A frozen prefill worker may still write, so that blocks at its peers wait for its exit or its word."""
    with simulated_site(replace(FIXED, num_blocks=400)) as site:
        for _ in range(4):
            site.ask(400, 20)
        site.until(lambda: site.phase() == "shipping")
        site.pass_time(0.02)
        site.strike("freeze", name, 30.0)
        site.until(site.has_ended, 10.0)
        site.pass_time(WORKER_SILENCE_S)
        loads = {each: site.cluster.workers[each].load() for each in site.cluster.workers if each != name}
        held = {each: load.num_blocks - load.num_free_blocks for each, load in loads.items()}
        assert held == {each: load.num_quarantined_blocks for each, load in loads.items()}
        if name == "decode-0":
            assert not any(held.values()), "prefill workers hold nothing for it"
        else:
            assert any(held.values())
        assert site.finish() == ["finished"] * 4


def test_expired_leases_leave_the_pairs_usable() -> None:
    """Decode workers stall for longer than a lease, but too briefly to be lost."""
    with simulated_site(replace(FIXED, lease_s=0.5)) as site:
        epochs, pairs = site.epochs(), site.pairs()
        for _ in range(6):
            site.ask(400, 20)
        site.until(lambda: site.phase() == "shipping")
        for name in ("decode-0", "decode-1"):
            site.strike("freeze", name, 2.0)
        assert site.finish(20.0) == ["finished"] * 6
        assert sum(site.scheduler(name).prefill.transfers.num_expired_leases for name in ("prefill-0", "prefill-1")) > 0
        assert (site.epochs(), site.pairs()) == (epochs, pairs)


def test_prompts_wait_while_decode_is_out_of_blocks() -> None:
    """Each decode worker has room for one of them at a time."""
    with simulated_site(replace(FIXED, num_blocks=64)) as site:
        for number in range(8):
            site.ask(256, 200, proxy=number % 2)
        decodes = [site.scheduler(name).decode for name in ("decode-0", "decode-1")]
        site.until(lambda: all(decode.num_running and decode.num_waiting for decode in decodes))
        assert site.finish() == ["finished"] * 8
        assert site.num_migrated() == 0


# ---- operators


def test_streams_do_not_notice_that_roles_change() -> None:
    """Each second a worker takes a random role."""
    with simulated_site(ELASTIC) as site:
        epochs, outcomes = site.epochs(), Counter[str]()
        for second in range(10):
            for number in range(4):
                site.ask(100 + 10 * number, 100, proxy=number % 2, num_sequences=1 + number % 2)
            name, role = f"worker-{site.timeline.rng.randrange(3)}", site.timeline.rng.choice(get_args(Role))
            site.tell(SetWorkerRole(name, role), proxy=second % 2)
            error = site.answers[-1].error
            assert not error or "last worker" in error, error
            outcomes["refused" if error else "changed"] += 1
            site.pass_time(1.0)
        assert set(site.finish()) == {"finished"}
        assert outcomes["changed"] >= 3, outcomes
        assert (site.epochs(), site.num_migrated()) == (epochs, 0)


def test_a_changed_role_decides_where_prompts_run() -> None:
    with simulated_site(ELASTIC) as site:
        roles: dict[str, Role] = {"worker-0": "decode", "worker-1": "prefill", "worker-2": "decode"}
        for name, role in roles.items():
            site.tell(SetWorkerRole(name, role))
            assert site.answers[-1].error == ""
        site.tell(SetWorkerRole("worker-1", "decode"))
        assert "last worker that may prefill" in site.answers[-1].error
        site.pass_time(2.0)
        before = {name: site.cluster.workers[name].load().num_prompt_tokens for name in site.cluster.workers}
        site.ask(200, 10)
        site.until(site.has_ended)
        after = {name: site.cluster.workers[name].load().num_prompt_tokens for name in site.cluster.workers}
        assert after["worker-1"] - before["worker-1"] == 200
        for name in site.cluster.workers:
            site.tell(SetWorkerRole(name, "any"))
        site.finish()
