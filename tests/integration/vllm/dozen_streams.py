"""A dozen streams on a cluster whose workers run vLLM, and the tokens that they must have whatever happens to it."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.faults.streams import Stream
from tests.support.cluster import MODEL, Cluster
from tests.support.vllm_clusters import complete

NUM_TOKENS = 120
LIMIT_S = 400.0
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 5},
    {"temperature": 0.9, "seed": 6, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.8, "seed": 7, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
]


def bodies(num_tokens: int = NUM_TOKENS, number: int = 12) -> list[dict[str, Any]]:
    """Returns requests with prompts of 3 to 1,500 tokens, the shortest ones first."""
    draw = random.Random(8)
    lengths = [3, 31, 64, 100, 200, 333, 400, 512, 640, 900, 1200, 1500]
    return [
        {
            "model": MODEL,
            "prompt": [draw.randrange(4, 2000) for _ in range(length)],
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            **SAMPLING[i % len(SAMPLING)],
        }
        for i, length in enumerate(lengths[:number])
    ]


def expected_tokens(cluster: Cluster, num_tokens: int = NUM_TOKENS, number: int = 12) -> list[list[int]]:
    """Returns the tokens of the requests without a fault."""
    with ThreadPoolExecutor(4) as pool:
        return [tokens for [tokens] in pool.map(lambda body: complete(cluster, body), bodies(num_tokens, number))]


def begin(cluster: Cluster, phase: str, num_tokens: int = NUM_TOKENS, number: int = 12) -> list[Stream]:
    """Starts streams and waits for a phase: that of the prompts, or of the answers ("decode")."""
    streams = [Stream(cluster, {**body, "cache_salt": str(time.monotonic())}) for body in bodies(num_tokens, number)]
    if phase == "decode":
        cluster.wait_for(lambda: all(len(each.token_ids) > 8 or each.has_ended for each in streams))
    else:
        cluster.wait_for(lambda: any(each.token_ids for each in streams))
    return streams


def check(cluster: Cluster, streams: list[Stream], expected: list[list[int]]) -> None:
    """Asserts that all streams end with the tokens that they have without a fault, and that no block is taken."""
    check_answers(streams, expected)
    cluster.wait_for(cluster.all_blocks_free)


def check_answers(streams: list[Stream], expected: list[list[int]]) -> None:
    deadline = time.monotonic() + LIMIT_S
    assert all(each.wait(max(1.0, deadline - time.monotonic())) for each in streams)
    ends = [(each.outcome, each.num_ends) for each in streams]
    assert ends == [("length", 1)] * len(streams), ends
    wrong = [number for number, each in enumerate(streams) if each.token_ids != expected[number]]
    assert not wrong, f"other tokens: {wrong}"
