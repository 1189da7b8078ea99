"""`python -m bench.http_dispatch fresh|pooled up ...`: `tandem up` whose proxy and workers talk HTTP, to compare.

The same proxy and workers in the same processes; just the socket between them is another one. Each command is a POST, a
request's facts come back as the chunks of its response, in the same msgpack. `fresh` makes a connection for each
request, `pooled` keeps them. Both ends are aiohttp, over unix sockets like ZeroMQ's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from deploy.log_file import LogFile
from deploy.processes import ChildProcess
from protocol.codec import Codec
from protocol.dispatch import AbortRequest, FirstToken, PrepareDecode, RequestFailed, StartPrefill, TokenBatch, ToProxy
from protocol.membership import WorkerInfo
from protocol.sockets import RouterSocket

_PART, _MODE = "TANDEM_BENCH_PART", "TANDEM_BENCH_HTTP"
_MAX_BODY_BYTES = 1 << 26


def _socket_path(endpoint: str) -> str:
    return endpoint.removeprefix("ipc://") + ".http"


# ---- the worker's end


class HttpRouter(RouterSocket[Any]):
    """A worker's ROUTER, which its peers go on using; beside it an HTTP server for the proxy."""

    def __init__(
        self, context: Any, endpoint: str, codec: Codec[Any], on_message: Callable[[bytes, Any], None]
    ) -> None:
        super().__init__(context, endpoint, codec, on_message)
        self._handle_message = on_message
        self._responses: dict[str, asyncio.Queue[bytes | None]] = {}  # by request id; None ends one
        self._serving = asyncio.create_task(self._serve(_socket_path(endpoint)))

    async def _serve(self, path: str) -> None:
        application = web.Application(client_max_size=_MAX_BODY_BYTES)
        application.router.add_post("/", self._on_post)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        try:
            await web.UnixSite(runner, path, backlog=1024).start()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    async def _on_post(self, request: web.Request) -> web.StreamResponse:
        message = self._codec.decode(await request.read())
        if isinstance(message, AbortRequest):
            self._handle_message(b"", message)
            if (queue := self._responses.get(message.request_id)) is not None:
                queue.put_nowait(None)
            return web.Response()
        assert isinstance(message, StartPrefill | PrepareDecode) and len(message.request_ids) == 1, "n is 1 here"
        assert isinstance(message, StartPrefill) or message.prefill_worker_id, "prefill's first token is its last fact"
        [request_id] = message.request_ids
        queue = self._responses[request_id] = asyncio.Queue()
        response = web.StreamResponse()
        try:
            await response.prepare(request)
            self._handle_message(f"{message.proxy_id}:0".encode(), message)
            while (fact := await queue.get()) is not None:
                await response.write(len(fact).to_bytes(4, "big") + fact)
        finally:
            del self._responses[request_id]
        return response

    def send(self, identity: bytes, message: msgspec.Struct) -> bool:
        if isinstance(message, TokenBatch):  # a batch is for one proxy; a response, for one request
            for token in message.tokens:
                self._respond(token.request_id, TokenBatch([token]), token.finish_reason is not None)
            return True
        request_id = getattr(message, "request_id", None)
        if request_id is None:
            return super().send(identity, message)
        return self._respond(request_id, message, isinstance(message, FirstToken | RequestFailed))

    def _respond(self, request_id: str, message: msgspec.Struct, is_last: bool) -> bool:
        if (queue := self._responses.get(request_id)) is not None:
            queue.put_nowait(self._codec.encode(message))
            if is_last:
                queue.put_nowait(None)
        return True

    def close(self) -> None:
        self._serving.cancel()
        super().close()


# ---- the proxy's end


class HttpWorkerPool:
    """In place of `proxy.worker_pool.WorkerPool`."""

    def __init__(
        self,
        context: Any,
        proxy_id: str,
        sockets_per_worker: int,
        on_message: Callable[[WorkerInfo, ToProxy], None],
        on_broken: Callable[[WorkerInfo], None],
    ) -> None:
        self._on_message = on_message
        self._on_broken = on_broken
        self._codec: Codec[ToProxy] = Codec(ToProxy)
        self._sessions: dict[str, aiohttp.ClientSession] = {}  # by epoch
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, worker: WorkerInfo) -> None:
        force_close = os.environ[_MODE] == "fresh"
        connector = aiohttp.UnixConnector(_socket_path(worker.endpoint), limit=0, force_close=force_close)
        timeout = aiohttp.ClientTimeout(total=None)
        self._sessions[worker.epoch] = aiohttp.ClientSession("http://worker", connector=connector, timeout=timeout)

    def send(self, worker: WorkerInfo, connection_key: str, message: msgspec.Struct) -> bool:
        task = asyncio.create_task(self._post(worker, self._codec.encode(message)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _post(self, worker: WorkerInfo, body: bytes) -> None:
        try:
            async with self._sessions[worker.epoch].post("/", data=body) as response:
                async for fact in _facts(response.content):
                    self._on_message(worker, self._codec.decode(fact))
        except aiohttp.ClientError:
            self._on_broken(worker)

    def close(self, worker: WorkerInfo) -> None:
        session = self._sessions.pop(worker.epoch, None)
        if session is not None:
            closing = asyncio.create_task(session.close())
            self._tasks.add(closing)

    def close_all(self) -> None:
        for task in self._tasks:
            task.cancel()


async def _facts(stream: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            yield await stream.readexactly(int.from_bytes(await stream.readexactly(4), "big"))


# ---- processes


class HttpChild(ChildProcess):
    """A process of the cluster, started through this module, which swaps its socket."""

    def __init__(
        self,
        name: str,
        module: str,
        config_file: Path,
        output: LogFile,
        env: dict[str, str],
        on_exit: Callable[[str, int, int], bool],
        pid_file: Path,
        pass_fds: Sequence[int] = (),
    ) -> None:
        env = {**env, _PART: module}
        super().__init__(name, "bench.http_dispatch", config_file, output, env, on_exit, pid_file, pass_fds)


def main() -> None:
    match os.environ.get(_PART):
        case None:
            import deploy.cli
            import deploy.site

            os.environ[_MODE] = sys.argv.pop(1)
            assert os.environ[_MODE] in ("fresh", "pooled")
            deploy.site.ChildProcess = HttpChild  # type: ignore[attr-defined]
            deploy.cli.main()
        case "proxy":
            import proxy.__main__
            import proxy.server

            proxy.server.WorkerPool = HttpWorkerPool  # type: ignore[attr-defined, assignment]
            os._exit(proxy.__main__.main(sys.argv[1:]))
        case "prefill_worker":
            import prefill_worker.__main__
            import prefill_worker.worker

            prefill_worker.worker.RouterSocket = HttpRouter  # type: ignore[attr-defined, assignment]
            prefill_worker.__main__.main()
        case "decode_worker":
            import decode_worker.__main__
            import decode_worker.worker

            decode_worker.worker.RouterSocket = HttpRouter  # type: ignore[attr-defined, assignment]
            decode_worker.__main__.main()
        case part:
            raise SystemExit(f"no such part: {part}")


if __name__ == "__main__":
    main()
