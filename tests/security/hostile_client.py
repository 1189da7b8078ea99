"""Sends one request and behaves as a case says: reads, hardly reads, hardly sends, or leaves at some moment."""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from tests.security.drawn_case import Case

HOLD_S = 4.0
"""For clients that hardly read or send."""
READ_S = 15.0
"""After which a client that reads leaves too."""
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
"""So that the attacker has more connections than the server allows to one address."""
LEAVE_S = {"leaves at once": 0.0, "leaves soon": 0.15, "leaves later": 0.7}
FOLDER = re.compile(rb"/(?:tmp|work|root|home|usr|var|etc|opt|srv|mnt|data)/[\w./-]+")
"""A folder of the server's host."""


@dataclass
class Answers:
    """What all requests of a case got."""

    statuses: Counter[int] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    """The beginnings of answers that are no 200."""
    num_bytes: int = 0
    folders: set[str] = field(default_factory=set)
    """Folders of the host that errors name."""
    retried: set[str] = field(default_factory=set)
    """Ends of answers with 500, which happen again when the request is sent again."""
    batch_ids: set[str] = field(default_factory=set)


async def attack(case: Case, port: int, key: str, path: str, bodies: list[bytes | None], answers: Answers) -> None:
    """bodies: None for a request without one. Each has a connection of its own, from an address of the attacker's."""
    requests = (_request(case, port, key, path, body, answers, number) for number, body in enumerate(bodies))
    await asyncio.gather(*requests)


async def _request(
    case: Case, port: int, key: str, path: str, body: bytes | None, answers: Answers, number: int
) -> None:
    with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
        reader, writer = await _connect(port, ADDRESSES[number % len(ADDRESSES)])
        try:
            await _behave(case, reader, writer, _head(key, path, body), body or b"", answers)
        finally:
            writer.transport.abort()


async def _connect(port: int, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = socket.socket()
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.bind((address, 0))
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=connection, limit=1024)


def _head(key: str, path: str, body: bytes | None) -> bytes:
    length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body is not None else ""
    method = "GET" if body is None else "POST"
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n{length}\r\n".encode()


async def _behave(
    case: Case, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, body: bytes, answers: Answers
) -> None:
    match case.client:
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
    if case.client in LEAVE_S:
        await asyncio.sleep(LEAVE_S[case.client])
    elif case.client == "leaves at the first event":
        async with asyncio.timeout(READ_S):
            await reader.read(1)
    elif case.client == "never reads":
        await asyncio.sleep(HOLD_S)
    else:
        await _read(case, reader, answers)


async def _read(case: Case, reader: asyncio.StreamReader, answers: Answers) -> None:
    async with asyncio.timeout(READ_S):
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split()[1])
        answers.statuses[status] += 1
        length = re.search(rb"(?i)content-length: (\d+)", head)
        left, kept = int(length[1]) if length else 1 << 40, b""
        while left and (piece := await reader.read(min(left, 1 << 16))):
            left -= len(piece)
            answers.num_bytes += len(piece)
            kept = (kept + piece)[-4096:]
            if case.client == "reads slowly":
                await asyncio.sleep(0.1)
            if not length and kept.endswith((b"[DONE]\n\n", b"0\r\n\r\n")):
                break
        if status != 200 or b'"error"' in kept:
            answers.folders |= {found.decode() for found in FOLDER.findall(kept)}
        answers.batch_ids |= {found.decode() for found in re.findall(rb'"(batch_\w+)"', kept)}
        if status != 200:
            answers.refusals[f"{status} {kept[:160].decode(errors='replace')}"] += 1
        if status == 500:
            answers.retried |= {kept.decode(errors="replace")[:300]}
