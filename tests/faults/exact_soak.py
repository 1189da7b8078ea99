"""Soak test of exactness: every token and log-probability of answers under load and faults, bit for bit.

    python -m tests.faults.exact_soak [--minutes 10] [--seed N] [--models dense,vision] [--dtypes bfloat16] [--quick]

For each model and dtype, a cluster serves requests of all sizes with `--exact`: shared prefixes, a KV cache that
overflows into host memory and onto a disk, siblings, seeds, penalties, grammars and adapters. Meanwhile its workers are
killed, frozen, drained and given other roles. It records every request. Then `worker.lone_engine` computes each
recorded sequence alone, in this process. A record has no images, so answers about images are compared with those of a
cluster of one worker that gets one request at a time.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from bench.support.report import Aim, Report, finish, new_parser
from tandem.deploy.commands.replay import Token
from tandem.protocol.messages.dispatch import AdapterRef
from tandem.proxy.records.record import Record, RecordedSequence, as_float32, decode_record
from tandem.runtime.files.lora_files import read_adapter
from tandem.worker.lone_engine import LoneEngine
from tests.faults.exact_models import ADAPTER, MODELS, make_adapter_of, make_questions
from tests.faults.fault_injector import CLUSTER_OPTIONS, WORKERS, FaultInjector
from tests.support.cluster import MODEL, Cluster
from tests.support.exact_engine import exact_engine

DTYPES = ("bfloat16", "float32")
NUM_AT_ONCE = 10
CANCEL_SHARE = 0.1
MAX_DIFFERENCES = 20
OPTIONS = ("--device", "cpu", "--exact", "--block-size", "16", "--threads-per-worker", "1")
UNDER_LOAD = (
    *CLUSTER_OPTIONS, "--kv-cache-gib", "0.004", "--kv-host-gib", "0.02", "--max-num-batched-tokens", "96",
    "--record-gib", "4",
)  # fmt: skip
Question = tuple[str, dict[str, Any]]


class Found(msgspec.Struct):
    """What one model and dtype has shown."""

    num_records: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_migrated: int = 0
    """Sequences of which several decode workers, or processes of one, have computed tokens."""
    num_different: int = 0
    num_cached_tokens: int = 0
    num_preempted: int = 0
    num_faults: int = 0
    num_role_changes: int = 0
    failed: Counter[str] = msgspec.field(default_factory=Counter)
    differences: list[str] = []


async def _send(session: aiohttp.ClientSession, url: str, question: Question, name: str) -> str:
    """Sends a request and reads its answer. Returns why it failed, or "". Refusals are no failures."""
    path, body = question
    async with session.post(url + path, json=body, headers={"X-Request-Id": name}) as response:
        text = (await response.read()).decode()
        if response.status in (429, 503) and "retry-after" in response.headers:
            return ""
        if response.status != 200:
            return f"{response.status}: {text[:200]}"
        return "" if '"error"' not in text else text[text.index('"error"') :][:200]


class Load:
    """Clients that send the questions at random, of which some leave before their answer is complete."""

    def __init__(self, cluster: Cluster, questions: list[Question], rng: random.Random, found: Found) -> None:
        self._url, self._questions, self._rng, self._found = cluster.url, questions, rng, found
        self._num_sent = 0

    async def send_while(self, session: aiohttp.ClientSession, end: float) -> None:
        while time.monotonic() < end:
            number = self._rng.randrange(len(self._questions))
            self._num_sent += 1
            sending = asyncio.create_task(
                _send(session, self._url, self._questions[number], f"q{number}-{self._num_sent}")
            )
            leaves_after_s = self._rng.uniform(0, 2) if self._rng.random() < CANCEL_SHARE else None
            done, _ = await asyncio.wait([sending], timeout=leaves_after_s)
            if not done:
                sending.cancel()
                await asyncio.wait([sending])
            elif problem := sending.result():
                self._found.failed[problem] += 1


async def _run_load(cluster: Cluster, questions: list[Question], seconds: float, seed: int, found: Found) -> None:
    rng = random.Random(seed)
    injector = FaultInjector(cluster.port, 1, WORKERS, rng, print)
    load = Load(cluster, questions, rng, found)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        end = time.monotonic() + seconds

        async def inject() -> None:
            await asyncio.sleep(min(5.0, seconds / 4))  # with the roles of the start, without faults
            await injector.make_all_elastic()
            await asyncio.gather(
                injector.run_while(lambda: time.monotonic() < end - 5),
                injector.change_roles_while(lambda: time.monotonic() < end - 5),
            )

        await asyncio.gather(inject(), *(load.send_while(session, end) for _ in range(NUM_AT_ONCE)))
    await asyncio.to_thread(cluster.wait_for, cluster.all_blocks_free, 60)
    loads = [report.load for report in (await asyncio.to_thread(cluster.status)).workers]
    found.num_preempted = sum(each.num_preempted for each in loads)
    found.num_cached_tokens = sum(each.num_cached_tokens for each in loads)
    found.num_faults, found.num_role_changes = len(injector.injected), injector.num_role_changes


async def _ask_each(cluster: Cluster, questions: list[Question]) -> None:
    async with aiohttp.ClientSession() as session:
        for number, question in enumerate(questions):
            if problem := await _send(session, cluster.url, question, f"q{number}-0"):
                raise RuntimeError(problem)


def _records(folder: Path) -> dict[int, list[Record]]:
    """Returns the records of each question by its number."""
    found: dict[int, list[Record]] = {}
    for file in folder.glob("*/*.jsonl"):
        content = file.read_bytes()
        if content.count(b"\n") > 1:  # a request that ended before its first token has no sequences
            found.setdefault(int(file.stem[1:].partition("-")[0]), []).append(decode_record(content))
    return found


Reference = dict[int, list[Token]]
"""Tokens of a question's sequences, by the sequence's number."""


def _as_recorded(record: Record) -> Reference:
    return {number: _tokens(each) for number, each in enumerate(record.sequences)}


def _tokens(sequence: RecordedSequence) -> list[Token]:
    return list(map(Token, sequence.token_ids, sequence.logprobs))


def _computed_alone(engine: LoneEngine, records: list[Record], adapter: AdapterRef | None) -> Reference:
    """Computes a question's sequences as far as the longest of its records has them."""
    head = records[0].head
    reference: Reference = {}
    for number in range(max(len(record.sequences) for record in records)):
        having = [record.sequences[number] for record in records if len(record.sequences) > number]
        num_tokens = max(len(each.token_ids) for each in having)
        prompt = head.prompts[having[0].prompt]
        sampling = msgspec.structs.replace(head.sampling, seed=having[0].seed, logprobs=0, logprob_token_ids=())
        computed = engine.tokens(
            prompt.token_ids, sampling, prompt.stop, num_tokens, adapter if head.adapter is not None else None
        )
        reference[number] = [
            Token(token.token_id, as_float32(token.logprobs.logprob if token.logprobs is not None else None))
            for token in computed
        ]
    return reference


def _compare(records: Mapping[int, list[Record]], references: Mapping[int, Reference], found: Found) -> None:
    for question, of_question in records.items():
        for record in of_question:
            found.num_records += 1
            for number, sequence in enumerate(record.sequences):
                tokens, wanted = _tokens(sequence), references[question][number]
                found.num_sequences += 1
                found.num_tokens += len(tokens)
                found.num_migrated += len(sequence.computed_by) > 2  # the prompt's worker, and one that decodes
                different = [i for i, token in enumerate(tokens) if i >= len(wanted) or token != wanted[i]]
                found.num_different += len(different)
                if different and len(found.differences) < MAX_DIFFERENCES:
                    found.differences.append(_described(record, number, different[0], tokens, wanted))


def _described(record: Record, sequence: int, first: int, tokens: list[Token], wanted: list[Token]) -> str:
    alone = str(wanted[first]) if first < len(wanted) else "none"
    by = record.sequences[sequence].computed_by, [each.worker_id for each in record.head.workers]
    where = f"{record.head.request_id}, sequence {sequence}, token {first} of {len(tokens)}"
    return f"{where}: {tokens[first]}, alone {alone}; computed by {by}"


def run(name: str, dtype: str, seconds: float, seed: int, scratch: Path) -> Found:
    """Serves, records and compares. name: of MODELS."""
    found = Found()
    folder = MODELS[name](scratch / name)
    questions = make_questions(random.Random(seed), name, MODEL)
    options = ["--model", str(folder), "--served-model-name", MODEL, "--dtype", dtype, *OPTIONS]
    adapter = None
    if name == "dense":
        files = make_adapter_of(folder, scratch / f"adapter-{dtype}")
        adapter = AdapterRef(read_adapter(files).digest, str(files))
        options += ["--lora", f"{ADAPTER}={files}"]
    recorded = scratch / f"{name}-{dtype}"
    disk = ("--kv-disk-dir", str(scratch / f"{name}-{dtype}-disk"), "--kv-disk-gib", "0.1")
    tiers = disk if name != "vision" else ()
    with Cluster(*options, *UNDER_LOAD, *tiers, "--record", str(recorded)) as cluster:
        asyncio.run(_run_load(cluster, questions, seconds, seed, found))
    records = _records(recorded)
    if name == "vision":
        alone = scratch / f"{name}-{dtype}-alone"
        with Cluster(*options, "--workers", "1", "--max-num-seqs", "1", "--record", str(alone)) as cluster:
            asyncio.run(_ask_each(cluster, questions))
        references = {number: _as_recorded(each) for number, [each] in _records(alone).items()}
    else:
        engine = exact_engine(folder, dtype, block_size=16)
        try:
            references = {number: _computed_alone(engine, each, adapter) for number, each in records.items()}
        finally:
            engine.close()
    _compare(records, references, found)
    print(f"{name}, {dtype}: {msgspec.json.encode(found).decode()}", flush=True)
    return found


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    arguments = parser.parse_args()
    cases = list(product(arguments.models.split(","), arguments.dtypes.split(",")))
    seconds = 12.0 if arguments.quick else 60 * arguments.minutes / len(cases)
    with tempfile.TemporaryDirectory() as scratch:
        found = {f"{name}, {dtype}": run(name, dtype, seconds, arguments.seed, Path(scratch)) for name, dtype in cases}
    aims = [
        Aim.of("tokens that differ", sum(each.num_different for each in found.values()), 0, "lower"),
        Aim.of("failed requests", sum(each.failed.total() for each in found.values()), 0, "lower"),
        Aim.of("fewest sequences compared of a case", min(each.num_sequences for each in found.values()), 1, "higher"),
    ]
    finish(Report.of("exact_soak", msgspec.to_builtins(found), aims), arguments.json)


if __name__ == "__main__":
    main()
