"""What the table of workers says about exact answers, and where the router lets them continue."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.messages.membership import PROTOCOL_VERSION, RegisterWorker
from tandem.protocol.messages.numerics import Numerics
from tandem.proxy.cluster.router import NoWorkerReady, PromptShape
from tandem.proxy.cluster.worker_table import WorkerTable
from tests.unit.proxy.cluster.router_machine import RouterMachine, worker

NEWER = Numerics(instruction_set="avx512", dtype="bfloat16")
OLDER = msgspec.structs.replace(NEWER, instruction_set="avx2")
INEXACT = msgspec.structs.replace(NEWER, problem="expert products depend on the batch")


def table_of(*workers: tuple[str, Numerics, bool], decode_may_prefill: bool = False) -> WorkerTable:
    table = WorkerTable(2.5, decode_may_prefill)
    for name, numerics, exact in workers:
        message = RegisterWorker(PROTOCOL_VERSION, worker(name), 100, 100, "m", 4, numerics=numerics, exact=exact)
        table.on_register(0, message)
    return table


def test_equal_workers_are_exact_with_and_without_the_flag() -> None:
    for exact in (False, True):
        found = table_of(("prefill-0", NEWER, exact), ("decode-0", NEWER, exact)).exactness()
        assert found == (True, f"yes (numerics {NEWER.digest})")
    assert WorkerTable(2.5).exactness() == (False, "")


def test_a_problem_is_named_with_the_workers_that_have_it() -> None:
    names = [f"prefill-{number}" for number in range(5)]
    is_exact, text = table_of(*((name, INEXACT, False) for name in names), ("decode-0", NEWER, False)).exactness()
    assert not is_exact
    assert text == "no: expert products depend on the batch (prefill-0, prefill-1, prefill-2 and 2 more)"


def test_unequal_workers_are_named_with_the_field_and_both_values() -> None:
    is_exact, text = table_of(("prefill-0", NEWER, False), ("decode-1", OLDER, False)).exactness()
    assert not is_exact and text.startswith("no: workers compute differently: ")
    assert "instruction_set is avx2 on decode-1 and avx512 on prefill-0" in text
    is_exact, text = table_of(("prefill-0", NEWER, True), ("decode-1", OLDER, True)).exactness()
    assert is_exact and text.startswith("yes, on 2 kinds of workers, each of which continues its own answers only: ")
    is_exact, text = table_of(("prefill-0", NEWER, True), ("decode-1", OLDER, False)).exactness()
    assert not is_exact


OURS = (("prefill-0", NEWER, True), ("decode-0", NEWER, True))


@pytest.mark.parametrize(
    ("joined", "expected"),
    [
        (["decode-9"], "decode-9 gets no work: no prefill worker computes alike, which --exact requires"),
        (["decode-8", "decode-9"], "decode-8, decode-9 get no work: no prefill worker computes alike, which --exact"),
        (["prefill-9"], "prefill-9 gets only prompts whose answer is one token: no decode worker computes alike"),
        (["prefill-9", "decode-9"], ""),
        (["worker-9"], ""),
        (["worker-9", "decode-9"], ""),
    ],
)
def test_workers_without_work_among_workers_of_another_kind_are_named(joined: list[str], expected: str) -> None:
    table = table_of(*OURS, *((name, OLDER, True) for name in joined))
    is_exact, text = table.exactness()
    assert is_exact and (expected in text if expected else "get" not in text)
    assert [expected in each for each in table.unused_kinds()] == ([True] if expected else [])


def test_decode_workers_that_compute_short_prompts_have_a_little_work() -> None:
    table = table_of(*OURS, ("decode-9", OLDER, True), decode_may_prefill=True)
    assert "decode-9 gets only prompts that decode workers compute themselves" in table.exactness()[1]
    decodes = (("decode-0", NEWER, True), ("decode-9", OLDER, True))
    assert not table_of(*decodes, decode_may_prefill=True).unused_kinds(), "without prefill workers they compute all"


def test_workers_lack_work_only_where_one_of_a_pair_is_exact() -> None:
    assert not table_of(("prefill-0", NEWER, False), ("decode-9", OLDER, False)).unused_kinds()
    mixed = table_of(*OURS, ("decode-9", OLDER, False))
    assert "decode-9 gets no work" in mixed.exactness()[1]
    assert not table_of(("prefill-0", NEWER, True)).unused_kinds(), "then the cluster is not ready, which is said"
    table = table_of(*OURS, ("decode-9", OLDER, True))
    table.on_drain_ordered(0, "decode-9")
    assert not table.unused_kinds()


def test_workers_without_work_are_named_beside_any_number_of_kinds() -> None:
    kinds = [msgspec.structs.replace(NEWER, num_threads=number) for number in range(300)]
    _, text = table_of(*((f"decode-{number}", kind, True) for number, kind in enumerate(kinds))).exactness()
    assert "gets no work" in text and text.endswith("; and 297 more") and len(text) < 1000


def test_what_is_said_is_bounded() -> None:
    kinds = [msgspec.structs.replace(NEWER, num_threads=number) for number in range(300)]
    _, text = table_of(*((f"decode-{number}", kind, False) for number, kind in enumerate(kinds))).exactness()
    assert "and 296 more" in text and len(text) < 500
    inexact = [msgspec.structs.replace(NEWER, problem=f"reason {number}") for number in range(300)]
    _, text = table_of(*((f"decode-{number}", kind, False) for number, kind in enumerate(inexact))).exactness()
    assert "and 297 more" in text and len(text) < 500


def world_of(kinds: list[Numerics], exact: bool, threshold: int) -> RouterMachine:
    """Two workers of each role, and all pairs ready; the worker with number i has kinds[i % len(kinds)]."""
    world = RouterMachine(2, 2, threshold=threshold, num_any=2)
    for number, info in enumerate(world.workers):
        again = msgspec.structs.replace(info, epoch=f"{info.worker_id}/2")
        world.workers[number] = again
        for group in (world.prefills, world.decodes, world.elastic):
            group[:] = [again if each.worker_id == again.worker_id else each for each in group]
        world.logs[again.epoch], world.tier_logs[again.epoch] = world.logs[info.epoch], world.tier_logs[info.epoch]
        numerics = kinds[number % len(kinds)]
        message = RegisterWorker(PROTOCOL_VERSION, again, 4096, 1000, "m", 4, numerics=numerics, exact=exact)
        world.table.on_register(0, message)
    for info in world.workers:
        world.report(info)
    return world


@given(st.sampled_from([0, 64]), st.lists(st.tuples(st.integers(1, 300), st.booleans(), st.booleans()), max_size=12))
def test_exact_answers_continue_on_equal_workers_only(threshold: int, prompts: list[tuple[int, bool, bool]]) -> None:
    world = world_of([NEWER, OLDER], True, threshold)
    numerics = {record.worker.epoch: record.registered.numerics.digest for record in world.table._by_epoch.values()}
    for num_tokens, needs_decode, is_newer in prompts:
        wanted = (NEWER if is_newer else OLDER).digest
        route = world.router.pick(PromptShape(num_tokens, needs_decode=needs_decode, numerics=wanted))
        assert {numerics[each.epoch] for each in route.workers} == {wanted} and route.numerics == wanted


@pytest.mark.parametrize("exact", [True, False])
def test_the_first_tokens_workers_decide_only_if_they_are_exact(exact: bool) -> None:
    world = world_of([NEWER], exact, 0)
    assert world.router.pick(PromptShape(10)).numerics == (NEWER.digest if exact else "")


def test_without_an_equal_worker_the_reason_says_so() -> None:
    world = world_of([NEWER], True, 64)
    with pytest.raises(NoWorkerReady, match=f"computes as this answer began .numerics {OLDER.digest}., which --exact"):
        world.router.pick(PromptShape(10, numerics=OLDER.digest))
