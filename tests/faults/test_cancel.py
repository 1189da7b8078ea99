"""Clients disconnect at random moments; prefill and decode workers free every block."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx
import pytest

from tests.support.cluster import MODEL, Cluster

NUM_REQUESTS = 120


async def _cancel_at_random(cluster: Cluster, rng: random.Random) -> Counter[str]:
    """Sends NUM_REQUESTS requests, 24 at a time, and drops each after a random time or number of events.

    Returns how many were dropped in which phase, as the client sees it.
    """
    seen: Counter[str] = Counter()
    places = asyncio.Semaphore(24)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        length = rng.choice([3, 200, 900, 1500])
        streaming = rng.random() < 0.7
        body = {
            "model": MODEL, "prompt": [rng.randrange(4, 2048) for _ in range(length)], "max_tokens": 400,
            "ignore_eos": True, "seed": number, "stream": streaming,
        }  # fmt: skip
        patience_s = rng.choice([0.005, 0.05, 0.2, 0.6, 1.5]) * rng.random()
        num_events = 0
        if streaming and rng.random() < 0.5:  # some are dropped in mid-stream on any machine
            patience_s, num_events = 60.0, rng.randint(1, 60)
        phase = "before the first token"

        async def consume() -> None:
            nonlocal phase
            async with client.stream("POST", f"{cluster.url}/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                num_seen = 0
                async for line in answer.aiter_lines():
                    phase = "decoding"
                    num_seen += bool(line)
                    if num_seen == num_events:
                        raise TimeoutError

        async with places:
            try:
                await asyncio.wait_for(consume(), patience_s)
                seen["finished"] += 1
            except TimeoutError:
                seen[phase] += 1

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        await asyncio.gather(*(one(client, number) for number in range(NUM_REQUESTS)))
    return seen


@pytest.mark.timeout(240)
@pytest.mark.parametrize("connector", ["ipc", pytest.param("tcp", marks=pytest.mark.exhaustive)])
def test_cancelled_requests_free_every_block(connector: str) -> None:
    # A small pool makes requests wait for blocks on both sides; short chunks make prefill last.
    arguments = ["--kv-connector", connector, "--max-num-batched-tokens", "128", "--kv-cache-gib", "0.02"]
    with Cluster(*arguments) as cluster:
        seen = asyncio.run(_cancel_at_random(cluster, random.Random(11)))
        assert seen["before the first token"] > 20, seen
        assert seen["decoding"] > 20, seen
        cluster.wait_for(cluster.all_blocks_free)
        body = {"model": MODEL, "prompt": "after all that", "max_tokens": 5}
        assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120).status_code == 200
        assert "Traceback" not in cluster.logs()
