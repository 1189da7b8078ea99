"""Sends text prompts one after the other from a process of its own, and notes when each answer begins.

Apart from the process that makes the load beside them, which is late itself when it has much to do.
"""

from __future__ import annotations

import http.client
import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from typing import Self

from bench.latency import Distribution
from bench.media_load import chat_body, text_of

_PAUSE_S = 0.1
_TIMEOUT_S = 300.0
_spawn = multiprocessing.get_context("spawn")  # no locks or sockets of the parent


class TextPrompts:
    """A context manager; sends from `begin` to `end`."""

    def __init__(self, port: int) -> None:
        self._port = port

    def __enter__(self) -> Self:
        self._pipe, far_end = _spawn.Pipe()
        self._process = _spawn.Process(target=_send, args=(self._port, far_end), daemon=True)
        self._process.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.join()

    def begin(self) -> None:
        self._pipe.send("begin")

    def end(self) -> Distribution | None:
        """Milliseconds to the first bytes of answers since `begin`. Raises RuntimeError when one was not served."""
        self._pipe.send("end")
        seconds = self._pipe.recv()
        if isinstance(seconds, str):
            raise RuntimeError(seconds)
        return Distribution.of_seconds(seconds)


def _send(port: int, pipe: Connection) -> None:
    rng = random.Random(0)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        while pipe.recv() == "begin":
            taken: list[float] = []
            while not pipe.poll():
                body = chat_body(text_of(rng), max_tokens=2)
                begun = time.perf_counter()
                connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                first = answer.read(1)
                taken.append(time.perf_counter() - begun)
                rest = answer.read()
                if answer.status != 200 or b"[DONE]" not in rest:
                    raise ValueError(f"HTTP {answer.status}: {(first + rest)[:200]!r}")
                time.sleep(_PAUSE_S)
            pipe.recv()
            pipe.send(taken)
    except (OSError, ValueError, http.client.HTTPException) as error:
        pipe.send(f"a text prompt failed: {error!r}")
    except EOFError:  # the parent has gone
        return
