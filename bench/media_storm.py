"""Throughput of 400 image prompts, 250 at once, and latency of /health meanwhile, beside vLLM in the same run.

    python -m bench.media_storm [--model FOLDER] [--vllm VENV] [--quick] [--json FILE]

Every server runs with default settings, and every prompt must be served. All images differ. Without --model the servers
get a tiny Qwen2.5-VL with random weights.
"""

from __future__ import annotations

import asyncio
import base64
import io
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
from PIL import Image

from bench.support.latency import Distribution
from bench.support.poller import Poller, poll_row
from bench.support.report import Aim, Report, finish, new_parser, print_rows
from bench.support.servers import MODEL, add_vllm_option, beside_vllm
from tests.support.served_vision_models import save_served_model

WIDTH, HEIGHT = 644, 364


def jpeg(seed: int, width: int = WIDTH, height: int = HEIGHT) -> bytes:
    """Makes a JPEG with about as many bytes as a photograph of that size."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    pixels = np.clip(smooth + rng.integers(-12, 13, smooth.shape), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85)
    return file.getvalue()


def chat_body(text: str, image: bytes, max_tokens: int = 1) -> bytes:
    """Returns the JSON body of a greedy, non-streamed chat request about one image."""
    url = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return msgspec.json.encode(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
    )


NUM_WARM_UP = 8
MAX_LATENCY_MS = 50.0
"""Aim for the largest latency of /health."""
IDLE_S = 3.0
TIMEOUT_S = 300.0
_HEADERS = {"content-type": "application/json"}


class StormFigures(msgspec.Struct, frozen=True):
    """`statuses` counts the image prompts by HTTP status."""

    requests_per_s: float
    duration_s: float
    statuses: dict[str, int]
    idle_poll_ms: dict[str, Distribution]
    poll_ms: dict[str, Distribution]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--model", type=Path, help="folder of a model that takes images")
    parser.add_argument("--num-prompts", type=int, default=400)
    parser.add_argument("--at-once", type=int, default=250)
    add_vllm_option(parser)
    options = parser.parse_args()
    if options.quick:
        options.num_prompts, options.at_once = 40, 25
    bodies = [chat_body("What is this?", jpeg(seed)) for seed in range(options.num_prompts + NUM_WARM_UP)]
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or save_served_model("qwen2_5_vl", Path(folder) / "model")
        figures = beside_vllm(options.vllm, model, partial(measure, bodies, options.at_once))
    print_rows(
        [
            {"server": name, "prompts/s": found.requests_per_s, "statuses": found.statuses, "path": path}
            | poll_row(spread)
            for name, found in figures.items()
            for path, spread in found.poll_ms.items()
        ]
    )
    finish(Report.of("media_storm", msgspec.to_builtins(figures), aims(figures)), options.json)


async def measure(bodies: list[bytes], at_once: int, port: int) -> StormFigures:
    """Sends NUM_WARM_UP of the bodies first, then the others."""
    with Poller({"/health": port}) as poller:
        await send_all(port, bodies[:NUM_WARM_UP], at_once)
        poller.begin()
        await asyncio.sleep(IDLE_S)
        idle = poller.end()
        poller.begin()
        started = time.perf_counter()
        statuses = await send_all(port, bodies[NUM_WARM_UP:], at_once)
        duration_s = time.perf_counter() - started
        return StormFigures(statuses["200"] / duration_s, duration_s, dict(statuses), idle, poller.end())


async def send_all(port: int, bodies: list[bytes], at_once: int) -> Counter[str]:
    """Sends the bodies in order with `at_once` requests in flight. Returns the number of responses by status."""
    limit = asyncio.Semaphore(at_once)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def send(body: bytes) -> str:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            async with limit, session.post(url, data=body, headers=_HEADERS) as response:
                await response.read()
                return str(response.status)

        return Counter(await asyncio.gather(*(send(body) for body in bodies)))


def aims(figures: dict[str, StormFigures]) -> list[Aim]:
    ours, theirs = figures["tandem"], figures.get("vllm")
    health = ours.poll_ms["/health"]
    not_served = sum(count for status, count in ours.statuses.items() if status != "200")
    wanted = [
        Aim.of("image prompts that were not served", not_served, 0, "lower"),
        Aim.of("largest latency of /health, ms", health.max, MAX_LATENCY_MS, "lower"),
    ]
    if theirs is not None:
        throughput = ours.requests_per_s / theirs.requests_per_s
        p99 = health.p99 / theirs.poll_ms["/health"].p99
        wanted += [
            Aim.of("image prompts/s, Tandem / vLLM", throughput, 1.0, "higher"),
            Aim.of("p99 of /health, Tandem / vLLM", p99, 1.0, "lower"),
        ]
    return wanted


if __name__ == "__main__":
    main()
