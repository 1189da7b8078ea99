"""What one client does to harm the others: each attack takes a few seconds where it is refused or bounded."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.cluster import MODEL, Cluster

TIMEOUT_S = 30.0
"""Of each request of an attack. One that waits longer has failed to be bounded."""


@dataclass(frozen=True)
class Attacker:
    """One client of the cluster. folder: on the server's host, for what an operator's call may name."""

    cluster: Cluster
    key: str
    folder: Path

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}", "content-type": "application/json"}

    def send(self, path: str, body: bytes | dict[str, Any] | None = None, **headers: str) -> httpx.Response | None:
        """Returns the answer, or None if there is none: the attack goes on all the same."""
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        try:
            method = "GET" if content is None else "POST"
            return httpx.request(
                method, self.cluster.url + path, content=content, headers=self.headers | headers, timeout=TIMEOUT_S
            )
        except httpx.HTTPError:
            return None

    def send_all(self, path: str, bodies: Iterable[bytes | dict[str, Any] | None], at_once: int = 8) -> None:
        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(lambda body: self.send(path, body), bodies))

    def complete(self, **fields: Any) -> dict[str, Any]:
        return {"model": MODEL, "prompt": "a", "max_tokens": 4, "timeout": 10, **fields}

    def with_grammars(self, grammars: Iterable[str], at_once: int = 4) -> None:
        bodies = (self.complete(structured_outputs={"grammar": grammar}) for grammar in grammars)
        self.send_all("/v1/completions", bodies, at_once)

    def with_schemas(self, schemas: Iterable[dict[str, Any] | str], at_once: int = 4) -> None:
        bodies = (self.complete(structured_outputs={"json": schema}) for schema in schemas)
        self.send_all("/v1/completions", bodies, at_once)


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
    attacker.with_grammars(f'start: {"a? " * (40_000 + number)}\na: "a"\n' for number in range(4))


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


def line_breaks(attacker: Attacker) -> None:
    """Batches whose input is 60 MiB of line breaks."""
    upload = {"file": ("lines.jsonl", b"\n" * (60 << 20)), "purpose": (None, "batch")}
    headers = {"authorization": f"Bearer {attacker.key}"}
    stored = httpx.post(f"{attacker.cluster.url}/v1/files", files=upload, headers=headers, timeout=TIMEOUT_S)
    if stored.status_code != 200:
        return
    batch = {
        "input_file_id": stored.json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    attacker.send_all("/v1/batches", [batch] * 8)
    time.sleep(3)


def large_timelines(attacker: Attacker) -> None:
    """A stream of 1,024 sequences that asks for its timeline with each event."""
    body = attacker.complete(prompt=[f"{i}" for i in range(8)], n=128, max_tokens=3, stream=True, ignore_eos=True)
    attacker.send("/v1/completions", body, **{"x-tandem-timeline": "1"})


def blocking_adapters(attacker: Attacker) -> None:
    """Adapters whose files are no regular files, loaded by 40 calls at once."""
    bodies = []
    for number, kind in enumerate(("fifo", "endless")):
        folder = attacker.folder / kind
        folder.mkdir()
        config = folder / "adapter_config.json"
        if kind == "fifo":
            os.mkfifo(config)
        else:
            config.symlink_to("/dev/zero")
        (folder / "adapter_model.safetensors").write_bytes(b"")
        bodies += [
            {"lora_name": f"a{number}-{i}", "lora_path": str(folder)} for i in range(40 if kind == "fifo" else 2)
        ]

    def load(body: dict[str, str]) -> None:
        with suppress(httpx.HTTPError):
            httpx.post(f"{attacker.cluster.admin_url}/v1/load_lora_adapter", json=body, timeout=4)

    with ThreadPoolExecutor(40) as threads:
        list(threads.map(load, bodies))


@dataclass(frozen=True)
class Attack:
    """max_gap_s, max_grown_bytes: bounds for the stream of the second tenant and for the memory of all processes."""

    run: Callable[[Attacker], None]
    max_gap_s: float = 2.0
    max_grown_bytes: int = 400 << 20

    @property
    def name(self) -> str:
        return self.run.__name__


ATTACKS = [
    Attack(critical_chains),
    Attack(longer_chains),
    Attack(stored_ballast),
    Attack(slow_conversions),
    Attack(ambiguous_grammars, max_grown_bytes=1 << 30),  # in processes of their own
    Attack(unread_answers, max_grown_bytes=1536 << 20),
    Attack(many_blocks),
    Attack(wide_beams),
    Attack(line_breaks),
    Attack(large_timelines),
    Attack(blocking_adapters),
]
