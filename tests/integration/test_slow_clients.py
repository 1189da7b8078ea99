"""Clients that read slowly or not at all, over real sockets, cost a limited buffer and do not delay others."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.cluster import NOW
from tests.support.fake_workers import FakeWorkers, Proxy, make_tokenizer
from tests.support.waiting import wait_until

N, NUM_TOKENS = 16, 800
"""Sequences and tokens of each: 2.5 MB of events, one for each token, and 13 KB of text."""
PROMPT = "abcdefgh"


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("slow")
    make_tokenizer(folder)
    with Proxy(folder, client_timeout_s=1.0) as started:
        yield started


@pytest.fixture
def workers(proxy: Proxy, tmp_path: Path) -> Iterator[FakeWorkers]:
    made = FakeWorkers(tmp_path, [proxy.control], max_model_len=2 * NUM_TOKENS)
    proxy.wait_for(200)
    yield made
    made.stop()


def ask(proxy: Proxy) -> socket.socket:
    """Returns the socket of a client with a small buffer that has sent its request and read nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", proxy.port))
    client.settimeout(20)
    body = json.dumps({"prompt": PROMPT, "max_tokens": NUM_TOKENS, "n": N, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


def read_all(client: socket.socket) -> bytes:
    data = bytearray()
    while piece := client.recv(65536):
        data += piece
    return bytes(data)


def pieces_of(answer: bytes) -> dict[int, list[str]]:
    """Returns the pieces of text by sequence."""
    events = [line.removeprefix(b"data: ") for line in answer.split(b"\n") if line.startswith(b"data: {")]
    pieces: dict[int, list[str]] = {}
    for event in events:
        [choice] = json.loads(event)["choices"]
        pieces.setdefault(choice["index"], []).append(choice["text"])
    return pieces


def test_a_client_that_does_not_read_is_disconnected_and_its_request_aborted(
    proxy: Proxy, workers: FakeWorkers
) -> None:
    with ask(proxy) as client:
        wait_until(lambda: bool(workers.seen), 20)
        fast = httpx.post(f"{proxy.url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 50})
        assert fast.json()["choices"][0]["text"] == (PROMPT * 7)[:50], "other clients are served meanwhile"
        wait_until(lambda: 'outcome="aborted"' in httpx.get(f"{proxy.url}/metrics", headers=NOW).text, 20)
        assert b"[DONE]" not in read_all(client)
    assert len(workers.aborted["decode"]) == N


def test_a_slow_client_gets_all_text_in_fewer_larger_events(proxy: Proxy, workers: FakeWorkers) -> None:
    with ask(proxy) as client:
        taken = bytearray()

        def read_a_little() -> bool:
            taken.extend(client.recv(2000))
            return workers.num_finished == N

        wait_until(read_a_little, 30)
        by_sequence = pieces_of(bytes(taken) + read_all(client))
    assert len(by_sequence) == N
    for pieces in by_sequence.values():
        assert "".join(pieces) == (PROMPT * NUM_TOKENS)[:NUM_TOKENS]
        assert len(pieces) < NUM_TOKENS / 2
        assert max(map(len, pieces)) > 100
