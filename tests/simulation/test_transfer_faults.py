"""Each fault in each state of a transfer, one at a time, over the fake connector.

Afterwards the other pair is unaffected, every request has ended exactly once, and no block is lost. Random orders are
in `tests.simulation.test_transfer`, real processes in `tests/faults`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest

from tandem.decode_worker.transfer import IncomingTransfer
from tandem.protocol.messages.transfer import FinishTransfer, KVReserved, ReserveKV
from tests.simulation.simulated_workers import LAYOUT, LEASE_S, NUM_BLOCKS, Worker
from tests.simulation.transfer_world import Wanted, World
from tests.support.fake_connector import Faults

PROMPT, OTHER_PROMPT = [7] * 3 + [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13], [20, 21, 22]
SIDES = pytest.mark.parametrize("one_sided", [True, False], ids=["one-sided", "two-sided"])
ROLES = pytest.mark.parametrize("elastic", [False, True], ids=["fixed roles", "elastic"])


@dataclass
class Case:
    """A world in which `victim` is being transferred by the first prefill worker."""

    world: World
    victim: Wanted

    @property
    def prefill(self) -> Worker:
        assert self.victim.prefill is not None
        return self.victim.prefill

    @property
    def transfer(self) -> IncomingTransfer | None:
        return self.world.decode.scheduler.decode._transfers.get(f"t-{self.victim.attempt_id}")

    @property
    def path_id(self) -> str:
        return path_of(self.world, self.prefill)

    def waits(self, process: Worker, kind: type) -> bool:
        """Whether a message of this kind is in flight to the process."""
        return any(isinstance(message, kind) for queue in process.inbox.values() for message in queue)

    def is_in_flight(self) -> bool:
        """Whether a shipment has begun and is not complete."""
        path = self.world.network._paths[self.path_id]
        return path.transfer is not None and bool(path.transfer.arrivals)


def path_of(world: World, prefill: Worker) -> str:
    """Returns the path on which the worker ships to the one that decodes."""
    path_id = prefill.path_to(world.decode)
    assert path_id is not None
    return path_id


STATES: dict[str, Callable[[Case], bool]] = {
    "dispatched": lambda case: True,
    "reserving": lambda case: case.waits(case.world.decode, ReserveKV),
    "reserved": lambda case: case.waits(case.prefill, KVReserved),
    "shipping": lambda case: case.is_in_flight(),
    "shipped in part": lambda case: case.transfer is not None and case.transfer.num_arrived_blocks > 0,
    "finishing": lambda case: case.waits(case.world.decode, FinishTransfer),
    "decoding": lambda case: len(case.victim.tokens) >= 3,
}


def notice(world: World, process: Worker) -> None:
    """The process is frozen until all others have noticed, then wakes up."""
    world.freeze(process)
    world.notice_silence(process)
    world.run_to_rest()
    world.thaw(process)


def stall(world: World, process: Worker, seconds: float) -> None:
    """Too short to be declared lost, but perhaps longer than a lease or a path's time-out."""
    world.freeze(process)
    world.run_to_rest()
    world.pass_time(seconds)
    world.run_to_rest()
    world.thaw(process)


def lose_client(case: Case) -> None:
    """Both workers end its request at once."""
    world = case.world
    world.abort(case.victim)
    world.deliver_all()
    key = "proxy", case.victim.attempt_id
    assert key not in case.prefill.scheduler.prefill._by_request
    assert key not in world.decode.scheduler.decode._by_request


def disorder(case: Case) -> None:
    """Control messages of its pair arrive in any order and in duplicate, until both have happened. Three more prompts
    ensure that there are messages in every state."""
    world = case.world
    world.disordered = {case.path_id}
    for number in range(3):
        world.ask([number, *PROMPT[1:]], 3, case.prefill)
    world.advance(lambda: min(world.num_reordered, world.num_duplicated) > 0)
    world.disordered = set()


FAULTS: dict[str, Callable[[Case], None]] = {
    "prefill exits": lambda case: case.world.restart(case.prefill),
    "decode exits": lambda case: case.world.restart(case.world.decode),
    "prefill freezes, is declared lost and resumes": lambda case: notice(case.world, case.prefill),
    "decode freezes, is declared lost and resumes": lambda case: notice(case.world, case.world.decode),
    "prefill stalls": lambda case: stall(case.world, case.prefill, LEASE_S * 1.5),
    "decode stalls": lambda case: stall(case.world, case.world.decode, LEASE_S * 1.5),
    "its client disconnects": lose_client,
    "prefill closes the pair": lambda case: case.prefill.perform_pairs(
        case.prefill.outgoing.fail(case.world.now, case.path_id, "clogged")
    ),
    "decode closes the pair": lambda case: case.world.decode.perform_pairs(
        case.world.decode.incoming.fail(case.path_id, "broke the rules")
    ),
    "messages are duplicated and reordered": disorder,
}
LOSE_DECODE = ("decode exits", "decode freezes, is declared lost and resumes")
STOP_DECODE = (*LOSE_DECODE, "decode stalls")
"""Affects the other pair too: its messages may be lost, or its leases may expire."""
ENDS = {"length", "aborted", "worker_lost", "kv_transfer_failed"}


@SIDES
@ROLES
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_each_state(fault: str, state: str, one_sided: bool, elastic: bool) -> None:
    case = begin(one_sided, elastic)
    world, neighbour = case.world, case.world.prefills[1]
    path_id = path_of(world, neighbour)
    case.world.advance(lambda: STATES[state](case))
    beside = world.ask(OTHER_PROMPT, 6, neighbour)
    FAULTS[fault](case)
    if fault not in STOP_DECODE:  # no time passes
        world.advance(lambda: beside.ended is not None)
        assert beside.ended == "length", "the other pair noticed"
    world.settle()
    assert case.victim.ended in ENDS
    if "stalls" not in fault and "messages" not in fault:
        assert (case.victim.ended == "aborted") == (fault == "its client disconnects")
    if fault not in LOSE_DECODE:
        assert path_of(world, neighbour) == path_id, "the other pair was reopened"
    serves(world)


def begin(one_sided: bool, elastic: bool) -> Case:
    world = World(1, one_sided, elastic=elastic)
    world.network.faults = Faults()
    world.run_to_rest()
    return Case(world, world.ask(PROMPT, 6, world.prefills[0]))


def serves(world: World) -> None:
    asked = [world.ask(PROMPT, 6, prefill, decode) for prefill, decode in world.routes()]
    world.settle()
    assert [each.ended for each in asked] == ["length"] * len(asked)


@SIDES
@ROLES
def test_a_stalled_transfer_fails_only_its_pair(one_sided: bool, elastic: bool) -> None:
    case = begin(one_sided, elastic)
    world, neighbour = case.world, case.world.prefills[1]
    path_id = path_of(world, neighbour)
    world.network.faults = Faults(loss=1.0)
    world.advance(lambda: world.network.num_lost_transfers == 1)
    world.network.faults = Faults()
    beside = world.ask(OTHER_PROMPT, 6, neighbour)
    world.advance(lambda: beside.ended is not None)
    world.settle()
    assert (case.victim.ended, beside.ended, path_of(world, neighbour)) == ("kv_transfer_failed", "length", path_id)
    serves(world)


@SIDES
@ROLES
def test_a_corrupt_block_fails_only_its_transfer(one_sided: bool, elastic: bool) -> None:
    case = begin(one_sided, elastic)
    world = case.world
    paths = [path_of(world, prefill) for prefill in world.prefills]
    world.network.faults = Faults(corruption=1.0)
    world.advance(lambda: world.network.num_corrupted_blocks == 1)
    world.network.faults = Faults()
    world.settle()
    assert (case.victim.ended, world.num_found_corrupt) == ("kv_transfer_failed", 1)
    assert [path_of(world, prefill) for prefill in world.prefills] == paths, "the pairs stay ready"
    serves(world)


@SIDES
@ROLES
def test_an_expired_lease_fails_only_its_transfer(one_sided: bool, elastic: bool) -> None:
    """Decode is stalled for longer than its leases, but not declared lost."""
    case = begin(one_sided, elastic)
    world = case.world
    paths = [path_of(world, prefill) for prefill in world.prefills]
    world.advance(lambda: case.waits(world.decode, ReserveKV))
    stall(world, world.decode, LEASE_S * 1.5)
    assert world.num_expired_leases == 1
    blocks = case.prefill.scheduler.blocks
    assert blocks.num_free == blocks.num_blocks, "prefill has its blocks back before decode wakes"
    world.settle()
    assert case.victim.ended == "kv_transfer_failed"
    assert [path_of(world, prefill) for prefill in world.prefills] == paths, "the pairs stay ready"
    serves(world)


@ROLES
def test_late_writes_of_a_resumed_worker_hit_no_reused_block(elastic: bool) -> None:
    """A prefill worker is frozen during a shipment; decode then fills all its blocks, and the prefill worker
    continues."""
    case = begin(True, elastic)
    world, neighbour = case.world, case.world.prefills[1]
    world.advance(case.is_in_flight)
    world.freeze(case.prefill)
    world.abort(case.victim)
    world.notice_silence(case.prefill)
    beside = [world.ask([20 + i, 21, 22], 6, neighbour) for i in range(4)]
    for each in beside:
        world.advance(lambda each=each: each.ended is not None)  # type: ignore[misc]
    assert case.transfer is not None
    assert NUM_BLOCKS - world.decode.scheduler.blocks.num_free == len(case.transfer.own_block_ids) > 0
    world.thaw(case.prefill)
    world.settle()
    assert world.num_late_writes > 0, "the resumed worker wrote nothing, so the test proves nothing"
    assert [each.ended for each in beside] == ["length"] * 4
    serves(world)


@SIDES
@ROLES
def test_decode_without_blocks_makes_prompts_wait(one_sided: bool, elastic: bool) -> None:
    """Each prompt takes five of nine blocks."""
    case = begin(one_sided, elastic)
    world = case.world
    asked = [case.victim, *(world.ask([i, *PROMPT[1:]], 5, world.prefills[i % 2]) for i in range(4))]

    def must_wait() -> bool:
        """Both its messages are here, and there are too few blocks for it."""
        decode = world.decode.scheduler.decode
        waiting = [t for t in decode._transfers.values() if t.pair_id and not t.is_reserved]
        return decode.blocks.num_free < 5 and any(t.transfer_id in decode._by_transfer for t in waiting)

    world.advance(must_wait)
    world.advance(lambda: all(each.ended for each in asked))
    assert [each.ended for each in asked] == ["length"] * 5
    world.settle()


@SIDES
def test_a_layout_mismatch_is_refused_and_the_other_pair_serves(one_sided: bool) -> None:
    world = World(1, one_sided)
    other = msgspec.structs.replace(LAYOUT, num_kv_heads=4)
    world.visible.discard(world.prefills[0].epoch)
    world.workers[0] = Worker(world, "prefill-0", "prefill", 9, other)
    world.visible.add(world.prefills[0].epoch)
    world.run_to_rest()
    (refused,) = world.prefills[0].outgoing.status()
    assert refused.state == "refused"
    assert refused.reason == "KV layout differs in total_kv_heads: prefill has 4, decode has 2"
    asked = world.ask(PROMPT, 6, world.prefills[1])
    world.advance(lambda: asked.ended is not None)
    assert asked.ended == "length"
