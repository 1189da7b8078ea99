"""The router alone: its choice depends on workers' reports, this proxy's requests and one random number."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.proxy.cluster.router import PromptShape, Route, SLOUnreachable
from tandem.runtime.errors import Overloaded
from tests.unit.proxy.cluster.router_machine import RouterMachine, shape


def test_predictions_learn_from_measured_first_tokens() -> None:
    world = RouterMachine(1, 1)
    for _ in range(60):
        route = world.router.pick(PromptShape(998))
        world.router.prefill_ended(route, 2.0)
    with pytest.raises(SLOUnreachable, match=r"predicted after 2\.0"):
        world.router.pick(PromptShape(998), max_ttft_s=1.5)


def test_a_route_names_its_placement() -> None:
    apart, elastic = RouterMachine(1, 1).router, RouterMachine(0, 0, num_any=1).router
    assert apart.pick(PromptShape(8)).placement == "two"
    assert apart.pick(PromptShape(8, needs_decode=False)).placement == "prefill_only"
    assert elastic.pick(PromptShape(8)).placement == "same"
    assert RouterMachine(0, 1, threshold=100).router.pick(PromptShape(8)).placement == "deflected"


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["pick", "first", "end", "report", "lose", "return", "tier"]), st.integers(0, 9)),
        max_size=60,
    )
)
def test_ended_requests_leave_no_load(events: list[tuple[str, int]]) -> None:
    world = RouterMachine(2, 2, threshold=8, num_proxies=2)
    waiting: list[Route] = []
    running: list[Route] = []
    for event, number in events:
        if event == "pick":
            try:
                prompt = shape(list(range(4 * number + 1)), num_sequences=2, priority=number % 3 - 1)
                route = world.router.pick(prompt)
            except Overloaded:
                continue
            waiting.append(route)
            running += [route, route]
        elif event == "first" and waiting:
            world.router.prefill_ended(waiting.pop(number % len(waiting)))
        elif event == "end" and running:
            world.router.sequence_ended(running.pop(number % len(running)))
        elif event == "report":
            info = (world.prefills + world.decodes)[number % 4]
            world.report(info, waiting_tokens=[(0, number)], running=number)
        elif event == "tier":  # the cost of loading changes while prompts are in flight
            info = (world.prefills + world.decodes)[number % 4]
            world.keep_in_tier(info, list(range(4 * number)), loaded_tokens_per_s=600.0 * number)
        elif event == "lose" and number < 2:
            world.table.on_exited(f"decode-{number}", 1, "crash")
        elif event == "return":  # lost and back under the same epoch: load from before does not count
            info = (world.prefills + world.decodes)[number % 4]
            world.table.on_left(info.epoch)
            world.join(info)
    for route in waiting:
        world.router.prefill_ended(route)
    for route in running:
        world.router.sequence_ended(route)
    for record in world.table.prefill_workers + world.table.decode_workers:
        world.report(record.worker)
        assert record.use.is_idle
        assert (record.use.prompts.total, record.use.num_sequences, record.use.num_free_blocks) == (0, 0, 100)


@given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 15))
def test_decode_is_promised_what_its_cache_lacks_and_blocks_for_each_sequence(
    num_tokens: int, num_sequences: int, num_held: int
) -> None:
    """Blocks have four tokens. Sequences share the prompt's full blocks, and need room for one token more each."""
    world = RouterMachine(1, 1)
    prompt = list(range(num_tokens))
    num_held = min(num_held, num_tokens // 4)
    world.cache(world.decodes[0], prompt[: 4 * num_held])
    route = world.router.pick(shape(prompt, num_sequences=num_sequences))
    num_full, num_all = num_tokens // 4, -(-(num_tokens + 1) // 4)
    assert route.num_blocks == num_full - num_held + num_sequences * (num_all - num_full)
    [record] = world.table.decode_workers
    assert record.use.num_free_blocks == 100 - route.num_blocks and record.use.num_sequences == num_sequences
