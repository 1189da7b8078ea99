"""How late a proxy answers small requests while it gets 60 prompts of 255,000 tokens at once, alone and beside streams.

A real cluster of the noise model, stretched to a model length of 32,768. The prompts are far too long, as text, as two
texts per request, as a chat and as token ids, or are to be cut to their last tokens (`truncated`: these must be
tokenised), or every other one is (`mixed`). Meanwhile another process polls /health, /v1/models and /metrics. Each
burst comes several times in a row, or its p99 would be the worst of a hundred polls. Done with one tokenizer thread and
two. How much sooner two are done is measured without polls, with both clusters there and bursts in turns; and again
with a fixed part of a core for each of these threads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from bench.core_share import NoCoreShares, same_shares
from bench.latency import Distribution
from bench.load_process import LoadProcess
from bench.noise_model import ensure_noise_model
from bench.poller import CONTROL, Poller
from bench.ports import free_port
from bench.process_cpu import children
from bench.report import Aim, Report, add_common_options, finish

MODEL = "m"
MAX_MODEL_LEN = 32_768
PATHS = ("/health", "/v1/models", "/metrics")
BURSTS = ("completions", "two per request", "chat", "token ids", "truncated", "mixed")
BURSTS_BESIDE_STREAMS = ("completions", "two per request", "chat")
BURSTS_THAT_SCALE = ("completions", "chat", "truncated")
IN_TURNS = "burst_s_in_turns"
OWN_CORES = "burst_s_with_own_cores"
READER_SHARE = 0.7
"""Two leave 0.6 of two cores to loop and senders, which use 0.1 to 0.2."""
HALF = 0.5
_ANSWER_TIMEOUT_S = 600.0
_WORDS_PER_TOKEN = 0.5673  # of the noise model's tokeniser and `long_text`
_START_TIMEOUT_S = 120.0


class BurstFigures(msgspec.Struct, frozen=True):
    """poll_ms: by path, and of the control. duration_s: from the first byte of a burst to its last answer, on average.

    loop_ran_s, loop_starved_s: the proxy's main thread on a core, and ready to run but without one, in that time.
    """

    statuses: dict[str, int]
    duration_s: float
    poll_ms: dict[str, Distribution]
    rss_mib: float
    loop_ran_s: float = 0.0
    loop_starved_s: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.event_loop", description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=60)
    parser.add_argument("--num-tokens", type=int, default=255_000, help="tokens of each prompt")
    parser.add_argument("--num-streams", type=int, default=256)
    parser.add_argument(
        "--rounds", type=int, default=6, help="how often each burst comes; half as often for the times of threads"
    )
    parser.add_argument("--tokenizer-threads", default="1,2", help="comma-separated; the aims are those of the last")
    parser.add_argument("--only", choices=BURSTS, action="append", help="these bursts alone")
    add_common_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.num_prompts, options.num_tokens, options.num_streams, options.rounds = 8, 70_000, 16, 1
    numbers = [int(number) for number in options.tokenizer_threads.split(",")]
    figures = {str(number): asyncio.run(run(options, number)) for number in numbers}
    for name, share in ((IN_TURNS, 0.0), (OWN_CORES, READER_SHARE)):
        try:
            for number, times_s in times_in_turns(options, numbers, share).items():
                figures[str(number)][name] = times_s
        except NoCoreShares as error:
            print(f"{error}: what threads with cores of their own take is not measured")
    print_table(figures)
    finish(Report.of("event_loop", msgspec.to_builtins(figures), aims(figures)), options.json)


async def run(options: argparse.Namespace, num_threads: int) -> dict[str, Any]:
    """All bursts against one cluster."""
    bursts = options.only or BURSTS
    figures: dict[str, Any] = {}
    with (
        cluster(num_threads, options.num_streams) as (port, admin_port, proxy_pid),
        Poller({path: admin_port if path == "/metrics" else port for path in PATHS}) as poller,
        LoadProcess() as load,
    ):
        figures["rss_mib before"] = rss_mib(proxy_pid)
        poller.begin()
        await asyncio.sleep(1 if options.quick else 4)
        figures["idle"] = BurstFigures({}, 0, poller.end(), rss_mib(proxy_pid))
        for burst in bursts:
            bodies = make_bodies(burst, options.num_prompts, options.num_tokens)
            figures[burst] = await poll_through(port, load, poller, proxy_pid, burst, bodies, options.rounds)
        async with streams(port, options.num_streams):
            poller.begin()
            await asyncio.sleep(1 if options.quick else 4)
            figures["streams alone"] = BurstFigures({}, 0, poller.end(), rss_mib(proxy_pid))
            for burst in BURSTS_BESIDE_STREAMS:
                if burst in bursts:
                    bodies = make_bodies(burst, options.num_prompts, options.num_tokens)
                    name = f"{burst} beside streams"
                    figures[name] = await poll_through(port, load, poller, proxy_pid, burst, bodies, options.rounds)
    return figures


async def post_at_once(
    port: int, path: str, bodies: list[bytes], num_rounds: int
) -> tuple[list[tuple[int, str]], float]:
    """Status and text of each answer, and the seconds until all of a round were there, on average.

    Over plain connections: with an HTTP library sixty bodies of 1.6 MB took 0.33 s of a core and not 0.04, which the
    readers of these bodies lacked.
    """

    async def post(body: bytes) -> tuple[int, str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode())
        writer.write(body)
        answer = await asyncio.wait_for(reader.read(), _ANSWER_TIMEOUT_S)
        writer.close()
        return int(answer[9:12]), answer.partition(b"\r\n\r\n")[2].decode()[:300]

    answers: list[tuple[int, str]] = []
    begun = time.perf_counter()
    for _ in range(num_rounds):
        answers += await asyncio.gather(*(post(body) for body in bodies))
    return answers, (time.perf_counter() - begun) / num_rounds


async def poll_through(
    port: int, load: LoadProcess, poller: Poller, proxy_pid: int, burst: str, bodies: list[bytes], num_rounds: int
) -> BurstFigures:
    """Send all bodies at once, wait for all answers; again for each further round."""
    post_all = await load.prepare(post_at_once, port, _path(burst), bodies, num_rounds)
    poller.begin()
    ran_before, starved_before = scheduled_s(proxy_pid)
    answers, duration_s = await post_all()
    ran, starved = scheduled_s(proxy_pid)
    polled = poller.end()
    statuses = check(burst, answers, num_rounds)
    ran_s, starved_s = (ran - ran_before) / num_rounds, (starved - starved_before) / num_rounds
    return BurstFigures(statuses, duration_s, polled, rss_mib(proxy_pid), ran_s, starved_s)


def check(burst: str, answers: list[tuple[int, str]], num_rounds: int) -> dict[str, int]:
    """Number of answers by status. Ends the benchmark where they are not what they should be."""
    statuses = dict(sorted(Counter(str(status) for status, _ in answers).items()))
    num_served = {"truncated": len(answers), "mixed": num_rounds * -(-len(answers) // num_rounds // 2)}.get(burst, 0)
    expected = {"200": num_served, "400": len(answers) - num_served}
    if statuses != {status: number for status, number in expected.items() if number}:
        raise SystemExit(f"{burst}: answers are {statuses}, expected {expected}: {answers[0][1]}")
    return statuses


def _path(burst: str) -> str:
    return "/v1/chat/completions" if burst == "chat" else "/v1/completions"


def times_in_turns(options: argparse.Namespace, numbers: list[int], share: float) -> dict[int, dict[str, float]]:
    """By number of tokenizer threads, seconds of each burst, one after the other on a cluster for each number: the
    machine is not as fast now as in a minute.

    share: of a core for each reader, so that two have twice what one has; with 0 the second has what loop and senders
    leave of the other core. Raises NoCoreShares.
    """
    times_s: dict[int, dict[str, float]] = {number: {} for number in numbers}
    num_rounds = max(1, options.rounds // 2)
    with contextlib.ExitStack() as stack:
        ports = {}
        for number in numbers:
            ports[number], _, proxy_pid = stack.enter_context(cluster(number, 64))
            readers = readers_of(proxy_pid)
            assert len(readers) == number
            stack.enter_context(same_shares(readers, share))
        for burst in BURSTS_THAT_SCALE:
            if burst not in (options.only or BURSTS):
                continue
            bodies = make_bodies(burst, options.num_prompts, options.num_tokens)
            taken_s: dict[int, list[float]] = {number: [] for number in numbers}
            for _ in range(num_rounds):
                for number in numbers:
                    answers, taken = asyncio.run(post_at_once(ports[number], _path(burst), bodies, 1))
                    check(burst, answers, 1)
                    taken_s[number].append(taken)
            for number in numbers:
                times_s[number][burst] = sum(taken_s[number]) / num_rounds
    return times_s


def readers_of(proxy_pid: int) -> list[int]:
    return [pid for pid in children(proxy_pid) if b"\0-m\0tandem.proxy\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@contextlib.asynccontextmanager
async def streams(port: int, num_streams: int) -> AsyncGenerator[None, None]:
    """So many completions, read as they come by a process of its own; each is under way when this is entered."""
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.stream_readers", str(port), MODEL, str(num_streams), stdout=subprocess.PIPE
    )
    try:
        assert reader.stdout is not None
        if not await asyncio.wait_for(reader.stdout.readline(), 120):
            raise SystemExit("the streams did not begin")
        yield
        if reader.returncode is not None:
            raise SystemExit("a stream ended before its time")
    finally:
        with contextlib.suppress(ProcessLookupError):
            reader.kill()
        await reader.wait()


def make_bodies(burst: str, num_prompts: int, num_tokens: int) -> list[bytes]:
    """Every prompt is another text, so that nothing is found in a cache."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 1}
    if burst == "token ids":
        rng = random.Random(0)
        ids = [rng.randrange(4, 2000) for _ in range(num_tokens)]
        return [json.dumps({**body, "prompt": [number, *ids]}).encode() for number in range(num_prompts)]
    texts = [long_text(seed, num_tokens) for seed in range(num_prompts)]
    match burst:
        case "chat":
            bodies = [{**body, "messages": [{"role": "user", "content": text}]} for text in texts]
        case "two per request":
            bodies = [{**body, "prompt": list(pair)} for pair in zip(texts[::2], texts[1::2], strict=True)]
        case "truncated":
            bodies = [{**body, "prompt": text, "truncate_prompt_tokens": 16} for text in texts]
        case "mixed":
            cut = [{"truncate_prompt_tokens": 16}, {}]
            bodies = [{**body, "prompt": text, **cut[i % 2]} for i, text in enumerate(texts)]
        case _:
            bodies = [{**body, "prompt": text} for text in texts]
    return [json.dumps(body).encode() for body in bodies]


def long_text(seed: int, num_tokens: int) -> str:
    """Words of Python's documentation, which the noise model's tokeniser has learnt, in random order."""
    import pydoc_data.topics

    words = " ".join(pydoc_data.topics.topics.values()).split()
    return " ".join(random.Random(seed).choices(words, k=int(num_tokens * _WORDS_PER_TOKEN)))


@contextlib.contextmanager
def cluster(num_threads: int, num_streams: int) -> Iterator[tuple[int, int, int]]:
    """`tandem up`; yields its port, that of /metrics and the proxy's process id."""
    with tempfile.TemporaryDirectory() as scratch:
        model = stretched_noise_model(Path(scratch) / "model")
        port, admin_port = free_port(), free_port()
        command = [
            sys.executable, "-m", "tandem.deploy.cli", "up", "--model", str(model), "--served-model-name", MODEL,
            "--port", str(port), "--max-num-seqs", str(max(64, num_streams)),
            "--kv-cache-gib", "2", "--admin-port", str(admin_port),
        ]  # fmt: skip
        launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not _is_up(port):
                if launcher.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the cluster did not start")
                time.sleep(0.2)
            yield port, admin_port, _proxy_pid(launcher.pid)
        finally:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(30)


def stretched_noise_model(folder: Path) -> Path:
    """The noise model with longer positions; it talks noise at any length."""
    shutil.copytree(ensure_noise_model(), folder)
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        config = json.loads((folder / name).read_text())
        config[key] = MAX_MODEL_LEN
        (folder / name).write_text(json.dumps(config))
    return folder


def _is_up(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _proxy_pid(launcher_pid: int) -> int:
    children = Path(f"/proc/{launcher_pid}/task/{launcher_pid}/children").read_text().split()
    for pid in children:
        if b"\0-m\0tandem.proxy\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    raise SystemExit("the cluster has no proxy process")


def rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def scheduled_s(pid: int) -> tuple[float, float]:
    """Seconds that the process's main thread has run, and waited for a core while it could have."""
    ran_ns, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(ran_ns) / 1e9, int(waited_ns) / 1e9


def aims(figures: dict[str, dict[str, Any]]) -> list[Aim]:
    wanted = []
    one, last = next(iter(figures)), list(figures)[-1]
    for name, burst in figures[last].items():
        if not isinstance(burst, BurstFigures) or name == "idle":
            continue
        for path in PATHS:
            where = f"of {path}, {name}, ms"
            wanted.append(Aim.of(f"p99 {where}", burst.poll_ms[path].p99, 3.0, "lower"))
            wanted.append(Aim.of(f"max {where}", burst.poll_ms[path].max, 20.0, "lower"))
    for times, where in ((IN_TURNS, ""), (OWN_CORES, f", {READER_SHARE} of a core each")):
        for name, time_s in figures[last].get(times, {}).items():
            what = f"time of {last} threads / time of {one}, {name}{where}"
            if one != last:
                wanted.append(Aim.of(what, time_s / figures[one][times][name], HALF, "lower"))
    return wanted


def print_table(figures: dict[str, dict[str, Any]]) -> None:
    table = Table(
        "threads", "burst", "s", "loop ran s", "starved s", "RSS MiB", "path", "polls p50 ms", "p99 ms", "max ms"
    )
    for num_threads, bursts in figures.items():
        for name, burst in bursts.items():
            if isinstance(burst, BurstFigures):
                numbers = (burst.duration_s, burst.loop_ran_s, burst.loop_starved_s)
                times = (*(f"{number:.2f}" for number in numbers), f"{burst.rss_mib:.0f}")
                for path in (*PATHS, CONTROL):
                    spread = burst.poll_ms[path]
                    cells = (f"{value:.2f}" for value in (spread.p50, spread.p99, spread.max))
                    table.add_row(num_threads, name, *times, path, *cells)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
