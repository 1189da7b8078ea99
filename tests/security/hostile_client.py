"""A client that sends requests and behaves as it likes: reads, hardly reads, hardly sends, or leaves at some moment.

Attacks that are written down (`tests.security.attacks`) and drawn ones (`tests.security.drawn_attacks`) are sent so.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Behaviour = Literal[
    "reads", "reads slowly", "never reads", "sends slowly", "sends nothing", "leaves in the body", "leaves at once",
    "leaves soon", "leaves later", "leaves at the first event",
]  # fmt: skip
LEAVE_S = {"leaves at once": 0.0, "leaves soon": 0.15, "leaves later": 0.7}
HOLD_S = 4.0
"""For clients that hardly read or send."""
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
"""So that the attacker has more connections than the server allows to one address."""
KEPT_BYTES = 4096


class Sent(NamedTuple):
    """A request. body: None for a GET. length: what its head says of the body, where that is not true."""

    path: str
    body: bytes | dict[str, Any] | None = None
    headers: Mapping[str, str] = MappingProxyType({})
    length: int | None = None

    @property
    def content(self) -> bytes:
        if self.body is None:
            return b""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()

    def head(self, key: str) -> bytes:
        fields = {"Host": "x", "Authorization": f"Bearer {key}", **self.headers}
        if self.body is not None:
            length = len(self.content) if self.length is None else self.length
            fields = {"Content-Type": "application/json", "Content-Length": str(length), **fields}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"{'GET' if self.body is None else 'POST'} {self.path} HTTP/1.1\r\n{lines}\r\n".encode()


@dataclass
class Answer:
    """status: 0 if there was no answer. text: its last bytes."""

    path: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    kept: bytearray = field(default_factory=bytearray)
    num_bytes: int = 0

    @property
    def text(self) -> str:
        return self.kept.decode(errors="replace")

    def json(self) -> Any:
        return json.loads(self.kept)


@dataclass(frozen=True)
class HostileClient:
    """read_s: time after which it leaves though it reads. kept_bytes: how much of each answer it keeps.

    has_small_buffers: what it has not read waits at the server. Clients that hardly read have small ones in any case.
    """

    port: int
    key: str
    read_s: float = 15.0
    kept_bytes: int = KEPT_BYTES
    addresses: Sequence[str] = ADDRESSES
    has_small_buffers: bool = True
    answers: list[Answer] = field(default_factory=list)
    """Of all requests so far, also while others wait."""

    async def send_all(
        self, requests: Iterable[Sent], behaviours: Iterable[Behaviour | float] = ("reads",), at_once: int = 1 << 16
    ) -> list[Answer]:
        """Sends each on a connection of its own. behaviours: of the first ones, and again; a number of seconds after
        which it leaves is one too. Returns an answer for each."""
        slots = asyncio.Semaphore(at_once)

        async def send(sent: Sent, behaviour: Behaviour | float, address: str) -> Answer:
            async with slots:
                return await self._send(sent, behaviour, address)

        each = zip(requests, itertools.cycle(behaviours), itertools.cycle(self.addresses), strict=False)
        return list(await asyncio.gather(*(send(*one) for one in each)))

    async def _send(self, sent: Sent, behaviour: Behaviour | float, address: str) -> Answer:
        self.answers.append(answer := Answer(sent.path))
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            reader, writer = await self._connect(address, behaviour)
            try:
                await self._behave(behaviour, reader, writer, sent, answer)
            finally:
                writer.transport.abort()
        return answer

    async def _connect(
        self, address: str, behaviour: Behaviour | float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = socket.socket()
        connection.setblocking(False)
        is_small = self.has_small_buffers or behaviour in ("reads slowly", "never reads")
        if is_small:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.bind((address, 0))
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        return await asyncio.open_connection(sock=connection, limit=1024 if is_small else 1 << 16)

    async def _behave(
        self,
        behaviour: Behaviour | float,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        sent: Sent,
        answer: Answer,
    ) -> None:
        head, body = sent.head(self.key), sent.content
        match behaviour:
            case "sends nothing":
                await asyncio.sleep(HOLD_S)
                return
            case "sends slowly":
                writer.write(head + body[: len(body) // 2])
                for each in body[len(body) // 2 :][: int(HOLD_S / 0.1)]:
                    writer.write(bytes([each]))
                    await asyncio.sleep(0.1)
                return
            case "leaves in the body":
                writer.write((head + body)[: (len(head) + len(body)) // 2])
                await writer.drain()
                return
        writer.write(head + body)
        await writer.drain()
        if isinstance(leaves_s := LEAVE_S.get(str(behaviour), behaviour), float):
            await asyncio.sleep(leaves_s)
        elif behaviour == "leaves at the first event":
            async with asyncio.timeout(self.read_s):
                await reader.read(1)
        elif behaviour == "never reads":
            await asyncio.sleep(HOLD_S)
        else:
            await self._read(reader, answer, pause_s=0.1 if behaviour == "reads slowly" else 0.0)

    async def _read(self, reader: asyncio.StreamReader, answer: Answer, pause_s: float) -> None:
        async with asyncio.timeout(self.read_s):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            answer.status = int(head.split()[1])
            answer.headers = {name.lower(): value for name, value in re.findall(r"(?m)^([\w-]+): (.*?)\r$", head)}
            length = answer.headers.get("content-length")
            left = int(length) if length is not None else 1 << 40
            while left and (piece := await reader.read(min(left, 1 << 16))):
                left -= len(piece)
                answer.num_bytes += len(piece)
                answer.kept += piece
                del answer.kept[: -self.kept_bytes]
                if pause_s:
                    await asyncio.sleep(pause_s)
                if length is None and answer.kept.endswith((b"[DONE]\n\n", b"0\r\n\r\n")):
                    break
