"""The table of workers and the router over it, by the scripts in `scripts/` (`tests.support.scripts`).

`decode-0/2` is the second process of that name, `decode-0` the first. Workers have pairs with all that decode, compute
1000 tokens per second, and have 100 blocks of 4 tokens. All prompts begin alike, but for those that are `other`.

    cluster [NAME...] [threshold=N] [proxies=N] [silence=S]      a new one, with these workers registered and reported
    register NAME [pid=N] [len=N] [version=N] [endpoint=X] [role=X]      exit NAME pid=N cause=X
    leave NAME cause=X [ATTEMPT...]                              drain NAME, role NAME ROLE (orders)
    report NAME [role=X] [draining] [refused|unpaired] [running=N] [free=N] [speed=N] [waiting=[PRIORITY:]N,...]
        [loaded=N] [steps]      steps: 18 ms, and 2 ms for each sequence, of 60 that a sequence may wait
    reports N NAME [prompts=N] ...      N reports, of which each prompts-th has 9 tokens to compute
    cache NAME N, tier NAME N, evict NAME N (N tokens' blocks come into the pool or a tier, or leave the tier)
    wait S      check      pass S [step=S] [NAME...]    the time in steps: these workers report, then silence is checked
    ping NAME      pong NAME [before|of=NAME]      connect
    prompt PROMPT... N [other] [whole] [one] [priority=N] [ttft=S] [read=S]     first PROMPT... [s=S]     end PROMPT...
    state      use NAME...      changes (whether prompts that wait for a worker are tried)
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.engine.kv_cache.prefix_log import PrefixLog
from tandem.protocol.messages.dispatch import Pong
from tandem.protocol.messages.membership import (
    DECODE_ROLES,
    PROTOCOL_VERSION,
    PairChanges,
    PairStatus,
    RegisterWorker,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from tandem.protocol.messages.packed import pack_token_ids
from tandem.proxy.cluster.router import PromptShape, Route, Router, SLOUnreachable
from tandem.proxy.cluster.worker_record import MembershipChange
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.runtime.errors import Overloaded, ProtocolError
from tests.support.scripts import Play, Words, check, listed
from tests.unit.proxy.cluster.router_machine import BLOCK_SIZE, HASHER, STEPS, add_blocks, shape, worker

SCRIPTS = Path(__file__).parent / "scripts"


def _info(name: str, pid: int = 1) -> WorkerInfo:
    worker_id, _, number = name.partition("/")
    return msgspec.structs.replace(worker(worker_id), epoch=f"{worker_id}/{number or 1}", pid=pid)


def _waiting(text: str) -> list[tuple[int, int]]:
    """Returns priorities and tokens of "5:1000,300"."""
    found = [each.rpartition(":") for each in text.split(",") if each]
    return [(int(priority or 0), int(number)) for priority, _, number in found]


class Machine:
    def play(self, event: str) -> list[str]:
        words = Words(event)
        what = words.words.pop(0)
        lines: list[str] = getattr(self, f"_{what}")(words) or []
        return lines

    # ---- workers

    def _cluster(self, words: Words) -> None:
        self.now, self.pings = 0.0, dict[str, int]()
        self.num_changes = 0
        self.routes: dict[str, Route] = {}
        self.logs: dict[str, PrefixLog] = {}
        self.tier_logs: dict[str, PrefixLog] = {}
        threshold = int(words.options.get("threshold", 0))
        self.table = WorkerTable(float(words.options.get("silence", 2.5)), decode_may_prefill=threshold > 0)
        self.router = Router(self.table, threshold, int(words.options.get("proxies", 1)), random.Random(0))
        for name in words.words:
            self._register(Words(name))
        for name in words.words:
            self._report(Words(name))

    def _register(self, words: Words) -> list[str]:
        options = words.options
        info = _info(words.words[0], int(options.get("pid", 1)))
        given: Any = {name: options[name] for name in ("endpoint", "role") if name in options}
        info = msgspec.structs.replace(info, **given)
        version, limit = int(options.get("version", PROTOCOL_VERSION)), int(options.get("len", 4096))
        message = RegisterWorker(version, info, limit, vocab_size=1000, model_id="m", block_size=BLOCK_SIZE)
        try:
            return self._changed(self.table.on_register(self.now, message))
        except ProtocolError as error:
            return [f"refused: {error}"]

    def _changed(self, change: MembershipChange) -> list[str]:
        lines = [f"{each.epoch} has joined" for each in change.joined]
        for lost in change.lost:
            flags = {
                "crashed": lost.has_crashed,
                "left": lost.has_left,
                "in order": lost.in_order,
                "gone": lost.is_gone,
            }
            found = [name for name, is_so in flags.items() if is_so] + sorted(lost.attempt_ids)
            lines.append(f"{lost.worker.epoch} is lost, {lost.reason}: {listed(found)}")
        return lines

    def _exit(self, words: Words) -> list[str]:
        pid, cause = int(words.options.get("pid", 1)), words.options["cause"]
        return self._changed(self.table.on_exited(words.words[0], pid, cause))  # type: ignore[arg-type]

    def _leave(self, words: Words) -> list[str]:
        name, *attempts = words.words
        return self._changed(self.table.on_left(_info(name).epoch, words.options["cause"], attempts))  # type: ignore[arg-type]

    def _report(self, words: Words) -> list[str]:
        state = "refused" if words.flag("refused") else "ready"
        is_unpaired, is_draining, has_steps = words.flag("unpaired"), words.flag("draining"), words.flag("steps")
        info, options = _info(words.words[0]), words.options
        load = WorkerLoad(
            num_decoding=int(options.get("running", 0)),
            num_blocks=100,
            num_free_blocks=int(options.get("free", 100)),
            prompt_tokens_per_s=float(options.get("speed", 1000)),
            waiting_tokens=_waiting(options.get("waiting", "")),
            loaded_tokens_per_s=float(options.get("loaded", 0)),
            **(STEPS if has_steps else {}),
        )
        role: Any = options.get("role", info.role)
        peers = [] if is_unpaired or role == "decode" else self.table.workers()
        pairs: list[Any] = [
            PairStatus(each.worker_id, each.epoch, state)  # type: ignore[arg-type]
            for each in peers
            if each.role in DECODE_ROLES and each.worker_id != info.worker_id
        ]
        logs = [each.setdefault(info.epoch, PrefixLog()) for each in (self.logs, self.tier_logs)]
        prefixes, tier_prefixes = (each.take() for each in logs)
        message = WorkerStatus(
            info.worker_id, info.epoch, role, load, PairChanges(0, pairs), prefixes, draining=is_draining,
            tier_prefixes=tier_prefixes,
        )  # fmt: skip
        return [] if self.table.on_status(self.now, message) else [f"{info.epoch} is asked to register"]

    def _reports(self, words: Words) -> None:
        number, name, *flags = words.words
        period = int(words.options.pop("prompts", 0))
        for each in range(int(number)):
            waiting = "waiting=9" if period and each % period == 0 else ""
            loads = (f"{key}={value}" for key, value in words.options.items())
            self._report(Words(" ".join([name, *flags, waiting, *loads])))

    def _cache(self, words: Words) -> list[str]:
        return self._add_blocks(self.logs, words)

    def _tier(self, words: Words) -> list[str]:
        return self._add_blocks(self.tier_logs, words)

    def _add_blocks(self, logs: dict[str, PrefixLog], words: Words) -> list[str]:
        name = words.words[0]
        add_blocks(logs.setdefault(_info(name).epoch, PrefixLog()), list(range(int(words.words.pop(1)))))
        return self._report(words)

    def _evict(self, words: Words) -> list[str]:
        name, number = words.words[0], int(words.words.pop(1))
        for block_hash in HASHER.prompt_hashes(pack_token_ids(list(range(number)))):
            self.tier_logs[_info(name).epoch].evict(block_hash)
        return self._report(words)

    # ---- orders and time

    def _drain(self, words: Words) -> None:
        self.table.on_drain_ordered(self.now, words.words[0])

    def _role(self, words: Words) -> list[str]:
        name, role = words.words
        refusal = self.table.change_role(self.now, name, role)  # type: ignore[arg-type]
        return [f"refused: {refusal}"] if refusal else []

    def _wait(self, words: Words) -> None:
        self.now += float(words.words[0])

    def _check(self, words: Words) -> list[str]:
        return [f"{self.now:g} s: {line}" for line in self._changed(self.table.check(self.now))]

    def _pass(self, words: Words) -> list[str]:
        duration, *names = words.words
        end, lines = self.now + float(duration), list[str]()
        while self.now < end:
            self.now = round(self.now + float(words.options.get("step", 0.25)), 6)
            for name in names:
                lines += self._report(Words(name))
            lines += self._check(words)
        return lines

    def _ping(self, words: Words) -> None:
        self.pings[words.words[0]] = self.table.on_ping(self.now, _info(words.words[0]).epoch)

    def _pong(self, words: Words) -> None:
        is_before, [name] = words.flag("before"), words.words
        of = words.options.get("of", name)
        self.table.on_pong(_info(name).epoch, Pong(_info(of).epoch, self.pings.get(name, 1) - is_before))

    def _connect(self, words: Words) -> list[str]:
        found = self.table.to_reconnect(self.now)
        return ["to nobody"] * (not found) + [
            f"to {each.epoch}{'' if is_first else ' again'}" for each, is_first in found
        ]

    # ---- prompts

    def _prompt(self, words: Words) -> list[str]:
        is_other, is_whole, is_one = (words.flag(each) for each in ("other", "whole", "one"))
        *names, number = words.words
        prompt = PromptShape(int(number)) if is_other else shape(list(range(int(number))))
        priority = int(words.options.get("priority", 0))
        prompt = msgspec.structs.replace(prompt, needs_decode=not is_one, can_be_cached=not is_whole, priority=priority)
        ttft = words.options.get("ttft")
        lines = []
        for name in names:
            try:
                route = self.routes[name] = self.router.pick(prompt, None if ttft is None else float(ttft))
                lines.append(f"{name}: {_shown(route)}")
            except SLOUnreachable as error:
                lasting = error.within(float(ttft or 0), float(words.options.get("read", 0)))
                lines.append(f"{name} is refused for {error.retry_after_s} s: {lasting} (alone {error.alone_s:.3f} s)")
            except Overloaded as error:
                lines.append(f"{name} is refused: {error}")
        return lines

    def _first(self, words: Words) -> None:
        for name in words.words:
            self.router.prefill_ended(self.routes[name], float(words.options["s"]) if "s" in words.options else None)

    def _end(self, words: Words) -> None:
        for name in words.words:
            self.router.sequence_ended(self.routes.pop(name))

    # ---- state

    def _state(self, words: Words) -> list[str]:
        reports = self.table.report(self.now)
        lines = []
        for each in reports:
            unanswered = "" if each.unanswered_s is None else f", unanswered for {each.unanswered_s:g} s"
            draining = ", draining" if each.draining else ""
            lines.append(f"{each.worker.epoch}: {each.worker.role}{draining}{unanswered}")
        for record in self.table.paired_prefill_workers:
            lines.append(f"{record.worker.epoch} computes for {listed(record.decode_peers)}")
        assert self.table.num_unanswered == sum(each.unanswered_s is not None for each in reports)
        lines += [f"not ready: {why}"] if (why := self.table.why_not_ready()) else []
        return lines + ([f"trouble: {why}"] if (why := self.table.trouble()) else [])

    def _changes(self, words: Words) -> list[str]:
        before, self.num_changes = self.num_changes, self.table.num_changes
        return ["prompts that wait are tried" if before < self.num_changes else "none"]

    def _use(self, words: Words) -> list[str]:
        records = {each.worker.worker_id: each for each in self.table.prefill_workers + self.table.decode_workers}
        lines = []
        for name in words.words:
            use = records[name].use
            idle = ", idle" if use.is_idle else ""
            lines.append(
                f"{name}: {use.prompts.total} tokens, {use.num_sequences} sequences, "
                f"{use.num_free_blocks} free blocks, {use.tokens_per_s:g} tokens/s{idle}"
            )
        return lines


def _shown(route: Route) -> str:
    where = route.prefill.worker_id if route.prefill == route.decode else f"{route.prefill.worker_id} for one token"
    if route.is_shipped:
        assert route.decode is not None
        where = f"{route.prefill.worker_id} for {route.decode.worker_id}"
    itl = f", then every {route.itl_s * 1000:.3g} ms" if route.itl_s else ""
    return f"{where}, {route.num_uncached_tokens} tokens in {route.computing_s:.4g} s{itl}"


def machine_of(file: Path) -> Play:
    return Machine().play


@pytest.mark.parametrize("file", sorted(SCRIPTS.glob("*.txt")), ids=lambda file: file.stem)
def test_scripts(file: Path) -> None:
    check(file, machine_of(file))
