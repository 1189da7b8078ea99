"""The schedulers of both roles of a worker, by the scripts in `scripts/` (`tests.support.scripts` says what those are).

`t=5` sets the time, which then stays. Attempts are named after their prompt: `a0` and `a1` are sequences of prompt `a`.

    worker [blocks=64] [block_size=8] [tokens=64] [seqs=2] [block_bytes=0] [held=N]
                          begins with another worker; held: limit on its sequences, `MAX_HELD_SEQUENCES`
    start NAME LENGTH [n=1] [max=3] [pair=PAIR] [salt=NAME] [priority=0] [deadline=9] [proxy=p] [adapter=X [loading]]
                          a prompt that is decoded here, or shipped through a pair. Without a salt of its own no other
                          prompt has its blocks. LENGTH may be 20+4+1: 4 tokens that the model answered follow the first
                          20, and then another one
    loaded X              an adapter
    prepare NAME LENGTH [n=1] [max=3] [deadline=9] [proxy=p], reserve NAME PAIR
    arrive NAME PAIR      all KV of a prompt, and its first tokens
    close NAME            CloseTransfer
    reserved NAME BLOCKS  the answer of the decode worker to which a prompt is shipped
    step [took=SECONDS]   schedules a step and ends it. Each sample is token 9
    steps N               as many of them, of which the last one is shown
    schedule, ahead, end  a step in three parts, of which `ahead` may be left out
    failed, no memory     the oldest step in flight has failed
    joined                the clock, as the shell tells it after each event during a step
    abort ATTEMPT [proxy=p], proxy lost PROXY, tick, state, figures
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tandem.decode_worker import decode_scheduler
from tandem.engine.batch import Batch, ItemOutput
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.engine.lora.adapter import Adapter, AdapterWeights
from tandem.handover.actions import SendToProxy
from tandem.prefill_worker import prefill_scheduler
from tandem.protocol.messages.checks import MAX_HELD_SEQUENCES
from tandem.protocol.messages.dispatch import (
    AdapterRef,
    AttemptFailed,
    AttemptPreempted,
    FirstToken,
    PrepareDecode,
    StartPrefill,
    TokenBatch,
)
from tandem.protocol.messages.packed import BYTES_PER_TOKEN, pack_token_ids
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions
from tandem.protocol.messages.transfer import FinishTransfer, KVReserved, ReservedBlocks, ReserveKV, ShipKV
from tandem.worker.worker_scheduler import WorkerScheduler
from tests.support.scripts import Play, Words, check, listed, numbers
from tests.unit.handover.test_scripts import shown as shown_handover

SCRIPTS = Path(__file__).parent / "scripts"
LEASE_S = 10.0
ANSWERED = 9
"""The token that the model samples."""


class ScriptedWorker:
    def __init__(self) -> None:
        self._now = 0.0
        self._adapters: dict[str, Future[AdapterWeights]] = {}
        self._prompts: dict[str, PrepareDecode] = {}
        self._num_ships = 0
        self._steps: list[Batch] = []
        self.worker()

    def worker(self, **options: str) -> None:
        of = {name: int(value) for name, value in options.items()}
        blocks = BlockManager(of.get("blocks", 64), of.get("block_size", 8))
        self._scheduler = WorkerScheduler(
            blocks, "m", of.get("tokens", 64), of.get("seqs", 2), LEASE_S, block_bytes=of.get("block_bytes", 0)
        )
        self._held = of.get("held", MAX_HELD_SEQUENCES)

    def play(self, event: str) -> list[str]:
        with (
            patch.object(decode_scheduler, "MAX_HELD_SEQUENCES", self._held),
            patch.object(prefill_scheduler, "MAX_HELD_SEQUENCES", self._held),
        ):
            return self._play(event)

    def _play(self, event: str) -> list[str]:
        words = Words(event)
        self._now = float(words.options.pop("t", self._now))
        scheduler, (what, *names) = self._scheduler, words.words
        actions: list[Any] = []
        match what, *names:
            case ["worker"]:
                self.worker(**words.options)
            case "start", name, length, *flags:
                actions = self._start(name, length, "loading" in flags, **words.options)
            case "loaded", name:
                self._adapters[name].set_result(AdapterWeights({}))
            case "prepare", name, length:
                request = PrepareDecode(
                    **_fields(name, length, **words.options), prefill_worker_id="x", prefill_epoch="e"
                )
                self._prompts[name] = request
                actions = scheduler.decode.on_prepare(self._now, request)
            case "reserve", name, pair_id:
                num_tokens = len(self._prompts[name].token_ids) // BYTES_PER_TOKEN
                actions = scheduler.decode.transfers.on_reserve(self._now, ReserveKV(pair_id, name, num_tokens))
            case "arrive", name, pair_id:
                actions = self._arrive(name, pair_id)
            case "close", name:
                actions = scheduler.decode.transfers.on_close_transfer(name)
            case "reserved", name, blocks:
                message = KVReserved(name, [ReservedBlocks(0, numbers(blocks))])
                actions = scheduler.prefill.transfers.on_reserved(message)
            case ["step"]:
                lines = self._schedule(ahead=False)
                return [*lines, *shown(self._end(words.options.get("took")))] if self._steps else lines
            case "steps", number:
                return [self.play("step") for _ in range(int(number))][-1]
            case ["schedule"]:
                return self._schedule(ahead=False)
            case ["ahead"]:
                return self._schedule(ahead=True)
            case ["end"]:
                actions = self._end()
            case ["failed"]:
                self._steps.clear()
                actions = scheduler.on_step_failed(ValueError("it broke"))
            case "no", "memory":
                self._steps.clear()
                actions = scheduler.on_out_of_memory(MemoryError("out of memory"))
            case ["joined"]:
                scheduler.decode.running.on_clock(self._now)
            case "abort", attempt_id:
                actions = scheduler.on_abort(words.options.get("proxy", "p"), attempt_id)
            case "proxy", "lost", proxy_id:
                actions = scheduler.on_proxy_lost(proxy_id)
            case ["tick"]:
                actions = scheduler.on_tick(self._now)
            case ["state"]:
                return self._state()
            case ["figures"]:
                return self._figures()
            case _:
                raise AssertionError(event)
        return shown(actions)

    def _start(self, name: str, length: str, is_loading: bool, **options: str) -> list[Any]:
        pair_id, adapter = options.pop("pair", None), None
        fields = _fields(name, length, **options)
        if (adapter_name := options.get("adapter")) is not None:
            loading = self._adapters[adapter_name] = Future()
            adapter = Adapter(loading)
            if not is_loading:
                loading.set_result(AdapterWeights({}))
        request = StartPrefill(**fields, decode_worker_id="d", decode_epoch="e")
        return self._scheduler.prefill.on_start(
            self._now, request, pair_id, adapter=adapter, decodes_here=pair_id is None
        )

    def _arrive(self, name: str, pair_id: str) -> list[Any]:
        transfers, prompt = self._scheduler.decode.transfers, self._prompts[name]
        num_tokens, transfer = len(prompt.token_ids) // BYTES_PER_TOKEN, transfers.get(name)
        assert transfer is not None
        num_cached, num_written = transfer.blocks.first_block, len(transfer.blocks.written_block_ids)
        actions = transfers.on_ship(ShipKV(pair_id, self._num_ships, name, num_cached, num_written))
        self._num_ships += 1
        actions += transfers.on_received(name, None)
        return actions + transfers.on_finish_transfer(FinishTransfer(name, num_tokens, [7] * len(prompt.attempt_ids)))

    def _schedule(self, ahead: bool) -> list[str]:
        scheduler = self._scheduler
        num_steps = len(scheduler.decode.running.steps)
        batch, actions = (scheduler.schedule_ahead if ahead else scheduler.schedule)(self._now)
        members = []
        if len(scheduler.decode.running.steps) > num_steps:
            members = [each.attempt_id for each in scheduler.decode.running.steps[-1].sequences]
        for item, (prompt, num_tokens) in zip(batch.items[len(members) :], scheduler.prefill._step.chunks, strict=True):
            adapter = "" if item.adapter is None else " with its adapter"
            members.append(f"{prompt.request.transfer_id} {item.start}-{item.start + num_tokens}{adapter}")
        if members:
            self._steps.append(batch)
        copies = [f"copy block {source} to {destination}" for source, destination in batch.block_copies]
        return [*shown(actions), f"computes: {', '.join(members) or 'nothing'}", *copies]

    def _end(self, took: str | None = None) -> list[Any]:
        batch = self._steps.pop(0)
        outputs = [ItemOutput([SampledToken(ANSWERED) for _ in item.samples]) for item in batch.items]
        return self._scheduler.on_step(self._now, outputs, float(took) if took else None)

    def _state(self) -> list[str]:
        scheduler, num_free = self._scheduler, self._scheduler.blocks.num_free
        waiting = [f"{tokens} at priority {each}" for each, tokens in scheduler.prefill.prompts.waiting_tokens()]
        return [
            f"{scheduler.num_running} running, {scheduler.num_waiting} waiting, {num_free} blocks free",
            f"tokens to compute: {', '.join(waiting) or 'none'}",
        ]

    def _figures(self) -> list[str]:
        prefill, decode = self._scheduler.prefill, self._scheduler.decode
        of_decode = (decode.num_finished, decode.num_preempted, decode.num_kept_blocks)
        return [
            f"prefill: {prefill.num_finished} finished, {prefill.num_shipped} shipped, "
            f"{prefill.num_cached_tokens} of {prefill.num_prompt_tokens} tokens were cached",
            "decode: {} finished, {} preempted, {} kept blocks".format(*of_decode),
            f"prompt tokens a second: {self._scheduler.step_times.prompt_tokens_per_s:.0f}",
        ]


def _fields(name: str, length: str, **options: str) -> dict[str, Any]:
    """Returns what both messages about a prompt have."""
    count = int(options.get("n", 1))
    parts = [int(each) for each in length.split("+")]
    num_first, num_answered, num_more = [*parts, 0, 0][:3]
    tokens = [*range(10, 10 + num_first), *[ANSWERED] * num_answered, *range(1000, 1000 + num_more)]
    return {
        "proxy_id": options.get("proxy", "p"), "attempt_ids": [f"{name}{number}" for number in range(count)],
        "transfer_id": name, "token_ids": pack_token_ids(tokens), "sampling": SamplingParams(), "seeds": [0] * count,
        "stop": StopConditions(int(options.get("max", 3))), "deadline_s": float(options.get("deadline", 9)),
        "cache_salt": options.get("salt", name), "priority": int(options.get("priority", 0)),
        "adapter": AdapterRef(options["adapter"], "") if "adapter" in options else None,
    }  # fmt: skip


def shown(actions: list[Any]) -> list[str]:
    return [line for action in actions for line in _shown(action)]


def _shown(action: Any) -> list[str]:
    if not isinstance(action, SendToProxy):
        return [shown_handover(action)]
    match action.message:
        case FirstToken() as first:
            cached = f", {first.num_cached_tokens} tokens were cached" if first.num_cached_tokens else ""
            return [f"{action.proxy_id}: first token of {first.attempt_id}{_why(first.finish_reason)}{cached}"]
        case TokenBatch() as batch:
            tokens = [f"{each.attempt_id}{_why(each.finish_reason)}" for each in batch.tokens]
            began = [
                f"{action.proxy_id}: {each.attempt_id} began after {each.decode_wait_s} s, "
                f"in a step of {each.step_s} s, with {each.num_kv_bytes} bytes"
                for each in batch.began
                if each.decode_wait_s or each.step_s or each.num_kv_bytes
            ]
            return [f"{action.proxy_id}: tokens of {listed(tokens)}", *began]
        case AttemptPreempted(attempt_id):
            return [f"{action.proxy_id}: {attempt_id} is preempted"]
        case AttemptFailed(attempt_id, error):
            return [f"{action.proxy_id}: {attempt_id} fails: {error.code}: {error.message}"]
    return [shown_handover(action)]


def _why(finish_reason: str | None) -> str:
    return f" ({finish_reason})" if finish_reason else ""


def machine_of(file: Path) -> Play:
    return ScriptedWorker().play


@pytest.mark.parametrize("file", sorted(SCRIPTS.glob("*.txt")), ids=lambda file: file.stem)
def test_scripts(file: Path) -> None:
    check(file, machine_of(file))
