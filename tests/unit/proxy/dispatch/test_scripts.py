"""The dispatcher with its router and table of workers, by the scripts in `scripts/` (`tests.support.scripts`).

Events that are divided by `;` come before the readers' next turn. A reader takes what comes, and drops its sequence at
the end. `a2` is the second attempt of sequence a, `decode-0/2` the second process of that name. A prompt is 1 2 3.

    cluster NAME... [threshold=N] [wait=S] [numerics=X]     a new one, after the one before has ended everything
    join NAME... [numerics=X]      exit NAME crash|order|unknown      leave NAME order|failure|silence [ATTEMPT...]
    broken NAME (a connection)     stranger NAME (a process without requests is lost)
    deaf NAME (messages cannot be sent)      report NAME ROLE [step=S]
    start NAME... [prompt=1,2] [max_tokens=N] [deadline=S] [salt=X] [temperature=X]      drop NAME      stop      wait S
    first ATTEMPT TOKEN [length|stop]      token ATTEMPT TOKEN [length|stop]      reserved ATTEMPT
    preempted ATTEMPT by=NAME      failed ATTEMPT lost|transfer|internal by=NAME
    state [NAME...], times NAME, metrics
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.protocol.messages.dispatch import (
    AbortAllAttempts,
    AbortAttempt,
    AttemptFailed,
    AttemptPreempted,
    DecodeReserved,
    FirstToken,
    NewToken,
    PrepareDecode,
    StartPrefill,
    TokenBatch,
)
from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    PairChanges,
    PairStatus,
    RegisterWorker,
    Role,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from tandem.protocol.messages.numerics import Numerics
from tandem.protocol.messages.packed import pack_token_ids, unpack_token_ids
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions
from tandem.proxy.cluster.router import Router
from tandem.proxy.cluster.worker_record import MembershipChange
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.proxy.dispatch.dispatcher import Dispatcher, WorkerConnections
from tandem.proxy.dispatch.sequence import DispatchedSequence, PromptTask
from tandem.proxy.text.prompt import Prompt
from tandem.runtime.errors import ErrorInfo, InternalError, KVTransferFailed, TandemError, WorkerLost
from tandem.telemetry.proxy_metrics import ProxyMetrics
from tests.support.clocked_loop import jumping_loop
from tests.support.scripts import Play, check

SCRIPTS = Path(__file__).parent / "scripts"
ROLES: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "worker": "any"}
ERRORS = {
    "lost": WorkerLost("the other worker was lost"),
    "transfer": KVTransferFailed("it broke"),
    "internal": InternalError("the model failed on this prompt"),
}


class Connections(WorkerConnections):
    """Notes what is sent."""

    def __init__(self, on_sent: Callable[[WorkerInfo, msgspec.Struct], bool]) -> None:
        self._on_sent = on_sent

    def send(self, worker: WorkerInfo, message: msgspec.Struct) -> bool:
        return self._on_sent(worker, message)


class Machine:
    """One cluster, whose clock stands still between events."""

    def __init__(self) -> None:
        self.loop = jumping_loop()
        self.num_processes: dict[str, int] = {}
        self.numerics: dict[str, str] = {}  # by epoch
        self.lines: list[str] = []
        self.waits_since: float | None = None
        self.names: list[str] = []  # of sequences, by their seeds
        self.sequences: dict[str, DispatchedSequence] = {}
        self.attempts: dict[str, str] = {}  # ids by their names here
        self.workers_of: dict[str, tuple[WorkerInfo, WorkerInfo]] = {}  # by name; the same one twice if it does both
        self.prepared: dict[str, tuple[WorkerInfo, PrepareDecode]] = {}  # by transfer_id, before StartPrefill
        self.deaf: set[str] = set()

    def play(self, event: str) -> list[str]:
        return self.loop.run_until_complete(self._play(event))

    def close(self) -> None:
        self.loop.run_until_complete(self._end())
        self.loop.close()

    async def _end(self) -> None:
        """Drops what still runs. Then nothing may be left of it."""
        for sequence in self.sequences.values():
            if sequence.is_open:
                self.dispatcher.drop(sequence)
        self.lines.clear()
        if self.num_processes:
            assert self.dispatcher.num_running == 0
            assert all(each.use.is_idle for each in self.table.prefill_workers + self.table.decode_workers)

    async def _play(self, event: str) -> list[str]:
        self.lines.clear()
        for each in event.split("; "):
            words = each.split()
            options = dict(word.split("=") for word in words if "=" in word)
            what, *names = [word for word in words if "=" not in word]
            await getattr(self, f"_{what}")(*names, **options)
        for _ in range(20):
            await asyncio.sleep(0)
        return list(self.lines)

    def note(self, line: str) -> None:
        since = self.waits_since
        self.lines.append(line if since is None else f"{round(self.loop.time() - since, 3):g} s: {line}")

    # ---- workers

    async def _cluster(self, *names: str, threshold: str = "0", wait: str = "0", numerics: str = "") -> None:
        await self._end()
        for each in (self.num_processes, self.names, self.sequences, self.attempts, self.deaf):
            each.clear()
        self.table = WorkerTable(2.5, decode_may_prefill=int(threshold) > 0)
        router = Router(self.table, int(threshold), rng=random.Random(0))
        self.metrics = ProxyMetrics()
        self.dispatcher = Dispatcher(
            "proxy", router, Connections(self._on_sent), self.metrics, float(wait), clock=self.loop.time
        )
        await self._join(*names, numerics=numerics)

    async def _join(self, *names: str, numerics: str = "") -> None:
        now = self.loop.time()
        for name in names:
            number = self.num_processes[name] = self.num_processes.get(name, 0) + 1
            info = WorkerInfo(name, f"{name}/{number}", ROLES[name.partition("-")[0]], f"ipc://{name}", number)
            message = RegisterWorker(PROTOCOL_VERSION, info, 100, 500, "m", 64)
            if numerics:
                message = msgspec.structs.replace(message, numerics=Numerics(instruction_set=numerics), exact=True)
            self.numerics[info.epoch] = numerics
            self._apply(self.table.on_register(now, message))
        workers = self.table.workers()
        for info in workers:
            if info.role != "decode":
                peers = [each for each in workers if each.role != "prefill" and each != info]
                peers = [each for each in peers if self.numerics[each.epoch] == self.numerics[info.epoch]]
                pairs = PairChanges(0, [PairStatus(each.worker_id, each.epoch, "ready") for each in peers])
                self.table.on_status(now, WorkerStatus(info.worker_id, info.epoch, info.role, WorkerLoad(), pairs))
        self.dispatcher.on_cluster_changed()

    def _apply(self, change: MembershipChange) -> None:
        """As Control does."""
        for gone in change.lost:
            self.dispatcher.on_worker_lost(
                gone.worker, gone.reason, gone.has_crashed, gone.has_left, gone.attempt_ids, gone.in_order
            )

    def _info(self, name: str) -> WorkerInfo:
        """Returns the worker of this name; the last process, or the one that is named."""
        worker_id, _, number = name.partition("/")
        number = number or str(self.num_processes.get(worker_id, 1))
        return WorkerInfo(
            worker_id, f"{worker_id}/{number}", ROLES[name.partition("-")[0]], f"ipc://{worker_id}", int(number)
        )

    async def _exit(self, name: str, cause: Any) -> None:
        info = self._info(name)
        self._apply(self.table.on_exited(info.worker_id, info.pid, cause))

    async def _leave(self, name: str, cause: Any, *attempts: str) -> None:
        self._apply(self.table.on_left(self._info(name).epoch, cause, [self.attempts[each] for each in attempts]))

    async def _broken(self, name: str) -> None:
        self.dispatcher.on_worker_lost(self._info(name), "a connection to it broke")

    async def _stranger(self, name: str) -> None:
        """A process that this proxy has no requests on is lost."""
        for has_crashed in (True, False):
            self.dispatcher.on_worker_lost(self._info(name), "its process has ended", has_crashed, not has_crashed)

    async def _deaf(self, name: str) -> None:
        self.deaf.add(name)

    async def _report(self, name: str, role: Any, step: str = "0") -> None:
        info = self._info(name)
        load = WorkerLoad(fixed_step_s=float(step))
        self.table.on_status(self.loop.time(), WorkerStatus(info.worker_id, info.epoch, role, load))

    def _on_sent(self, worker: WorkerInfo, message: Any) -> bool:
        process = _process(worker.epoch)
        match message:
            case PrepareDecode():
                self.prepared[message.transfer_id] = worker, message
            case StartPrefill():
                self.note(f"start {self._started(worker, message)}: {_tokens(message)}")
            case AbortAttempt():
                name = next(name for name, attempt_id in self.attempts.items() if attempt_id == message.attempt_id)
                if self.lines and f"abort {name} on " in self.lines[-1]:
                    self.lines[-1] += f" {process}"
                else:
                    self.note(f"abort {name} on {process}")
            case AbortAllAttempts():
                self.note(f"abort all on {process}")
            case _:
                raise AssertionError(message)
        return worker.worker_id not in self.deaf

    def _started(self, worker: WorkerInfo, message: StartPrefill) -> str:
        """Checks that both workers are told the same, and gives the attempts their names."""
        decode, prepare = self.prepared.pop(message.transfer_id, (worker, None))
        if prepare is not None:
            assert (message.decode_worker_id, message.decode_epoch) == (decode.worker_id, decode.epoch)
            assert (prepare.prefill_worker_id, prepare.prefill_epoch) == (worker.worker_id, worker.epoch)
            for field in ("attempt_ids", "token_ids", "num_generated", "seeds", "deadline_s", "stop", "sampling"):
                assert getattr(prepare, field) == getattr(message, field), field
        names = []
        for attempt_id, seed in zip(message.attempt_ids, message.seeds, strict=True):
            number = 1 + sum(name.startswith(self.names[seed]) for name in self.attempts)
            names.append(f"{self.names[seed]}{number}")
            assert attempt_id not in self.attempts.values()
            self.attempts[names[-1]] = attempt_id
            self.workers_of[names[-1]] = worker, decode
        where = f"{' '.join(names)} on {_process(worker.epoch)}"
        if message.decode_epoch is None:
            return f"{where} for one token"
        assert prepare is not None or message.decode_epoch == worker.epoch
        return f"{where} for {_process(decode.epoch)}" if prepare is not None else where

    # ---- readers

    async def _start(
        self, *names: str, prompt: str = "1,2,3", max_tokens: str = "10", deadline: str = "600", salt: str = "",
        temperature: str = "1",
    ) -> None:  # fmt: skip
        ids = [int(each) for each in prompt.split(",")]
        task = PromptTask(
            Prompt(pack_token_ids(ids), len(ids), cache_salt=salt), StopConditions(int(max_tokens)), float(deadline)
        )
        samplings = [SamplingParams(float(temperature), seed=len(self.names) + number) for number in range(len(names))]
        self.names += names
        try:
            started = self.dispatcher.start(task, samplings, lambda sequence: self._on_ready(sequence))
        except TandemError as error:
            self.note(f"{' '.join(names)}: {type(error).__name__}: {error}")
        else:
            self.sequences |= dict(zip(names, started, strict=True))

    def _on_ready(self, sequence: DispatchedSequence) -> None:
        self.loop.call_soon(self._read, self.names[sequence.sampling.seed], sequence)

    def _read(self, name: str, sequence: DispatchedSequence) -> None:
        if not sequence.is_open:
            return
        try:
            delta = self.dispatcher.take(sequence)
        except TandemError as error:
            self.note(f"{name}: {type(error).__name__}: {self._named_numerics(str(error))}")
            self.dispatcher.drop(sequence)
            return
        if delta is not None:
            end = [f"({delta.finish_reason})"] if delta.finish_reason is not None else []
            self.note(f"{name}: {' '.join([*(str(each.token_id) for each in delta.tokens), *end])}")
            if end:
                self.dispatcher.drop(sequence)

    def _named_numerics(self, text: str) -> str:
        for name in set(self.numerics.values()):
            text = text.replace(Numerics(instruction_set=name).digest, name)
        return text

    async def _drop(self, name: str) -> None:
        self.dispatcher.drop(self.sequences[name])

    async def _stop(self) -> None:
        self.dispatcher.fail_all(TandemError("the server stops"))

    async def _wait(self, seconds: str) -> None:
        self.waits_since = self.loop.time()
        await asyncio.sleep(float(seconds))
        self.waits_since = None

    # ---- messages of workers

    async def _first(self, name: str, token_id: str, finish_reason: Any = None, by: str = "") -> None:
        worker = self._info(by) if by else self.workers_of[name][0]
        message = FirstToken(self.attempts[name], SampledToken(int(token_id)), finish_reason, 0.1, 0.2)
        self.dispatcher.on_message(worker, message)

    async def _token(self, name: str, token_id: str, finish_reason: Any = None) -> None:
        token = NewToken(self.attempts[name], SampledToken(int(token_id)), finish_reason)
        self.dispatcher.on_message(self.workers_of[name][1], TokenBatch([token]))

    async def _reserved(self, name: str) -> None:
        self.dispatcher.on_message(self.workers_of[name][1], DecodeReserved(self.attempts[name]))

    async def _preempted(self, name: str, by: str) -> None:
        self.dispatcher.on_message(self._info(by), AttemptPreempted(self.attempts[name]))

    async def _failed(self, name: str, error: str, by: str) -> None:
        self.dispatcher.on_message(self._info(by), AttemptFailed(self.attempts[name], ErrorInfo.of(ERRORS[error])))

    # ---- state

    async def _state(self, *names: str) -> None:
        for name, each in self.sequences.items():
            if each.is_open and (not names or name in names):
                attempts = [
                    name for name, own in self.attempts.items() if each.attempt and each.attempt.attempt_id == own
                ]
                counts = {"lost": each.num_lost, "deaths": each.num_deaths, "failed steps": each.num_failed_steps}
                counts |= {"trials": each.num_trials}
                shown = [*(attempts or ["waits"]), *(f"{what} {number}" for what, number in counts.items() if number)]
                refused_at = each.attempt.refused_at if each.attempt is not None else {}
                shown += [f"refused at {number} by {_process(epoch)}" for epoch, number in refused_at.items()]
                self.note(f"{name}: {', '.join(shown)}")
        if closed := self.dispatcher._trials.closed(self.loop.time()):
            self.note(f"closed to others: {' '.join(sorted(map(_process, closed)))}")
        if not self.dispatcher.num_running:
            self.note("nothing runs")

    async def _times(self, name: str) -> None:
        for each in self.sequences[name].times:
            where = [each.prefill, each.decode or "-", each.placement, "shipped" if each.is_shipped else "not shipped"]
            where += ["lost"] if each.lost_at is not None else []
            self.note(f"{', '.join(where)}; {each.predicted_ttft_s:g} s, {each.predicted_itl_s:g} s")

    async def _metrics(self) -> None:
        counts = (self.metrics.migrated, self.metrics.preempted)
        self.note("migrated {:g}, preempted {:g}".format(*(each._value.get() for each in counts)))


def _process(epoch: str) -> str:
    """Returns the name of a process: that of the worker, and behind it the number if it is not the first."""
    return epoch.removesuffix("/1")


def _tokens(message: PrepareDecode | StartPrefill) -> str:
    """Returns the token ids: of the prompt, and behind + those that were generated before."""
    ids = [str(each) for each in unpack_token_ids(message.token_ids)]
    num_prompt = len(ids) - message.num_generated
    return " ".join(ids[:num_prompt] + ["+"] * bool(message.num_generated) + ids[num_prompt:])


def machine_of(file: Path) -> Play:
    return Machine().play


@pytest.mark.parametrize("file", sorted(SCRIPTS.glob("*.txt")), ids=lambda file: file.stem)
def test_scripts(file: Path) -> None:
    machine = Machine()
    check(file, machine.play)
    machine.close()
