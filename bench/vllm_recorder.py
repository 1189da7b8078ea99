"""`vllm bench serve` as it is, with every stream that it reads kept, bytes and times, for another reader.

VENV/bin/python -m bench.vllm_recorder FILE ARGUMENTS...    under vLLM's own Python; ARGUMENTS follow `vllm bench serve`

FILE gets JSON: a list of streams, each the time its request was sent and [time, text] for each piece that was read.
Times are of the host's monotonic clock. `bench.load_agreement` reads it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

STREAMS: list[dict[str, Any]] = []


class _Sent:
    """In place of what `session.post` returns: notes when it was sent and which reader its answer has."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._sent_at = time.perf_counter()

    async def __aenter__(self) -> aiohttp.ClientResponse:
        response: aiohttp.ClientResponse = await self._request.__aenter__()
        stream: dict[str, Any] = {"sent_at": self._sent_at, "status": response.status, "pieces": []}
        STREAMS.append(stream)
        pieces: list[Any] = stream["pieces"]
        _PIECES[id(response.content)] = pieces
        return response

    async def __aexit__(self, *error: Any) -> None:
        await self._request.__aexit__(*error)


_PIECES: dict[int, list[Any]] = {}


def record() -> None:
    post = aiohttp.ClientSession.post

    def sent(session: aiohttp.ClientSession, *args: Any, **kwargs: Any) -> _Sent:
        return _Sent(post(session, *args, **kwargs))

    async def iter_any(reader: aiohttp.StreamReader) -> AsyncIterator[bytes]:
        pieces = _PIECES.pop(id(reader))
        while piece := await reader.readany():
            pieces.append([time.perf_counter(), piece.decode()])
            yield piece

    aiohttp.ClientSession.post = sent  # type: ignore[method-assign,assignment]
    aiohttp.StreamReader.iter_any = iter_any  # type: ignore[method-assign,assignment]


def main() -> None:
    file, arguments = Path(sys.argv[1]), sys.argv[2:]
    from vllm.entrypoints.cli.main import main as vllm  # type: ignore[import-not-found]

    record()
    sys.argv = ["vllm", "bench", "serve", *arguments]
    vllm()
    file.write_text(json.dumps(STREAMS))


if __name__ == "__main__":
    main()
