"""Asks a cluster the 500 questions of the demo model's exam and compares the answers with transformers.

    python -m tests.integration.exam [--quick] [--during chaos] [--json FILE]

Three runs: greedy in float32 (answers must equal those of transformers), greedy in bfloat16, and temperature 0.7 with
the question's number as seed. With --during chaos: greedy in float32 while workers are killed, frozen and drained.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.support.report import Aim, Report, finish, new_parser
from tandem.deploy.demo_model import DEMO_MODEL
from tests.faults.fault_injector import CLUSTER_OPTIONS, WORKERS, FaultInjector
from tests.support.cluster import Cluster
from tools.demo_model.exam import SEED, Question, exam, rows, score

NUM_AT_ONCE, NUM_IN_CHAOS = 16, 6
MIN_FAULTS = 10
TIMEOUT_S = 120.0
GREEDY, WARM = 0.0, 0.7


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
    model = ("--model", str(options.model), "--kv-cache-gib", "0.25")
    if options.during:
        during_chaos(questions, model, options.model, options.json)
        return
    runs = {"transformers float32": list(by_transformers(options.model, questions))}
    with Cluster(*model, "--dtype", "float32") as cluster:
        runs["greedy float32"] = ask_all(cluster.url, questions, GREEDY)
    with Cluster(*model, "--dtype", "bfloat16") as cluster:
        runs["greedy bfloat16"] = ask_all(cluster.url, questions, GREEDY)
        runs["temperature 0.7"] = ask_all(cluster.url, questions, WARM)
    print_scores(questions, runs)
    percent = {name: 100 * share_right(questions, answers) for name, answers in runs.items()}
    differing = sum(a != b for a, b in zip(runs["transformers float32"], runs["greedy float32"], strict=True))
    aims = [
        Aim.of("greedy through the cluster, % right", percent["greedy bfloat16"], 90.0, "higher"),
        Aim.of("temperature 0.7, % right", percent["temperature 0.7"], 90.0, "higher"),
        Aim.of("float32 answers that differ from transformers", differing, 0, "lower"),
        Aim.of(
            "percentage points between bfloat16 and float32",
            abs(percent["greedy bfloat16"] - percent["greedy float32"]),
            1.0,
            "lower",
        ),
    ]
    figures = {name: score(questions, answers) for name, answers in runs.items()}
    finish(Report.of("exam", {"right": figures}, aims), options.json)
    sys.exit(0 if all(aim.met for aim in aims) else 1)


def during_chaos(questions: list[Question], options: tuple[str, ...], folder: Path, json_file: Path | None) -> None:
    """Repeats the exam until MIN_FAULTS faults have been injected."""
    right = list(by_transformers(folder, questions))
    console = Console(stderr=True)
    answers: list[list[str]] = []
    with Cluster(*options, *CLUSTER_OPTIONS, "--dtype", "float32", "--threads-per-worker", "1") as cluster:
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
    print_scores(questions, {"transformers": right, "first round": answers[0], "last round": answers[-1]})
    differing = sum(a != b for given in answers for a, b in zip(right, given, strict=True))
    lowest = min(100 * share_right(questions, given) for given in answers)
    aims = [
        Aim.of("answers that differ from transformers", differing, 0, "lower"),
        Aim.of("% right in the worst round", lowest, 90.0, "higher"),
    ]
    figures = {"answers": sum(map(len, answers)), "faults": injector.injected}
    finish(Report.of("exam", figures, aims), json_file)
    sys.exit(0 if all(aim.met for aim in aims) else 1)


def ask_all(url: str, questions: list[Question], temperature: float, num_at_once: int = NUM_AT_ONCE) -> list[str]:
    """Returns the answers in order, with `num_at_once` requests in flight. An error counts as a wrong answer."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client, ThreadPoolExecutor(num_at_once) as pool:
        answers = pool.map(partial(ask, client, temperature), range(len(questions)), questions)
        return list(track(answers, f"temperature {temperature}", total=len(questions), console=Console(stderr=True)))


def ask(client: httpx.Client, temperature: float, seed: int, question: Question) -> str:
    body = {"messages": question.messages, "temperature": temperature, "seed": seed}
    response = client.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        return f"HTTP {response.status_code}: {response.text}"
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


def by_transformers(folder: Path, questions: list[Question]) -> Iterator[str]:
    """Yields the greedy float32 answers of transformers, one question at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for question in track(questions, "transformers", console=Console(stderr=True)):
        ids = tokenizer.apply_chat_template(
            question.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        with torch.inference_mode():
            out = model.generate(ids, max_length=model.config.max_position_embeddings, do_sample=False)
        yield tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def share_right(questions: list[Question], answers: list[str]) -> float:
    return sum(a == q.answer for q, a in zip(questions, answers, strict=True)) / len(questions)


def print_scores(questions: list[Question], runs: dict[str, list[str]]) -> None:
    table = Table("subject", *runs)
    by_run = [list(rows(score(questions, answers))) for answers in runs.values()]
    for columns in zip(*by_run, strict=True):
        table.add_row(columns[0][0], *(f"{right} ({percent} %)" for _, right, percent in columns))
    Console().print(table)


if __name__ == "__main__":
    main()
