"""The hand-over's machines, by the scripts in `scripts/` (`tests.support.scripts` says what a script is).

Events have the name of a transfer first. `t=5` is the time. Blocks of several groups are divided by `/`.

    incoming_*.txt   prepare NAME ATTEMPT... [adapter=X] [media], reserve NAME PAIR [adapter=X], allocated NAME CACHED
                     WRITTEN, ship NAME PAIR FIRST COUNT [group=N], received NAME [broken], corrupt NAME,
                     finish NAME TOKEN... [offset=N], close NAME, ended NAME, pair lost PAIR [stopped],
                     prefill lost EPOCH, keep NAME COUNT, wanted PAIR, tick, state
    outgoing_*.txt   add NAME PAIR NUMBER ATTEMPT..., begun NAME, computed NAME BLOCKS, token NAME ATTEMPT TOKEN [last],
                     ended NAME ATTEMPT, reserved NAME CACHED BLOCKS, refused NAME, shipped NAME [broken],
                     renewed PAIR NAME..., end NAME, pair lost PAIR, tick, state
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tandem.handover.actions import Receive, SendToPeer, SendToProxy, Ship
from tandem.handover.incoming import ArrivingBlocks, IncomingTransfer, IncomingTransfers
from tandem.handover.outgoing import OutgoingTransfer, OutgoingTransfers
from tandem.protocol.messages.dispatch import AdapterRef, DecodeReserved, PrepareDecode, StartPrefill
from tandem.protocol.messages.media import MediaItem
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions
from tandem.protocol.messages.transfer import (
    CloseTransfer,
    FinishTransfer,
    KVRefused,
    KVReserved,
    RenewLeases,
    ReservedBlocks,
    ReserveKV,
    ShipKV,
)
from tandem.runtime.errors import ErrorInfo, KVTransferFailed, Overloaded, TandemError
from tests.support.scripts import Play, Words, check, listed, numbers

SCRIPTS = Path(__file__).parent / "scripts"
LEASE_S = 10.0


class Call(NamedTuple):
    """A call of the holder."""

    what: str
    transfer_id: str
    error: TandemError | None = None


class Holder:
    """A holder of blocks that notes what it is asked."""

    def allocate(self, transfer: IncomingTransfer[str]) -> list[Any]:
        return [Call("allocate", transfer.transfer_id)]

    def resume(self, transfer: IncomingTransfer[str]) -> list[Any]:
        return [Call("resume", transfer.transfer_id)]

    def give_up(self, transfer: IncomingTransfer[str], error: TandemError | None) -> list[Any]:
        return [Call("give up", transfer.transfer_id, error)]

    def release_received(self, transfer: IncomingTransfer[str]) -> list[Any]:
        return [Call("release", transfer.transfer_id)]

    def stop(self, transfer: OutgoingTransfer[str], error: TandemError | None) -> list[Any]:
        return [Call("stop", transfer.transfer_id, error)]

    def release_sent(self, transfer: OutgoingTransfer[str]) -> list[Any]:
        return [Call("release" if transfer.ended else "release, shipped", transfer.transfer_id)]


def shown(action: Any) -> str:
    match action:
        case Call(what, name, error):
            return f"{what} {name}" + (f": {error.code}: {error.message}" if error is not None else "")
        case SendToProxy(_, DecodeReserved(attempt_id)):
            return f"proxy: reserved {attempt_id}"
        case SendToPeer(pair_id, KVReserved(name, groups)):
            each = [f"from {group.first_block}, {listed(group.block_ids)}" for group in groups]
            return f"{pair_id}: KVReserved {name}: {'; '.join(each)}"
        case SendToPeer(pair_id, KVRefused(name, error)):
            return f"{pair_id}: KVRefused {name}: {error.code}: {error.message}"
        case SendToPeer(pair_id, ReserveKV() as message):
            return f"{pair_id}: ReserveKV {message.transfer_id} for {message.num_prompt_tokens} tokens"
        case SendToPeer(pair_id, FinishTransfer() as message):
            return f"{pair_id}: FinishTransfer {message.transfer_id}: {listed(message.first_token_ids)}"
        case SendToPeer(pair_id, CloseTransfer(name)):
            return f"{pair_id}: CloseTransfer {name}"
        case Ship():
            group = f" of group {action.group}" if action.group else ""
            blocks = f"{listed(action.src_block_ids)} to {listed(action.dst_block_ids)}"
            return f"{action.pair_id}: ship {action.transfer_id} from {action.first_block}{group}: {blocks}"
        case Receive():
            return f"{action.pair_id}: receive {action.transfer_id}: {listed(action.block_ids)}"
    raise AssertionError(action)


def incoming() -> Play:
    transfers: IncomingTransfers[str, Any] = IncomingTransfers(Holder())
    ship_numbers: dict[str, int] = {}

    def prepare(words: Words) -> list[Any]:
        media = (MediaItem(b"m", "image", ((0, 1),), "", ()),) if words.flag("media") else ()
        name, *attempts = words.words
        adapter = AdapterRef(words.options["adapter"], "") if "adapter" in words.options else None
        request = PrepareDecode(
            "proxy", attempts, name, pack_token_ids([1, 2]), SamplingParams(), [0] * len(attempts), StopConditions(9),
            9.0, prefill_worker_id="p", prefill_epoch="p1", adapter=adapter, media=media,
        )  # fmt: skip
        if (error := transfers.why_refused(request)) is not None:
            return [Call("refuse", name, error)]
        return transfers.on_prepare(request, "prompt")

    def allocated(name: str, first: str, written: str) -> list[Any]:
        transfer = transfers.get(name)
        assert transfer is not None and transfer.request is not None
        groups = [
            ArrivingBlocks(int(one), numbers(two))
            for one, two in zip(first.split("/"), written.split("/"), strict=True)
        ]
        return transfers.on_allocated(transfer, groups, transfer.request.attempt_ids)

    def ship(words: Words) -> list[Any]:
        name, pair_id, first, count = words.words
        number = ship_numbers[pair_id] = ship_numbers.get(pair_id, -1) + 1
        group = int(words.options.get("group", 0))
        return transfers.on_ship(ShipKV(pair_id, number, name, int(first), int(count), group=group))

    def state() -> list[str]:
        lines = []
        for each in transfers:
            has = [word for word, is_so in (("prepared", each.prompt), ("announced", each.pair_id)) if is_so]
            has += ["given up"] if each.is_given_up else []
            has += [f"{group.num_arrived} of {len(group.written_block_ids)} blocks" for group in each.groups]
            lines.append(f"{each.transfer_id}: {', '.join(has)}")
        return [*lines, f"quarantined: {transfers.num_quarantined_blocks}, blocked: {transfers.is_blocked}"]

    def play(event: str) -> list[str]:
        words = Words(event)
        now, what = float(words.options.get("t", 0)), words.words.pop(0)
        names = words.words
        actions: list[Any] = []
        try:
            match what:
                case "prepare":
                    actions = prepare(words)
                case "reserve":
                    message = ReserveKV(names[1], names[0], 2, words.options.get("adapter", ""))
                    actions = transfers.on_reserve(now, message)
                case "allocated":
                    actions = allocated(*names)
                case "ship":
                    actions = ship(words)
                case "received":
                    error = KVTransferFailed("it broke") if words.flag("broken") else None
                    actions = transfers.on_received(names[0], error)
                case "corrupt":
                    actions = transfers.on_corrupt(names[0], KVTransferFailed("blocks differ"))
                case "finish":
                    offset = int(words.options.get("offset", 0))
                    actions = transfers.on_finish_transfer(FinishTransfer(names[0], 2, [*map(int, names[1:])], offset))
                case "close":
                    actions = transfers.on_close_transfer(names[0])
                case "ended":
                    transfer = transfers.get(names[0])
                    assert transfer is not None
                    actions = transfers.fail(transfer, None)
                case "keep":
                    transfer = transfers.get(names[0])
                    assert transfer is not None
                    return [f"kept {listed(transfer.keep(int(names[1])))}, open {listed(transfer.open_block_ids)}"]
                case "pair":
                    actions = transfers.on_pair_lost(names[1], "it broke", words.flag("stopped"))
                case "prefill":
                    actions = transfers.on_prefill_lost(names[1])
                case "wanted":
                    return [listed(transfers.wanted_ids(names[0]))]
                case "tick":
                    actions = transfers.on_tick(now)
                case "state":
                    return state()
                case _:
                    raise AssertionError(event)
        except KVTransferFailed as error:
            return [f"the pair is to blame: {error.message}"]
        return [shown(action) for action in actions]

    return play


def outgoing() -> Play:
    transfers: OutgoingTransfers[str, Any] = OutgoingTransfers(LEASE_S, Holder())

    def get(name: str) -> OutgoingTransfer[str]:
        transfer = transfers.get(name)
        assert transfer is not None
        return transfer

    def add(name: str, pair_id: str, num_blocks: str, *attempts: str) -> list[Any]:
        request = StartPrefill(
            "proxy", list(attempts), name, pack_token_ids([1, 2]), SamplingParams(), [0] * len(attempts),
            StopConditions(9), 9.0, decode_worker_id="d", decode_epoch="d1",
        )  # fmt: skip
        transfers.add(request, pair_id, "prompt", [int(each) for each in num_blocks.split("/")])
        return []

    def state(now: float) -> list[str]:
        lines = []
        for each in transfers._by_id.values():
            groups = "/".join(f"{group.num_shipped} of {group.num_blocks}" for group in each.groups)
            words = [word for word in ("reserve_sent", "finish_sent", "ended") if getattr(each, word)]
            lines.append(
                " ".join([f"{each.transfer_id}: {groups} shipped, {each.num_ships_in_flight} in flight", *words])
            )
        found = transfers.unanswered(now), transfers.without_tokens(now)
        stuck = [each.transfer_id if each is not None else "none" for each in found]
        full = sorted(transfers.full_pairs())
        return [*lines, f"full: {listed(full)}, unanswered: {stuck[0]}, without tokens: {stuck[1]}"]

    def play(event: str) -> list[str]:
        words = Words(event)
        now, what = float(words.options.get("t", 0)), words.words.pop(0)
        names = words.words
        match what:
            case "add":
                actions = add(*names)
            case "begun":
                actions = transfers.on_begun(now, get(names[0]))
            case "computed":
                groups = [numbers(each) for each in names[1].split("/")]
                actions = transfers.on_computed(now, get(names[0]), groups, int(words.options.get("offset", 0)))
            case "token":
                is_last = words.flag("last")
                actions = transfers.on_first_token(get(names[0]), names[1], int(names[2]), goes_on=not is_last)
            case "ended":
                actions = transfers.on_attempt_ended(get(names[0]), names[1])
            case "reserved":
                blocks = [
                    ReservedBlocks(int(one), numbers(two))
                    for one, two in zip(names[1].split("/"), names[2].split("/"), strict=True)
                ]
                actions = transfers.on_reserved(KVReserved(names[0], blocks))
            case "refused":
                actions = transfers.on_refused(names[0], ErrorInfo.of(Overloaded("no room")))
            case "shipped":
                error = KVTransferFailed("it broke") if words.flag("broken") else None
                actions = transfers.on_shipped(names[0], error)
            case "renewed":
                transfers.on_renewed(now, RenewLeases(names[0], names[1:]))
                actions = []
            case "end":
                actions = transfers.end(get(names[0]))
            case "pair":
                actions = transfers.on_pair_lost(names[1], "it broke")
            case "tick":
                actions = transfers.on_tick(now)
            case "state":
                return state(now)
            case _:
                raise AssertionError(event)
        return [shown(action) for action in actions]

    return play


MACHINES = {"incoming": incoming, "outgoing": outgoing}


def machine_of(file: Path) -> Play:
    return MACHINES[file.name.partition("_")[0]]()


@pytest.mark.parametrize("file", sorted(SCRIPTS.glob("*.txt")), ids=lambda file: file.stem)
def test_scripts(file: Path) -> None:
    check(file, machine_of(file))
