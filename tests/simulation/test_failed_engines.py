"""A prompt ends each worker that computes it, in simulated time: it is refused, and no other request loses anything.

Each fault of `shell_mutations.FAILURES` excuses such an end, or blames nobody for it, and is shown here: seeds have no
such prompts.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Literal

import pytest

from tandem.proxy.dispatch.sequence import MAX_DEATHS
from tandem.simulator.engine import SimulatedEngine
from tandem.simulator.scenario import ClusterShape
from tandem.worker.presence import EngineFailed
from tests.simulation.cluster_mutations import apply, mutated
from tests.simulation.mutation import Mutation
from tests.simulation.shell_mutations import FAILURES
from tests.simulation.simulated_site import ELASTIC, FIXED, DrivenCluster, simulated_site

End = Literal["named", "not named", "exit 0", "exit 1"]
"""How a worker ends: it says that its engine has failed, with or without the names of the attempts in the step; or its
process exits in the middle of the step."""
_SHOWN = 9


def serve_beside_poison(shape: ClusterShape, end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: dict[SimulatedEngine, str] = {}
    post, report = SimulatedEngine._post, DrivenCluster.report

    def end_with_poison(engine: SimulatedEngine) -> None:
        batch, _ = engine._steps[0]
        first_token = site.requests[poison].prompt[0]
        if batch is not None and any(item.start == 0 and item.token_ids[0] == first_token for item in batch.items):
            engine.is_stopped = True
            failed[engine] = site.attempt().attempt_id
            if end.startswith("exit"):
                [worker] = [each for each in site.cluster.workers.values() if getattr(each, "engine", None) is engine]
                worker.exit(int(end.removeprefix("exit ")))
                return
        post(engine)

    def check(engine: SimulatedEngine, now: float) -> None:
        if engine in failed:
            raise EngineFailed("it met the poison", [failed[engine]] if end == "named" else [])

    def report_others(site: DrivenCluster, rule: str, details: str) -> None:
        if "it met the poison" not in details and "is refused" not in details:
            report(site, rule, details)

    monkeypatch.setattr(DrivenCluster, "report", report_others)
    with simulated_site(shape) as site:
        site.clients._expected.add("request_crashes_workers")
        poison = site.ask(100, 10, proxy=0)
        monkeypatch.setattr(SimulatedEngine, "_post", end_with_poison)
        monkeypatch.setattr(SimulatedEngine, "check", check)
        site.cluster.orderly.disturb("the poison")
        bystanders = [site.ask(60, 60, proxy=1) for _ in range(4)]
        site.until(lambda: bool(site.outcome(poison)), 60.0)
        outcomes = site.finish()
        assert outcomes[poison] == "request_crashes_workers"
        assert [outcomes[each] for each in bystanders] == ["finished"] * 4
        # What a worker says may be lost with its process.
        assert len(failed) <= MAX_DEATHS if end == "named" else len(failed) == MAX_DEATHS


@pytest.mark.parametrize("end", ["named", "not named", "exit 0", "exit 1"])
@pytest.mark.parametrize("shape", [FIXED, ELASTIC], ids=["fixed", "elastic"])
def test_a_prompt_that_ends_engines_is_refused_and_no_other(
    shape: ClusterShape, end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose engine fails by an error has not left in order, nor has one that a library ends with exit(0)."""
    serve_beside_poison(shape, end, monkeypatch)


def _serve_with(mutation: Mutation) -> None:
    """In a process of its own."""
    apply(mutation)
    for end in ("not named", "exit 0"):
        with pytest.MonkeyPatch.context() as monkeypatch:
            try:
                serve_beside_poison(FIXED, end, monkeypatch)
            except AssertionError:
                os._exit(_SHOWN)
    os._exit(0)


@pytest.mark.parametrize("mutation", FAILURES, ids=lambda mutation: mutation.what)
def test_a_fault_that_excuses_such_an_end_is_shown(mutation: Mutation) -> None:
    compile(mutated(mutation), mutation.file, "exec")
    process = multiprocessing.get_context("spawn").Process(target=_serve_with, args=(mutation,))
    process.start()
    process.join(300)
    assert process.exitcode == _SHOWN
