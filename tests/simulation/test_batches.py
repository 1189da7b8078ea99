"""Batches in simulated time: the rules about their slots, and the rest of `simulator.batches` by whole runs."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from tandem.simulator.batches import CheckedSlots
from tandem.simulator.run import run
from tandem.simulator.scenario import ClusterShape, Fault, Request, Scenario, cluster_config, of_batch


def test_a_batch_ends_with_all_results_whatever_ends_its_proxies() -> None:
    rng = random.Random(0)
    shape = ClusterShape(cluster_config(prefill=1, decode=2, proxies=2), num_blocks=100)
    prompts = [tuple(rng.randrange(1, 50_000) for _ in range(50)) for _ in range(12)]
    lines = tuple(of_batch(Request(number, 2.0, 0, prompt, 40, 1, 0, 5.0, 3)) for number, prompt in enumerate(prompts))
    faults = tuple(Fault(2.1 + number, "kill proxy", number % 2, 0, 0.0) for number in range(2))
    result = run(Scenario(1, shape, lines, (*faults, Fault(6.0, "leave proxy", 0, 0, 0.0))))
    assert not result.violations and result.outcomes == {"finished": len(lines)}


def test_a_line_that_ends_its_proxies_again_and_again_fails() -> None:
    shape = ClusterShape(cluster_config(prefill=1, decode=1, proxies=1), num_blocks=100)
    line = of_batch(Request(0, 2.0, 0, tuple(range(1, 60)), 300, 1, 0, 5.0, None))
    line = replace(line, wishes=replace(line.wishes, ignore_eos=True))
    faults = tuple(Fault(2.3 + 2.5 * number, "kill proxy", 0, 0, 0.0) for number in range(4))
    result = run(Scenario(1, shape, (line,), faults))
    assert not result.violations and sum(result.outcomes.values()) == 1


async def _slots_of(served: list[str], rules: list[str], slots: CheckedSlots) -> None:
    async def take(client: str) -> None:
        async with slots.slot(client):
            served.append(client)
            await asyncio.sleep(0)

    await asyncio.gather(*(take(client) for client in "aaabb"))


def test_a_client_that_is_passed_is_reported() -> None:
    rules: list[str] = []
    served: list[str] = []

    class Unfair(CheckedSlots):
        def _grant(self) -> None:
            """Each free slot goes to the waiting client whose name sorts first, however often that one was served."""
            for place, client in enumerate(sorted(self._waiting)):
                self._waiting[client].place = place
            super()._grant()

    asyncio.run(_slots_of(served, rules, CheckedSlots(lambda rule, details: rules.append(rule), 1, 1)))
    assert not rules and sorted(served) == [*"aaabb"]
    asyncio.run(_slots_of([], rules, Unfair(lambda rule, details: rules.append(rule), 1, 1)))
    assert "a client is passed by another" in rules
