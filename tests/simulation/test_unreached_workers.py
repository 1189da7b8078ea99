"""Workers whose reports reach a proxy that does not reach them, in simulated time."""

from __future__ import annotations

import pytest

from tandem.handover.incoming import UNCLAIMED_TIMEOUT_S
from tests.simulation.simulated_site import FIXED, START_LIMIT_S, DrivenCluster, simulated_site

PAIR = FIXED.with_config(prefill=1, decode=1)
"""Workers prefill-0 and decode-0, without a substitute."""


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_no_request_waits_at_a_worker_that_reports_but_is_not_reached(name: str) -> None:
    """It is used by the proxy that reaches it, and again by the other one when the network has healed."""
    with simulated_site() as site:
        epochs = site.epochs()
        for number in range(8):
            site.ask(200, 60, proxy=number % 2)
        site.pass_time(0.1)
        site.cut_one_way("proxy-0", name)
        site.pass_time(0.1)
        for number in range(8):
            site.ask(proxy=number % 2)
        assert not uses(site, 0, name)
        site.until(lambda: uses(site, 1, name), UNCLAIMED_TIMEOUT_S / 2)
        site.until(site.has_ended, UNCLAIMED_TIMEOUT_S / 2)
        assert unanswered(site, 0) == {name} and not unanswered(site, 1)
        site.pass_time(20.0)
        site.heal()
        site.until(lambda: not unanswered(site, 0), 1.0)
        for _ in range(8):
            site.ask()
        site.until(lambda: uses(site, 0, name), UNCLAIMED_TIMEOUT_S / 2)
        assert site.finish() == ["finished"] * 24
        assert site.epochs() == epochs


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_worker_that_was_never_reached_since_it_started_gets_no_request(name: str) -> None:
    with simulated_site() as site:
        epoch = site.epochs()[name]
        for proxy in ("proxy-0", "proxy-1"):
            site.cut_one_way(proxy, name)
        site.strike("kill", name)
        site.until(lambda: site.epochs().get(name, epoch) != epoch, START_LIMIT_S)
        for number in range(8):
            site.ask(proxy=number % 2)
        site.until(site.has_ended, UNCLAIMED_TIMEOUT_S / 2)
        assert unanswered(site, 0) == unanswered(site, 1) == {name}
        site.heal()
        assert site.finish() == ["finished"] * 8


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_requests_wait_for_the_answer_of_the_only_worker(name: str) -> None:
    with simulated_site(PAIR) as site:
        site.cut_one_way("proxy-0", name)
        site.pass_time(1.0)
        site.ask()
        site.pass_time(30.0)
        assert site.attempt() is None and not site.has_ended()
        site.heal()
        site.until(site.has_ended, 2.0)
        assert site.finish() == ["finished"]


def uses(site: DrivenCluster, proxy: int, name: str) -> bool:
    """Whether a proxy has an attempt on the worker."""
    running = site.cluster.proxies[f"proxy-{proxy}"].dispatcher._running.values()
    return any(info.worker_id == name for each in running for info in (each.route.prefill, each.route.decode) if info)


def unanswered(site: DrivenCluster, proxy: int) -> set[str]:
    """Workers that do not answer a proxy."""
    return {name for name, report in site.reports(proxy).items() if report.unanswered_s is not None}
