"""What one client sends to harm the others: each attack takes a few seconds where it is refused or bounded."""

from __future__ import annotations

import itertools
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.faults.streams import descendants
from tests.security.attacker import Attack, Attacker
from tests.support.cluster import MODEL, Cluster
from tests.support.hostile_grammars import CONJUNCTIONS, ambiguous


def lark_chain(length: int) -> str:
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(length))
    return f'start: r0\n{rules}r{length}: "a"\n'


def gbnf_chain(length: int) -> str:
    rules = "".join(f"r{i} ::= r{i + 1}\n" for i in range(length))
    return f'root ::= r0\n{rules}r{length} ::= "a"\n'


def ref_chain(length: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    definitions[f"d{length}"] = {"type": "integer"}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def nested_choices(depth: int) -> str:
    return '{"anyOf":[' * depth + '{"type":"integer"}' + ',{"type":"null"}]}' * depth


def critical_chains(attacker: Attacker) -> None:
    """Chains that the reader's check survived and the worker's compile thread did not."""
    attacker.with_grammars(lark_chain(length) for length in (700, 2673, 2674, 2675, 2676, 2677))
    attacker.with_schemas(ref_chain(length) for length in (700, 1037, 1038, 1039, 1040))


def longer_chains(attacker: Attacker) -> None:
    """Chains that ended the readers themselves."""
    attacker.with_grammars(lark_chain(length) for length in (4000, 6000, 8000))
    attacker.with_schemas([ref_chain(3000), nested_choices(400), nested_choices(900)])
    attacker.send_all(
        "/v1/completions",
        [attacker.complete(structured_outputs={"regex": "(" * 20_000 + "a" + ")" * 20_000})],
    )


def slow_conversions(attacker: Attacker) -> None:
    """Texts whose conversion to Lark took minutes."""
    breaks = "\n" * 30_000
    attacker.with_grammars([f'root ::= "a"{breaks}{number}' for number in range(4)] + [gbnf_chain(4000)] * 2)
    attacker.send_all(
        "/v1/completions", [attacker.complete(structured_outputs={"choice": ["\n" * 60_000, str(i)]}) for i in range(4)]
    )


def ambiguous_grammars(attacker: Attacker) -> None:
    """Grammars for which one mask took seconds, in the step of all."""
    attacker.with_grammars(f'start: {"a? " * number}\na: "a"\n' for number in (5000, 10_000, 20_000, 40_000))


def ambiguous_sequences(attacker: Attacker) -> None:
    """Many sequences of grammars within all limits, each of whose masks takes milliseconds in the step of all."""
    bodies = [
        attacker.complete(structured_outputs={"grammar": ambiguous(number)}, n=60, max_tokens=30, ignore_eos=True)
        for number in (500, 600, 650)
    ]
    attacker.send_all("/v1/completions", bodies)


def prompt_logprobs(attacker: Attacker) -> None:
    """Long prompts for each of whose tokens a row of logits is computed."""
    bodies = [
        attacker.complete(prompt=[5, number] * 950, prompt_logprobs=20, max_tokens=1, timeout=20) for number in range(8)
    ]
    attacker.send_all("/v1/completions", bodies)


def long_lists_of_tokens(attacker: Attacker) -> None:
    """The longest lists of tokens for as many sequences as a request may have."""
    ids = list(range(3, 2000))
    lists: list[dict[str, Any]] = [
        {"allowed_token_ids": ids},
        {"logit_bias": {str(each): 1.0 for each in ids[:1024]}},
        {"stop_token_ids": ids[:1024], "min_tokens": 60},
        {"bad_words": [f"word {number} of many" for number in range(128)]},
    ]
    bodies = [attacker.complete(n=60, max_tokens=60, ignore_eos=True, **each) for each in lists]
    attacker.send_all("/v1/completions", bodies)


def heavy_formats(number: int) -> list[tuple[str, dict[str, Any]]]:
    """Returns (path, body) of requests whose grammars take minutes or gigabytes to check, one for each way to ask.

    number: makes them different from others, so that no result is kept.
    """
    conjunctions = [*CONJUNCTIONS.values()]
    patterns = [{"pattern": f"{pattern}|{number}"} for pattern in conjunctions[number % len(conjunctions)]]
    schema = {"type": "object", "properties": {"a": {"type": "string", "allOf": patterns}}, "required": ["a"]}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    function = {"name": "f", "parameters": schema}
    tools = [{"type": "function", "function": {**function, "name": f"f{i}"}} for i in range(64)]
    strict = [{"type": "function", "function": {**function, "strict": True}}]
    json_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    responses = {"model": MODEL, "input": "a", "max_output_tokens": 16}
    return [
        ("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 4, "structured_outputs": {"json": schema}}),
        ("/v1/chat/completions", chat | {"response_format": json_format}),
        ("/v1/chat/completions", chat | {"tools": strict}),
        ("/v1/chat/completions", chat | {"tools": tools, "tool_choice": "required"}),
        ("/v1/messages", chat | {"tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"}}),
        ("/v1/responses", responses | {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}),
    ]  # fmt: skip


def heavy_formats_that_stay(attacker: Attacker) -> None:
    """Each is answered by an error that says what to change, and none by one that asks to try again."""
    requests = [each for number in range(2) for each in heavy_formats(number)]
    with ThreadPoolExecutor(30) as threads:
        answers = list(threads.map(lambda request: attacker.send(*request, timeout_s=300), requests))
    for (path, _), answer in zip(requests, answers, strict=True):
        assert answer is not None and answer.status_code == 400, (path, answer and answer.text)
        assert "Send fewer" in answer.text, (path, answer.text)


def heavy_formats_that_hang_up(attacker: Attacker) -> None:
    """Requests whose client is gone after a while, again and again."""
    requests = [each for number in range(5) for each in heavy_formats(number)]
    waits_s = itertools.cycle([0.7, 0.02, 0.2, 2.5])
    with ThreadPoolExecutor(30) as threads:
        list(threads.map(lambda request, wait_s: attacker.send(*request, timeout_s=wait_s), requests, waits_s))


def heavy_tools_that_nobody_asked_for(attacker: Attacker) -> None:
    """Tools that help, and are no condition: the answer comes without a grammar for their arguments."""
    for number in range(3):
        patterns = [{"pattern": f"{pattern}|{number}"} for pattern in CONJUNCTIONS["contains, few"]]
        function = {"name": "f", "parameters": {"properties": {"a": {"type": "string", "allOf": patterns}}}}
        body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        body["tools"] = [{"type": "function", "function": function}]
        answer = attacker.send("/v1/chat/completions", body, timeout_s=120)
        assert answer is not None and answer.status_code == 200, answer and answer.text


def stored_ballast(attacker: Attacker) -> None:
    """A stored response of 15 MB that the server decoded anew for each page of its items."""
    lists = b",".join([b"[]"] * 4_900_000)
    item = b'{"role":"user","content":[{"type":"input_text","text":"hi","annotations":[%s]}]}' % lists
    body = b'{"model":"%s","max_output_tokens":2,"input":[%s]}' % (MODEL.encode(), item)
    answer = attacker.send("/v1/responses", body)
    if answer is None or answer.status_code != 200:
        return
    path = f"/v1/responses/{answer.json()['id']}/input_items?limit=1"
    attacker.send_all(path, [None] * 10, at_once=10)


def unread_answers(attacker: Attacker) -> None:
    """Large answers that nobody reads, on 100 connections: 1.5 GB, of which one client may have 1 GiB in memory."""
    tool = {"type": "function", "name": "f", "description": "x" * 15_000_000, "parameters": {}}
    body = {"model": MODEL, "max_output_tokens": 2, "input": "hi", "tools": [tool], "tool_choice": "none"}
    answer = attacker.send("/v1/responses", body)
    if answer is None or answer.status_code != 200:
        return
    path = f"/v1/responses/{answer.json()['id']}"
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {attacker.key}\r\n\r\n"
    with ExitStack() as connections:
        for _ in range(100):
            connection = socket.socket()
            connections.enter_context(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", attacker.cluster.port))
            connection.sendall(request.encode())
        time.sleep(3)


def many_blocks(attacker: Attacker) -> None:
    """Messages of 40,000 parts, in each API that has parts."""
    parts = [{"type": "text", "text": "a"}] * 40_000
    message = {"role": "user", "content": parts}
    tool_calls = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 10_000
    attacker.send("/v1/chat/completions", {"model": MODEL, "max_tokens": 1, "messages": [message]})
    attacker.send("/v1/messages", {"model": MODEL, "max_tokens": 1, "messages": [message]})
    inputs = [{"type": "input_text", "text": "a"}] * 40_000
    for items in ([{"role": "user", "content": inputs}], tool_calls, [{"role": "user", "content": "a"}] * 40_000):
        attacker.send("/v1/responses", {"model": MODEL, "max_output_tokens": 1, "input": items})


def wide_beams(attacker: Attacker) -> None:
    """Beam searches of the largest width behind a long prompt."""
    prompt = [5] * 1900
    body = attacker.complete(prompt=prompt, n=128, use_beam_search=True, max_tokens=100, logprobs=20, timeout=6)
    attacker.send_all("/v1/completions", [body] * 2)


def large_timelines(attacker: Attacker) -> None:
    """A stream of 1,024 sequences that asks for its timeline with each event."""
    body = attacker.complete(prompt=[f"{i}" for i in range(8)], n=128, max_tokens=3, stream=True, ignore_eos=True)
    attacker.send("/v1/completions", body, more={"x-tandem-timeline": "1"})


def large_records(attacker: Attacker) -> None:
    """Requests with the largest settings for as many sequences as a client may have, all recorded, whose records are
    fetched many times and by names that lead nowhere."""
    asks = {"x-tandem-record": "1"}
    settings = {
        "allowed_token_ids": list(range(5, 2000)),
        "logit_bias": {str(number): 1.0 for number in range(1000)},
        "bad_words": ["ab" * 100] * 100,
        "structured_outputs": {"grammar": "start: /[ab ]+/\n" + "// " + "x" * 100_000},
    }
    bodies = [
        attacker.complete(prompt=["a" * 1000] * 8, n=128, max_tokens=3, ignore_eos=True),
        attacker.complete(prompt=[5] * 1000, n=128, max_tokens=8, **settings),
        attacker.complete(prompt=["a"] * 512, n=1, max_tokens=4, allowed_token_ids=list(range(5, 2000))),
    ]

    def record(body: dict[str, Any]) -> None:
        if (answer := attacker.send("/v1/completions", body, more=asks)) is not None and answer.status_code == 200:
            where = answer.headers["x-tandem-record"]
            for path in (where, f"{where}x", f"{where}/../../..%2f" * 40):
                attacker.send(path)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(record, bodies * 4))


def sooner_priorities(attacker: Attacker) -> None:
    """Prompts of the soonest priority, which nobody else's may wait for."""
    bodies = [attacker.complete(prompt=[5, number] * 500, max_tokens=2, priority=-100) for number in range(40)]
    attacker.send_all("/v1/completions", bodies, at_once=40)


def idle_scrapers(attacker: Attacker) -> None:
    """Connections to the metrics of each worker that never end their request, while the operator scrapes them."""
    groups = httpx.get(f"{attacker.cluster.admin_url}/sd").json()
    addresses = [group["targets"][0] for group in groups if "worker" in group["labels"]]
    num_before = num_threads(attacker.cluster)
    with ExitStack() as connections:
        for address in addresses:
            host, _, port = address.rpartition(":")
            for _ in range(100):
                connection = connections.enter_context(socket.create_connection((host, int(port))))
                connection.sendall(b"GET /metrics HTTP/1.1\r\n")
        with ThreadPoolExecutor(8) as threads:
            for _ in range(5):
                answers = list(threads.map(lambda address: httpx.get(f"http://{address}/metrics"), addresses))
                assert addresses and all(answer.status_code == 200 for answer in answers)
        assert num_threads(attacker.cluster) - num_before < 20 * len(addresses)


def idle_connections(attacker: Attacker) -> None:
    """More connections without a request than one address may have, while the operator's probes are asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 14), hard))
    try:
        with ExitStack() as connections:
            for number in range(4_500):
                connection = connections.enter_context(socket.socket())
                connection.bind(("127.0.0.2", 0))
                connection.connect(("127.0.0.1", attacker.cluster.port))
                if number % 3 == 0:
                    with suppress(OSError):  # refused
                        connection.sendall(b"GET /live HTTP/1.1\r\nHost:")
                if number % 500 == 0:
                    for path in ("/live", "/health"):
                        assert httpx.get(attacker.cluster.admin_url + path, timeout=5).status_code == 200
            time.sleep(2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def num_threads(cluster: Cluster) -> int:
    return sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in descendants(cluster.launcher_pid))


ATTACKS = [
    Attack(critical_chains),
    Attack(longer_chains),
    Attack(heavy_formats_that_stay, max_grown_bytes=800 << 20),
    Attack(heavy_formats_that_hang_up, max_grown_bytes=800 << 20),
    Attack(heavy_tools_that_nobody_asked_for, max_grown_bytes=800 << 20),
    Attack(stored_ballast),
    Attack(slow_conversions),
    Attack(ambiguous_grammars, max_grown_bytes=1 << 30),  # in processes of their own
    Attack(ambiguous_sequences, max_grown_bytes=1 << 30),
    Attack(prompt_logprobs),
    Attack(long_lists_of_tokens),
    Attack(unread_answers, max_grown_bytes=1664 << 20),
    Attack(many_blocks),
    Attack(wide_beams),
    Attack(large_timelines),
    Attack(large_records, max_grown_bytes=512 << 20),  # of eight at once, and of the processes of their grammar
    Attack(sooner_priorities),
    Attack(idle_scrapers),
    Attack(idle_connections),
]
