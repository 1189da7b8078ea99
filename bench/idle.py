"""A request after a long pause: `python -m bench.idle`.

With each connector a cluster answers, is left alone for longer than an idle HTTP connection is kept (75 s), and is
asked again: on the connection of before, as a client with a pool would, and on a new one. The answers must be the same,
with their KV blocks shipped anew. Reports what the pause adds to the time to the first token.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import httpx

from bench.report import Aim, Report, add_common_options, finish
from tests.support.cluster import MODEL, Cluster

CONNECTORS = ("ipc", "gloo")
IDLE_S = 100.0
NUM_PROMPT_TOKENS = 600


def ask(client: httpx.Client, salt: str) -> tuple[list[int], float]:
    """Token ids, and seconds to the first event; salt: with different ones no cached block is shared."""
    body = {
        "model": MODEL, "prompt": [4 + 7 * i % 2000 for i in range(NUM_PROMPT_TOKENS)], "max_tokens": 20,
        "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True, "cache_salt": salt,
    }  # fmt: skip
    started_at, ttft_s = time.perf_counter(), 0.0
    token_ids: list[int] = []
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                ttft_s = ttft_s or time.perf_counter() - started_at
                event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                token_ids += event["choices"][0]["token_ids"]
    return token_ids, ttft_s


def measure(connector: str, idle_s: float) -> dict[str, Any]:
    limits = httpx.Limits(keepalive_expiry=None)
    with Cluster("--dtype", "float32", "--kv-connector", connector) as cluster:
        with httpx.Client(base_url=cluster.url, timeout=60, limits=limits) as client:
            ask(client, "first")
            before, ttft_s = ask(client, "before")
            time.sleep(idle_s)
            kept, ttft_after_s = ask(client, "after")
        with httpx.Client(base_url=cluster.url, timeout=60) as client:
            new, _ = ask(client, "on a new connection")
        cluster.wait_for(cluster.all_blocks_free, 10)
        failed = [line for line in cluster.logs().splitlines() if " failed: " in line or "lost" in line]
    return {
        "connector": connector,
        "wrong": 2 - [kept, new].count(before),
        "ttft_ms_before": round(1000 * ttft_s, 1),
        "ttft_ms_first_after": round(1000 * ttft_after_s, 1),
        "lost_or_failed": failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--idle-s", type=float, default=IDLE_S)
    add_common_options(parser)
    arguments = parser.parse_args()
    idle_s = 5.0 if arguments.quick else arguments.idle_s
    rows = [measure(connector, idle_s) for connector in CONNECTORS]
    aims = [
        Aim.of("wrong answers after the pause", sum(row["wrong"] for row in rows), 0, "lower"),
        Aim.of("pairs or workers lost meanwhile", sum(len(row["lost_or_failed"]) for row in rows), 0, "lower"),
    ]
    finish(Report.of("idle", {"idle_s": idle_s, "rows": rows}, aims), arguments.json)


if __name__ == "__main__":
    main()
