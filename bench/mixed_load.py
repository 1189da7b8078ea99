"""Text, images and video mixed, by Poisson arrivals at 5 to 100 requests/s: what is served, and what is refused.

40 % text, 30 % video, 30 % images, nearly all of them new; clients wait 10 s for the first byte. A server that is past
what it can do should say so: 429 or 503 count as refused, a broken connection or a time-out as an error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from pathlib import Path

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from bench.latency import Distribution
from bench.media_load import Answer, chat_body, clip, cluster, jpeg, send, text_of
from bench.report import Aim, Report, add_common_options, finish

RATES = (5.0, 10.0, 20.0, 50.0, 100.0)
_CLIENT_TIMEOUT_S = 10.0
_NICENESS = -10
"""Of this process, where it may: it stands for other machines; one that is late itself takes answers for time-outs."""
_WATCH_S = 0.05
_NUM_MEDIA = 200
"""Images, and as many videos; each is sent a few times over the whole run."""


class RateFigures(msgspec.Struct, frozen=True):
    """errors: by what happened. ttft_ms: of requests that were served. client_lag_ms: how late this process itself was
    when it wanted to run: what it counts as a time-out is its own fault where that comes near the time-out."""

    num_requests: int
    num_served: int
    num_refused: int
    errors: dict[str, int]
    ttft_ms: Distribution | None
    client_lag_ms: Distribution | None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.mixed_load", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model that takes images and video")
    parser.add_argument("--rates", default=",".join(f"{rate:g}" for rate in RATES), help="requests/s, comma-separated")
    parser.add_argument("--duration", type=float, default=10.0, help="seconds of arrivals at each rate")
    parser.add_argument("--media-threads", default="1")
    parser.add_argument("--ttft-slo-ms", default="5000", help="the cluster's bound on predicted first tokens")
    parser.add_argument("--max-waiting-media", default="100")
    add_common_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.rates, options.duration = "5", 2.0
    num_media = 10 if options.quick else _NUM_MEDIA
    images = [jpeg(number, 448, 336) for number in range(num_media)]
    videos = [clip(number) for number in range(num_media)]
    flags = (
        "--media-cache-mib", "4096", "--ttft-slo-ms", options.ttft_slo_ms,
    )  # fmt: skip
    with cluster(options.model, *flags) as url:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
        rates = [float(rate) for rate in options.rates.split(",")]
        figures = asyncio.run(run(url, rates, options.duration, images, videos))
    print_table(figures)
    finish(Report.of("mixed_load", msgspec.to_builtins(figures), aims(figures)), options.json)


async def run(
    url: str, rates: list[float], duration_s: float, images: list[bytes], videos: list[bytes]
) -> dict[str, RateFigures]:
    rng = random.Random(0)
    figures = {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, limits=limits) as client:
        for rate in rates:
            arrivals = arrival_times(rate, duration_s, rng)
            bodies = [a_body(rng, images, videos) for _ in arrivals]
            lags: list[float] = []
            watching = asyncio.create_task(watch(lags))
            answers = await asyncio.gather(*(send_at(client, t, b) for t, (_, b) in zip(arrivals, bodies, strict=True)))
            watching.cancel()
            figures[f"{rate:g}"] = summary([kind for kind, _ in bodies], list(answers), lags)
    return figures


def arrival_times(rate: float, duration_s: float, rng: random.Random) -> list[float]:
    """Seconds from the start; gaps are exponential with mean 1/rate."""
    times, now = [], rng.expovariate(rate)
    while now < duration_s:
        times.append(now)
        now += rng.expovariate(rate)
    return times


def a_body(rng: random.Random, images: list[bytes], videos: list[bytes]) -> tuple[str, bytes]:
    """What it is, and the request."""
    [kind], text = rng.choices(["text", "video", "image"], [40, 30, 30]), text_of(rng)
    video = rng.choice(videos) if kind == "video" else None
    return kind, chat_body(text, rng.choice(images) if kind == "image" else None, video)


async def send_at(client: httpx.AsyncClient, at_s: float, body: bytes) -> Answer:
    await asyncio.sleep(at_s)
    return await send(client, body, _CLIENT_TIMEOUT_S)


async def watch(lags: list[float]) -> None:
    """Until cancelled: seconds that each short sleep took too long."""
    while True:
        begun = time.perf_counter()
        await asyncio.sleep(_WATCH_S)
        lags.append(time.perf_counter() - begun - _WATCH_S)


def summary(kinds: list[str], answers: list[Answer], lags: list[float]) -> RateFigures:
    errors = Counter(
        f"{kind} {answer.error or f'HTTP {answer.status}'}"
        for kind, answer in zip(kinds, answers, strict=True)
        if answer.error or answer.status not in (200, 429, 503)
    )
    served = [answer for answer in answers if answer.status == 200 and not answer.error]
    return RateFigures(
        len(answers),
        len(served),
        sum(answer.status in (429, 503) for answer in answers),
        dict(errors),
        Distribution.of_seconds([answer.first_byte_s for answer in served if answer.first_byte_s is not None]),
        Distribution.of_seconds(lags),
    )


def aims(figures: dict[str, RateFigures]) -> list[Aim]:
    return [
        Aim.of(f"errors at {rate} requests/s", sum(each.errors.values()), 0, "lower") for rate, each in figures.items()
    ]


def print_table(figures: dict[str, RateFigures]) -> None:
    table = Table("requests/s", "sent", "served", "refused", "errors", "TTFT p50 ms", "p99", "max", "client's lag")
    for rate, each in figures.items():
        spread = each.ttft_ms
        times = [f"{value:.0f}" for value in (spread.p50, spread.p99, spread.max)] if spread else ["", "", ""]
        counts = [str(count) for count in (each.num_requests, each.num_served, each.num_refused)]
        errors = ", ".join(f"{k}: {v}" for k, v in each.errors.items()) or "none"
        table.add_row(rate, *counts, errors, *times, f"{each.client_lag_ms.max:.0f}" if each.client_lag_ms else "")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
