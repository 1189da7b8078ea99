"""Asks a cluster the 500 questions of the demo model's exam, and computes each answer again alone.

    python -m tests.integration.exam [--quick] [--during chaos] [--json FILE]

Two runs in bfloat16: greedy, and temperature 0.7 with the question's number as seed. Every token and log-probability
must be that of a process that computes each answer by itself, bit for bit. With --during chaos: greedy, while workers
are killed, frozen and drained.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.support.report import Aim, Report, finish, new_parser
from tandem.deploy.commands.replay import lines_of
from tandem.deploy.demo_model import DEMO_MODEL
from tandem.proxy.records.record import Record, decode_record
from tandem.worker.lone_engine import LoneEngine
from tests.faults.fault_injector import CLUSTER_OPTIONS, WORKERS, FaultInjector
from tests.support.cluster import Cluster
from tests.support.exact_engine import differences, exact_engine
from tools.demo_model.exam import SEED, Question, exam, rows, score

NUM_AT_ONCE, NUM_IN_CHAOS = 16, 6
MIN_FAULTS = 10
TIMEOUT_S = 120.0
GREEDY, WARM = 0.0, 0.7
EXACT = ("--dtype", "bfloat16", "--threads-per-worker", "1")
"""Options of a cluster whose answers `tests.support.exact_engine` computes again."""


class Answered(NamedTuple):
    """An answer's text, or an error."""

    text: str
    record: Record | None = None


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="model folder")
    parser.add_argument("--during", choices=["chaos"], help="inject faults meanwhile")
    parser.add_argument("--url", help="only ask this running server, greedy and at temperature 0.7")
    options = parser.parse_args()
    questions = exam()[:: 10 if options.quick else 1]
    if options.url:
        runs = {"greedy": ask_all(options.url, questions, GREEDY), "warm": ask_all(options.url, questions, WARM)}
        print_scores(questions, runs)
        return
    model = ("--model", str(options.model), "--kv-cache-gib", "0.25", *EXACT)
    if options.during:
        during_chaos(questions, model, options.model, options.json)
        return
    with Cluster(*model) as cluster:
        runs = {
            name: ask_all(cluster.url, questions, temperature)
            for name, temperature in (("greedy", GREEDY), ("temperature 0.7", WARM))
        }
    print_scores(questions, runs)
    percent = {name: 100 * share_right(questions, answers) for name, answers in runs.items()}
    aims = [
        Aim.of("greedy through the cluster, % right", percent["greedy"], 90.0, "higher"),
        Aim.of("temperature 0.7, % right", percent["temperature 0.7"], 90.0, "higher"),
        Aim.of("answers that differ when computed alone", num_different(options.model, runs.values()), 0, "lower"),
    ]
    figures = {name: score(questions, texts(answers)) for name, answers in runs.items()}
    finish(Report.of("exam", {"right": figures}, aims), options.json)
    sys.exit(0 if all(aim.met for aim in aims) else 1)


def during_chaos(questions: list[Question], options: tuple[str, ...], folder: Path, json_file: Path | None) -> None:
    """Repeats the exam until MIN_FAULTS faults have been injected."""
    console = Console(stderr=True)
    answers: list[list[Answered]] = []
    with Cluster(*options, *CLUSTER_OPTIONS) as cluster:
        ended = threading.Event()
        injector = FaultInjector(cluster.port, 1, WORKERS, Random(SEED), console.print)
        with ThreadPoolExecutor(1) as pool:
            injecting = pool.submit(asyncio.run, injector.run_while(lambda: not ended.is_set()))
            try:
                while len(injector.injected) < MIN_FAULTS and not injecting.done():
                    answers.append(ask_all(cluster.url, questions, GREEDY, NUM_IN_CHAOS))
            finally:
                ended.set()
            injecting.result()
    print_scores(questions, {"first round": answers[0], "last round": answers[-1]})
    lowest = min(100 * share_right(questions, given) for given in answers)
    aims = [
        Aim.of("answers that differ when computed alone", num_different(folder, answers), 0, "lower"),
        Aim.of("% right in the worst round", lowest, 90.0, "higher"),
    ]
    figures = {"answers": sum(map(len, answers)), "faults": injector.injected}
    finish(Report.of("exam", figures, aims), json_file)
    sys.exit(0 if all(aim.met for aim in aims) else 1)


def ask_all(url: str, questions: list[Question], temperature: float, num_at_once: int = NUM_AT_ONCE) -> list[Answered]:
    """Returns the answers in order, with `num_at_once` requests in flight. An error counts as a wrong answer."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client, ThreadPoolExecutor(num_at_once) as pool:
        answers = pool.map(partial(ask, client, temperature), range(len(questions)), questions)
        return list(track(answers, f"temperature {temperature}", total=len(questions), console=Console(stderr=True)))


def ask(client: httpx.Client, temperature: float, seed: int, question: Question) -> Answered:
    body = {"messages": question.messages, "temperature": temperature, "seed": seed}
    response = client.post("/v1/chat/completions", json=body, headers={"x-tandem-record": "1"})
    if response.status_code != 200:
        return Answered(f"HTTP {response.status_code}: {response.text}")
    record = client.get(response.headers["x-tandem-record"]).raise_for_status()
    content: str = response.json()["choices"][0]["message"]["content"]
    return Answered(content, decode_record(record.content))


def num_different(folder: Path, runs: Iterable[Sequence[Answered]]) -> int:
    """Returns how many answers are not equal, bit for bit, to what one process computes alone."""
    answers = [answer for run in runs for answer in run]
    engine = exact_engine(folder)
    try:
        return sum(is_different(engine, answer) for answer in track(answers, "alone", console=Console(stderr=True)))
    finally:
        engine.close()


def is_different(engine: LoneEngine, answer: Answered) -> bool:
    """Prints where they differ. An answer without a record, which is an error, is different."""
    found = differences(engine, answer.record) if answer.record is not None else []
    for difference in found:
        print("\n".join(lines_of(difference)), file=sys.stderr)
    return answer.record is None or bool(found)


def texts(answers: Sequence[Answered]) -> list[str]:
    return [answer.text for answer in answers]


def share_right(questions: list[Question], answers: Sequence[Answered]) -> float:
    return sum(a.text == q.answer for q, a in zip(questions, answers, strict=True)) / len(questions)


def print_scores(questions: list[Question], runs: dict[str, list[Answered]]) -> None:
    table = Table("subject", *runs)
    by_run = [list(rows(score(questions, texts(answers)))) for answers in runs.values()]
    for columns in zip(*by_run, strict=True):
        table.add_row(columns[0][0], *(f"{right} ({percent} %)" for _, right, percent in columns))
    Console().print(table)


if __name__ == "__main__":
    main()
