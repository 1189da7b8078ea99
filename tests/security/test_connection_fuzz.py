"""A short run of the connection fuzzer against two proxies, one of them with TLS."""

from __future__ import annotations

import random

import pytest

from tests.security.fuzzing.fuzz_connection import MODEL, run
from tests.security.fuzzing.fuzz_connection_inputs import Expected, make_input, split_answers

NUM_INPUTS = 1000


@pytest.mark.extended
def test_raw_bytes_neither_stop_a_proxy_nor_stay_in_it() -> None:
    for figures in run(NUM_INPUTS, seed=0).values():
        assert figures["statuses"].keys() >= {"200", "400", "404", "431"}
        assert "500" not in figures["statuses"]
        assert figures["memory_growth_mib"] < 64


def test_the_seed_determines_the_inputs() -> None:
    assert make_input(random.Random("0 1"), MODEL) == make_input(random.Random("0 1"), MODEL)


def test_incomplete_answers_are_noticed() -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    head = b"HTTP/1.1 404 Not Found\r\ncontent-length: 9\r\n\r\n"
    expected = (Expected(200), Expected(200), Expected(404, is_head=True))
    assert split_answers(whole + chunked + head, expected) == ([200, 200, 404], b"")
    assert split_answers(whole[:-1], expected) == ([], whole[:-1])
    assert split_answers(whole + chunked[:-3], expected) == ([200], chunked[:-3])
