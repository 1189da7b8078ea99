"""Latency of /health while a server tokenises 60 prompts of 255,000 tokens at once, beside vLLM in the same run.

    python -m bench.event_loop [--vllm VENV] [--quick] [--json FILE]

Each server runs the noise model with a model length of 32,768, otherwise with default settings. Most prompts exceed
that length and are refused; the `truncated` ones are tokenised in full and answered. A control server that does nothing
is polled too: its latency is the machine's share of a delay.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from bench.support.latency import Distribution
from bench.support.poller import Poller, poll_row
from bench.support.report import Aim, Report, finish, new_parser, print_rows
from bench.support.servers import MODEL, add_vllm_option, beside_vllm
from tests.support.noise_model import ensure_noise_model

MAX_MODEL_LEN = 32_768
BURSTS = ("completions", "chat", "truncated")
BESIDE_STREAMS = "completions beside streams"
NUM_STREAMS = 32
STREAM_TOKENS = 2_000
MAX_LATENCY_MS = 20.0
"""Aim for the largest latency of /health in any burst."""
MAX_P99_MS = 6.0
"""Aim for its 99th percentile."""
MAX_P99_RATIO = 1.2
"""Aim for its 99th percentile over vLLM's."""
IDLE_S = 3.0
TIMEOUT_S = 600.0
_WORDS_PER_TOKEN = 0.5673  # for the noise model's tokeniser and `long_text`


class BurstFigures(msgspec.Struct, frozen=True):
    """`statuses` counts responses by HTTP status; `duration_s` runs from the first byte sent to the last received."""

    statuses: dict[str, int]
    duration_s: float
    poll_ms: dict[str, Distribution]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--num-prompts", type=int, default=60)
    parser.add_argument("--num-tokens", type=int, default=255_000, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=6, help="repetitions of each burst; one gives too few polls")
    add_vllm_option(parser)
    options = parser.parse_args()
    if options.quick:
        options.num_prompts, options.num_tokens, options.rounds = 8, 70_000, 1
    with tempfile.TemporaryDirectory() as folder:
        model = stretched_noise_model(Path(folder) / "model")
        figures = beside_vllm(options.vllm, model, partial(measure, options), MAX_MODEL_LEN)
    print_rows(
        [
            {"server": name, "burst": burst, "s": found.duration_s, "path": path, **poll_row(spread)}
            for name, bursts in figures.items()
            for burst, found in bursts.items()
            for path, spread in found.poll_ms.items()
        ]
    )
    finish(Report.of("event_loop", msgspec.to_builtins(figures), aims(figures)), options.json)


async def measure(options: argparse.Namespace, port: int) -> dict[str, BurstFigures]:
    """Sends all bursts to one server."""
    figures: dict[str, BurstFigures] = {}
    with Poller({"/health": port}) as poller:
        poller.begin()
        await asyncio.sleep(IDLE_S)
        figures["idle"] = BurstFigures({}, IDLE_S, poller.end())
        for burst in BURSTS:
            bodies = make_bodies(burst, options.num_prompts, options.num_tokens)
            figures[burst] = await send_burst(port, poller, burst, bodies, options.rounds)
        bodies = make_bodies("completions", options.num_prompts, options.num_tokens)
        async with streams(port):
            figures[BESIDE_STREAMS] = await send_burst(port, poller, "completions", bodies, options.rounds)
    return figures


async def send_burst(port: int, poller: Poller, burst: str, bodies: list[bytes], num_rounds: int) -> BurstFigures:
    """Sends all bodies at once and waits for all responses, `num_rounds` times. Raises SystemExit on a wrong status."""
    path = "/v1/chat/completions" if burst == "chat" else "/v1/completions"
    statuses: Counter[str] = Counter()
    poller.begin()
    started = time.perf_counter()
    for _ in range(num_rounds):
        statuses.update(await asyncio.gather(*(post(port, path, body) for body in bodies)))
    duration_s = time.perf_counter() - started
    polls = poller.end()
    expected = "200" if burst == "truncated" else "400"
    if set(statuses) != {expected}:
        raise SystemExit(f"{burst}: every response should have status {expected}, but they are {dict(statuses)}")
    return BurstFigures(dict(statuses), duration_s, polls)


async def post(port: int, path: str, body: bytes) -> str:
    """Returns the status. Uses a bare connection: an HTTP library needs much more CPU time for bodies of 1.6 MB."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    try:
        response = await asyncio.wait_for(reader.read(), TIMEOUT_S)
    finally:
        writer.close()
    return response[9:12].decode()


@contextlib.asynccontextmanager
async def streams(port: int) -> AsyncGenerator[None, None]:
    """Keeps NUM_STREAMS streamed completions running. Raises SystemExit when one fails."""
    num_started = 0

    async def keep_streaming(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal num_started
        body = {"model": MODEL, "prompt": [4 + number] * 8, "max_tokens": STREAM_TOKENS, "ignore_eos": True}
        is_first = True
        while True:
            async with session.post("/v1/completions", json={**body, "stream": True}) as response:
                response.raise_for_status()
                async for _ in response.content.iter_any():
                    num_started += is_first
                    is_first = False

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector, timeout=timeout) as session:
        tasks = [asyncio.create_task(keep_streaming(session, number)) for number in range(NUM_STREAMS)]
        try:
            while num_started < NUM_STREAMS:
                await asyncio.sleep(0.1)
                check_running(tasks)
            yield
            check_running(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def check_running(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            raise SystemExit(f"a stream failed: {task.exception()!r}")


def make_bodies(burst: str, num_prompts: int, num_tokens: int) -> list[bytes]:
    """Returns one request body per prompt. All prompts differ, so that no cache contains them."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 1}
    if burst == "truncated":
        body["truncate_prompt_tokens"] = 16
    texts = (long_text(seed, num_tokens) for seed in range(num_prompts))
    if burst == "chat":
        return [json.dumps({**body, "messages": [{"role": "user", "content": text}]}).encode() for text in texts]
    return [json.dumps({**body, "prompt": text}).encode() for text in texts]


def long_text(seed: int, num_tokens: int) -> str:
    """Returns random words of Python's documentation, on which the noise model's tokeniser was trained."""
    import pydoc_data.topics

    words = " ".join(pydoc_data.topics.topics.values()).split()
    return " ".join(random.Random(seed).choices(words, k=int(num_tokens * _WORDS_PER_TOKEN)))


def stretched_noise_model(folder: Path) -> Path:
    """Copies the noise model and raises its number of positions; its output is noise at any length."""
    shutil.copytree(ensure_noise_model(), folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": MAX_MODEL_LEN}))
    return folder


def aims(figures: dict[str, dict[str, BurstFigures]]) -> list[Aim]:
    """Without vLLM in the run there is no ratio."""
    wanted = []
    for burst, ours in figures["tandem"].items():
        if burst == "idle":
            continue
        health = ours.poll_ms["/health"]
        if "vllm" in figures:
            ratio = health.p99 / figures["vllm"][burst].poll_ms["/health"].p99
            wanted.append(Aim.of(f"{burst}: p99 of /health, Tandem / vLLM", ratio, MAX_P99_RATIO, "lower"))
        wanted.append(Aim.of(f"{burst}: p99 of /health, ms", health.p99, MAX_P99_MS, "lower"))
        wanted.append(Aim.of(f"{burst}: largest latency of /health, ms", health.max, MAX_LATENCY_MS, "lower"))
    return wanted


if __name__ == "__main__":
    main()
