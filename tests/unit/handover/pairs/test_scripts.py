"""The tables of pairs, by the scripts in `scripts/` (`tests.support.scripts` says what a script is).

`t=5` sets the time, which then stays. Each script begins with a table; the event `table` begins with another one.

    outgoing_*.txt   table [role=prefill] [connectors=ipc,nccl], view NAME:ROLE..., role ROLE, tick,
                     accepted PAIR CONNECTOR, refused PAIR, closes PAIR (the peer does), sender ready PAIR,
                     sender failed PAIR, path refused PAIR, impossible PAIR, stopped PAIR, broken PAIR,
                     shipped PAIR BYTES SECONDS, traffic, restart traffic, state
                     The worker is `me`. A pair is named after both workers, this one's epoch, and its number.
                     `d/2:decode` is another process of worker d.
    incoming_*.txt   table [connectors=gloo] [exact] [pairs=N] (the limit `MAX_PAIRS`),
                     open PAIR NUMBER [peer=p] [epoch=e] [pids=1,2] [closed=PAIR,...] [connectors=gloo] [computes=avx2]
                     [exact], accepted PAIR [writes] (the peer writes by itself), impossible PAIR CONNECTOR, close PAIR,
                     exit PAIR PID, broken PAIR, view EPOCH..., renew, state
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest

from tandem.handover import incoming_pairs as incoming_table
from tandem.handover.incoming_pairs import (
    AcceptPair,
    IncomingPairLost,
    IncomingPairTable,
    PrefillLost,
    SendToSender,
    StopReceiver,
)
from tandem.handover.outgoing_pairs import (
    Connect,
    Disconnect,
    OutgoingPairLost,
    OutgoingPairTable,
    SendCloseToReceiver,
    StartSender,
    StopSender,
)
from tandem.protocol.messages.checks import MAX_PAIRS
from tandem.protocol.messages.membership import PROTOCOL_VERSION, Role, WorkerInfo
from tandem.protocol.messages.numerics import Numerics
from tandem.protocol.messages.transfer import ClosePair, KVLayout, OpenPair, PairAccepted, PairRefused
from tandem.runtime.errors import KVPathRefused, KVTransferFailed
from tests.support.named_connectors import named
from tests.support.scripts import Play, Words, check, listed, numbers

SCRIPTS = Path(__file__).parent / "scripts"
LAYOUT = KVLayout("m", "float32", 2, 2, 16, 64)
LEASE_S = 9.0


def info(text: str) -> WorkerInfo:
    """Returns the worker of "name:role" or "name/process:role"."""
    epoch, _, role = text.partition(":")
    name, _, process = epoch.partition("/")
    return WorkerInfo(name, f"{name}/{process or 1}", cast(Role, role), f"ipc://{name}", 1)


def outgoing() -> Play:
    table = OutgoingPairTable(info("me:prefill"), [1], LAYOUT, "host", "cuda", ["ipc", "nccl"], False, LEASE_S)
    now = 0.0

    def play(event: str) -> list[str]:
        nonlocal table, now
        words = Words(event)
        now = float(words.options.pop("t", now))
        actions: list[Any] = []
        match words.words:
            case ["table"]:
                me = info(f"me:{words.options.get('role', 'prefill')}")
                connectors = words.options.get("connectors", "ipc,nccl").split(",")
                table = OutgoingPairTable(me, [1], LAYOUT, "host", "cuda", connectors, False, LEASE_S)
            case "view", *workers:
                actions = table.on_view(now, [table.worker, *map(info, workers)])
            case "role", role:
                actions = table.on_role(now, info(f"me:{role}"))
            case ["tick"]:
                actions = table.on_tick(now)
            case "accepted", pair_id, connector:
                actions = table.on_message(now, PairAccepted(pair_id, connector, [[]]))
            case "refused", pair_id:
                actions = table.on_message(now, PairRefused(pair_id, "no connector in common"))
            case "closes", pair_id:
                actions = table.on_message(now, ClosePair(pair_id, "it breaks"))
            case "sender", "ready", pair_id:
                actions = table.on_sender_ready(now, pair_id, None)
            case "sender", "failed", pair_id:
                actions = table.on_sender_ready(now, pair_id, KVTransferFailed("no data moved"))
            case "path", "refused", pair_id:
                actions = table.on_sender_ready(now, pair_id, KVPathRefused("cannot map the pool"))
            case "impossible", pair_id:
                actions = table.on_sender_impossible(now, pair_id, "no driver")
            case "stopped", pair_id:
                actions = table.on_sender_closed(pair_id)
            case "broken", pair_id:
                actions = table.fail(now, pair_id, "it broke")
            case "shipped", pair_id, num_bytes, seconds:
                table.on_shipped(pair_id, int(num_bytes), float(seconds))
            case ["traffic"]:
                traffic = [(each.decode_worker_id, each.num_shipments, each.num_bytes) for each in table.take_traffic()]
                return ["{}: {} shipments of {} bytes".format(*each) for each in traffic]
            case "restart", "traffic":
                table.restart_traffic()
            case ["state"]:
                return [
                    f"{each.decode_worker_id}: {each.state} {each.connector} {each.reason}".rstrip()
                    for each in table.status()
                ]
            case _:
                raise AssertionError(event)
        return [shown(action) for action in actions]

    return play


def incoming() -> Play:
    table = IncomingPairTable(LAYOUT, "here", "cpu", named("gloo"), False)
    max_pairs = MAX_PAIRS
    now = 0.0

    def begin(connectors: str = "gloo", exact: bool = False, pairs: str | None = None) -> None:
        nonlocal table, max_pairs
        table = IncomingPairTable(LAYOUT, "here", "cpu", named(*connectors.split(",")), False, exact)
        max_pairs = MAX_PAIRS if pairs is None else int(pairs)

    def open_pair(
        pair_id: str, number: str, exact: bool, peer: str = "p", epoch: str = "e", pids: str = "1", closed: str = "",
        connectors: str = "gloo", computes: str = "",
    ) -> list[Any]:  # fmt: skip
        layout = KVLayout("m", "float32", 2, 2, 16, 64, numerics=Numerics(instruction_set=computes))
        message = OpenPair(
            PROTOCOL_VERSION, peer, epoch, numbers(pids), "d", pair_id, layout, "here", "cpu", connectors.split(","),
            lease_s=LEASE_S, number=int(number), exact=exact, closed_pair_ids=closed.split(",") if closed else [],
        )  # fmt: skip
        return table.on_open(message)

    def play(event: str) -> list[str]:
        nonlocal now
        words = Words(event)
        now = float(words.options.pop("t", now))
        exact, writes = words.flag("exact"), words.flag("writes")
        actions: list[Any] = []
        match words.words:
            case ["table"]:
                begin(exact=exact, **words.options)
            case "open", pair_id, number:
                with patch.object(incoming_table, "MAX_PAIRS", max_pairs):
                    actions = open_pair(pair_id, number, exact, **words.options)
            case "accepted", pair_id:
                table.on_accepted(pair_id, writes)
            case "impossible", pair_id, connector:
                actions = table.on_receiver_impossible(pair_id, connector, "no descriptors")
            case "close", pair_id:
                actions = table.on_close(pair_id, "it has stopped")
            case "exit", pair_id, pid:
                actions = table.on_exit(pair_id, int(pid))
            case "broken", pair_id:
                actions = table.fail(pair_id, "it broke")
            case "view", *epochs:
                workers = [WorkerInfo(epoch, epoch, "prefill", "ipc://p", 1) for epoch in epochs]
                actions = table.on_view(workers)
            case ["renew"]:
                return [f"renew: {listed(table.due_for_renewal(now))}"]
            case ["state"]:
                states = [
                    f"{each.pair_id}{'' if table.is_open(each.pair_id) else ' (broken)'}" for each in table.pairs()
                ]
                return [f"pairs: {listed(states)}"]
            case _:
                raise AssertionError(event)
        return [shown(action) for action in actions]

    return play


def shown(action: Any) -> str:
    match action:
        case Connect(pair_id, endpoint, message):
            closed = f", closed are {listed(message.closed_pair_ids)}" if message.closed_pair_ids else ""
            return f"{endpoint}: open {pair_id} with {listed(message.connectors)}{closed}"
        case StartSender(pair_id, connector):
            return f"{pair_id}: start its sender over {connector}"
        case StopSender(pair_id):
            return f"{pair_id}: stop its sender"
        case SendCloseToReceiver(message):
            return f"{message.pair_id}: ClosePair to the receiver: {message.reason}"
        case Disconnect(pair_id):
            return f"{pair_id}: disconnect"
        case OutgoingPairLost(pair_id, reason):
            return f"{pair_id}: lost: {reason}"
        case AcceptPair():
            warning = f", warn: {action.warning}" if action.warning else ""
            return f"{action.pair_id}: accept over {action.connector}, watch {listed(action.pids)}{warning}"
        case StopReceiver(pair_id):
            return f"{pair_id}: stop its receiver"
        case SendToSender(PairRefused(pair_id, reason)):
            return f"{pair_id}: PairRefused to the sender: {reason}"
        case SendToSender(ClosePair(pair_id, reason)):
            return f"{pair_id}: ClosePair to the sender: {reason}"
        case IncomingPairLost(pair_id, reason, peer_stopped):
            return f"{pair_id}: lost: {reason}; its peer {'has stopped' if peer_stopped else 'may write'}"
        case PrefillLost(epoch):
            return f"prefill process {epoch} is lost"
    raise AssertionError(action)


MACHINES = {"outgoing": outgoing, "incoming": incoming}


def machine_of(file: Path) -> Play:
    return MACHINES[file.stem.partition("_")[0]]()


@pytest.mark.parametrize("file", sorted(SCRIPTS.glob("*.txt")), ids=lambda file: file.stem)
def test_scripts(file: Path) -> None:
    check(file, machine_of(file))
