"""A real proxy process with fake workers on a thread of the test, which echo the prompt's tokens.

They exchange the prompt in memory instead of a KV transfer.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self
from unittest.mock import MagicMock

import httpx
import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tandem.engine.kv_cache.prefix_log import PrefixLog
from tandem.protocol.codec import Codec
from tandem.protocol.messages.dispatch import (
    AbortAttempt,
    AttemptFailed,
    DecodeReserved,
    FirstToken,
    NewToken,
    Ping,
    Pong,
    PrepareDecode,
    StartPrefill,
    TokenBatch,
    ToWorker,
)
from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    PairChanges,
    PairStatus,
    RegisterWorker,
    Role,
    TierFigures,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from tandem.protocol.messages.packed import unpack_token_ids
from tandem.protocol.messages.sampling import SampledToken
from tandem.protocol.sockets import RouterSocket, new_context
from tandem.proxy.proxy_config import ProxyConfig
from tandem.runtime.errors import ErrorInfo, TandemError
from tandem.runtime.settings import with_values
from tandem.worker.presence import ProxyLinks
from tests.support.ports import free_port
from tests.support.waiting import wait_until

MAX_MODEL_LEN = 256
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if m is defined %}{{ raise_exception('no') }}{% endif %}"
)
STEP_S = 0.002


class FakeWorkers:
    """Prefill workers and one decode worker on a thread with a loop.

    sticks: prompts that begin with "hold" get no answer, and those with "stall" three tokens. computed_by: names of the
    workers that got the prompts, by attempt. tiers: blocks that a worker reports in its host memory, by its name;
    ClearCache evicts them. fail_at: where the first of the sequences that share a prompt fails, with which error: at
    "prefill", before decode has reserved ("reserve"), or at the third token ("decode").
    """

    def __init__(
        self,
        folder: Path,
        controls: list[str],
        max_model_len: int = MAX_MODEL_LEN,
        step_s: float = STEP_S,
        num_prefill: int = 1,
        sticks: bool = True,
    ) -> None:
        self._roles: dict[str, Role] = {f"prefill-{i}": "prefill" for i in range(num_prefill)}
        self._roles["decode-0"] = "decode"
        self._folder, self._controls = folder, controls
        ids = _byte_tokenizer().encode_batch_fast(["hold", "stall"])
        self._hold, self._stall = (each.ids if sticks else [-1] for each in ids)
        self._max_model_len, self._step_s = max_model_len, step_s
        self.aborted: dict[str, set[str]] = {"prefill": set(), "decode": set()}
        self.seen: list[str] = []
        self.computed_by: dict[str, str] = {}
        self.tiers: dict[str, PrefixLog] = {}
        self.num_finished = 0
        self.fail_at: tuple[str, TandemError] | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._ready = threading.Event()
        self._thread.start()
        if not self._ready.wait(180):
            self.stop()  # otherwise it would register under the names of the next test's workers
            raise AssertionError("the workers were not seen by every proxy")

    async def _run(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        context = new_context()
        self._prepared: dict[str, PrepareDecode] = {}
        self._started: dict[str, StartPrefill] = {}
        infos = {name: self._info(name, role) for name, role in self._roles.items()}
        self._epochs = {info.epoch for info in infos.values()}
        self._routers: dict[str, Any] = {
            name: RouterSocket(
                context,
                info.endpoint,
                Codec(ToWorker),
                partial(self._on_message, name),
            )
            for name, info in infos.items()
        }
        self._registrations: dict[str, ProxyLinks] = {}
        self._infos = infos
        for name in infos:
            self._registrations[name] = ProxyLinks(
                context,
                self._register(name),
                MagicMock(
                    status=partial(self._status, name),
                    on_view=self._on_view,
                    clear_cache=partial(self._clear_tiers, name),
                ),
                self._controls,
            )
        await self._stopped.wait()
        for thing in (*self._registrations.values(), *self._routers.values()):
            thing.close()
        context.destroy(linger=0)

    def _register(self, name: str) -> RegisterWorker:
        return RegisterWorker(PROTOCOL_VERSION, self._infos[name], self._max_model_len, 300, "echo", 64)

    def _status(self, name: str) -> WorkerStatus:
        info = self._infos[name]
        pairs = [PairStatus("decode-0", self._infos["decode-0"].epoch, "ready", "fake")]
        log = self.tiers.get(name)
        return WorkerStatus(
            name,
            info.epoch,
            info.role,
            WorkerLoad(tiers=[TierFigures("host", num_blocks=len(log.cached))] if log is not None else []),
            PairChanges(0, pairs if info.role == "prefill" else []),
            tier_prefixes=log.take() if log is not None else None,
        )

    def _clear_tiers(self, name: str) -> None:
        for block_hash in list(self.tiers[name].cached):
            self.tiers[name].evict(block_hash)

    def _on_view(self, view: list[WorkerInfo]) -> None:
        if {info.epoch for info in view} == self._epochs:  # and not those of an earlier test
            self._ready.set()

    def _info(self, name: str, role: Role) -> WorkerInfo:
        return WorkerInfo(name, f"{name}/{os.urandom(4).hex()}", role, f"ipc://{self._folder}/{name}", os.getpid())

    def _on_message(self, name: str, identity: bytes, message: Any) -> None:
        if isinstance(message, Ping):
            self._routers[name].send(identity, Pong(self._infos[name].epoch, message.number))
        elif self._roles[name] == "decode":
            self._on_decode(message)
        else:
            self._on_prefill(name, message)

    def _on_prefill(self, name: str, message: Any) -> None:
        match message:
            case StartPrefill():
                for attempt_id in message.attempt_ids:
                    self.seen.append(attempt_id)
                    self.computed_by[attempt_id] = name
                    self._started[attempt_id] = message
                    self._advance(attempt_id)
            case AbortAttempt():
                self.aborted["prefill"].add(message.attempt_id)

    def _on_decode(self, message: Any) -> None:
        match message:
            case PrepareDecode():
                for attempt_id in message.attempt_ids:
                    self._prepared[attempt_id] = message
                    self._advance(attempt_id)
            case AbortAttempt():
                self.aborted["decode"].add(message.attempt_id)

    def _advance(self, attempt_id: str) -> None:
        start, prepare = self._started.get(attempt_id), self._prepared.get(attempt_id)
        if start is None or (prepare is None and start.decode_worker_id is not None):
            return
        token_ids = unpack_token_ids(start.token_ids)
        if token_ids[: len(self._hold)] == self._hold:
            return
        token_ids = self.reply(token_ids)
        identity = f"{start.proxy_id}:0".encode()
        if self._fails("prefill", attempt_id, start):
            return
        reason = start.stop.check(token_ids[0], 1)
        first = FirstToken(attempt_id, SampledToken(token_ids[0]), reason, 0.0, 0.001)
        self._routers[self.computed_by[attempt_id]].send(identity, first)
        if reason is None:
            assert prepare is not None and prepare.transfer_id == start.transfer_id
            if self._fails("reserve", attempt_id, start):
                return
            self._routers["decode-0"].send(identity, DecodeReserved(attempt_id))
            self._loop.call_later(self._step_s, self._step, attempt_id, start, token_ids, 1)

    def reply(self, token_ids: list[int]) -> list[int]:
        """Returns the tokens that are generated, again and again until the sequence ends. token_ids: of the prompt."""
        return token_ids

    def _step(self, attempt_id: str, start: StartPrefill, token_ids: list[int], number: int) -> None:
        if attempt_id in self.aborted["decode"]:
            return
        if number == 3 and token_ids[: len(self._stall)] == self._stall:
            return
        if number == 2 and self._fails("decode", attempt_id, start):
            return
        token_id = token_ids[number % len(token_ids)]
        reason = start.stop.check(token_id, number + 1)
        batch = TokenBatch([NewToken(attempt_id, SampledToken(token_id), reason)])
        self._routers["decode-0"].send(f"{start.proxy_id}:0".encode(), batch)
        self.num_finished += reason is not None
        if reason is None:
            self._loop.call_later(self._step_s, self._step, attempt_id, start, token_ids, number + 1)

    def _fails(self, where: str, attempt_id: str, start: StartPrefill) -> bool:
        if self.fail_at is None or self.fail_at[0] != where or attempt_id != start.attempt_ids[0]:
            return False
        failed = AttemptFailed(attempt_id, ErrorInfo.of(self.fail_at[1]))
        sender = self.computed_by[attempt_id] if where == "prefill" else "decode-0"
        self._routers[sender].send(f"{start.proxy_id}:0".encode(), failed)
        return True

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(5)


def _byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"</s>": 0} | {c: i for i, c in enumerate(alphabet, start=1)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_tokenizer(folder: Path, chat_template: str = TEMPLATE, markers: Sequence[str] = ()) -> Tokenizer:
    """Writes the text files of a model whose tokens are bytes. markers: texts that are special tokens besides."""
    tokenizer = _byte_tokenizer()
    tokenizer.add_special_tokens(["</s>", *markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 0}')
    return tokenizer


class Proxy:
    """A context manager, or stopped by `stop`. metrics: the folder that several proxies share for theirs.
    max_descriptors: that it may open; 0 for as many as this process may.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "proxy-0",
        port: int = 0,
        metrics: Path | None = None,
        max_descriptors: int = 0,
        **config: Any,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.admin_url = f"http://127.0.0.1:{config.get('admin_port') or self.port}"
        self.control = f"ipc://{folder}/{name}.sock"
        made = ProxyConfig(name, self.control, str(folder), "echo")
        file = folder / f"{name}.json"
        file.write_bytes(
            msgspec.json.encode(
                with_values(made, {"port": self.port, "decode_prefill_threshold": 0, "max_body_mib": 1, **config})
            )
        )
        env = os.environ | ({"PROMETHEUS_MULTIPROC_DIR": str(metrics)} if metrics else {})
        command = ["prlimit", f"--nofile={max_descriptors}"] if max_descriptors else []
        command += [sys.executable, "-W", "error", "-m", "tandem.proxy", str(file)]
        self.process = subprocess.Popen(command, env=env)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()

    def wait_for(self, status: int) -> None:
        def answered() -> bool:
            assert self.process.poll() is None, "the proxy exited"
            try:
                return httpx.get(f"{self.url}/health").status_code == status
            except httpx.TransportError:
                return False

        wait_until(answered, 180)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@contextmanager
def proxy_with_workers(
    folder: Path, workers: Mapping[str, Any] = MappingProxyType({}), **config: Any
) -> Iterator[tuple[Proxy, FakeWorkers]]:
    """Starts a proxy and its workers. workers: arguments of `FakeWorkers`. config: of `Proxy`."""
    if not (folder / "tokenizer.json").exists():
        make_tokenizer(folder)
    with Proxy(folder, **config) as proxy:
        proxy.wait_for(503)
        running = FakeWorkers(folder, [proxy.control], **workers)
        try:
            proxy.wait_for(200)
            yield proxy, running
        finally:
            running.stop()
