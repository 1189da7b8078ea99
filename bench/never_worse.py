"""Elastic workers, one prefill and one decode worker, and one vLLM on the same cores, with the same requests.

    python -m bench.never_worse --models FOLDER [--vllm VENV] [--rounds 3] [--quick] [--json FILE]
    python -m bench.never_worse --models FOLDER --cases 256/64@2,chat --servers elastic-1,vllm

The folder of --models holds `llama100m` (100 M parameters) and `tiny` (4 M, where the cost of everything except the
model shows), both in bfloat16. A case N/M@R sends prompts of N tokens with M tokens of output at R requests per second,
Poisson; N/MxC sends C at once; N/M~C is a closed loop of C clients that each send the next prompt when the last one is
answered. `chat` holds conversations of eight turns, each with all earlier turns as its prefix.
`shift` sends long prompts with short outputs, then short prompts with long outputs. Prompts and arrival times are drawn
from the name of the case and the number of the round, so they are the same for all servers.

In each round each server starts once for each model, alone on the machine, and runs all cases; the order of the servers
rotates. Each case runs a few unmeasured requests first. A figure is the median of the rounds, a ratio the median of the
ratios of each round, with the lowest and the highest. `bench.support.latency` defines the figures;
`python -m bench.support.load_plot` draws them over the rate.

Every server gets a model length of 4,096 tokens and 2 GiB of KV cache, Tandem for each worker; all other settings are
the defaults. vLLM's command is `vllm serve MODEL --served-model-name m --dtype DTYPE --max-model-len 4096` with
VLLM_CPU_KVCACHE_SPACE=2.

The rates are for two cores that compute about 2,000 prompt tokens of llama100m per second. --rate multiplies them on
other machines. --dtype float32 is for CPUs without AVX-512, where torch emulates bfloat16 products.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from bench.support.latency import RequestTrace, read_events, summarise
from bench.support.report import Aim, Report, finish, log, new_parser, print_rows
from bench.support.servers import MODEL, server, tandem, vllm_serve
from tests.support.ports import free_port
from tests.support.sse import events_of

SERVERS = {
    "elastic-1": ("--workers", "1"),
    "elastic-2": ("--workers", "2"),
    "1P1D": ("--prefill", "1", "--decode", "1"),
    "vllm": (),
}
"""Flags of `tandem up`; the workers of each server share the cores."""
ELASTIC = ("elastic-1", "elastic-2")
TANDEM_FLAGS = ("--max-model-len", "4096", "--kv-cache-gib", "2")
TIMEOUT_S = 180.0
PAUSE_S = 1.0
"""Idle time before each measured run."""
VOCABULARY = 32_000
FIGURES = ("ttft_ms_mean", "ttft_ms_p99", "tpot_ms_mean", "itl_ms_p99", "output_tokens_per_s")
QUICK_SHARE = 0.25
"""Share of the requests that --quick sends."""


@dataclass(frozen=True)
class ChatTurn:
    """Tokens that the client adds to the conversation, and tokens that it asks for."""

    num_new_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class Conversation:
    """Turns in order, the first one `at` seconds after the start; a request without a history has one turn.

    keeps_history: each turn's prompt begins with the earlier turns and answers.
    """

    at: float
    turns: tuple[ChatTurn, ...]
    keeps_history: bool = True


@dataclass(frozen=True)
class LoadCase:
    """`draw` makes the conversations of one run. num_warm_up: those that run unmeasured, all at once.

    num_repeats: runs in each round. max_ttft: aim for mean TTFT, elastic / vLLM.
    """

    name: str
    model: str
    draw: Callable[[random.Random, float], list[Conversation]]
    num_warm_up: int = 4
    num_repeats: int = 1
    max_ttft: float = 1.0


def poisson(num_requests: int, per_s: float, *turns: ChatTurn) -> Callable[[random.Random, float], list[Conversation]]:
    """Conversations with these turns; the function takes the generator and the share of them to send."""

    def draw(rng: random.Random, share: float) -> list[Conversation]:
        at, found = 0.0, []
        for _ in range(max(2, round(share * num_requests))):
            found.append(Conversation(at, turns))
            at += rng.expovariate(per_s)
        return found

    return draw


def at_once(num_requests: int, turn: ChatTurn) -> Callable[[random.Random, float], list[Conversation]]:
    """Requests without delays. Their number is the load, so it does not depend on the share."""
    return lambda rng, share: [Conversation(0.0, (turn,))] * num_requests


def closed_loop(
    num_clients: int, num_each: int, turn: ChatTurn
) -> Callable[[random.Random, float], list[Conversation]]:
    """Clients that each send `num_each` requests one after the other."""
    return lambda rng, share: (
        [Conversation(0.0, (turn,) * max(1, round(share * num_each)), keeps_history=False)] * num_clients
    )


def shift(rng: random.Random, share: float) -> list[Conversation]:
    """16 prompts of 700 tokens with 16 of output at 1 per second, then 24 of 64 tokens with 160 at 1.5 per second."""
    long_prompts = poisson(16, 1.0, ChatTurn(700, 16))(rng, share)
    long_answers = poisson(24, 1.5, ChatTurn(64, 160))(rng, share)
    begin = long_prompts[-1].at + 1.0
    return long_prompts + [replace(each, at=begin + each.at) for each in long_answers]


CASES = (
    LoadCase("256/64@2", "llama100m", poisson(32, 2.0, ChatTurn(256, 64))),
    LoadCase("256/64@4", "llama100m", poisson(40, 4.0, ChatTurn(256, 64))),
    LoadCase("700/40@1", "llama100m", poisson(24, 1.0, ChatTurn(700, 40))),
    LoadCase("1024/6@1", "llama100m", poisson(24, 1.0, ChatTurn(1024, 6)), max_ttft=1.3),
    LoadCase("chat", "llama100m", poisson(6, 0.25, *[ChatTurn(200, 64)] * 8)),
    LoadCase("shift", "llama100m", shift),
    LoadCase("128/128x64", "tiny", at_once(64, ChatTurn(128, 128)), num_warm_up=64, num_repeats=2),
    LoadCase("512/16x32", "tiny", at_once(32, ChatTurn(512, 16)), num_warm_up=32, num_repeats=4),
)
SWEEP = (
    LoadCase("256/64@1", "llama100m", poisson(20, 1.0, ChatTurn(256, 64))),
    LoadCase("256/64@3", "llama100m", poisson(36, 3.0, ChatTurn(256, 64))),
    LoadCase("256/64@5", "llama100m", poisson(50, 5.0, ChatTurn(256, 64))),
    LoadCase("256/64~8", "llama100m", closed_loop(8, 6, ChatTurn(256, 64)), num_warm_up=8),
)
"""More rates, for a plot over the load, and a closed loop."""


class LoadClient:
    """Streams completions of token ids from one server, all in this process."""

    def __init__(self, session: aiohttp.ClientSession, port: int, seed: str) -> None:
        self._session = session
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._seed = seed

    async def run(self, conversations: list[Conversation]) -> list[RequestTrace]:
        """Returns the traces of all turns."""
        started = time.perf_counter()
        traces = await asyncio.gather(
            *(self._converse(started + each.at, each, number) for number, each in enumerate(conversations))
        )
        return [trace for of_one in traces for trace in of_one]

    async def _converse(self, begins_at: float, conversation: Conversation, number: int) -> list[RequestTrace]:
        """Sends each turn when the one before it has completed; stops after a failed one."""
        rng = random.Random(f"{self._seed} {number}")
        keeps_answers = conversation.keeps_history and len(conversation.turns) > 1
        tokens: list[int] = []
        traces: list[RequestTrace] = []
        await asyncio.sleep(begins_at - time.perf_counter())
        for turn in conversation.turns:
            tokens += [rng.randrange(300, VOCABULARY) for _ in range(turn.num_new_tokens)]
            trace, answer = await self._stream(tokens, turn.num_output_tokens, keeps_answers)
            traces.append(trace)
            if trace.error is not None:
                break
            tokens = tokens + answer if conversation.keeps_history else []
        return traces

    async def _stream(
        self, prompt: list[int], num_output_tokens: int, keeps_answer: bool
    ) -> tuple[RequestTrace, list[int]]:
        """Returns the trace and, if the answer is to be kept, its token ids."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": num_output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | ({"return_token_ids": True} if keeps_answer else {})
        data = msgspec.json.encode(body)
        lines: list[bytes] = []
        times: list[float] = []
        trace = RequestTrace(time.perf_counter())
        try:
            async with self._session.post(
                self._url, data=data, headers={"content-type": "application/json"}
            ) as response:
                if response.status != 200:
                    trace.error = f"HTTP {response.status}"
                async for line in response.content:
                    lines.append(line)
                    times.append(time.perf_counter())
        except (aiohttp.ClientError, TimeoutError) as error:
            trace.error = type(error).__name__
        if trace.error is None:
            read_events(lines, trace, iter(times).__next__)  # after the stream, so that it delays no other one
        if trace.error is None and trace.num_output_tokens != num_output_tokens:
            trace.error = f"{trace.num_output_tokens} tokens instead of {num_output_tokens}"
        return trace, answer_ids(lines) if keeps_answer and trace.error is None else []


def answer_ids(lines: list[bytes]) -> list[int]:
    """Returns the token ids of a streamed completion."""
    return [
        token_id
        for event in events_of(lines)
        for choice in event["choices"]
        for token_id in choice.get("token_ids") or ()
    ]


async def run_case(case: LoadCase, port: int, number: int, share: float, rate: float) -> list[dict[str, Any]]:
    """Returns the figures of each repeat of a case in one round."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        warm_up = case.draw(random.Random(0), 1.0)
        first = [Conversation(0.0, each.turns[:1]) for each in warm_up[: case.num_warm_up // 2]]
        last = [Conversation(0.0, each.turns[:1]) for each in warm_up[-(case.num_warm_up - len(first)) :]]
        await LoadClient(session, port, f"warm-up {case.name}").run(first + last)
        rows = []
        for repeat in range(case.num_repeats):
            await asyncio.sleep(PAUSE_S)
            seed = f"{case.name} {number} {repeat}"
            drawn = case.draw(random.Random(seed), share)
            conversations = [replace(each, at=each.at / rate) for each in drawn]
            rows.append(row(await LoadClient(session, port, seed).run(conversations)))
        return rows


def row(traces: list[RequestTrace]) -> dict[str, Any]:
    figures = summarise(traces)
    if figures.ttft_ms is None or figures.tpot_ms is None or figures.itl_ms is None:
        raise SystemExit(f"error: no request completed: {figures.errors}")
    return {
        "requests": figures.num_requests,
        "errors": figures.errors,
        "duration_s": round(figures.duration_s, 2),
        "ttft_ms_mean": round(figures.ttft_ms.mean, 2),
        "ttft_ms_p99": round(figures.ttft_ms.p99, 2),
        "tpot_ms_mean": round(figures.tpot_ms.mean, 3),
        "itl_ms_p99": round(figures.itl_ms.p99, 2),
        "output_tokens_per_s": round(figures.output_tokens_per_s, 1),
    }


Rows = dict[str, dict[str, list[dict[str, Any]]]]
"""Figures by case, server and run: rounds in order, and repeats within each."""


def run_server(
    name: str, folder: Path, cases: list[LoadCase], number: int, share: float, options: argparse.Namespace, rows: Rows
) -> None:
    """Starts a server, runs the cases of one model and adds to `rows`."""
    port = free_port()
    env: dict[str, str] = {}
    if name == "vllm":
        command, env = vllm_serve(options.vllm, folder, port, dtype=options.dtype)
    else:
        command = tandem(folder, port, *SERVERS[name], *TANDEM_FLAGS, "--dtype", options.dtype)
    log(f"round {number + 1}, {folder.name}: starting {name}")
    with server(command, port, env):
        for case in cases:
            found = uvloop.run(run_case(case, port, number, share, options.rate))
            rows.setdefault(case.name, {}).setdefault(name, []).extend(found)
            log(f"  {case.name}: {found}")


def medians(rows: Rows) -> list[dict[str, Any]]:
    """Returns a line for each case and server."""
    return [
        {"case": case, "server": name, "runs": len(runs), "failed": sum(sum(run["errors"].values()) for run in runs)}
        | {figure: round(statistics.median(run[figure] for run in runs), 2) for figure in FIGURES}
        for case, of_case in rows.items()
        for name, runs in of_case.items()
    ]


def ratio(rows: Rows, case: str, name: str, figure: str) -> tuple[float, float, float]:
    """Median, lowest and highest over all runs of this server / vLLM."""
    pairs = zip(rows[case][name], rows[case]["vllm"], strict=True)
    each = [ours[figure] / theirs[figure] for ours, theirs in pairs]
    return statistics.median(each), min(each), max(each)


def ratios(rows: Rows) -> list[dict[str, Any]]:
    """Returns a line for each case and server beside vLLM: median, lowest and highest ratio of each figure."""
    return [
        {"case": case, "server": name}
        | {figure: [round(value, 3) for value in ratio(rows, case, name, figure)] for figure in FIGURES}
        for case, of_case in rows.items()
        for name in of_case
        if name != "vllm" and "vllm" in of_case
    ]


def aims(rows: Rows, cases: list[LoadCase]) -> list[Aim]:
    found = []
    for case in cases:
        for name in (each for each in ELASTIC if each in rows[case.name]):
            failed = sum(sum(run["errors"].values()) for run in rows[case.name][name])
            found.append(Aim.of(f"{case.name}, {name}: failed requests", failed, 0, "lower"))
            if "vllm" not in rows[case.name]:
                continue
            where = f"{case.name}, {name} / vLLM:"
            ttft, gap, throughput = (
                ratio(rows, case.name, name, figure)[0]
                for figure in ("ttft_ms_mean", "itl_ms_p99", "output_tokens_per_s")
            )
            found += [
                Aim.of(f"{where} mean TTFT", ttft, case.max_ttft, "lower"),
                Aim.of(f"{where} p99 ITL", gap, 0.5, "lower"),
                Aim.of(f"{where} output tokens/s", throughput, 1.0, "higher"),
            ]
    return found


def chosen(parser: argparse.ArgumentParser, names: str, known: list[str]) -> list[str]:
    """Returns the comma-separated names in the order of `known`; all of them for an empty string."""
    asked = names.split(",") if names else known
    if unknown := set(asked) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    return [name for name in known if name in asked]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--models", type=Path, required=True, help="folder with the models llama100m and tiny")
    parser.add_argument("--vllm", type=Path, help="virtual environment with vLLM; without it, vLLM does not run")
    parser.add_argument("--cases", default="", help="comma-separated; all by default")
    parser.add_argument("--servers", default="", help=f"comma-separated, of {', '.join(SERVERS)}; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rate", type=float, default=1.0, help="multiplies the rates of requests (default 1)")
    options = parser.parse_args()
    names = chosen(parser, options.cases, [case.name for case in CASES + SWEEP])
    cases = [case for case in CASES + SWEEP if case.name in names]
    known = list(SERVERS) if options.vllm is not None else [name for name in SERVERS if name != "vllm"]
    servers = chosen(parser, options.servers, known)
    rounds, share = (1, QUICK_SHARE) if options.quick else (options.rounds, 1.0)
    rows: Rows = {name: {} for name in names}
    for number in range(rounds):
        first = number % len(servers)
        for model in dict.fromkeys(case.model for case in cases):
            of_model = [case for case in cases if case.model == model]
            for name in servers[first:] + servers[:first]:
                run_server(name, options.models / model, of_model, number, share, options, rows)
        report = Report.of(
            "never_worse",
            {
                "dtype": options.dtype,
                "rate": options.rate,
                "medians": medians(rows),
                "ratios": ratios(rows),
                "runs": rows,
            },
            aims(rows, cases),
        )
        if options.json is not None:
            report.write(options.json)  # after each round, so that an interrupted run leaves its figures
    print_rows(medians(rows))
    finish(report, options.json)


if __name__ == "__main__":
    main()
