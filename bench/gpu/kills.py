"""kill -9 of prefill and decode workers in the middle of KV transfers, with checksums of every transferred block.

    python -m bench.gpu.kills [--device cpu] [--quick] [--json FILE]

No request fails, no block arrives corrupt, and the tokens are those of an undisturbed run. In float32, because then
batches of different sizes seldom round to different tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.gpu.kv_transfer import why_not_nccl
from bench.gpu.part import Part
from bench.gpu.served import served
from bench.support.servers import MODEL
from tandem.deploy.operations.cluster_client import ClusterClient
from tandem.protocol.messages.membership import WorkerReport
from tests.support.noise_model import ensure_noise_model

NUM_PROMPTS, NUM_OUTPUT = 8, 32
MIN_EQUAL = {"cpu": 1.0, "cuda": 0.9}


def complete(port: int, prompt: list[int]) -> list[int]:
    body: dict[str, Any] = {
        "model": MODEL, "prompt": prompt, "max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "cache_salt": secrets.token_hex(8),  # no prefix of another request is used
    }  # fmt: skip
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=45) as response:
        tokens: list[int] = json.load(response)["choices"][0]["token_ids"]
    return tokens


def workers(port: int) -> list[WorkerReport]:
    return asyncio.run(ClusterClient(port).status())[0].workers


def kill_while_transferring(port: int, role: str, limit_s: float) -> bool:
    """Kills a worker of the role as soon as more bytes have been transferred; returns whether it did."""
    deadline = time.monotonic() + limit_s
    before = sum(report.load.num_transferred_bytes for report in workers(port))
    while time.monotonic() < deadline:
        found = workers(port)
        if sum(report.load.num_transferred_bytes for report in found) > before:
            victim = random.choice([report.worker for report in found if report.worker.role == role])
            os.kill(victim.pid, signal.SIGKILL)
            return True
        time.sleep(0.02)
    return False


def check_kills(part: Part, connector: str, port: int, length: int) -> None:
    rng = random.Random(2)
    prompts = [[rng.randrange(4, 2000) for _ in range(length)] for _ in range(NUM_PROMPTS)]
    expected = [complete(port, prompt) for prompt in prompts]
    for role in ("prefill",) if part.quick else ("prefill", "decode"):
        with part.case(f"{connector}: a {role} worker is killed while KV moves"):
            with ThreadPoolExecutor(NUM_PROMPTS + 1) as pool:
                killed = pool.submit(kill_while_transferring, port, role, 10)
                rounds = [pool.submit(complete, port, prompt) for _ in range(3) for prompt in prompts]
                outputs = [future.result() for future in rounds]
            assert killed.result(), "no transfer began"
            equal = sum(a == b for a, b in zip(outputs, expected * 3, strict=True)) / len(outputs)
            part.add(f"{connector}, {role}: share of requests with the same tokens", equal)
            assert equal >= MIN_EQUAL[part.device], f"{equal:.0%} of the requests have the same tokens"
    loads = [report.load for report in workers(port)]
    part.add(f"{connector}: compared blocks", compared := sum(load.num_compared_blocks for load in loads))
    part.add(f"{connector}: corrupt blocks", corrupt := sum(load.num_corrupt_blocks for load in loads))
    with part.case(f"{connector}: no block is corrupt"):
        assert compared and not corrupt


def main() -> None:
    part = Part("kills", __doc__)
    flags = ("--prefill", "2", "--decode", "2", "--dtype", "float32", "--kv-cache-gib", "0.25",
             "--decode-prefill-threshold", "0")  # fmt: skip
    environment = {"TANDEM_KV_CHECKSUMS": "1"}
    model = ensure_noise_model()
    connectors = ["auto"]
    if part.device == "cuda" and why_not_nccl() is None:
        connectors.append("nccl")
    for connector in connectors:
        with (
            part.case(f"{connector}: the cluster starts and ends"),
            served(part, model, *flags, "--kv-connector", connector, env=environment) as port,
        ):
            check_kills(part, connector, port, 100 if part.quick else 600)
    part.end()


if __name__ == "__main__":
    main()
