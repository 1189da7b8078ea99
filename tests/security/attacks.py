"""What one client sends to harm the others, as a table: each attack takes a few seconds where it is refused or bounded.

A row has the kind of server that is attacked, what is sent, what its answers must be, and what it may cost a second
tenant. `tests/security/test_attacks.py` runs them; `python -m tests.security.attacks [CHECKOUT] [NAME...]` prints how
the tenant is served beside those of some names, or all, by the server of this or of another version's folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from socket import create_connection
from typing import Any

import httpx
import msgspec

from tandem.proxy.dispatch.sequence import MAX_DEATHS
from tandem.proxy.parsers.tool_parser import MAX_HEAD_CHARACTERS
from tests.faults.phases import Phases
from tests.faults.streams import Stream
from tests.security.hostile_client import Answer, Behaviour, HostileClient, Sent
from tests.security.second_tenant import BATCH, GAP, LARGE, STREAM, Plan, SecondTenant, Verdict
from tests.support.cluster import MODEL, Cluster
from tests.support.hostile_grammars import CONJUNCTIONS, ambiguous
from tests.support.media_proxy import data_url, image_part, media_proxy, video_part
from tests.support.processes import descendants, private_bytes
from tests.support.vision_model import clip, encoded, picture, save_model

KEY, TENANTS_KEY = "key-of-the-attacker", "key-of-the-tenant"
ADDRESS = "127.0.0.2"
"""Of the attacker, which is one client."""
READ_S = 30.0
"""For each request of an attack. One that waits longer has failed to be bounded."""
MAX_PROBE_S = 5.0
"""For answers to the probes of an operator."""
MIB = 1 << 20

# ---- what is attacked


@dataclass(frozen=True)
class Server:
    """folder: of its files, on the attacked host. pid: process whose memory is measured, with its descendants; or 0."""

    url: str
    admin_url: str
    port: int
    folder: Path
    pid: int = 0
    cluster: Cluster | None = None
    check: Callable[[], None] = lambda: None
    """Asserts after each attack that nothing is left of it."""


@dataclass(frozen=True)
class Kind:
    """start: runs such a server, with files in a folder. tenant: fields of the tenant's `Plan`. max_latency_s: of all
    that it does, as a share of the readers on a machine that does other work; max_gap_s: between events of its stream,
    about eight times what two cores need that do nothing else."""

    name: str
    start: Callable[..., AbstractContextManager[Server]]
    tenant: dict[str, Any] = field(hash=False)
    max_latency_s: float = 10.0
    max_gap_s: float = 4.0
    max_grown_bytes: int = 400 * MIB
    probes: tuple[str, ...] = ("/live", "/health")


@contextmanager
def a_cluster(
    folder: Path, *flags: str, model: Callable[[Path], Path] | None = None, has_keys: bool = True, **options: Any
) -> Iterator[Server]:
    """model: makes the served model in a folder. options: of `Cluster`."""
    keys = folder / "keys"
    keys.write_text(f"{KEY} attacker\n{TENANTS_KEY} tenant\n")
    more = ["--api-keys-file", str(keys), "--kv-cache-gib", "0.25"] if has_keys else []
    if model is not None:
        more += ["--model", str(model(folder)), "--served-model-name", MODEL]
    with Cluster(*more, *flags, **options) as cluster:

        def check() -> None:
            cluster.wait_for(cluster.is_healthy)
            cluster.wait_for(cluster.all_blocks_free)

        pid = cluster.launcher_pid if has_keys else 0
        yield Server(cluster.url, cluster.admin_url, cluster.port, folder, pid, cluster, check)


@contextmanager
def a_media_process(folder: Path, **_options: Any) -> Iterator[Server]:
    """A proxy with fake workers: only the process that makes tensors of media has work. Clients have no keys."""
    with media_proxy(folder) as served:
        assert served.chat(small_picture(0)).status_code == 200, "the media process is loaded"
        pid = served.media_process()
        before = private_bytes(pid)

        def check() -> None:
            assert served.media_process() == pid and private_bytes(pid) - before < 256 * MIB

        yield Server(served.url, served.proxy.admin_url, served.proxy.port, folder, check=check)


MARKERS_PER_TOKEN = 16
"""More than in real vocabularies, so that a long text takes few steps."""


def marker_model(marker: str, folder: Path) -> Path:
    """Makes a model with a token of many markers of calls, so that one `logit_bias` fills an answer with them."""
    from transformers import AutoModelForCausalLM

    from tests.support.fake_workers import make_tokenizer
    from tests.support.tiny_models import make_tiny_config

    model, token = folder / "model", marker * MARKERS_PER_TOKEN
    model.mkdir()
    tokenizer = make_tokenizer(model)
    tokenizer.add_tokens([token])
    tokenizer.save(str(model / "tokenizer.json"))
    config = make_tiny_config("llama")
    config.num_hidden_layers = 1
    config.max_position_embeddings = 2048
    config.eos_token_id = tokenizer.token_to_id("</s>")
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    (folder / "token_id").write_text(str(tokenizer.token_to_id(token)))
    return model


def kind_with_markers(parser: str, marker: str) -> Kind:
    make = partial(marker_model, marker)
    start = lambda folder, **options: a_cluster(folder, "--tool-call-parser", parser, model=make, **options)  # noqa: E731
    return Kind(f"{parser} markers", start, {"large_prompt_bytes": 20_000})


TEXT = Kind(
    "text",
    lambda folder, **options: a_cluster(
        folder, "--data-dir", f"{folder}/data", "--max-waiting-requests", "4096", "--max-body-mib", "64", **options
    ),
    {"does": (STREAM, LARGE, BATCH), "gets": ("/live", "/v1/files", "/v1/batches")},
)
PICTURES = Kind(
    "pictures",
    lambda folder, **options: a_cluster(
        folder, "--media-cache-mib", "8", "--max-waiting-requests", "4096", model=lambda at: save_model(at / "model"),
        **options,
    ),
    {"does": (STREAM, LARGE, "same picture"), "stream_tokens": 300, "large_prompt_bytes": 20_000},
    max_latency_s=30.0,  # the tenant's pictures take turns with the attacker's prompts, which are long
    max_gap_s=8.0,
    max_grown_bytes=1024 * MIB,  # the media process decodes
)  # fmt: skip
MEDIA = Kind("media process", a_media_process, {"key": "", "does": ("picture",), "gets": (), "model": "echo"}, 15.0)
OPENAI_MARKERS, HERMES_MARKERS = kind_with_markers("openai", "<|start|>"), kind_with_markers("hermes", "<tool_call>")
TWO_PREFILLS = Kind(
    "two prefill workers",
    lambda folder, **options: a_cluster(
        folder, "--prefill", "2", "--decode", "1", "--max-num-batched-tokens", "16", "--worker-wait-s", "120",
        has_keys=False, **options,
    ),
    {"key": "", "large_prompt_bytes": 20_000},
    max_latency_s=50.0,  # prompts wait while a suspect is tried alone and when a worker starts again
    max_gap_s=5.0,
    probes=("/live",),  # it is not ready while no worker is left that computes prompts
)  # fmt: skip


# ---- the attacker


@dataclass(frozen=True)
class Attacker:
    """One client. folder: on the server's host, for what an operator's call may name. statuses: of its answers so far,
    0 for those that it has not read."""

    server: Server
    folder: Path
    statuses: Counter[int] = field(default_factory=Counter)

    def send(
        self,
        requests: Iterable[Sent],
        *behaviours: Behaviour | float,
        at_once: int = 8,
        read_s: float = READ_S,
        kept_bytes: int = 4096,
    ) -> list[Answer]:
        """behaviours: of the first requests, and again. Without any it reads."""
        client = HostileClient(self.server.port, KEY, read_s, kept_bytes, (ADDRESS,), has_small_buffers=False)
        answers = asyncio.run(client.send_all(requests, behaviours or ("reads",), at_once))
        self.statuses.update(answer.status for answer in answers)
        return answers

    def made(self, path: str, body: bytes | dict[str, Any], **headers: str) -> str | None:
        """Returns the id of what a request makes, or None if it is refused."""
        [answer] = self.send([Sent(path, body, {name.replace("_", "-"): each for name, each in headers.items()})],
                             kept_bytes=64 * MIB)  # fmt: skip
        return str(answer.json()["id"]) if answer.status == 200 else None

    def uploaded(self, content: bytes) -> str | None:
        purpose = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        return self.made("/v1/files", purpose + FILE_PART + content + b"\r\n--x--\r\n", Content_Type=FORM)


FORM = "multipart/form-data; boundary=x"
FILE_PART = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'


def refused(answers: list[Answer], *words: str) -> list[Answer]:
    """Asserts that each is answered by an error that says what to change, and none by one that asks to try again."""
    for answer in answers:
        assert answer.status == 400 and all(word in answer.text for word in words), answer
    return answers


def completion(**fields: Any) -> Sent:
    return Sent("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 4, "timeout": 10, **fields})


def structured(**fields: Any) -> Sent:
    return completion(structured_outputs=fields)


def chat(*parts: dict[str, Any] | str, **fields: Any) -> Sent:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    messages = [{"role": "user", "content": content}]
    return Sent("/v1/chat/completions", {"messages": messages, "max_tokens": 1, "timeout": 20, **fields})


# ---- grammars and schemas


def lark_chain(length: int) -> Sent:
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(length))
    return structured(grammar=f'start: r0\n{rules}r{length}: "a"\n')


def gbnf_chain(length: int) -> Sent:
    rules = "".join(f"r{i} ::= r{i + 1}\n" for i in range(length))
    return structured(grammar=f'root ::= r0\n{rules}r{length} ::= "a"\n')


def ref_chain(length: int) -> Sent:
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    definitions[f"d{length}"] = {"type": "integer"}
    return structured(json={"$ref": "#/$defs/d0", "$defs": definitions})


def nested_choices(depth: int) -> Sent:
    return structured(json='{"anyOf":[' * depth + '{"type":"integer"}' + ',{"type":"null"}]}' * depth)


def heavy_schema(number: int, kind: str = "") -> dict[str, Any]:
    """Returns a schema that takes minutes or gigabytes to check. number: makes it different, so that no result is
    kept. kind: of CONJUNCTIONS; by default one after the other."""
    conjunctions = CONJUNCTIONS[kind or [*CONJUNCTIONS][number % len(CONJUNCTIONS)]]
    patterns = [{"pattern": f"{pattern}|{number}"} for pattern in conjunctions]
    return {"type": "object", "properties": {"a": {"type": "string", "allOf": patterns}}, "required": ["a"]}


def heavy_formats(number: int) -> list[Sent]:
    """Returns a request with such a schema for each way to ask for it."""
    schema = heavy_schema(number)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    function = {"name": "f", "parameters": schema}
    tools = [{"type": "function", "function": {**function, "name": f"f{i}"}} for i in range(64)]
    strict = [{"type": "function", "function": {**function, "strict": True}}]
    named = {"name": "a", "schema": schema}
    text = {"format": {"type": "json_schema", **named}}
    return [
        Sent("/v1/completions", {"model": MODEL, "prompt": "a", "structured_outputs": {"json": schema}}),
        Sent("/v1/chat/completions", asked | {"response_format": {"type": "json_schema", "json_schema": named}}),
        Sent("/v1/chat/completions", asked | {"tools": strict}),
        Sent("/v1/chat/completions", asked | {"tools": tools, "tool_choice": "required"}),
        Sent(
            "/v1/messages", asked | {"tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"}}
        ),
        Sent("/v1/responses", {"model": MODEL, "input": "a", "max_output_tokens": 16, "text": text}),
    ]


def heavy_tools(number: int) -> Sent:
    """Tools that help, and are no condition: the answer comes without a grammar for their arguments."""
    function = {"name": "f", "parameters": heavy_schema(number, "contains, few")}
    return chat("a", model=MODEL, max_tokens=4, tools=[{"type": "function", "function": function}], timeout=120)


def heavy_tools_that_nobody_asked_for(attacker: Attacker) -> None:
    answers = attacker.send(map(heavy_tools, range(3)), at_once=1, read_s=120)
    assert [answer.status for answer in answers] == [200] * 3, answers


# ---- answers and records


def stored_ballast(attacker: Attacker) -> None:
    """A stored response of 15 MB that the server decoded anew for each page of its items."""
    lists = b",".join([b"[]"] * 4_900_000)
    item = b'{"role":"user","content":[{"type":"input_text","text":"hi","annotations":[%s]}]}' % lists
    made = attacker.made("/v1/responses", b'{"model":"%s","max_output_tokens":2,"input":[%s]}' % (MODEL.encode(), item))
    if made is not None:
        attacker.send([Sent(f"/v1/responses/{made}/input_items?limit=1")] * 10, at_once=10)


def unread_answers(attacker: Attacker) -> None:
    """Large answers that nobody reads, on 100 connections: 1.5 GB, of which one client may have 1 GiB in memory."""
    tool = {"type": "function", "name": "f", "description": "x" * 15_000_000, "parameters": {}}
    body = {"model": MODEL, "max_output_tokens": 2, "input": "hi", "tools": [tool], "tool_choice": "none"}
    if (made := attacker.made("/v1/responses", body)) is not None:
        attacker.send([Sent(f"/v1/responses/{made}")] * 100, "never reads", at_once=100)


def many_blocks() -> list[Sent]:
    """Messages of 40,000 parts, in each API that has parts."""
    message = {"role": "user", "content": [{"type": "text", "text": "a"}] * 40_000}
    inputs = [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 40_000}]
    calls = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 10_000
    return [
        *(Sent(path, {"model": MODEL, "max_tokens": 1, "messages": [message]})
          for path in ("/v1/chat/completions", "/v1/messages")),
        *(Sent("/v1/responses", {"model": MODEL, "max_output_tokens": 1, "input": items})
          for items in (inputs, calls, [{"role": "user", "content": "a"}] * 40_000)),
    ]  # fmt: skip


def large_records(attacker: Attacker) -> None:
    """Requests with the largest settings for as many sequences as a client may have, all recorded, whose records are
    fetched many times and by names that lead nowhere."""
    ids = list(range(5, 2000))
    settings = {
        "allowed_token_ids": ids,
        "logit_bias": {str(number): 1.0 for number in range(1000)},
        "bad_words": ["ab" * 100] * 100,
        "structured_outputs": {"grammar": "start: /[ab ]+/\n" + "// " + "x" * 100_000},
    }
    asked = [
        completion(prompt=["a" * 1000] * 8, n=128, max_tokens=3, ignore_eos=True),
        completion(prompt=[5] * 1000, n=128, max_tokens=8, **settings),
        completion(prompt=["a"] * 512, n=1, allowed_token_ids=ids),
    ]
    made = attacker.send([each._replace(headers={"x-tandem-record": "1"}) for each in asked * 4])
    found = [answer.headers["x-tandem-record"] for answer in made if answer.status == 200]
    attacker.send(Sent(path) for at in found for path in (at, f"{at}x", f"{at}/../../..%2f" * 40))


def full_of_markers(attacker: Attacker, marker: str) -> None:
    """Its 8,000 markers in each choice took a second of the event loop when the work was quadratic."""
    num_choices, num_tokens = 8, 500
    token_id = (attacker.server.folder / "token_id").read_text()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    fields = {"model": MODEL, "tools": tools, "logit_bias": {token_id: 100}, "ignore_eos": True, "timeout": 60}
    asked = [chat("hi", n=num_choices, max_tokens=num_tokens, stream=stream, **fields) for stream in (False, True)]
    for answer in attacker.send(asked, at_once=1, kept_bytes=16 * MIB):
        # What has begun as a call, up to the length of a head, is no content where a limit cuts it.
        num_cut = num_choices * num_tokens * MARKERS_PER_TOKEN - answer.text.count(marker)
        assert 0 <= num_cut <= num_choices * (1 + MAX_HEAD_CHARACTERS / len(marker)), answer.status


# ---- files


def batch_of(file_id: str) -> Sent:
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    return Sent("/v1/batches", body)


def line_breaks(attacker: Attacker) -> None:
    """Batches whose input is 60 MiB of line breaks."""
    if (file_id := attacker.uploaded(b"\n" * (60 * MIB))) is not None:
        attacker.send([batch_of(file_id)] * 8)
        time.sleep(3)


def late_lines(attacker: Attacker) -> None:
    """Batches of lines that are never in time, so that each is tried again after a wait."""
    line = {"method": "POST", "url": "/v1/completions", "body": completion(prompt=[5] * 1900, timeout=0.001).body}
    lines = "\n".join(json.dumps({"custom_id": str(number), **line}) for number in range(60))
    if (file_id := attacker.uploaded(lines.encode())) is not None:
        made = attacker.send([batch_of(file_id)] * 3)
        time.sleep(8)
        attacker.send(Sent(f"/v1/batches/{each.json()['id']}/cancel", b"{}") for each in made if each.status == 200)


def open_files(attacker: Attacker) -> None:
    """Downloads that nobody reads, and bodies that stop halfway: each has a file open beside its connection."""
    download = Sent(f"/v1/files/{attacker.uploaded(b'x' * (4 * MIB))}/content")
    body = Sent("/v1/chat/completions", b" " * 80_000, length=900_000)
    attacker.send([download, body] * 300, "never reads", "sends slowly", at_once=600)


def blocking_adapters(attacker: Attacker) -> None:
    """Adapters whose files are no regular files, loaded by 40 calls at once."""
    bodies = []
    for kind, number in (("fifo", 40), ("endless", 2)):
        folder = attacker.folder / kind
        folder.mkdir()
        config = folder / "adapter_config.json"
        if kind == "fifo":
            os.mkfifo(config)
        else:
            config.symlink_to("/dev/zero")
        (folder / "adapter_model.safetensors").write_bytes(b"")
        bodies += [{"lora_name": f"{kind}-{i}", "lora_path": str(folder)} for i in range(number)]

    def load(body: dict[str, str]) -> None:
        with suppress(httpx.HTTPError):
            httpx.post(f"{attacker.server.admin_url}/v1/load_lora_adapter", json=body, timeout=4)

    with ThreadPoolExecutor(40) as threads:
        list(threads.map(load, bodies))


# ---- connections


def idle_scrapers(attacker: Attacker) -> None:
    """Connections to the metrics of each worker that never end their request, while the operator scrapes them."""

    def num_threads() -> int:
        return sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in descendants(attacker.server.pid))

    groups = httpx.get(f"{attacker.server.admin_url}/sd").json()
    addresses = [group["targets"][0] for group in groups if "worker" in group["labels"]]
    num_before = num_threads()
    with ExitStack() as connections:
        for host, _, port in (address.rpartition(":") for address in addresses):
            for _ in range(100):
                connection = connections.enter_context(create_connection((host, int(port))))
                connection.sendall(b"GET /metrics HTTP/1.1\r\n")
        with ThreadPoolExecutor(8) as threads:
            for _ in range(5):
                answers = list(threads.map(lambda address: httpx.get(f"http://{address}/metrics"), addresses))
                assert addresses and all(answer.status_code == 200 for answer in answers)
        assert num_threads() - num_before < 20 * len(addresses)


def idle_connections(attacker: Attacker) -> None:
    """More connections without a request than one address may have. The tenant's probes are asked meanwhile."""
    with ExitStack() as connections:
        for number in range(4_500):
            connection = create_connection(("127.0.0.1", attacker.server.port), source_address=(ADDRESS, 0))
            connections.enter_context(connection)
            if number % 3 == 0:
                with suppress(OSError):  # refused
                    connection.sendall(b"GET /live HTTP/1.1\r\nHost:")
        time.sleep(2)


# ---- media


def small_picture(number: int, width: int = 140, height: int = 140) -> dict[str, Any]:
    return image_part(data_url(encoded(picture(width, height, seed=1000 + number), "JPEG"), "image/jpeg"))


def waiting_pictures() -> Iterator[Sent]:
    """Chats with a small picture each, before a prompt of its own that takes long."""
    for number in range(130):
        yield chat(small_picture(number), f"{number} " + "lorem ipsum dolor sit amet " * 60, model=MODEL)


def large_pictures() -> list[Sent]:
    """Pictures that take a seventh of the cache each, or all of it together in one request."""
    alone = [chat(small_picture(number, 350, 420), "what?", model=MODEL) for number in range(200, 260)]
    return alone + [chat(*(small_picture(300 + i, 350, 420) for i in range(8)), "what?", model=MODEL)] * 4


def answered_pictures(attacker: Attacker) -> None:
    """Streams that go on for long after their pictures were encoded; half of them hang up at different moments."""
    fields = {"model": MODEL, "max_tokens": 600, "ignore_eos": True, "n": 2}
    leave: list[Behaviour | float] = ["reads" if i % 2 else 0.1 * (i % 40) + 0.01 for i in range(80)]
    attacker.send((chat(small_picture(400 + i), "go on", **fields) for i in range(80)), *leave, at_once=80)


def pictures_with_heavy_schemas() -> list[Sent]:
    schemas = [{"name": "a", "schema": heavy_schema(number, "contains")} for number in range(8)]
    formats = [{"type": "json_schema", "json_schema": schema} for schema in schemas]
    return [chat(small_picture(i), response_format=each, timeout=120) for i, each in enumerate(formats)]


def slow_media(attacker: Attacker) -> None:
    """Videos and images that take long to decode, of which half the clients hang up."""
    parts = [video_part(data_url(clip(60, 1280, 720), "video/mp4")), image_part(data_url(encoded(picture(4000, 3000))))]
    asked = [chat(parts[number % 2], cache_salt=str(number), timeout=60) for number in range(8)]
    attacker.send(asked, *["reads", "reads", "reads", "reads", 0.5, 0.5, 0.5, 0.5], read_s=60)  # type: ignore[arg-type]


# ---- workers


def a_prompt_whose_workers_die(attacker: Attacker) -> None:
    """Kills each prefill worker that computes one prompt, which is refused soon. It takes a hundred steps."""
    assert attacker.server.cluster is not None
    cluster, phases = attacker.server.cluster, Phases(attacker.server.cluster)
    for attempt in range(6):  # a fast machine may compute the prompt before its worker is killed
        body = {"model": MODEL, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
        poison, killed, num_seen = Stream(cluster, body | {"prompt": [7, attempt] * 900}), set[int](), 0
        deadline = time.monotonic() + 240
        while not poison.has_ended and time.monotonic() < deadline:
            dispatched = [each for each in phases.events(poison) if each["event"] == "dispatched"]
            if len(dispatched) > num_seen and not poison.has_ended:
                num_seen = len(dispatched)
                pid = phases.pid(dispatched[-1]["prefill"])
                if pid not in killed:  # else it was dispatched once more before the launcher reported the exit
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            time.sleep(0.01)
        if poison.outcome != "length":
            break
    assert poison.outcome == "request_crashes_workers" and poison.token_ids == []
    # One more if the decode worker reports a death before the launcher, or another prompt is a suspect too.
    assert MAX_DEATHS <= len(killed) <= MAX_DEATHS + 1
    refused(attacker.send([Sent("/v1/completions", body | {"prompt": [7, attempt] * 900})]), "request_crashes_workers")


# ---- the table


@dataclass(frozen=True)
class Attack:
    """max_batch_s: for each of the tenant's batches, whose lines come after all other requests. max_grown_bytes: by how
    much all processes of the server may grow; 0 for the kind's."""

    name: str
    kind: Kind
    run: Callable[[Attacker], object]
    max_batch_s: float = 30.0
    max_grown_bytes: int = 0

    def check(self, verdict: Verdict) -> None:
        limits = {GAP: self.kind.max_gap_s, BATCH: self.max_batch_s}
        limits |= {name: MAX_PROBE_S for name in verdict.waits_s if name.startswith("http")}
        verdict.check(self.kind.max_latency_s, self.max_grown_bytes or self.kind.max_grown_bytes, **limits)


IDS = list(range(3, 2000))
MANY = {"n": 60, "max_tokens": 60, "ignore_eos": True}
TIMELINE = {"x-tandem-timeline": "1"}
ATTACKS = [
    # Chains that the reader's check survived and the worker's compile thread did not.
    Attack("critical_chains", TEXT, lambda attacker: attacker.send(
        [*map(lark_chain, (700, 2673, 2674, 2675, 2676, 2677)), *map(ref_chain, (700, 1037, 1038, 1039, 1040))],
        at_once=4)),
    # Chains that ended the readers themselves.
    Attack("longer_chains", TEXT, lambda attacker: attacker.send(
        [*map(lark_chain, (4000, 6000, 8000)), ref_chain(3000), nested_choices(400), nested_choices(900),
         structured(regex="(" * 20_000 + "a" + ")" * 20_000)], at_once=4)),
    Attack("heavy_formats_that_stay", TEXT, lambda attacker: refused(attacker.send(
        [*heavy_formats(0), *heavy_formats(1)], at_once=30, read_s=300), "Send fewer"), max_grown_bytes=800 * MIB),
    # Requests whose client is gone after a while, again and again.
    Attack("heavy_formats_that_hang_up", TEXT, lambda attacker: attacker.send(
        [each for number in range(5) for each in heavy_formats(number)], 0.7, 0.02, 0.2, 2.5, at_once=30),
        max_grown_bytes=800 * MIB),
    Attack("heavy_tools_that_nobody_asked_for", TEXT, heavy_tools_that_nobody_asked_for, max_grown_bytes=800 * MIB),
    Attack("stored_ballast", TEXT, stored_ballast),
    # Texts whose conversion to Lark took minutes.
    Attack("slow_conversions", TEXT, lambda attacker: attacker.send(
        [*(structured(grammar=f'root ::= "a"{chr(10) * 30_000}{i}') for i in range(4)), gbnf_chain(4000),
         gbnf_chain(4000), *(structured(choice=["\n" * 60_000, str(i)]) for i in range(4))], at_once=4)),
    # Grammars for which one mask took seconds, in the step of all. They are compiled in processes of their own.
    Attack("ambiguous_grammars", TEXT, lambda attacker: attacker.send(
        [structured(grammar=ambiguous(number) + "\n") for number in (5000, 10_000, 20_000, 40_000)], at_once=4),
        max_grown_bytes=1024 * MIB),
    # Many sequences of grammars within all limits, each of whose masks takes milliseconds in the step of all.
    Attack("ambiguous_sequences", TEXT, lambda attacker: attacker.send(
        [completion(structured_outputs={"grammar": ambiguous(number)}, n=60, max_tokens=30, ignore_eos=True)
         for number in (500, 600, 650)]), max_grown_bytes=1024 * MIB),
    # Long prompts for each of whose tokens a row of logits is computed.
    Attack("prompt_logprobs", TEXT, lambda attacker: attacker.send(
        [completion(prompt=[5, i] * 950, prompt_logprobs=20, max_tokens=1, timeout=20) for i in range(8)])),
    # The longest lists of tokens for as many sequences as a request may have.
    Attack("long_lists_of_tokens", TEXT, lambda attacker: attacker.send(
        [completion(**MANY, allowed_token_ids=IDS), completion(**MANY, logit_bias={str(i): 1.0 for i in IDS[:1024]}),
         completion(**MANY, stop_token_ids=IDS[:1024], min_tokens=60),
         completion(**MANY, bad_words=[f"word {number} of many" for number in range(128)])])),
    Attack("unread_answers", TEXT, unread_answers, max_grown_bytes=1664 * MIB),
    Attack("many_blocks", TEXT, lambda attacker: attacker.send(many_blocks(), at_once=1)),
    # Beam searches of the largest width behind a long prompt.
    Attack("wide_beams", TEXT, lambda attacker: attacker.send([completion(
        prompt=[5] * 1900, n=128, use_beam_search=True, max_tokens=100, logprobs=20, timeout=6)] * 2)),
    # A stream of 1,024 sequences that asks for its timeline with each event.
    Attack("large_timelines", TEXT, lambda attacker: attacker.send([completion(
        prompt=[f"{i}" for i in range(8)], n=128, max_tokens=3, stream=True, ignore_eos=True)._replace(
            headers=TIMELINE)])),
    # Workers keep the memory of steps of 256 sequences, about 200 MiB each, and the grammar's process 100: five times
    # this attack on one server grew it by 296, 150, 48, 23 and 25 MiB.
    Attack("large_records", TEXT, large_records, max_grown_bytes=768 * MIB),
    # Prompts of the soonest priority, which nobody else's may wait for.
    Attack("sooner_priorities", TEXT, lambda attacker: attacker.send(
        [completion(prompt=[5, i] * 500, max_tokens=2, priority=-100) for i in range(40)], at_once=40)),
    # As many sequences as may wait in all; with keys no priority is sooner than the default.
    Attack("places_of_the_soonest_priority", TEXT, lambda attacker: attacker.send(
        [completion(prompt=["a"] * 8, n=128, max_tokens=2, priority=-100) for _ in range(16)], at_once=16)),
    Attack("idle_scrapers", TEXT, idle_scrapers),
    Attack("idle_connections", TEXT, idle_connections),
    Attack("line_breaks", TEXT, line_breaks),
    Attack("late_lines", TEXT, late_lines, max_batch_s=5.0),
    # Uploads that hardly move, and then break off.
    Attack("slow_uploads", TEXT, lambda attacker: attacker.send(
        [Sent("/v1/files", FILE_PART + b"x" * 2000, {"Content-Type": FORM}, 100 * MIB)] * 20, "sends slowly",
        at_once=20)),
    Attack("open_files", TEXT, open_files),
    Attack("blocking_adapters", TEXT, blocking_adapters),
    Attack("waiting_pictures", PICTURES, lambda attacker: attacker.send(waiting_pictures(), at_once=130)),
    Attack("large_pictures", PICTURES, lambda attacker: attacker.send(large_pictures(), at_once=64)),
    Attack("answered_pictures", PICTURES, answered_pictures),
    Attack("pictures_with_heavy_schemas_that_stay", MEDIA, lambda attacker: refused(attacker.send(
        pictures_with_heavy_schemas(), read_s=120), "response_format", "Send fewer")),
    Attack("pictures_with_heavy_schemas_that_hang_up", MEDIA, lambda attacker: attacker.send(
        pictures_with_heavy_schemas(), 0.7)),
    Attack("slow_media", MEDIA, slow_media),
    Attack("full_of_openai_markers", OPENAI_MARKERS, partial(full_of_markers, marker="<|start|>")),
    Attack("full_of_hermes_markers", HERMES_MARKERS, partial(full_of_markers, marker="<tool_call>")),
    Attack("a_prompt_whose_workers_die", TWO_PREFILLS, a_prompt_whose_workers_die),
]  # fmt: skip
"""Those of one kind are neighbours, so that a test starts each server once."""


def run(attack: Attack, server: Server, folder: Path) -> Verdict:
    """Prints and returns how a second tenant is served beside the attack. folder: for the attacker's files."""
    attacker = Attacker(server, folder)
    plan = Plan(server.url, **{"key": TENANTS_KEY, **attack.kind.tenant})
    if server.cluster is not None:
        probes = (server.admin_url + path for path in attack.kind.probes)
        plan = msgspec.structs.replace(plan, gets=(*plan.gets, *probes))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with SecondTenant(plan, server.pid) as tenant:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 14), hard))
        try:
            attack.run(attacker)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(f"\n{attack.name}: answers {dict(attacker.statuses)}; {tenant.verdict}", flush=True)
    return tenant.verdict


def main(checkout: Path, names: list[str]) -> None:
    """checkout: a folder with the source and the `.venv` of the version whose server is attacked; "." is this one."""
    other = {"python": str(checkout / ".venv/bin/python"), "cwd": checkout} if checkout != Path.cwd() else {}
    for attack in (each for each in ATTACKS if not names or each.name in names):
        with tempfile.TemporaryDirectory() as name, attack.kind.start(Path(name), **other) as server:
            run(attack, server, Path(name))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve(), sys.argv[2:])
