"""A dispatcher whose workers are played by the test. Its tables must be empty at the end."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, cast

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tandem.protocol.messages.dispatch import (
    AbortAttempt,
    AttemptFailed,
    DecodeReserved,
    FirstToken,
    NewToken,
    StartPrefill,
    TokenBatch,
)
from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    PairChanges,
    PairStatus,
    RegisterWorker,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from tandem.protocol.messages.numerics import Numerics
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import FinishReason, SampledToken, SamplingParams, StopConditions
from tandem.proxy.admission.admission import Admission
from tandem.proxy.admission.budgets import AnswerBudget
from tandem.proxy.answers.answers import Answers
from tandem.proxy.cluster.router import Router
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.proxy.dispatch.dispatcher import Dispatcher, WorkerConnections
from tandem.proxy.dispatch.generation import GenerationServices
from tandem.proxy.dispatch.sequence import DispatchedSequence, PromptTask, TokenDelta
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.proxy_settings import AdmissionSettings
from tandem.proxy.reading.body_reader import BodyReader
from tandem.proxy.reading.reader_pool import ReaderPool
from tandem.proxy.text.model_text import EmbeddingDefaults, ModelText, SamplingDefaults
from tandem.proxy.text.prompt import ChatPrompt, Prompt
from tandem.proxy.text.token_text import TokenText
from tandem.runtime.errors import ErrorInfo, TandemError
from tandem.telemetry.proxy_metrics import ProxyMetrics
from tandem.telemetry.request_log import RequestLog
from tests.support.async_tests import like

P = ParamSpec("P")
PREFILL = WorkerInfo("prefill-0", "p1", "prefill", "ipc://p", 1)
DECODE = WorkerInfo("decode-0", "d1", "decode", "ipc://d", 2)
PROMPT = Prompt(pack_token_ids([1, 2, 3]), 3)
EOS = 0


class FakePool(WorkerConnections):
    """Records the messages to the workers."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, msgspec.Struct]] = []
        self.accepts = True

    def send(self, worker: WorkerInfo, message: msgspec.Struct) -> bool:
        self.sent.append((worker.worker_id, message))
        return self.accepts

    def of(self, kind: type[Any]) -> list[tuple[str, Any]]:
        return [(worker_id, message) for worker_id, message in self.sent if isinstance(message, kind)]


class FakeText:
    """A tokeniser with one token for each byte."""

    chat_template = None
    eos_token_ids = frozenset({EOS})
    sampling_defaults = SamplingDefaults()
    embedding_defaults = EmbeddingDefaults()
    requires_short_call_ids = False

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {"</s>": EOS} | {character: number for number, character in enumerate(alphabet, start=1)}
        self.num_token_ids = len(vocab)
        self.tokenizer = Tokenizer(models.BPE(vocab, []))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode_batch_fast([text])[0].ids)

    def render_chat(self, prompt: ChatPrompt) -> str:
        return "".join(message["content"] for message in prompt.messages)


class Cluster:
    def __init__(
        self,
        threshold: int = 0,
        worker_wait_s: float = 0.0,
        workers: tuple[WorkerInfo, ...] = (PREFILL, DECODE),
        max_model_len: int = 100,
    ) -> None:
        self._max_model_len = max_model_len
        self.worker_table = WorkerTable(2.5, decode_may_prefill=threshold > 0)
        self.router = Router(self.worker_table, threshold, rng=random.Random(0))
        self.metrics = ProxyMetrics()
        self.pool = FakePool()
        self.dispatcher = Dispatcher("proxy", self.router, self.pool, self.metrics, worker_wait_s)
        self._ready: defaultdict[DispatchedSequence, asyncio.Event] = defaultdict(asyncio.Event)
        self.join(*workers)
        self.text = FakeText()
        text = cast(ModelText, self.text)
        self.admission = Admission(AdmissionSettings(8), time.monotonic)
        self.reader = BodyReader(text, ProxyConfig("proxy-0", "", "m", "m"))
        readers = ReaderPool(self.reader, ProxyConfig("proxy-0", "", "m", "m"), 2)  # what is small starts no process
        self.services = GenerationServices(
            text,
            TokenText(self.text.tokenizer),
            readers,
            self.worker_table,
            self.admission,
            AnswerBudget(),
            self.dispatcher,
            self.metrics,
            RequestLog(),
            request_timeout_s=60,
            ttft_slo_s=None,
        )

    def join(self, *workers: WorkerInfo, numerics: Numerics | None = None) -> None:
        """Registers the workers and makes all pairs ready. numerics: of workers that run with --exact."""
        for worker in workers:
            message = RegisterWorker(PROTOCOL_VERSION, worker, self._max_model_len, 500, "m", 64)
            if numerics is not None:
                message = msgspec.structs.replace(message, numerics=numerics, exact=True)
            self.worker_table.on_register(0, message)
        there = self.worker_table.workers()
        ready = [PairStatus(w.worker_id, w.epoch, "ready") for w in there if w.role == "decode"]
        pairs = PairChanges(0, ready)
        for worker in there:
            if worker.role == "prefill":
                self.worker_table.on_status(
                    0, WorkerStatus(worker.worker_id, worker.epoch, worker.role, WorkerLoad(), pairs)
                )
        self.dispatcher.on_cluster_changed()

    def lose(self, worker: WorkerInfo, reason: str = "its process has crashed", has_crashed: bool = True) -> None:
        """Loses a worker in the order that Control uses: first the worker table, then the dispatcher."""
        assert self.worker_table.on_exited(worker.worker_id, worker.pid, "crash" if has_crashed else "unknown")
        self.dispatcher.on_worker_lost(worker, reason, has_crashed)

    def fail(self, worker: WorkerInfo, attempt_ids: list[str]) -> None:
        """A worker says that it has failed in a step with these attempts. The launcher reports its exit later."""
        [gone] = self.worker_table.on_left(worker.epoch, "failure", attempt_ids).lost
        self.dispatcher.on_worker_lost(gone.worker, gone.reason, gone.has_crashed, gone.has_left, gone.attempt_ids)
        self.worker_table.on_exited(worker.worker_id, worker.pid, "crash")

    def start(self, samplings: list[SamplingParams], max_tokens: int, deadline_s: float) -> list[DispatchedSequence]:
        task = PromptTask(PROMPT, StopConditions(max_tokens), deadline_s)
        return self.dispatcher.start(task, samplings, lambda sequence: self._ready[sequence].set())

    async def next_tokens(self, sequence: DispatchedSequence) -> TokenDelta:
        while True:
            await self._ready[sequence].wait()
            self._ready[sequence].clear()
            if (delta := self.dispatcher.take(sequence)) is not None:
                return delta

    async def generate(self, max_tokens: int = 10, deadline_s: float = 60) -> AsyncGenerator[TokenDelta, None]:
        [sequence] = self.start([SamplingParams()], max_tokens, deadline_s)
        try:
            finish_reason = None
            while finish_reason is None:
                delta = await self.next_tokens(sequence)
                finish_reason = delta.finish_reason
                yield delta
        finally:
            self.dispatcher.drop(sequence)

    def started(self, number: int = 0) -> str:
        return str(self.pool.of(StartPrefill)[number][1].attempt_ids[0])

    def first(
        self,
        attempt_id: str,
        token_id: int,
        finish_reason: FinishReason | None = None,
        worker: WorkerInfo = PREFILL,
    ) -> None:
        self.dispatcher.on_message(worker, FirstToken(attempt_id, SampledToken(token_id), finish_reason, 0.1, 0.2))

    def reserved(self, attempt_id: str, worker: WorkerInfo = DECODE) -> None:
        self.dispatcher.on_message(worker, DecodeReserved(attempt_id))

    def token(
        self,
        attempt_id: str,
        token_id: int,
        finish_reason: FinishReason | None = None,
        worker: WorkerInfo = DECODE,
    ) -> None:
        self.dispatcher.on_message(worker, TokenBatch([NewToken(attempt_id, SampledToken(token_id), finish_reason)]))

    def failed(self, worker: WorkerInfo, attempt_id: str, error: TandemError) -> None:
        self.dispatcher.on_message(worker, AttemptFailed(attempt_id, ErrorInfo.of(error)))

    def aborted(self) -> list[str]:
        return sorted(worker_id for worker_id, _ in self.pool.of(AbortAttempt))

    def check_nothing_is_left(self) -> None:
        assert self.dispatcher.num_running == 0
        assert self.admission.num_waiting == 0
        records = self.worker_table.prefill_workers + self.worker_table.decode_workers
        assert all(record.use.is_idle for record in records)


@contextmanager
def _cluster(
    threshold: int, worker_wait_s: float, max_model_len: int, workers: tuple[WorkerInfo, ...]
) -> Iterator[Cluster]:
    cluster = Cluster(threshold, worker_wait_s, workers, max_model_len)
    yield cluster
    cluster.check_nothing_is_left()


Test = Callable[Concatenate["Cluster", P], Coroutine[Any, Any, None]]


def played(
    threshold: int = 0,
    worker_wait_s: float = 0.0,
    max_model_len: int = 100,
    workers: tuple[WorkerInfo, ...] = (PREFILL, DECODE),
) -> Callable[[Test[P]], Callable[P, None]]:
    """Returns a decorator of coroutines, which get a cluster of which nothing may be left at their end."""

    def decorate(test: Test[P]) -> Callable[P, None]:
        def run_test(*arguments: P.args, **named: P.kwargs) -> None:
            play(lambda cluster: test(cluster, *arguments, **named), threshold, worker_wait_s, max_model_len, workers)

        return like(test, run_test, num_given=1)

    return decorate


def play(
    test: Callable[[Cluster], Coroutine[Any, Any, None]],
    threshold: int = 0,
    worker_wait_s: float = 0.0,
    max_model_len: int = 100,
    workers: tuple[WorkerInfo, ...] = (PREFILL, DECODE),
) -> None:
    async def run() -> None:
        with _cluster(threshold, worker_wait_s, max_model_len, workers) as cluster:
            await asyncio.wait_for(test(cluster), 30)

    asyncio.run(run())


async def turn() -> None:
    """Lets every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def collect(stream: Any) -> tuple[list[int], FinishReason | None]:
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    async for delta in stream:
        assert finish_reason is None, "a sequence has exactly one terminal event"
        token_ids += [token.token_id for token in delta.tokens]
        finish_reason = delta.finish_reason
    return token_ids, finish_reason


async def whole(answers: Answers) -> bytes:
    """Returns the body of an answer that is not streamed."""
    try:
        return b"".join(await answers.whole())
    finally:
        answers.release()
