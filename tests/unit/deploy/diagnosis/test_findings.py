"""Each finding of `tandem doctor` appears from its limit on, and not below it."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.deploy.diagnosis.diagnosis import diagnose
from tandem.deploy.diagnosis.observation import HostFigures, Observation, ProcessUse, WorkerMemory
from tandem.protocol.messages.membership import PairTraffic, PredictionFigures, TierFigures
from tandem.protocol.messages.operations import LaunchedProcess
from tests.unit.deploy.diagnosis.figures import Cluster, pair, serving, usual_cluster


def texts(observation: Observation, kind: str) -> list[str]:
    return [finding.text for finding in diagnose(observation).findings if finding.kind == kind]


def kinds(observation: Observation) -> list[str]:
    return [finding.kind for finding in diagnose(observation).findings]


def decode(now: dict[str, Any] | None = None, before: dict[str, Any] | None = None, **report: Any) -> Observation:
    """A cluster whose decode worker differs."""
    return Cluster().worker("prefill-0").worker("decode-0", now, before, **report).observe()


def test_a_usual_cluster_has_no_findings() -> None:
    assert kinds(usual_cluster().observe()) == []


# ---- pairs


@pytest.mark.parametrize(
    ("status", "host", "kind"),
    [
        (pair("decode-0"), "a", None),
        (pair("decode-0", connector="tcp"), "a", "slow connector"),
        (pair("decode-0", connector="tcp"), "b", None),
        (pair("decode-0", connector="gloo"), "b", "slow connector"),
        (pair("decode-0", connector="nccl", reason="ipc: no peer access"), "a", "no peer access"),
        (pair("decode-0", "refused", reason="KV layout differs in dtype"), "b", "pair"),
        (pair("decode-0", "failed", reason="the peer is gone"), "a", "pair"),
        (pair("decode-0", "opening"), "a", "pair"),
        (pair("decode-9", "failed"), "a", None),  # the peer has left
    ],
)
def test_pairs(status: Any, host: str, kind: str | None) -> None:
    observation = Cluster().worker("prefill-0", pairs=[status]).worker("decode-0", host=host).observe()
    assert kinds(observation) == ([kind] if kind else [])
    if kind is not None and status.reason:
        assert status.reason in diagnose(observation).findings[0].text


@pytest.mark.parametrize(("seconds", "num_shipments", "is_slow"), [(1.0, 10, False), (3.2, 10, True), (3.2, 9, False)])
def test_a_pair_is_slow_below_a_third_of_the_others(seconds: float, num_shipments: int, is_slow: bool) -> None:
    cluster = Cluster().worker("decode-0")
    for name, took_s in (("prefill-0", 1.0), ("prefill-1", seconds)):
        now = {"traffic": [PairTraffic("decode-0", 10_000_000, num_shipments, took_s)]}
        cluster.worker(name, now, {"traffic": []}, pairs=[pair("decode-0")])
    found = texts(cluster.observe(), "slow pair")
    assert len(found) == is_slow
    if found:
        assert "prefill-1 to decode-0 moves 3.1 MB/s" in found[0] and "10.0 MB/s" in found[0]


# ---- workers


@pytest.mark.parametrize(
    ("now", "before", "kind"),
    [
        ({"num_corrupt_blocks": 2, "num_compared_blocks": 9}, {"num_corrupt_blocks": 1}, "corrupt blocks"),
        ({"num_corrupt_blocks": 2, "num_compared_blocks": 9}, {}, None),  # before
        ({"num_preempted": 3}, {"num_preempted": 2}, "preemptions"),
        ({"num_preempted": 3}, {}, None),
        ({"num_free_blocks": 4}, None, "full pool"),
        ({"num_free_blocks": 6}, None, None),
        ({"num_quarantined_blocks": 5}, None, "quarantine"),
        ({"num_quarantined_blocks": 4}, None, None),
    ],
)
def test_blocks_of_a_worker(now: dict[str, Any], before: dict[str, Any] | None, kind: str | None) -> None:
    assert kinds(decode(now, before)) == ([kind] if kind else [])


@pytest.mark.parametrize(
    ("silence_s", "draining", "kind"), [(1.5, False, "silent worker"), (1.4, False, None), (0.1, True, "draining")]
)
def test_a_worker_that_is_silent_or_drains(silence_s: float, draining: bool, kind: str | None) -> None:
    assert kinds(decode(silence_s=silence_s, draining=draining)) == ([kind] if kind else [])


@pytest.mark.parametrize(("unanswered_s", "kind"), [(None, None), (0.1, None), (1.5, "unreachable worker")])
def test_a_worker_that_does_not_answer_a_proxy(unanswered_s: float | None, kind: str | None) -> None:
    cluster = decode(unanswered_s=unanswered_s)
    assert kinds(cluster) == ([kind] if kind else [])


@pytest.mark.parametrize(
    ("name", "now", "is_slow"),
    [
        ("prefill-1", {"prompt_tokens_per_s": 620.0}, True),
        ("prefill-1", {"prompt_tokens_per_s": 630.0}, False),
        ("prefill-1", {"prompt_tokens_per_s": 0.0}, False),  # not measured
        ("decode-1", {"fixed_step_s": 0.017}, True),
        ("decode-1", {"fixed_step_s": 0.016}, False),
    ],
)
def test_a_worker_that_is_slower_than_its_peers(name: str, now: dict[str, Any], is_slow: bool) -> None:
    cluster = usual_cluster().worker("decode-2").worker("prefill-2").worker(name, now)
    found = texts(cluster.observe(), "slow worker")
    assert len(found) == is_slow and all(name in text for text in found)


def test_processes_that_are_started_again_and_again() -> None:
    processes = [LaunchedProcess("decode-0", 1, 3), LaunchedProcess("prefill-0", 1, 2)]
    [text] = texts(usual_cluster().observe(processes=processes), "restarts")
    assert text.startswith("decode-0 has been started 3 times")


# ---- caches and tiers


@pytest.mark.parametrize(
    ("num_cached", "num_finished", "is_said"),
    [(0, 20, True), (0, 19, False), (19, 20, True), (20, 20, False)],
)
def test_prefix_hits_that_never_come(num_cached: int, num_finished: int, is_said: bool) -> None:
    now = {"num_prompt_tokens": 2000, "num_cached_tokens": num_cached, "num_finished": num_finished}
    found = texts(Cluster().worker("prefill-0", now).worker("decode-0").observe(), "no hits")
    assert len(found) == is_said
    if found:
        assert "2,000 prompt tokens" in found[0] and "50 blocks are kept" in found[0]


def test_prefixes_that_are_evicted_are_told_from_those_that_differ() -> None:
    now = {"num_prompt_tokens": 2000, "num_finished": 20, "num_cached_blocks": 3}
    [text] = texts(Cluster().worker("prefill-0", now).worker("decode-0").observe(), "no hits")
    assert "evicted before they return" in text


def test_short_prompts_cannot_be_cached() -> None:
    now = {"num_prompt_tokens": 600, "num_finished": 20}  # 30 tokens each, and blocks of 16
    assert kinds(Cluster().worker("prefill-0", now).worker("decode-0").observe()) == []


@pytest.mark.parametrize(("speed", "kind"), [(999.0, ["slow tier"]), (1000.0, []), (0.0, [])])
def test_a_tier_slower_than_computing(speed: float, kind: list[str]) -> None:
    assert kinds(decode({"loaded_tokens_per_s": speed, "tiers": [TierFigures("disk", num_loaded=1)]})) == kind


@pytest.mark.parametrize(
    ("now", "before", "kind"),
    [
        ({"error": "cannot pin 8 GiB of host memory"}, {}, ["tier fails"]),
        ({"num_skipped": 9, "num_stored": 8}, {}, ["tier behind"]),
        ({"num_skipped": 8, "num_stored": 8}, {}, []),
        ({"num_stored": 201}, {}, ["unused tier"]),
        ({"num_stored": 200}, {}, []),
        ({"num_stored": 201, "num_loaded": 1}, {}, []),
        ({"num_corrupt": 1}, {}, ["tier corrupt"]),
        ({"num_corrupt": 1}, {"num_corrupt": 1}, []),
    ],
)
def test_tiers(now: dict[str, Any], before: dict[str, Any], kind: list[str]) -> None:
    observation = decode({"tiers": [TierFigures("host", **now)]}, {"tiers": [TierFigures("host", **before)]})
    assert kinds(observation) == kind
    if "error" in now:
        assert "cannot pin 8 GiB" in texts(observation, "tier fails")[0]


# ---- proxies


def test_proxies_that_do_not_answer() -> None:
    [text] = texts(usual_cluster().observe(num_silent_proxies=2), "silent proxy")
    assert text.startswith("2 proxies did not answer")


@pytest.mark.parametrize(
    ("measured_s", "num", "is_said"), [(20.0, 100, True), (19.0, 100, False), (2.0, 19, False), (4.0, 100, True)]
)
def test_predictions_that_are_wrong(measured_s: float, num: int, is_said: bool) -> None:
    now = serving(num, ttft=PredictionFigures(num, 10.0, measured_s, 1.0))
    assert len(texts(usual_cluster().observe(now), "predictions")) == is_said


def test_refused_requests() -> None:
    [text] = texts(usual_cluster().observe(serving(100, num_refused=50)), "refusals")
    assert text.startswith("10 requests/s are refused")


# ---- hosts


def host(busy: float, own: float = 1.0, stolen: float = 0.0, **fields: Any) -> HostFigures:
    neighbours = (ProcessUse(77, "stress-ng", 1.4), ProcessUse(78, "bash", 0.01))
    return HostFigures(4, busy, own, stolen, neighbours, **fields)


@pytest.mark.parametrize(
    ("figures", "kind"),
    [
        (host(3.2), ["neighbours"]),
        (host(3.1), []),  # CPUs are left
        (host(3.9, own=3.5), []),  # the cluster's own
        (host(2.0, stolen=0.2), ["stolen cpus"]),
        (host(2.0, stolen=0.19), []),
    ],
)
def test_neighbours(figures: HostFigures, kind: list[str]) -> None:
    observation = usual_cluster().observe(host=figures)
    assert kinds(observation) == kind
    if kind == ["neighbours"]:
        assert "stress-ng (77) 1.4." in texts(observation, "neighbours")[0]


@pytest.mark.parametrize(
    ("figures", "is_said"),
    [
        (host(2.0, own=1.6, cpu_quota=2.0), True),
        (host(2.0, own=1.5, cpu_quota=2.0), False),
        (host(0.5, own=0.45, cpu_quota=0.5), True),
        (host(3.9, own=3.9, cpu_quota=4.0), False),  # as many as the host has
        (host(3.9, own=3.9), False),
    ],
)
def test_a_cpu_quota_that_is_used_up(figures: HostFigures, is_said: bool) -> None:
    said = texts(usual_cluster().observe(host=figures), "cpu quota")
    assert len(said) == is_said
    if is_said:
        assert f"the quota of its control group is {figures.cpu_quota:.1f} of this host's 4" in said[0]


@pytest.mark.parametrize(
    ("prefill", "decode", "kind"),
    [
        (WorkerMemory(frozenset({0}), {0: 70, 1: 30}), WorkerMemory(frozenset({0}), {0: 1}), ["numa memory"]),
        (WorkerMemory(frozenset({0}), {0: 71, 1: 29}), WorkerMemory(frozenset({0}), {0: 1}), []),
        (WorkerMemory(frozenset({0, 1}), {0: 1, 1: 99}), WorkerMemory(frozenset({0}), {0: 1}), []),
        (WorkerMemory(frozenset({0}), {0: 1}), WorkerMemory(frozenset({1}), {1: 1}), ["numa pair"]),
    ],
)
def test_numa_nodes(prefill: WorkerMemory, decode: WorkerMemory, kind: list[str]) -> None:
    memory = {"prefill-0": prefill, "decode-0": decode}
    assert kinds(usual_cluster().observe(host=host(1.0, num_nodes=2, memory=memory))) == kind


@pytest.mark.parametrize(("offset_s", "is_said"), [(2.0, True), (-37.0, True), (1.9, False)])
def test_clocks(offset_s: float, is_said: bool) -> None:
    assert len(texts(usual_cluster().observe(clock_offsets_s={"decode-0": offset_s}), "clock")) == is_said
