"""Processes that decode, render and tokenise long bodies, so that the event loop never waits for them.

They are processes and not threads because a thread holds the interpreter's lock while it decodes JSON
(docs/adr/0007-reader-processes.md), and sandboxes because the bodies are the clients' (`runtime.processes.sandbox`). A
fork server, which is forked before the loop and any thread exists, forks them and their successors, so that all share
the tokeniser's memory. Each has one job at a time. A process is ended when its job crashes it, exceeds a limit or has
no caller any more, and when it has grown; another one takes its place. Clients take turns, and none holds the last
process (`proxy.reading.sandbox_pool`).
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from tandem.protocol.messages.packed import BYTES_PER_TOKEN
from tandem.proxy.admission.admission import ClientLimitExceeded
from tandem.proxy.admission.budgets import ClientBudget
from tandem.proxy.admission.fair_slots import FairSlots
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading.body_reader import BodyKind, BodyReader, HasMedia, reads_files
from tandem.proxy.reading.sandbox_pool import SandboxPool
from tandem.proxy.reading.spooled_body import SpooledBody
from tandem.proxy.text.prompt import CompletionPrompt, has_media, has_own_template, has_token_ids
from tandem.runtime.client_share import CLIENT_SHARE
from tandem.runtime.errors import InternalError, InvalidRequest, Overloaded, TandemError
from tandem.runtime.garbage_collection import freeze_loaded_objects
from tandem.runtime.processes.fork_server import Entry
from tandem.runtime.processes.forked_process import ForkServer, ForkServerLost, KeptForkServer
from tandem.runtime.processes.sandbox import Limits, SandboxLost, sandbox_entry

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_INLINE_BYTES = 2048
"""Size up to which text is tokenised on the loop: that takes no longer than a round trip to a process (0.5 ms)."""
MAX_INLINE_PROMPTS = 32
"""Number of prompts up to which a short body is tokenised on the loop (under 1 ms)."""
MAX_INLINE_TOKENS = 1024
"""Prompt tokens up to which an echo is detokenised on the loop (under 1 ms)."""
JOB_CPU_S = 10.0
"""CPU time that a job may take, besides JOB_CPU_S_PER_MIB."""
JOB_CPU_S_PER_MIB = 3.0
"""CPU time in addition for each MiB of the body: six times what tokenising a MiB of text takes."""
JOB_MEMORY_BYTES = 1 << 30
"""Memory that a job may take, besides MEMORY_PER_BODY_BYTE."""
MEMORY_PER_BODY_BYTE = 128
"""Memory in addition for each byte of the body: a byte of text may become a token of 120."""
MAX_GROWN_BYTES = 128 << 20
"""Memory by which a process may have grown after a job. A new one takes milliseconds."""
_DEADLINE_FACTOR = 10
"""A job may take this many times its CPU limit in elapsed time, because the machine may be busy."""
MAX_PENDING_JOBS = 4096
"""Jobs that may wait for a process, or be in one. CLIENT_SHARE of them may wait for one client. Other limits apply
earlier (`proxy.admission`)."""
_TRANSFORM_SHARE = 0.5
"""Share of the processes, and at least one, that work on calls without a worker of one client at the same time."""
_RETRY_AFTER_S = 1
_LOAD_TIMEOUT_S = 60.0
"""Deadline of a fork server that must load the model's text files first; it takes about 3 s."""
_SERVER, _ENTRY = "tandem.proxy.reading.reader_process", "reader"


def reader_entries(reader: BodyReader) -> dict[str, Entry]:
    """Returns the entries of a fork server that forks readers."""
    return {_ENTRY: sandbox_entry(reader, MAX_GROWN_BYTES)}


class _PendingJobs(ClientBudget):
    """Jobs that have not ended."""

    def check(self, client: str, number: int) -> None:
        """Raises Overloaded, ClientLimitExceeded."""
        if self.num_held >= MAX_PENDING_JOBS:
            raise Overloaded("too many requests are waiting to be read; try again later")
        if (num_own := self._by_client[client]) >= MAX_PENDING_JOBS * CLIENT_SHARE:
            raise ClientLimitExceeded(
                f"{num_own} of your requests are waiting to be read already, which is the limit for each client. Try "
                "again later.",
                _RETRY_AFTER_S,
            )


class ReaderPool:
    """config: a fork server loads a reader by it if the one that `fork` makes is lost, or was not made.

    num_processes: at least 2, because one client holds all but one at most.
    """

    def __init__(self, reader: BodyReader, config: ProxyConfig, num_processes: int) -> None:
        self._reader = reader
        self._config = config.without_secrets()
        self._server = KeptForkServer(self._spawn_server, _LOAD_TIMEOUT_S)
        self._sandboxes = SandboxPool(self._server, _ENTRY, num_processes)
        self._transforms = FairSlots(MAX_PENDING_JOBS, max(1, int(_TRANSFORM_SHARE * num_processes)))
        self._pending = _PendingJobs()

    def fork(self) -> None:
        """Forks the fork server. Must be called while this process has one thread and no loop.

        Without this call, and if it is refused, one that loads the model's text files is started when first needed.
        """
        freeze_loaded_objects()
        try:
            self._server.take(ForkServer.fork_here(reader_entries(self._reader)))
        except ForkServerLost as error:
            log.error("%s; the readers load the model's text files again", error)

    def start(self) -> None:
        """Starts the processes, now instead of for the first job."""
        self._sandboxes.start()

    async def read(
        self, kind: BodyKind, body: bytes | SpooledBody, limits: ModelLimits, client: str = "", cache_scope: str = ""
    ) -> GenerationRequest:
        """Returns the request with tokenised prompts. client: see `run`. cache_scope: see `BodyReader.decode`.

        Raises InvalidRequest, HasMedia, Overloaded, InternalError."""
        if isinstance(body, bytes) and not reads_files(kind, body):
            request = self._reader.decode(body, kind, cache_scope)
            if has_media(request.prompt):
                raise HasMedia("the request has images or video")
            prompt = request.prompt
            is_short = len(body) <= MAX_INLINE_BYTES or has_token_ids(prompt)
            if isinstance(prompt, CompletionPrompt) and prompt.num_prompts(MAX_INLINE_PROMPTS) > MAX_INLINE_PROMPTS:
                is_short = False
            # The client decides how long its own template or grammar takes.
            if is_short and not has_own_template(request.prompt) and request.output_grammar is None:
                return self._reader.render(request, limits)
        return await self.run(BodyReader.read, body, kind, limits, cache_scope, client=client)

    async def text_of(self, token_ids: bytes, skip_special_tokens: bool = True, client: str = "") -> str:
        """Returns the text of a prompt. token_ids: packed. client: see `run`."""
        if len(token_ids) <= MAX_INLINE_TOKENS * BYTES_PER_TOKEN:
            return self._reader.text_of(token_ids, skip_special_tokens)
        return await self.run(BodyReader.text_of, token_ids, skip_special_tokens, client=client)

    async def transform(
        self, method: Callable[..., bytes], body: bytes | SpooledBody, *arguments: object, client: str = ""
    ) -> bytes:
        """Like `run`, for a call that needs no worker. Such calls have a share of the client's processes."""
        with self._pending.hold(client):
            async with self._transforms.slot(client):
                return await self._call(method, body, arguments, client)

    async def run(self, method: Callable[..., T], data: bytes | SpooledBody, *arguments: object, client: str = "") -> T:
        """Calls a method of a process's reader; a spooled body is passed as the path of its file.

        method: a function of a module or class, annotated with types that msgspec encodes. client: whose job it is;
        clients take turns. Cancelling ends the job, and its process if it has begun. Raises as the method does,
        InvalidRequest if it takes too much CPU time or memory or crashes, Overloaded, ClientLimitExceeded,
        InternalError.
        """
        with self._pending.hold(client):
            return await self._call(method, data, arguments, client)

    async def _call(
        self, method: Callable[..., T], data: bytes | SpooledBody, arguments: tuple[object, ...], client: str
    ) -> T:
        content = Path(data.path) if isinstance(data, SpooledBody) else data
        num_bytes = data.num_bytes if isinstance(data, SpooledBody) else len(data)
        cpu_s = JOB_CPU_S + JOB_CPU_S_PER_MIB * num_bytes / (1 << 20)
        limits = Limits(cpu_s, JOB_MEMORY_BYTES + MEMORY_PER_BODY_BYTE * num_bytes, _DEADLINE_FACTOR * cpu_s)
        try:
            return await self._sandboxes.call(client, method, content, arguments, limits)
        except TimeoutError as error:
            raise Overloaded("the request was not read in time, because the machine is busy; try again") from error
        except SandboxLost as lost:
            raise _error_of(lost, limits) from lost

    def _spawn_server(self) -> ForkServer:
        """Starts a fork server that loads a reader. Raises OSError."""
        return ForkServer.spawn(_SERVER, os.environ, config=msgspec.json.encode(self._config))

    def close(self) -> None:
        """Ends the processes, and all jobs with an error."""
        self._sandboxes.close()


def _error_of(lost: SandboxLost, limits: Limits) -> TandemError:
    if lost.is_over_time:
        return InvalidRequest(
            f"Reading this request takes more than {limits.cpu_s:.0f} s of CPU time, the limit for its size. Send a "
            "shorter one, or a simpler schema, grammar or template."
        )
    if lost.is_out_of_memory:
        return InvalidRequest(
            "Reading this request takes more memory than its size allows; send a smaller or simpler one."
        )
    if lost.is_fault:
        return InvalidRequest(
            f"Reading this request ends the process that reads it ({signal.Signals(-lost.status).name}): it takes too "
            "much memory, or is too deeply nested. Send a smaller or simpler one."
        )
    if not lost.had_read:
        return InternalError("the process that should read the request died; try again")
    return InvalidRequest(
        "Two processes that read this request were killed while they did, probably because it takes too much memory. "
        "Send a smaller or simpler one."
    )
