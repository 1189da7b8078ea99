"""Chats whose KV is four times the pool, with each tier below the pool and without any.

    python -m bench.kv_tiers [--quick] [--servers none,host,disk,both,store] [--json FILE]

One elastic worker serves CHATS chats of TURNS turns in turn, one request at a time, so that each chat's KV has left the
pool when its next turn comes. A first turn has FIRST_TOKENS tokens, such as a system prompt and a document. A later one
has NEW_TOKENS, which with an answer are one block, so that all of them compute equally many. TTFT is their mean.

Then prompts without a common prefix run, CONCURRENCY at once, which no cache can serve, in turn on this cluster and on
one without tiers: output tokens per second show what writing to a tier costs. At last all workers are killed (SIGKILL)
and the chats go on: their first turns after that are compared with their last ones before.

The model has 25 M parameters with random weights in float32 and 4 KiB of KV per token: per computed operation about ten
times as much KV as Llama-3.1-8B, so loading pays less here than it would there. `store` is a Mooncake Store on this
machine; it needs MOONCAKE_FOLDER (see .ci/clients.sh).
"""

from __future__ import annotations

import concurrent.futures
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx

from bench.support.report import Aim, Report, finish, new_parser, print_rows
from bench.support.servers import is_up, server, tandem
from bench.support.stream_client import StreamClient
from tests.support.mooncake import MooncakeStore, mooncake_environment
from tests.support.noise_model import write_dummy_model
from tests.support.ports import free_port

CHATS, TURNS, FIRST_TOKENS, NEW_TOKENS, OUTPUT_TOKENS = 8, 10, 600, 48, 16
PROMPT_TOKENS, CONCURRENCY, NUM_PROMPTS, THROUGHPUT_ROUNDS = 512, 4, 12, 4
MODEL_CONFIG: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip
KV_BYTES_PER_TOKEN = 4 * 2 * 2 * 64 * 4
CHAT_TOKENS = FIRST_TOKENS + (TURNS - 1) * NEW_TOKENS + TURNS * OUTPUT_TOKENS
POOL_GIB = CHATS * CHAT_TOKENS * KV_BYTES_PER_TOKEN / 4 / 2**30
SERVERS = ("none", "host", "disk", "both", "store")
AIMS = {"host": 0.25, "disk": 0.4, "store": 0.5}
RESTART_TIMEOUT_S = 120.0


@contextmanager
def cluster(name: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yields the URLs for clients and for operators of a cluster with the tiers `name`, one of SERVERS."""
    model, port, admin_port = folder / "model", free_port(), free_port()
    write_dummy_model(model, **MODEL_CONFIG)
    flags = {
        "host": ["--kv-host-gib", "1"],
        "disk": ["--kv-disk-dir", str(folder / name), "--kv-disk-gib", "2"],
    }
    with ExitStack() as stack:
        chosen = [flag for tier in flags if name in (tier, "both") for flag in flags[tier]]
        env: dict[str, str] = {}
        if name == "store":
            store = stack.enter_context(MooncakeStore(segment_bytes=1 << 30))
            chosen, env = ["--kv-store", f"mooncake://{store.address}"], mooncake_environment()
        command = tandem(
            model, port, "--load-format", "dummy", "--dtype", "float32", "--workers", "1",
            "--kv-cache-gib", str(POOL_GIB), "--admin-port", str(admin_port), *chosen,
        )  # fmt: skip
        stack.enter_context(server(command, port, env))
        yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"


class Chats:
    """Chats with token ids as their history."""

    def __init__(self, url: str, num_chats: int) -> None:
        self._client = StreamClient(url)
        self._histories: list[list[int]] = [[] for _ in range(num_chats)]

    def turn(self, number: int) -> tuple[float, int]:
        """Sends the next turn of a chat. Returns (TTFT in seconds, cached prompt tokens)."""
        history = self._histories[number]
        history += self._client.random_prompt(NEW_TOKENS if history else FIRST_TOKENS)
        answer = self._client.complete(history, OUTPUT_TOKENS)
        history += answer.token_ids
        return answer.times_s[0], answer.num_cached

    def num_tokens(self, number: int) -> int:
        return len(self._histories[number])


def measure_chats(url: str, num_turns: int) -> tuple[Chats, dict[str, float]]:
    chats = Chats(url, CHATS)
    ttfts, num_cached, num_prompt = [], 0, 0
    for turn in range(num_turns):
        for number in range(CHATS):
            before = chats.num_tokens(number)
            ttft_s, cached = chats.turn(number)
            if turn:
                ttfts.append(ttft_s)
                num_cached, num_prompt = num_cached + cached, num_prompt + before + NEW_TOKENS
    return chats, {"ttft_ms": 1000 * statistics.mean(ttfts), "hit_rate": num_cached / num_prompt}


def measure_throughput(url: str, num_prompts: int) -> float:
    """Returns output tokens per second of new prompts that share no prefix."""
    prompts = [[random.randrange(4, 2048) for _ in range(PROMPT_TOKENS)] for _ in range(num_prompts)]

    def ask(prompt: list[int]) -> None:
        body = {"model": "m", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()

    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(CONCURRENCY) as pool:
        list(pool.map(ask, prompts))
    return num_prompts * OUTPUT_TOKENS / (time.perf_counter() - started)


def measure_throughput_ratio(url: str, without: str, num_rounds: int) -> float:
    """Returns the median over rounds of a cluster's throughput over that of the one without tiers."""
    ratios = []
    for number in range(num_rounds):
        order = (url, without) if number % 2 else (without, url)
        rates = {each: measure_throughput(each, NUM_PROMPTS) for each in order}
        ratios.append(rates[url] / rates[without])
    return statistics.median(ratios)


def measure_restart(chats: Chats, url: str, admin_url: str) -> dict[str, float]:
    """Kills all workers. Returns the mean TTFT of a turn of each chat before and after."""
    before = statistics.mean(chats.turn(number)[0] for number in range(CHATS))
    for worker in httpx.get(f"{admin_url}/dashboard/cluster", timeout=10).json()["workers"]:
        os.kill(worker["worker"]["pid"], signal.SIGKILL)
    deadline = time.monotonic() + RESTART_TIMEOUT_S
    while not is_up(int(url.rpartition(":")[2])) and time.monotonic() < deadline:
        time.sleep(0.5)
    measure_throughput(url, 2)  # the first steps of a new process are slow
    after = statistics.mean(chats.turn(number)[0] for number in range(CHATS))
    return {"before_kill_ms": 1000 * before, "after_kill_ms": 1000 * after, "ratio": after / before}


def main() -> None:
    parser = new_parser(__doc__)
    able = [name for name in SERVERS if name != "store" or "MOONCAKE_FOLDER" in os.environ]
    parser.add_argument("--servers", default=",".join(able), help="comma-separated; all that can run by default")
    options = parser.parse_args()
    names = options.servers.split(",")
    if unknown := set(names) - set(SERVERS):
        parser.error(f"unknown server {', '.join(sorted(unknown))}; choose from {', '.join(SERVERS)}")
    if not set(names) <= set(able):
        parser.error("store needs Mooncake: set MOONCAKE_FOLDER to the folder where .ci/clients.sh installs it")
    num_turns, num_rounds = (4, 2) if options.quick else (TURNS, THROUGHPUT_ROUNDS)
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        without = stack.enter_context(cluster("none", Path(folder)))[0]
        for name in names:
            with nullcontext((without, "")) if name == "none" else cluster(name, Path(folder)) as (url, admin_url):
                measure_throughput(url, CONCURRENCY)
                chats, row = measure_chats(url, num_turns)
                if name != "none":
                    row["throughput_ratio"] = measure_throughput_ratio(url, without, num_rounds)
                    row |= measure_restart(chats, url, admin_url)
                figures[name] = row
                print(name, {key: round(value, 3) for key, value in row.items()}, file=sys.stderr, flush=True)
    aims = []
    if none := figures.get("none"):
        for name, row in figures.items():
            if name in AIMS:
                ttft, throughput = row["ttft_ms"] / none["ttft_ms"], row["throughput_ratio"]
                aims.append(Aim.of(f"TTFT of later turns, {name} / none", ttft, AIMS[name], "lower"))
                aims.append(Aim.of(f"tokens/s that no cache serves, {name} / none", throughput, 0.98, "higher"))
    aims += [
        Aim.of(f"TTFT after SIGKILL of all workers / before, {name}", row["ratio"], 1.1, "lower")
        for name, row in figures.items()
        if "ratio" in row
    ]
    print_rows([{"tier": name, **row} for name, row in figures.items()])
    finish(Report.of("kv_tiers", {"pool_gib": POOL_GIB, "servers": figures}, aims), options.json)


if __name__ == "__main__":
    main()
