"""Short runs of the fuzzers, and what they draw: what clients and attackers have really sent."""

from __future__ import annotations

import json
import random

import pytest

from tests.security.fuzzing import fuzz_cluster, fuzz_connection
from tests.security.fuzzing.fuzz_bodies import encoded, random_body
from tests.security.fuzzing.fuzz_connection_inputs import Expected, make_input, split_answers
from tests.security.fuzzing.fuzz_http import HttpFuzzer
from tests.support.cluster import Cluster

NUM_DRAWN = 3000
NUM_CONNECTION_INPUTS, NUM_CLUSTER_INPUTS = 1000, 3000


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


@pytest.mark.extended
def test_raw_bytes_neither_stop_a_proxy_nor_stay_in_it() -> None:
    for figures in fuzz_connection.run(NUM_CONNECTION_INPUTS, seed=0).values():
        assert figures["statuses"].keys() >= {"200", "400", "404", "431"}
        assert "500" not in figures["statuses"]
        assert figures["memory_growth_mib"] < 64


def test_the_seed_determines_the_inputs() -> None:
    assert make_input(random.Random("0 1"), "m") == make_input(random.Random("0 1"), "m")


def test_incomplete_answers_are_noticed() -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    head = b"HTTP/1.1 404 Not Found\r\ncontent-length: 9\r\n\r\n"
    expected = (Expected(200), Expected(200), Expected(404, is_head=True))
    assert split_answers(whole + chunked + head, expected) == ([200, 200, 404], b"")
    assert split_answers(whole[:-1], expected) == ([], whole[:-1])
    assert split_answers(whole + chunked[:-3], expected) == ([200], chunked[:-3])


@pytest.mark.extended
def test_a_cluster_survives_invalid_input() -> None:
    with Cluster("--kv-cache-gib", "0.05", "--device", "cpu") as cluster:
        figures = fuzz_cluster.run(cluster.port, cluster.admin_url, NUM_CLUSTER_INPUTS, seed=0)
        assert "a message handler failed" not in cluster.logs()
    assert figures["num_inputs"] >= NUM_CLUSTER_INPUTS
    assert not figures["internal_errors"], "\n".join(figures["internal_errors"])
    assert figures["replay_outcomes"]["length"] > 0, "no replayed request completed"
    refused = figures["refusals"]
    assert {label.split('"')[-2] for label in refused} >= {"bad_handshake", "not_a_message", "not_possible"}
    for process in ("prefill-0", "decode-0", "proxy-0"):
        assert any(label.startswith(process) for label in refused), f"{process} counted no refusal"
    growth = figures["memory_growth_mib"]
    assert growth.pop("proxy-0") < fuzz_cluster.MAX_PROXY_GROWTH_MIB
    assert max(growth.values()) < fuzz_cluster.MAX_WORKER_GROWTH_MIB
