"""How late small requests are answered, and text, while 500 prompts with an image each come, 300 at once.

A cluster of a vision-language model (`--model`, for example a folder that `make_models.py` wrote), once for each number
of media threads. Another process polls /health, /v1/models and /metrics; a third
sends text prompts one after the other.
`cached`: the same images again. `--peers DIR --vllm VENV`: before that, the same prompts go to one vLLM engine, whose
prompts/s are then what is to be reached.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.latency import Distribution
from bench.load_process import LoadProcess
from bench.media_load import Answer, chat_body, cluster, jpeg, send_at_most
from bench.poller import CONTROL, Poller
from bench.ports import free_port
from bench.report import Aim, Report, add_common_options, finish
from bench.side_by_side import server
from bench.text_prompts import TextPrompts

PATHS = ("/health", "/v1/models", "/metrics")
NUM_LOCAL_TOKENS = 512
"""Text prompts are computed by the decode worker, as where text must not wait for images on prefill."""
_TIMEOUT_S = 300.0
_TEXT_ALONE_S = 8.0
_ALONE = ("text alone", "text alone, again")


class StormFigures(msgspec.Struct, frozen=True):
    """text_ttft_ms: of text prompts that came beside. statuses: of the image prompts."""

    requests_per_s: float
    duration_s: float
    statuses: dict[str, int]
    poll_ms: dict[str, Distribution]
    text_ttft_ms: Distribution | None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.media_storm", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model that takes images")
    parser.add_argument("--num-prompts", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=300)
    parser.add_argument("--threads", default="1,2,4", help="comma-separated numbers of media threads")
    parser.add_argument("--peers", type=Path, help="folder with vllm_single.sh")
    parser.add_argument("--vllm", type=Path, help="virtual environment with vLLM")
    parser.add_argument("--requests-per-s", type=float, help="what is to be reached, where vLLM does not run beside")
    add_common_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.num_prompts, options.at_once, options.threads = 20, 12, "1"
    images = [chat_body("what is this?", image=jpeg(i), max_tokens=1) for i in range(options.num_prompts)]
    wanted_per_s = options.requests_per_s
    if options.vllm is not None:
        wanted_per_s = of_vllm(options, images)
    figures: dict[str, Any] = {}
    for threads in options.threads.split(","):
        flags = (
            "--media-threads", threads, "--media-cache-mib", "4096", "--max-body-mib", "4", "--max-num-seqs", "64",
            "--decode-prefill-threshold", str(NUM_LOCAL_TOKENS),
        )  # fmt: skip
        with cluster(options.model, *flags) as url:
            figures[threads] = asyncio.run(run(url, images, options.at_once))
    print_table(figures)
    told = msgspec.to_builtins(figures) | {"vllm_requests_per_s": wanted_per_s}
    finish(Report.of("media_storm", told, aims(figures, wanted_per_s)), options.json)


def of_vllm(options: argparse.Namespace, images: list[bytes]) -> float:
    """Image prompts/s of one vLLM engine with the same model, after a few that warm it up."""
    port = free_port()
    command = [str(options.peers / "vllm_single.sh"), str(options.vllm), str(options.model), str(port)]

    async def ask() -> float:
        warm_up = [chat_body("?", image=jpeg(len(images) + i), max_tokens=1) for i in range(16)]
        for bodies in (warm_up, images):
            # Not from a process that gives way: vLLM's spin, and would leave it nothing.
            answers, duration_s = await send_at_most(f"http://127.0.0.1:{port}", bodies, options.at_once, _TIMEOUT_S)
            if wrong := [each for each in answers if each.status != 200]:
                raise SystemExit(f"{len(wrong)} requests to vLLM failed: {wrong[0]}")
        return len(images) / duration_s

    with server(command, port):
        per_s = asyncio.run(ask())
    print(f"one vLLM: {per_s:.1f} image prompts/s", flush=True)
    return per_s


async def run(url: str, images: list[bytes], at_once: int) -> dict[str, StormFigures]:
    port = int(url.rpartition(":")[2])
    with (
        Poller({path: port + (path == "/metrics") for path in PATHS}) as poller,  # the admin port is the next
        TextPrompts(port) as texts,
        LoadProcess() as load,
    ):
        figures = {_ALONE[0]: await storm(url, load, poller, texts, [], 1)}
        figures["new"] = await storm(url, load, poller, texts, images, at_once)
        figures[_ALONE[1]] = await storm(url, load, poller, texts, [], 1)
        figures["cached"] = await storm(url, load, poller, texts, images, at_once)
    return figures


async def storm(
    url: str, load: LoadProcess, poller: Poller, texts: TextPrompts, images: list[bytes], at_once: int
) -> StormFigures:
    """Text prompts one after the other, beside the images where there are any."""
    answers, duration_s = list[Answer](), _TEXT_ALONE_S
    send_all = await load.prepare(send_at_most, url, images, at_once, _TIMEOUT_S) if images else None
    poller.begin()
    texts.begin()
    if send_all is not None:
        answers, duration_s = await send_all()
    else:
        await asyncio.sleep(_TEXT_ALONE_S)
    ttft = await asyncio.to_thread(texts.end)
    polled = poller.end()
    wrong = [answer for answer in answers if answer.status not in (200, 429, 503) or answer.error]
    if wrong:
        raise SystemExit(f"{len(wrong)} requests failed: {wrong[0]}")
    num_served = sum(answer.status == 200 for answer in answers)
    statuses = Counter(str(answer.status) for answer in answers)
    return StormFigures(num_served / duration_s if answers else 0.0, duration_s, dict(statuses), polled, ttft)


def aims(figures: dict[str, dict[str, StormFigures]], requests_per_s: float | None) -> list[Aim]:
    found = []
    for threads, storms in figures.items():
        where = f"{threads} threads"
        for path in PATHS:
            found.append(Aim.of(f"{path} p50, {where}, ms", storms["new"].poll_ms[path].p50, 1.0, "lower"))
            found.append(Aim.of(f"{path} p99, {where}, ms", storms["new"].poll_ms[path].p99, 5.0, "lower"))
        # Before and after: a machine that others share is not as fast from one minute to the next.
        alone = [spread.p50 for name in _ALONE if (spread := storms[name].text_ttft_ms) is not None]
        if (beside := storms["new"].text_ttft_ms) is not None and alone:
            ratio = beside.p50 / fmean(alone)
            found.append(Aim.of(f"text TTFT p50 beside images / alone, {where}", ratio, 1.2, "lower"))
    if requests_per_s is not None:
        best = max(storms["new"].requests_per_s for storms in figures.values())
        found.append(Aim.of("image prompts/s, of those of one vLLM", best / requests_per_s, 1.0, "higher"))
    return found


def print_table(figures: dict[str, dict[str, StormFigures]]) -> None:
    table = Table("threads", "images", "prompts/s", "text TTFT p50 ms", "p99", "path", "polls p50 ms", "p99", "max")
    for threads, storms in figures.items():
        for name, each in storms.items():
            ttft = (f"{each.text_ttft_ms.p50:.1f}", f"{each.text_ttft_ms.p99:.1f}") if each.text_ttft_ms else ("", "")
            for path in (*PATHS, CONTROL):
                spread = each.poll_ms[path]
                polls = [f"{value:.2f}" for value in (spread.p50, spread.p99, spread.max)]
                table.add_row(threads, name, f"{each.requests_per_s:.1f}", *ttft, path, *polls)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
