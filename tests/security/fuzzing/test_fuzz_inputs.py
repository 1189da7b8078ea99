"""The fuzzer of the cluster draws what clients and attackers have really sent."""

from __future__ import annotations

import json
import random

import pytest

from tests.security.fuzzing.fuzz_bodies import encoded, random_body
from tests.security.fuzzing.fuzz_http import HttpFuzzer

NUM_DRAWN = 3000


@pytest.fixture(scope="module")
def drawn() -> tuple[list[bytes], list[str]]:
    """Returns complete requests, and bodies before they are damaged."""
    rng = random.Random(0)
    fuzzer, requests, bodies = HttpFuzzer(rng, 0, "m"), [], []
    for _ in range(NUM_DRAWN):
        path, body = random_body(rng, "m")
        bodies.append(json.dumps(body))
        requests.append(fuzzer.request(encoded(rng, body), path))
    return requests, bodies


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Encoding: gzip", b"Upgrade: h2c", b"HTTP/1.0",
        b"X-Tandem-Timeline: 1", b"X-Tandem-Record: 1", b"Authorization: bearer x", b"X-Api-Key: x",
        b"Origin: https://example.com", b"Content-Type: text/plain", b"X-Request-Timeout: 0.01",
    ],
)  # fmt: skip
def test_heads_are_drawn(drawn: tuple[list[bytes], list[str]], head: bytes) -> None:
    assert any(head in request.partition(b"\r\n\r\n")[0] for request in drawn[0])


@pytest.mark.parametrize(
    "part",
    [
        "r2676 : r2677",
        "r2999 ::= r3000",
        "#/$defs/r1040",
        "a? a? a? ",
        r"\n" * 3000,
        '"previous_response_id"',
        "tool_calls",
    ],
)
def test_bodies_are_drawn(drawn: tuple[list[bytes], list[str]], part: str) -> None:
    assert any(part in body for body in drawn[1])
