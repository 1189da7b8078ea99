"""Reports that end the start of workers: other engines in a cluster, and pairs that are refused."""

from __future__ import annotations

import msgspec
import pytest

from tandem.deploy.cluster_config import load_config
from tandem.deploy.launch.start import UNREACHED_S, check_reports
from tandem.protocol.messages.membership import PairStatus, Role, StatusReport, WorkerInfo, WorkerLoad, WorkerReport
from tandem.runtime.errors import ConfigError

JOIN = {"join": "tcp://10.0.0.1:7777", "cluster_host": "10.0.0.2", "insecure_network": True}


def report(**engines: str) -> StatusReport:
    """Workers by name, with their engines; each has a refused pair with decode_0."""
    pair = PairStatus("decode-0", "epoch of decode_0", "refused", reason="engine differs")
    workers = [
        WorkerReport(WorkerInfo(name, f"epoch of {name}", "any", "", 1), WorkerLoad(), [pair], 0.0, engine=engine)
        for name, engine in engines.items()
    ]
    return StatusReport("proxy-0", "m", True, 0, workers)


def test_a_cluster_with_another_engine_is_joined_only_on_request() -> None:
    reports = [report(), report(decode_0="vllm 0.32.0", ours="tandem 0.1.0")]
    with pytest.raises(
        ConfigError, match=r"decode_0 .* runs vllm 0\.32\.0, not tandem; give --engine vllm, or --engine tandem to"
    ):
        check_reports(load_config(None, JOIN), reports, ["ours"])
    check_reports(load_config(None, {**JOIN, "engine": "tandem"}), reports, ["ours"])  # also: the pair does not count


@pytest.mark.parametrize("settings", [{}, JOIN])
@pytest.mark.parametrize("engine", ["tandem 0.1.0", ""])
def test_a_refused_pair_of_one_engine_ends_the_start(settings: dict[str, object], engine: str) -> None:
    config = load_config(None, settings)
    with pytest.raises(ConfigError, match="decode-0 refused to pair with a prefill worker: engine differs"):
        check_reports(config, [report(decode_0=engine, ours=engine)], ["ours"])
    check_reports(config, [report(decode_0=engine)], ["ours"])  # the pair of another host's worker


@pytest.mark.parametrize("reason", ["KV layout differs in dtype", "with --exact, workers must compute alike, but"])
@pytest.mark.parametrize(
    ("roles", "is_served"),
    [
        ({"ours": "any"}, True),
        ({"ours": "prefill", "ours-1": "decode"}, True),
        ({"ours": "prefill", "equal": "decode"}, True),
        ({"ours": "prefill", "equal": "prefill"}, False),
        ({"ours": "prefill", "unlike": "decode"}, False),
    ],
)
def test_workers_that_join_an_exact_cluster_may_be_unlike_others_if_they_serve_without_them(
    roles: dict[str, Role], is_served: bool, reason: str
) -> None:
    pair = PairStatus("decode-0", "epoch of decode-0", "refused", reason=reason)
    workers = [
        WorkerReport(
            WorkerInfo(name, f"epoch of {name}", role, "", 1), WorkerLoad(), [pair] if role != "decode" else [], 0.0,
            numerics="other" if name == "unlike" else "our", exact=True,
        )
        for name, role in {**roles, "decode-0": "decode", "unlike-0": "any"}.items()
    ]  # fmt: skip
    workers[-1] = msgspec.structs.replace(workers[-1], numerics="other")
    workers[-2] = msgspec.structs.replace(workers[-2], numerics="other")
    reports = [StatusReport("proxy-0", "m", True, 0, workers)]
    counts = {"prefill": 0, "decode": 0, "workers": 0}
    for name, role in roles.items():
        if name.startswith("ours"):
            counts["workers" if role == "any" else role] += 1
    ours = [name for name in roles if name.startswith("ours")]
    joining = load_config(None, {**JOIN, **counts})
    if is_served and reason.startswith("with --exact"):
        check_reports(joining, reports, ours)
    else:
        with pytest.raises(ConfigError, match=reason):
            check_reports(joining, reports, ours)
    with pytest.raises(ConfigError, match=reason):
        check_reports(load_config(None, {}), reports, ours)


@pytest.mark.parametrize(("role", "is_served"), [("any", True), ("prefill", False)])
def test_workers_may_join_with_another_version_of_the_engine_if_they_serve_without_the_others(
    role: Role, is_served: bool
) -> None:
    reason = "KV layout differs in engine: prefill has vllm LBNHC of 0.32.0, decode has vllm LBNHC of 0.31.0"
    pair = PairStatus("decode-0", "epoch of decode-0", "refused", reason=reason)
    workers = [
        WorkerReport(
            WorkerInfo(name, f"epoch of {name}", role, "", 1), WorkerLoad(), [pair] if name == "ours" else [], 0.0,
            engine=engine, numerics=engine,
        )
        for name, role, engine in (("ours", role, "vllm 0.32.0"), ("decode-0", "decode", "vllm 0.31.0"))
    ]  # fmt: skip
    reports = [StatusReport("proxy-0", "m", True, 0, workers)]
    counts = {"prefill": 0, "decode": 0, "workers": 0, "workers" if role == "any" else role: 1}
    config = load_config(None, {**JOIN, **counts, "engine": "vllm"})
    if is_served:
        check_reports(config, reports, ["ours"])
    else:
        with pytest.raises(ConfigError, match=f"decode-0 refused to pair with a prefill worker: {reason}"):
            check_reports(config, reports, ["ours"])


def test_a_worker_of_ours_that_a_proxy_does_not_reach_ends_the_start() -> None:
    info = WorkerInfo("ours", "e", "any", "tcp://127.0.0.1:4000", 1)

    def reported(unanswered_s: float | None) -> list[StatusReport]:
        worker = WorkerReport(info, WorkerLoad(), [], 0.0, unanswered_s=unanswered_s)
        return [report(), StatusReport("proxy-1", "m", True, 0, [worker])]

    config = load_config(None, JOIN)
    for unanswered_s in (None, 0.0, UNREACHED_S - 0.1):
        check_reports(config, reported(unanswered_s), ["ours"])
    check_reports(config, reported(UNREACHED_S), ["another host's"])
    with pytest.raises(
        ConfigError, match=r"proxy-1 .* no answer from it at tcp://127\.0\.0\.1:4000; give .*--cluster-host"
    ):
        check_reports(config, reported(UNREACHED_S), ["ours"])
