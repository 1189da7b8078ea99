"""The scheduler of a vLLM worker, by the scripts in `scripts/` (`tests.support.scripts` says what a script is).

`t=5` sets the time, which then stays. The engine's requests are named transfer/sequence/number.

    worker [held=N]           begins with another worker; held: limit on its sequences, `MAX_HELD_SEQUENCES`
    start ATTEMPT... [transfer=t] [tokens=10] [max=4] [stop=TOKEN] [generated=0] [priority=0] [deadline=100]
                     [pair=PAIR] [last]
                              a prompt; last: no worker decodes it, so that it has one token
    prepare ATTEMPT... [...]  the same, whose KV comes from another worker
    report WHAT; WHAT...      a step of the engine: begun ID, computed ID BLOCKS, allocated ID CACHED WRITTEN,
                              token ID TOKEN... [length|stop], error ID, lost ID, running N, took SECONDS, gap SECONDS,
                              cached HASH..., evicted HASH...
    reserve NAME PAIR, ship NAME FIRST COUNT, received NAME, finish NAME TOKEN..., close NAME, pair lost PAIR [stopped]
                              of incoming transfers
    reserved NAME CACHED BLOCKS, refused NAME, shipped NAME [broken], renewed NAME, sending pair lost PAIR
                              of outgoing ones
    abort ATTEMPT, proxy lost PROXY, tick, state, figures, gap, cached
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tandem.handover.actions import SendToProxy
from tandem.protocol.messages.checks import MAX_HELD_SEQUENCES
from tandem.protocol.messages.dispatch import (
    AttemptFailed,
    AttemptPreempted,
    FirstToken,
    PrepareDecode,
    StartPrefill,
    TokenBatch,
)
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import FinishReason, SampledToken, SamplingParams, StopConditions
from tandem.protocol.messages.transfer import (
    FinishTransfer,
    KVReserved,
    RenewLeases,
    ReservedBlocks,
    ReserveKV,
    ShipKV,
)
from tandem.runtime.errors import ErrorInfo, InternalError, KVTransferFailed, Overloaded
from tandem.vllm_worker.scheduler import vllm_scheduler
from tandem.vllm_worker.scheduler.engine_orders import (
    AbortRequests,
    AddRequest,
    AllocatedBlocks,
    ComputedBlocks,
    EndReceiving,
    EndShipping,
    EngineFigures,
    EngineOutput,
    KVArrived,
    StepReport,
)
from tandem.vllm_worker.scheduler.vllm_scheduler import VllmScheduler
from tests.support.scripts import Play, Words, check, listed, numbers
from tests.unit.handover.test_scripts import shown as shown_handover
from tests.unit.vllm_worker.scheduler.prompts import start

SCRIPTS = Path(__file__).parent / "scripts"
NUM_BLOCKS, BLOCK_SIZE, BLOCK_BYTES, LEASE_S, ITL_SLO_S = 100, 4, 1000, 10.0, 0.05


class ScriptedVllmWorker:
    def __init__(self, held: str | None = None, block_sizes: Sequence[int] = (BLOCK_SIZE,)) -> None:
        self._held = MAX_HELD_SEQUENCES if held is None else int(held)
        self._now = 0.0
        self._num_ships = 0
        self._scheduler = VllmScheduler(NUM_BLOCKS, block_sizes, BLOCK_BYTES, LEASE_S, ITL_SLO_S)

    def play(self, event: str) -> list[str]:
        with patch.object(vllm_scheduler, "MAX_HELD_SEQUENCES", self._held):
            return self._play(event)

    def _play(self, event: str) -> list[str]:
        words = Words(event)
        self._now = float(words.options.pop("t", self._now))
        if words.words[0] == "report":
            return self._shown(self._report(event.partition("report ")[2]))
        scheduler = self._scheduler
        incoming, outgoing = scheduler.incoming, scheduler.outgoing
        is_last, is_broken, has_stopped = map(words.flag, ("last", "broken", "stopped"))
        actions: list[Any] = []
        match words.words:
            case ["worker"]:
                sizes = words.options.get("block_sizes", str(BLOCK_SIZE))
                self.__init__(words.options.get("held"), [*map(int, sizes.split("/"))])
            case "start", *attempts:
                pair_id = words.options.pop("pair", None)
                request = StartPrefill(**_fields(attempts, **words.options), decode_worker_id="d", decode_epoch="e")
                decodes_here = pair_id is None and not is_last
                actions = scheduler.on_start(self._now, request, pair_id, decodes_here)
            case "prepare", *attempts:
                fields = _fields(attempts, **words.options)
                prepared = PrepareDecode(**fields, prefill_worker_id="p", prefill_epoch="e")
                actions = scheduler.on_prepare(self._now, prepared)
            case "reserve", name, pair_id:
                actions = incoming.on_reserve(self._now, ReserveKV(pair_id, name, 10))
            case "ship", name, first, count:
                transfer = incoming.get(name)
                assert transfer is not None and transfer.pair_id is not None
                group = int(words.options.get("group", 0))
                shipped = ShipKV(transfer.pair_id, self._num_ships, name, int(first), int(count), group=group)
                actions = incoming.on_ship(shipped)
                self._num_ships += 1
            case "received", name:
                actions = incoming.on_received(name, None)
            case "finish", name, *tokens:
                actions = incoming.on_finish_transfer(FinishTransfer(name, 10, [*map(int, tokens)]))
            case "close", name:
                actions = incoming.on_close_transfer(name)
            case "pair", "lost", pair_id:
                actions = incoming.on_pair_lost(pair_id, "it broke", has_stopped)
            case "reserved", name, first, blocks:
                pairs = zip(first.split("/"), blocks.split("/"), strict=True)
                actions = outgoing.on_reserved(
                    KVReserved(name, [ReservedBlocks(int(one), numbers(two)) for one, two in pairs])
                )
            case "refused", name:
                actions = outgoing.on_refused(name, ErrorInfo.of(Overloaded("no room")))
            case "shipped", name:
                actions = outgoing.on_shipped(name, KVTransferFailed("it broke") if is_broken else None)
            case "renewed", name:
                running = outgoing.running(name)
                assert running is not None
                outgoing.on_renewed(self._now, RenewLeases(running.pair_id, [name]))
            case "sending", "pair", "lost", pair_id:
                actions = outgoing.on_pair_lost(pair_id, "it broke")
            case "abort", attempt_id:
                actions = scheduler.on_abort("proxy", attempt_id)
            case "proxy", "lost", proxy_id:
                actions = scheduler.on_proxy_lost(proxy_id)
            case ["tick"]:
                actions = scheduler.on_tick(self._now)
            case ["state"]:
                return self._state()
            case ["figures"]:
                return self._figures()
            case ["gap"]:
                return [f"gap: {scheduler.step_times.gap_s} s"]
            case ["cached"]:
                return [f"cached: {listed(sorted(each.decode() for each in scheduler.prefixes.cached))}"]
            case _:
                raise AssertionError(event)
        return self._shown(actions)

    def _report(self, text: str) -> list[Any]:
        report, figures = StepReport([], [], [], [], [], EngineFigures(), added=[], evicted=[]), EngineFigures()
        for part in text.split("; "):
            match part.split():
                case "begun", engine_id:
                    report.begun.append(engine_id)
                case "computed", engine_id, blocks:
                    groups = [numbers(each) for each in blocks.split("/")]
                    report.computed.append(ComputedBlocks(engine_id, groups))
                case "allocated", engine_id, first, written:
                    pairs = zip(first.split("/"), written.split("/"), strict=True)
                    given = [(int(one), numbers(two)) for one, two in pairs]
                    report.allocated.append(AllocatedBlocks(engine_id, given[0][0] * BLOCK_SIZE, given))
                case "token", engine_id, *words:
                    reasons: dict[str, FinishReason] = {"length": "length", "stop": "stop"}
                    reason = reasons.get(words[-1])
                    tokens = [SampledToken(int(each)) for each in words if each not in reasons]
                    report.outputs.append(EngineOutput(engine_id, tokens, reason))
                case "error", engine_id:
                    report.outputs.append(EngineOutput(engine_id, [], error=InternalError("it broke")))
                case "lost", engine_id:
                    report.lost.append(engine_id)
                case "running", number:
                    figures = figures._replace(num_running=int(number))
                case "preempted", number:
                    figures = figures._replace(num_preempted=int(number))
                case "took", seconds:
                    report = report._replace(step_s=float(seconds))
                case "gap", seconds:
                    report = report._replace(gap_s=float(seconds))
                case "cached", *hashes:
                    report.added.extend(each.encode() for each in hashes)
                case "evicted", *hashes:
                    report.evicted.extend(each.encode() for each in hashes)
                case ["nothing"]:
                    pass
                case _:
                    raise AssertionError(part)
        return self._scheduler.on_report(self._now, report._replace(figures=figures))

    def _state(self) -> list[str]:
        of = self._scheduler
        parts = [f"{of.num_waiting} waiting", f"{of.num_decoding} decoding"]
        parts += [f"{tokens} tokens to compute at priority {priority}" for priority, tokens in of.waiting_tokens()]
        parts += [f"wanted {each}" for each in of.incoming.wanted_ids("pair")]
        parts += [f"{of.incoming.num_quarantined_blocks} quarantined"] if of.incoming.num_quarantined_blocks else []
        return [", ".join([*parts, *(["idle"] if of.is_idle else [])])]

    def _figures(self) -> list[str]:
        of = self._scheduler
        return [
            f"{of.num_finished} finished, {of.num_shipped} shipped, {of.num_received} received, "
            f"{of.outgoing.num_expired_leases} leases expired",
            f"{of.num_prompt_tokens} prompt tokens, {of.num_cached_tokens} cached, {of.num_received_tokens} received",
        ]

    def _shown(self, actions: list[Any]) -> list[str]:
        return [line for action in actions for line in _shown(action)]


def _fields(attempts: list[str], **options: str) -> dict[str, Any]:
    stop = frozenset({int(options["stop"])} if "stop" in options else ())
    return {
        "proxy_id": "proxy", "attempt_ids": attempts, "transfer_id": options.get("transfer", "t"),
        "token_ids": pack_token_ids(range(int(options.get("tokens", 10)))), "sampling": SamplingParams(),
        "seeds": [0] * len(attempts), "stop": StopConditions(int(options.get("max", 4)), stop),
        "deadline_s": float(options.get("deadline", 100)), "num_generated": int(options.get("generated", 0)),
        "priority": int(options.get("priority", 0)),
    }  # fmt: skip


def _shown(action: Any) -> list[str]:
    match action:
        case AddRequest():
            moves = (", ships" if action.ships else "") + (", receives" if action.receives else "")
            more = f" and {listed(action.token_ids[10:])}" if len(action.token_ids) == 11 else ""
            known = f" ({action.num_generated} generated)" if action.num_generated else ""
            limit = f"at most {action.max_tokens}"
            return [f"engine: add {action.engine_id}: {len(action.token_ids)} tokens{more}{known}, {limit}{moves}"]
        case AbortRequests(engine_ids):
            return [f"engine: abort {listed(engine_ids)}"]
        case KVArrived(engine_id, token_id):
            return [f"engine: the KV of {engine_id} is here, its next token is {token_id}"]
        case EndReceiving(engine_id):
            return [f"engine: nothing is written to {engine_id} any more"]
        case EndShipping(engine_id):
            return [f"engine: nothing is read from {engine_id} any more"]
        case SendToProxy(_, FirstToken() as first):
            reason = f" ({first.finish_reason})" if first.finish_reason else ""
            times = f", waited {first.queue_s} s, took {first.prefill_s} s" if first.queue_s or first.prefill_s else ""
            return [f"proxy: first token of {first.attempt_id}: {first.token.token_id}{reason}{times}"]
        case SendToProxy(_, TokenBatch() as batch):
            lines = []
            for each in batch.tokens:
                reason = f" ({each.finish_reason})" if each.finish_reason else ""
                lines.append(f"proxy: token of {each.attempt_id}: {each.token.token_id}{reason}")
            for began in batch.began:
                if began.decode_wait_s or began.num_kv_bytes:
                    times = f"after {began.decode_wait_s} s, with {began.num_kv_bytes} bytes"
                    lines.append(f"proxy: {began.attempt_id} began {times}")
            return lines
        case SendToProxy(_, AttemptPreempted(attempt_id)):
            return [f"proxy: {attempt_id} is preempted"]
        case SendToProxy(_, AttemptFailed(attempt_id, error)):
            return [f"proxy: {attempt_id} fails: {error.code}: {error.message}"]
    return [shown_handover(action)]


def machine_of(file: Path) -> Play:
    return ScriptedVllmWorker().play


def test_sequences_of_a_prompt_share_its_numbers() -> None:
    """128 sequences of 300,000 tokens had 128 copies of them."""
    scheduler = VllmScheduler(NUM_BLOCKS, [BLOCK_SIZE], BLOCK_BYTES, LEASE_S, ITL_SLO_S)
    orders = scheduler.on_start(0.0, start(["a", "b", "c"], 350), None, True)
    first, *others = [order.token_ids for order in orders if isinstance(order, AddRequest)]
    assert all(one is other for each in others for one, other in zip(first, each, strict=True))
    assert all(first is not each for each in others)


@pytest.mark.parametrize("file", sorted(SCRIPTS.glob("*.txt")), ids=lambda file: file.stem)
def test_scripts(file: Path) -> None:
    check(file, machine_of(file))
