"""One HTTP request for generation, from the tokenised prompts to the last text delta.

`Generation.deltas` is the request's path through the proxy: admit, dispatch, detokenise, watch for stop strings.
Streamed and whole answers share it. Closing the generator at any point aborts whatever is in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from tandem.protocol.messages.token_ids import unpack_token_ids
from tandem.proxy.admission.admission import Admission, Ticket
from tandem.proxy.admission.rejections import rejection_reason
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.cluster.router import NoWorkerReady
from tandem.proxy.cluster.worker_table import WorkerTable
from tandem.proxy.dispatch.dispatcher import Dispatcher
from tandem.proxy.dispatch.sequence import DispatchedSequence, TokenDelta
from tandem.proxy.dispatch.sequence_text import PromptTokens, SequenceText, TextDelta
from tandem.proxy.reading.reader_pool import ReaderPool
from tandem.proxy.text.detokenizer import Detokenizer
from tandem.proxy.text.model_text import ModelText
from tandem.proxy.text.prompt import Prompt, RenderedPrompts
from tandem.proxy.text.stop_strings import StopStrings
from tandem.proxy.text.token_text import TokenText
from tandem.runtime.errors import TandemError
from tandem.telemetry.proxy_metrics import ProxyMetrics, SequenceTimer
from tandem.telemetry.request_log import RequestLog, RequestRecord


@dataclass(frozen=True, slots=True)
class GenerationServices:
    """The parts of a proxy that every `Generation` uses.

    ttft_slo_s: a request whose first token is predicted later is refused; None for no SLO.
    """

    text: ModelText
    token_text: TokenText
    readers: ReaderPool
    worker_table: WorkerTable
    admission: Admission
    dispatcher: Dispatcher
    metrics: ProxyMetrics
    requests: RequestLog
    request_timeout_s: float
    ttft_slo_s: float | None


class Generation:
    """Generates the sequences of one request.

    `record` counts the tokens: those of the prompts from the first delta on, the others of the deltas so far.
    """

    def __init__(
        self,
        services: GenerationServices,
        request: GenerationRequest,
        record: RequestRecord,
        client: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """request: with tokenised prompts, as `ReaderPool.read` returns it. record: ended by `deltas`.

        client: whose limits the request counts towards. timeout_s: the client's, from arrival; the server's and the
        request's own hold as well.
        """
        limits_s = (services.request_timeout_s, timeout_s, request.timeout)
        self._timeout_s = min(limit_s for limit_s in limits_s if limit_s is not None)
        self.token_text = services.token_text
        self.request = request
        self.record = record
        self.created = int(time.time())
        self._services = services
        self._client = client

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Yields the text of all sequences as it comes. The last delta of each has a finish_reason.

        Raises TandemError; the first error of a sequence ends all.
        """
        services = self._services
        outcome, is_refused = "aborted", False  # unless the generator runs to its end
        texts: dict[DispatchedSequence, SequenceText] = {}
        ready: asyncio.Queue[DispatchedSequence] = asyncio.Queue()
        ticket: Ticket | None = None

        def on_displaced(error: TandemError) -> None:
            for sequence in texts:
                sequence.fail(error)

        try:
            prompts = self._prompts()
            # A prompt is computed once for all its sequences, so it counts for the first of them.
            prompt_tokens = [0 if i else prompt.num_tokens for prompt in prompts for i in range(self.request.n)]
            ticket = services.admission.admit(self._client, prompt_tokens, self.request.priority, on_displaced)
            for prompt in prompts:
                self._start(prompt, texts, ready)
            num_open = len(texts)
            while num_open:
                sequence = await ready.get()
                if (tokens := services.dispatcher.take(sequence)) is None:
                    continue
                text = texts[sequence]
                if tokens.is_first:
                    ticket.on_first_token(text.index)
                delta = await self._next_text(sequence, text, tokens)
                self.record.num_completion_tokens += len(delta.tokens)
                if delta.finish_reason is not None:
                    num_open -= 1
                    outcome = delta.finish_reason if not num_open else outcome
                    services.dispatcher.drop(sequence)  # the workers do not know of a stop string
                yield delta
        except TandemError as error:
            outcome = error.code
            if (reason := rejection_reason(error)) is not None:
                is_refused = self.record.num_completion_tokens == 0 and not isinstance(error, NoWorkerReady)
                services.metrics.rejected.labels(reason).inc()
            raise
        except Exception:
            outcome = "internal_error"
            raise
        finally:
            for sequence, text in texts.items():
                text.timer.close()
                services.dispatcher.drop(sequence)
            if ticket is not None:
                ticket.close()
            self.request.release_media()
            services.metrics.requests.labels(outcome).inc()
            services.requests.end(self.record, outcome, is_refused)

    def _prompts(self) -> list[Prompt]:
        """Returns the prompts as they are dispatched. Raises InvalidRequest for tokens that the model does not have."""
        request = self.request
        request.check_vocabulary(self._services.worker_table.limits())
        assert isinstance(request.prompt, RenderedPrompts)
        prompts = request.prompt.prompts
        self.record.num_prompt_tokens = sum(prompt.num_tokens for prompt in prompts)
        return [
            replace(
                prompt,
                num_prompt_logprobs=request.num_prompt_logprobs,
                cache_salt=request.cache_salt,
                priority=request.priority,
            )
            for prompt in prompts
        ]

    def _start(
        self,
        prompt: Prompt,
        texts: dict[DispatchedSequence, SequenceText],
        ready: asyncio.Queue[DispatchedSequence],
    ) -> None:
        """Dispatches a prompt and adds its sequences to `texts`. Raises SLOUnreachable or ContextLengthExceeded."""
        request, services = self.request, self._services
        stop = request.stop_conditions(prompt.num_tokens, services.worker_table.limits(), services.text.eos_token_ids)
        waited_s = time.monotonic() - self.record.arrived_at
        deadline_s = max(0.001, self._timeout_s - waited_s)
        max_ttft_s = deadline_s if services.ttft_slo_s is None else min(deadline_s, services.ttft_slo_s - waited_s)
        samplings = request.samplings()
        for sequence in services.dispatcher.start(prompt, samplings, stop, deadline_s, ready.put_nowait, max_ttft_s):
            timer = SequenceTimer(services.metrics, self.record.arrived_at, sequence.times)
            self.record.sequences.append(timer)
            texts[sequence] = SequenceText(
                len(texts),
                Detokenizer(services.text.tokenizer, prompt.token_ids, request.skip_special_tokens),
                StopStrings(request.stop, request.include_stop_str_in_output),
                timer,
            )

    async def _next_text(self, sequence: DispatchedSequence, text: SequenceText, delta: TokenDelta) -> TextDelta:
        request = self.request
        tokens, finish_reason = delta.tokens, delta.finish_reason
        if request.is_prompt_only:  # workers generate at least one token, which the client did not ask for
            tokens, finish_reason = [], "length"
        text.timer.on_tokens(time.monotonic(), len(tokens))
        prompt: PromptTokens | None = None
        echo = ""
        if delta.is_first:
            if text.index % request.n == 0:
                self.record.num_cached_tokens += delta.num_cached_tokens
            if request.echo or request.num_prompt_logprobs is not None:
                token_ids = unpack_token_ids(sequence.prompt.token_ids)
                echo = await self._services.readers.text_of(token_ids) if request.echo else ""
                prompt = PromptTokens(token_ids, delta.prompt_logprobs or [])
        return await text.push(tokens, finish_reason, prompt, echo)
