"""A decode worker is killed while it serves requests of all kinds; every answer equals that of an undisturbed run.

Log-probabilities have the same bits, in bfloat16.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tandem.protocol.messages.membership import WorkerReport
from tests.support.cluster import MODEL, Cluster
from tests.support.sse import events_of

NUM_TOKENS = 500
_LONG = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
_LONGEST = _LONG | {"max_tokens": 3 * NUM_TOKENS}
"""Still running when the last request has begun, also on a fast machine."""
_LETTERS = f"[ab]{{{NUM_TOKENS}}}"
_COUNTS = {"type": "array", "items": {"enum": [1, 2, 30]}, "minItems": 2000}
_SCHEMA = {"type": "object", "properties": {"counts": _COUNTS}, "required": ["counts"], "additionalProperties": False}
_TOOL = {"type": "function", "function": {"name": "count", "parameters": _SCHEMA}}
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "A greedy one", "temperature": 0, "logprobs": 2, **_LONGEST},
    {"prompt": "A seeded one", "temperature": 1.0, "top_p": 0.9, "seed": 11, "repetition_penalty": 1.1, **_LONG},
    {"prompt": "Three of them", "temperature": 0.8, "seed": 5, "n": 3, **_LONGEST},
    {"prompt": list(range(5, 200)), "temperature": 0, **_LONGEST},
    {"prompt": "With a grammar", "seed": 3, "structured_outputs": {"regex": _LETTERS}, **_LONG},
    {
        "path": "/v1/messages", "messages": [{"role": "user", "content": "A message."}], "temperature": 0,
        "max_tokens": NUM_TOKENS, "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
    },
    {
        "path": "/v1/responses", "input": "A response.", "store": False, "temperature": 0,
        "max_output_tokens": NUM_TOKENS,
        "text": {"format": {"type": "json_schema", "name": "counts", "schema": _SCHEMA}},
    },
    {"prompt": "Stopped by no string", "seed": 8, "stop": ["no such thing", "\x00"], **_LONG},
    {
        "prompt": "Stopped by one that comes late", "seed": 9, "stop": ["YZ"],
        "structured_outputs": {"regex": f"{_LETTERS}YZ[ab]{{100}}"}, **_LONG,
    },
    {"prompt": "With a schema", "seed": 4, "structured_outputs": {"json": _SCHEMA}, **_LONG},
    {
        "messages": [{"role": "user", "content": "Call it."}], "seed": 6, "tools": [_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "count"}}, **_LONG,
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    workers = ("--prefill", "2", "--decode", "2", "--dtype", "bfloat16", "--max-num-batched-tokens", "64")
    with Cluster(*workers, "--worker-wait-s", "240", start_timeout_s=240) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(running: Cluster) -> list[Any]:
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        answers = list(pool.map(lambda body: stream(running, body), REQUESTS))
    [stopped, of_schema, of_tool] = [answer[0] for answer in answers[-3:]]
    assert stopped["ends"] == ["stop"] and re.fullmatch(_LETTERS, stopped["text"])
    for answer in (of_schema, of_tool):
        assert answer["ends"] == ["length"] and re.match(r'\s*\{\s*"counts"\s*:\s*\[[\s\d,]{100}', answer["text"])
    for body, answer in zip(REQUESTS, answers, strict=True):
        if "path" in body:
            whole = post(running, body)
            text = whole["content"][0]["text"] if "content" in whole else whole["output"][0]["content"][0]["text"]
            assert text == answer[0]["text"] and len(text) > NUM_TOKENS and answer[0]["ends"]
    return answers


def post(cluster: Cluster, body: dict[str, Any]) -> Any:
    fields = {"model": MODEL, **body}
    return httpx.post(f"{cluster.url}{fields.pop('path')}", json=fields, timeout=300).raise_for_status().json()


def choices_of(event: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the pieces of choices that an event of any API has, in the form of a completion."""
    if "choices" in event:
        return list(event["choices"])
    match event["type"]:
        case "content_block_delta":
            return [{"index": 0, "text": event["delta"]["text"], "finish_reason": None}]
        case "response.output_text.delta":
            return [{"index": 0, "text": event["delta"], "finish_reason": None}]
        case "message_delta":
            return [{"index": 0, "text": "", "finish_reason": event["delta"]["stop_reason"]}]
        case "response.incomplete" | "response.completed" | "response.failed":
            return [{"index": 0, "text": "", "finish_reason": event["response"]["status"]}]
    return []


def stream(cluster: Cluster, body: dict[str, Any], begun: threading.Event | None = None) -> Any:
    """Text, token ids, log-probabilities and finish reasons, by choice. Sets `begun` at the tenth event."""
    choices: dict[int, dict[str, Any]] = {}
    num_events = 0
    fields = {"model": MODEL, "stream": True, **body}
    path = fields.pop("path", "/v1/chat/completions" if "messages" in body else "/v1/completions")
    with httpx.stream("POST", f"{cluster.url}{path}", json=fields, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        for event in events_of(answer.iter_lines()):
            assert "error" not in event, event
            num_events += 1
            if num_events == 10 and begun is not None:
                begun.set()
            for choice in choices_of(event):
                seen = choices.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": [], "ends": []})
                seen["text"] += choice["text"] if "text" in choice else text_of(choice["delta"])
                seen["ids"] += choice.get("token_ids") or []
                seen["logprobs"] += (choice.get("logprobs") or {}).get("token_logprobs") or []
                seen["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return [choices[index] for index in sorted(choices)]


def text_of(delta: dict[str, Any]) -> str:
    """Text of a chat delta: its content, or the arguments of its tool calls."""
    calls = delta.get("tool_calls") or []
    return (delta.get("content") or "") + "".join(call["function"].get("arguments") or "" for call in calls)


def check_same(answers: list[Any], expected: list[Any]) -> None:
    for body, answer, reference in zip(REQUESTS, answers, expected, strict=True):
        for got, wanted in zip(answer, reference, strict=True):
            assert len(got["ends"]) == 1
            for field in ("ids", "text", "ends", "logprobs"):
                assert got[field] == wanted[field], (field, body)


def is_whole(cluster: Cluster, old_epoch: str) -> bool:
    """True with all workers, none of `old_epoch`, every pair ready and no request in flight."""
    report = cluster.status()
    if old_epoch in {worker.worker.epoch for worker in report.workers}:
        return False
    num_pairs = sum(pair.state == "ready" for worker in report.workers for pair in worker.pairs)
    return (len(report.workers), num_pairs) == (4, 4) and cluster.all_blocks_free()


def busiest(cluster: Cluster) -> WorkerReport:
    """Returns the decode worker that runs the most sequences."""
    workers = [report for report in cluster.status().workers if report.worker.role == "decode"]
    return max(workers, key=lambda report: report.load.num_running)


def start_all(cluster: Cluster, pool: ThreadPoolExecutor) -> list[Future[Any]]:
    """Starts every request and waits for its tenth event. The last three start first: their grammars compile slowly."""
    answers: dict[int, Future[Any]] = {}
    numbers = range(len(REQUESTS))
    for group in (numbers[-3:], numbers[:-3]):
        begun = {number: threading.Event() for number in group}
        for number, event in begun.items():
            answers[number] = pool.submit(stream, cluster, REQUESTS[number], event)
        for event in begun.values():
            assert event.wait(120)
    return [answers[number] for number in numbers]


@pytest.mark.timeout(600)
def test_streams_survive_the_loss_of_a_decode_worker(running: Cluster, undisturbed: list[Any]) -> None:
    before = running.num_migrations()
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        answers = start_all(running, pool)
        gone = busiest(running).worker
        os.kill(gone.pid, signal.SIGKILL)
        check_same([answer.result(300) for answer in answers], undisturbed)
    assert running.num_migrations() > before
    running.wait_for(lambda: is_whole(running, gone.epoch), 240)
    assert running.worker(gone.worker_id).worker.pid != gone.pid
