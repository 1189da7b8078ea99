"""Inputs for the HTTP connection: valid requests in every framing, then sometimes bytes that no server may accept."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Literal

End = Literal["read", "half_close", "reset", "close"]
"""What the client does after its last byte: read until the server closes, close its sending side, or leave."""
_MAX_PIECES = 12
_ATTACK_BYTES = (2_000, 70_000, 300_000)


@dataclass(frozen=True, slots=True)
class Expected:
    """One request that arrives complete. status: of its answer."""

    status: int
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class Input:
    """What one connection sends: `pieces` with pauses of `pause_s` between them.

    expected: answers that must come complete and in this order, where `end` is "read".
    is_valid: the server sends these answers and nothing else, and closes the connection.
    """

    kind: str
    pieces: tuple[bytes, ...]
    expected: tuple[Expected, ...]
    is_valid: bool
    end: End
    pause_s: float


def make_input(rng: random.Random, model: str) -> Input:
    requests = [_request(rng, model, is_last=False) for _ in range(rng.choice((0, 0, 1, 2, 4)))]
    is_valid = rng.random() < 0.4
    if is_valid:
        requests.append(_request(rng, model, is_last=True))
        kind, tail = "valid", b""
    else:
        kind, tail = _attack(rng, model)
    data = b"".join(sent for sent, _ in requests) + tail
    end: End = rng.choices(("read", "half_close", "reset", "close"), weights=(76, 8, 8, 8))[0]
    pieces: tuple[bytes, ...] = (data,)
    pause_s = 0.0
    if rng.random() < 0.3:
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(1, _MAX_PIECES)))
        pieces = tuple(data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True))
        pause_s = rng.choice((0.0, 0.001, 0.01))
    return Input(kind, pieces, tuple(expected for _, expected in requests), is_valid, end, pause_s)


def _request(rng: random.Random, model: str, *, is_last: bool) -> tuple[bytes, Expected]:
    """Returns a valid request and its answer. Only the last one closes the connection, or makes the server do so."""
    headers = [b"Host: x"]
    if is_last:
        headers.append(b"Connection: close")
    if rng.random() < 0.1:  # the server ignores it
        headers += [b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + rng.choice((b"h2c", b"websocket"))]
    if rng.random() < 0.2:
        headers += [b"X-%d: %s" % (number, b"a" * rng.choice((0, 1, 300))) for number in range(rng.choice((1, 5, 90)))]
    if rng.random() < 0.05:
        headers.append(b"traceparent: " + rng.randbytes(rng.choice((10, 27, 5000))).hex().encode())
    empty_lines = b"\r\n" * rng.choice((0, 0, 0, 1, 3))
    if rng.random() < 0.5:
        method = rng.choice((b"GET", b"GET", b"HEAD"))
        path, status = rng.choice(((b"/live", 200), (b"/health", 200), (b"/v1/models", 200), (b"/nothing", 404)))
        version = b"1.0" if is_last and rng.random() < 0.1 else b"1.1"
        head = method + b" " + path + b" HTTP/" + version + b"\r\n" + b"\r\n".join(headers) + b"\r\n\r\n"
        return empty_lines + head, Expected(status, method == b"HEAD")
    path, body, status = _post(rng, model)
    if is_last and rng.random() < 0.1:
        path, status = b"/nothing", 404  # answered before its body
    if rng.random() < 0.5:
        sent = b"Content-Length: %d\r\n\r\n" % len(body) + body
    else:
        sent = b"Transfer-Encoding: chunked\r\n\r\n" + _chunked(rng, body)
    return empty_lines + b"POST " + path + b" HTTP/1.1\r\n" + b"\r\n".join(headers) + b"\r\n" + sent, Expected(status)


def _post(rng: random.Random, model: str) -> tuple[bytes, bytes, int]:
    """Returns a path, a body and the status of the answer."""
    match rng.randrange(4):
        case 0:
            return b"/tokenize", json.dumps({"model": model, "prompt": "ab" * rng.choice((1, 20_000))}).encode(), 200
        case 1:
            return b"/v1/completions", b'{"prompt": 1.5}', 400
        case 2:
            return b"/v1/completions", b"}" * rng.choice((1, 5000)), 400
        case _:
            body = {"model": model, "prompt": "hello", "max_tokens": rng.choice((1, 3)), "stream": rng.random() < 0.5}
            return b"/v1/completions", json.dumps(body).encode(), 200


def _chunked(rng: random.Random, body: bytes) -> bytes:
    size = max(rng.choice((1, 10, 1000, len(body))), len(body) // 2000)
    extension = rng.choice((b"", b"", b";a", b";a=b;c=d"))
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    trailers = b"".join(b"t%d: x\r\n" % number for number in range(rng.choice((0, 0, 1, 20))))
    framed = b"".join(b"%x%s\r\n%s\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    return framed + b"0\r\n" + trailers + b"\r\n"


def _attack(rng: random.Random, model: str) -> tuple[str, bytes]:
    """Returns the name of an attack and its bytes."""
    size = rng.choice(_ATTACK_BYTES)
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    whole, _ = _request(rng, model, is_last=rng.random() < 0.5)
    mutated = bytearray(whole)
    for _ in range(rng.choice((1, 1, 3, 20))):
        mutated[rng.randrange(len(mutated))] = rng.randrange(256)
    attacks = {
        "trailers": chunked + b"0\r\n" + b"a:b\r\n" * (size // 5),
        "trailer name": chunked + b"0\r\n" + b"a" * size,
        "chunk extension": chunked + b"1;" + b"a" * size,
        "chunk extensions": chunked + b"1;aaaaaaaaaaaaaaaaaaaaaaa\r\na\r\n" * (size // 30),
        "small chunks": chunked + b"1\r\na\r\n" * (size // 6),
        "empty lines": b"\r\n" * (size // 2),
        "long header": b"GET /live HTTP/1.1\r\nx: " + b"a" * size,
        "long path": b"GET /" + b"a" * size + b" HTTP/1.1\r\n\r\n",
        "headers": b"GET /live HTTP/1.1\r\n" + b"a:b\r\n" * (size // 5) + b"\r\n",
        "pipelined": b"GET /live HTTP/1.1\r\n\r\n" * (size // 22),
        "upgrade": b"GET /live HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n" + rng.randbytes(200),
        "two lengths": chunked[:-2] + b"Content-Length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        "bytes": rng.randbytes(rng.randrange(1, 500)),
        "tls record": b"\x16\x03\x01" + rng.randbytes(rng.randrange(1, 300)),
        "cut": whole[: rng.randrange(len(whole))],
        "mutated": bytes(mutated),
    }
    kind = rng.choice(list(attacks))
    return kind, attacks[kind]


def split_answers(data: bytes, expected: tuple[Expected, ...]) -> tuple[list[int], bytes]:
    """Returns the statuses of the complete answers in `data`, and the bytes after them."""
    statuses: list[int] = []
    while data:
        head, separator, rest = data.partition(b"\r\n\r\n")
        if not separator or not head.startswith(b"HTTP/1.1 "):
            break
        status = int(head[9:12])
        if len(statuses) < len(expected):
            is_head = expected[len(statuses)].is_head
        else:  # mutated bytes may have become a HEAD request
            is_head = not rest or rest.startswith(b"HTTP/1.1 ")
        end = 0 if status == 100 or is_head else _body_size(head.lower(), rest)
        if end is None:
            break
        data = rest[end:]
        if status != 100:
            statuses.append(status)
    return statuses, data


def _body_size(head: bytes, rest: bytes) -> int | None:
    """Returns the size of the body with its framing, or None where it is not complete."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b": ")
        if name == b"content-length":
            return int(value) if len(rest) >= int(value) else None
    at = 0
    while (line_end := rest.find(b"\r\n", at)) >= 0:
        size = int(rest[at:line_end], 16)
        at = line_end + 2 + size + 2
        if size == 0:
            return at if len(rest) >= at else None
    return None
