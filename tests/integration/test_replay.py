"""Answers of every API are recorded while a worker is killed, and computed again alone: every bit is equal.

Clients get the text of the tokens that were recorded, and one end. Two clients have keys. The operator records all
requests, and the clients ask for some of their records.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
import pytest
from tokenizers import Tokenizer

from tandem.deploy.commands.replay import computed_alone, report
from tandem.deploy.commands.replay_cluster import replay_on_cluster
from tandem.engine.engine_config import EngineConfig
from tandem.proxy.records.record import Record, decode_record
from tandem.worker.lone_engine import LoneEngine
from tests.support.cluster import MODEL, Cluster
from tests.support.noise_model import ensure_noise_model
from tests.support.sse import event_of

DTYPE = "bfloat16"
NUM_TOKENS = 120
_LETTERS = f"[ab]{{{NUM_TOKENS}}}"
_SCHEMA = {"type": "object", "properties": {"n": {"type": "array", "items": {"enum": [1, 22]}, "minItems": 500}}}
_CHAT = [{"role": "user", "content": "Count."}]
_COUNTS = {"type": "object", "properties": {"n": {"type": "array", "items": {"enum": [1, 2, 30]}, "minItems": 2000}},
    "required": ["n"], "additionalProperties": False}  # fmt: skip
_TOOL = {"type": "function", "function": {"name": "count", "parameters": _COUNTS}}
_LONG = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "A greedy one", "temperature": 0, **_LONG}),
    ("/v1/completions", {"prompt": "Three, which nobody has seeded", "n": 3, "top_p": 0.9, **_LONG}),
    ("/v1/completions", {"prompt": [[5, 6, 7], list(range(5, 300))], "seed": 4, "top_k": 50, "logprobs": 2, **_LONG}),
    ("/v1/completions", {"prompt": "Penalties", "repetition_penalty": 1.3, "presence_penalty": 0.5, "min_p": 0.01,
        "frequency_penalty": 0.5, "logit_bias": {"9": 2.0}, "bad_words": ["the", "a"], "min_tokens": 20, **_LONG}),
    ("/v1/completions", {"prompt": "A pattern", "structured_outputs": {"regex": _LETTERS}, **_LONG}),
    ("/v1/completions", {"prompt": "A stop string", "structured_outputs": {"regex": "[ab]{50}YZ[ab]{100}"},
        "stop": ["YZ"], **_LONG}),
    ("/v1/chat/completions", {"messages": _CHAT, "response_format": {"type": "json_schema",
        "json_schema": {"name": "n", "schema": _SCHEMA}}, **_LONG}),
    ("/v1/chat/completions", {"messages": _CHAT, "tools": [_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "count"}}, **_LONG}),
    ("/v1/messages", {"messages": _CHAT, "max_tokens": NUM_TOKENS}),
    ("/v1/messages", {"messages": _CHAT, "max_tokens": NUM_TOKENS,
        "output_config": {"format": {"type": "json_schema", "schema": _COUNTS}}}),
    ("/v1/responses", {"input": "Count.", "store": False, "max_output_tokens": NUM_TOKENS}),
]  # fmt: skip
ALICE, BOB = {"authorization": "Bearer key-of-alice"}, {"authorization": "Bearer key-of-bob"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records") / "all"


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Cluster]:
    keys = folder.parent / "keys"
    keys.write_text("key-of-alice alice\nkey-of-bob bob\n")
    keys.chmod(0o600)
    flags = ("--prefill", "2", "--decode", "2", "--dtype", DTYPE, "--max-num-batched-tokens", "64")
    more = ("--api-keys-file", str(keys), "--record", str(folder), "--worker-wait-s", "240")
    with Cluster(*flags, *more, "--threads-per-worker", "1") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alone() -> Iterator[LoneEngine]:
    engine = LoneEngine(EngineConfig(str(ensure_noise_model()), dtype=DTYPE, num_threads=1))  # type: ignore[arg-type]
    yield engine
    engine.close()


def fetched(cluster: Cluster, where: str, headers: dict[str, str] = ALICE) -> Record:
    answer = httpx.get(cluster.url + where, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return decode_record(answer.content)


class Asked(NamedTuple):
    """where: the record is. texts, ends: of a stream, by choice."""

    where: str
    texts: dict[int, str]
    ends: dict[int, list[str]]


def ask(cluster: Cluster, path: str, body: dict[str, Any], begun: threading.Semaphore, stream: bool) -> Asked:
    headers = ALICE | {"x-tandem-record": "1"}
    fields = {"model": MODEL, "stream": stream, **body}
    texts, ends = defaultdict[int, str](str), defaultdict[int, list[str]](list)
    with httpx.stream("POST", cluster.url + path, json=fields, headers=headers, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        for number, line in enumerate(answer.iter_lines()):
            if number == 20:
                begun.release()
            for index, text, reason in pieces_of(event_of(line) or {}):
                texts[index] += text
                ends[index] += [reason] if reason else []
    return Asked(answer.headers["x-tandem-record"], texts, ends)


def pieces_of(event: dict[str, Any]) -> list[tuple[int, str, str | None]]:
    """Returns choice, text (of a call its arguments) and end of what an event of any API has."""
    if "choices" in event:
        return [(each["index"], each.get("text") or text_of(each.get("delta") or {}), each["finish_reason"])
                for each in event["choices"]]  # fmt: skip
    match event.get("type"):
        case "content_block_delta" if "text" in event["delta"]:
            return [(0, event["delta"]["text"], None)]
        case "response.output_text.delta":
            return [(0, event["delta"], None)]
        case "message_delta":
            return [(0, "", event["delta"]["stop_reason"])]
        case "response.incomplete" | "response.completed" | "response.failed":
            return [(0, "", event["response"]["status"])]
    return []


def text_of(delta: dict[str, Any]) -> str:
    calls = delta.get("tool_calls") or []
    return (delta.get("content") or "") + "".join(call["function"].get("arguments") or "" for call in calls)


def test_answers_recorded_under_load_with_a_kill_are_computed_again_alone(running: Cluster, alone: LoneEngine) -> None:
    before, begun = running.num_migrations(), threading.Semaphore(0)
    asked = [(path, body, stream) for path, body in REQUESTS for stream in (True, False)]
    with ThreadPoolExecutor(len(asked)) as pool:
        jobs = [pool.submit(ask, running, path, body, begun, stream) for path, body, stream in asked]
        for _ in range(4):
            assert begun.acquire(timeout=500)
        os.kill(running.worker("decode-0").worker.pid, signal.SIGKILL)
        answers = [job.result() for job in jobs]
        records = [fetched(running, answer.where) for answer in answers]
    assert running.num_migrations() > before
    num_parts = [len(sequence.computed_by) for record in records for sequence in record.sequences]
    assert max(num_parts) > 2, "no migrated answer was recorded"
    tokenizer = Tokenizer.from_file(str(ensure_noise_model() / "tokenizer.json"))
    for (path, body, stream), answer, record in zip(asked, answers, records, strict=True):
        prompts = body.get("prompt")
        num_prompts = len(prompts) if isinstance(prompts, list) else 1
        assert len(record.sequences) == num_prompts * body.get("n", 1) and record.head.outcome in ("stop", "length")
        assert all(1 <= len(sequence.token_ids) <= NUM_TOKENS for sequence in record.sequences)
        assert report(record, computed_alone(record, alone), "alone") == 0, (path, body)
        for number, sequence in enumerate(record.sequences if stream else ()):
            text = tokenizer.decode(sequence.token_ids)
            assert len(answer.ends[number]) == 1, (path, body, answer.ends)
            if "tools" in body:
                assert answer.texts[number] and answer.texts[number] in text
            else:
                assert answer.texts[number] == text.partition(body.get("stop", ["no stop string"])[0])[0], (path, body)
    running.wait_for(lambda: len(running.ready_pairs()) == 4)
    running.wait_for(running.all_blocks_free)


def test_a_cluster_computes_a_record_again(running: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    path, body = REQUESTS[3]
    where = ask(running, path, body, threading.Semaphore(0), stream=False).where
    record = fetched(running, where)
    assert replay_on_cluster(record, "", running.url, "key-of-alice", 120.0) == 0, capsys.readouterr().out
    assert "by the cluster" in capsys.readouterr().out


def test_clients_of_sdks_get_their_answers_and_their_records(running: Cluster) -> None:
    wanted = {"X-Tandem-Record": "1"}
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="key-of-alice", max_retries=0)
    made = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": "a"}], max_tokens=5, extra_headers=wanted
    )
    answer = made.parse()
    assert answer.choices[0].logprobs is None and answer.usage is not None
    record = fetched(running, made.headers["x-tandem-record"])
    assert len(record.sequences[0].token_ids) == answer.usage.completion_tokens
    assert made.headers["x-tandem-record"].endswith(made.headers["x-request-id"])
    response = client.responses.with_raw_response.create(model=MODEL, input="a", extra_headers=wanted)
    assert response.parse().output and fetched(running, response.headers["x-tandem-record"]).head.api == "response"
    with anthropic.Anthropic(base_url=running.url, api_key="key-of-alice", max_retries=0) as claude:
        message = claude.messages.with_raw_response.create(
            model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "a"}], extra_headers=wanted
        )
        assert message.parse().content and fetched(running, message.headers["x-tandem-record"]).head.api == "message"


def test_no_other_client_reads_a_record(running: Cluster) -> None:
    headers = {"x-tandem-record": "1", "x-request-id": "guessed"}
    body = {"model": MODEL, "prompt": "secret", "max_tokens": 2}
    made = httpx.post(f"{running.url}/v1/completions", json=body, headers=ALICE | headers, timeout=60)
    where = made.headers["x-tandem-record"]
    assert fetched(running, where).head.request_id == "guessed"
    for other, status in ((BOB, 404), ({}, 401), ({"authorization": "Bearer x"}, 401)):
        refused = httpx.get(running.url + where, headers=other, timeout=60)
        assert refused.status_code == status and "secret" not in refused.text
    httpx.post(f"{running.url}/v1/completions", json=body, headers=BOB | headers, timeout=60).raise_for_status()
    assert fetched(running, where).head.created and fetched(running, where, BOB).head.request_id == "guessed"


def test_the_operator_has_the_records_of_all_requests(running: Cluster, folder: Path) -> None:
    headers = ALICE | {"x-request-id": "not-asked-for"}
    body = {"model": MODEL, "prompt": "a", "max_tokens": 3, "stream": True}
    answer = httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200 and "x-tandem-record" not in answer.headers
    Cluster.wait_for(lambda: bool(list(folder.glob("*/not-asked-for.jsonl"))))
    [file] = folder.glob("*/not-asked-for.jsonl")
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    head = json.loads(file.read_text().splitlines()[0])
    assert head["api"] == "completion" and head["workers"]
    metrics = httpx.get(f"{running.admin_url}/metrics", timeout=60).text
    assert 'tandem_records_total{outcome="written"}' in metrics


@pytest.mark.parametrize(
    "path, body, value, reason",
    [
        ("/v1/completions", {"prompt": "a"}, "yes", "must be 1 or 0"),
        ("/v1/embeddings", {"input": "a"}, "1", "an embedding has no tokens"),
        ("/v1/completions", {"prompt": "a", "use_beam_search": True, "n": 2, "temperature": 0}, "1", "use_beam_search"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    running: Cluster, path: str, body: dict[str, Any], value: str, reason: str
) -> None:
    headers = ALICE | {"x-tandem-record": value}
    answer = httpx.post(running.url + path, json={"model": MODEL, **body}, headers=headers, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == 400 and reason in error["message"] and error["param"] == "x-tandem-record"
