"""The clients of a simulated cluster: each sends one request to a proxy, and checks what it gets.

Lines of batches come from the proxy itself, see `simulator.batches`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from tandem.protocol.messages.dispatch import AdapterRef
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.prefix_hash import BlockHasher, pack_short_hashes
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.cluster.adapter_table import NamedAdapter
from tandem.proxy.dispatch.generation import Generation, TextDelta
from tandem.proxy.dispatch.sequence import MAX_DEATHS
from tandem.proxy.proxy_settings import AdmissionSettings
from tandem.proxy.text.prompt import Prompt, RenderedPrompts
from tandem.runtime.errors import TandemError
from tandem.runtime.tasks import start
from tandem.simulator.answer_check import AnswerCheck, KnownPrefixes
from tandem.simulator.processes import Note, SimulatedProxy
from tandem.simulator.scenario import MODEL, NO_TIMEOUT_S, Request
from tandem.telemetry.request_log import RequestRecord

LATE_ERRORS = {"deadline_exceeded", "ttft_slo_unreachable"}
"""Codes that a client with a deadline may get."""


def expected_errors(num_kills: int, limits: AdmissionSettings) -> set[str]:
    """Returns the codes that clients may get. A lost worker alone costs no request.

    num_kills: workers that faults kill; a request that several of them computed may be taken for the cause
    (`proxy.dispatch.sequence`).
    """
    is_tight = limits.ttft_slo_ms or limits.max_waiting_requests < AdmissionSettings().max_waiting_requests
    codes = {"no_worker_ready", *LATE_ERRORS}
    codes |= {"overloaded"} if is_tight else set()
    codes |= {"too_many_requests"} if is_tight or limits.max_requests_per_client else set()
    return codes | ({"request_crashes_workers"} if num_kills >= MAX_DEATHS else set())


class Clients:
    """All clients of one run. outcomes: what each request came to, by its number.

    report(rule, details): called when a rule is broken. note: gets a line of the log. num_kills, limits: see
    `expected_errors`.
    """

    def __init__(
        self,
        report: Callable[[str, str], None],
        note: Note,
        num_kills: int = 0,
        limits: AdmissionSettings = AdmissionSettings(),  # noqa: B008  # frozen
        *,
        steps_fail: bool = False,
    ) -> None:
        self._expected = expected_errors(num_kills, limits) | ({"internal_error"} if steps_fail else set())
        self._has_slo = limits.ttft_slo_ms > 0
        self.outcomes: dict[int, str] = {}
        self._served: defaultdict[str, Counter[str]] = defaultdict(Counter)  # what proxies should count
        self._of_proxies: defaultdict[str, dict[int, Request]] = defaultdict(dict)  # open requests by proxy
        self._num_open: Counter[str] = Counter()  # sequences whose end has not come, by proxy
        self.num_failed = 0
        """Requests that have failed together with a step."""
        self._prefixes = KnownPrefixes(report)
        self._report = report
        self._note = note

    def send(self, request: Request, proxy: SimulatedProxy) -> None:
        proxy.num_open += 1
        self._of_proxies[proxy.proxy_id][request.number] = request
        proxy.loop.call_soon(lambda: start(self._serve(request, proxy)))

    def on_proxy_end(self, proxy_id: str) -> None:
        """Clients of a proxy that has ended see their connections break."""
        for request in self._of_proxies.pop(proxy_id, {}).values():
            self.outcomes[request.number] = "connection broke"

    async def _serve(self, request: Request, proxy: SimulatedProxy) -> None:
        outcome, _ = await self.answer(request, proxy)
        proxy.num_open -= 1
        self._of_proxies[proxy.proxy_id].pop(request.number, None)
        self.end(request, outcome)

    async def answer(self, request: Request, proxy: SimulatedProxy) -> tuple[str, TandemError | None]:
        """Does what an HTTP route does: reads all deltas of a request, and closes the generator.

        Returns what the request came to, and the error that it got. May be cancelled, as a client may leave.
        """
        wanted, check = _wanted(request, proxy.block_size), AnswerCheck(request, self._report)
        record = RequestRecord(f"request {request.number}", MODEL, arrived_at=proxy.loop.time())
        outcome, served, client = "finished", Counter[str](), client_of(request)
        problem: TandemError | None = None
        proxy.refusals.begin(request, client)
        is_first = self._prefixes.add(request, check, proxy.block_size)
        self._num_open[proxy.proxy_id] += check.num_open
        try:
            await proxy.readiness.limits()
            served = self._served[proxy.proxy_id]
            served["requests"] += 1
            served["with stop strings"] += bool(request.wishes.stop)
            proxy.refusals.ask(request)
            generation = Generation(proxy.services, wanted, record, client)
            async with aclosing(generation.deltas()) as deltas:
                if not await self._read(served, request, check, proxy, deltas):
                    outcome = "client left"
            if outcome == "finished":
                check.check_usage(record, proxy.num_cached_tokens)
                is_first = is_first and all(len(each._attempts) == 1 for each in record.sequences)
                if is_first and not request.more_prompts:
                    self._prefixes.check(request, record.num_cached_tokens, proxy.block_size)
            served["left" if outcome == "client left" else "finished"] += 1
        except asyncio.CancelledError:
            served["left"] += 1
            raise
        except TandemError as error:
            problem, outcome = error, error.code
            served[outcome] += 1
            if outcome == "overloaded" and not proxy.table.workers():  # none has come
                outcome = "no_worker_ready"
            is_expected = outcome in self._expected | check.errors
            is_expected = is_expected or (outcome == "request_aborted" and not proxy.accepts)
            self.num_failed += outcome == "internal_error" and outcome not in check.errors
            timeout_s = min(request.timeout_s, proxy.services.request_timeout_s)
            is_patient = timeout_s == NO_TIMEOUT_S and not self._has_slo
            if not is_expected or (outcome in LATE_ERRORS and is_patient):
                self._report("an unexpected error", f"request {request.number}: {outcome}: {error.message}")
        finally:
            self._num_open[proxy.proxy_id] -= check.num_open
            proxy.refusals.end(request, problem)
        return outcome, problem

    def miscounted(self, proxy: SimulatedProxy) -> str | None:
        """Returns what the metrics of a proxy without open requests count otherwise than its clients.

        A request that its client leaves with its last token counts as finished or as left. Tokens that come behind a
        stop string, together with it, are counted.
        """
        served, counted = self._served[proxy.proxy_id], Counter[str]()
        for sample in next(iter(proxy.metrics.requests.collect())).samples:
            if sample.name.endswith("_total"):
                outcome = sample.labels["outcome"]
                counted["finished" if outcome in ("stop", "length") else outcome] += int(sample.value)
        codes = (counted | served).keys() - {"requests", "finished", "left", "aborted", "tokens", "with stop strings"}
        wrong = [
            f"{code}: {counted[code]}, not {served[code]}" for code in sorted(codes) if counted[code] != served[code]
        ]
        if not served["finished"] <= counted["finished"] <= served["finished"] + served["left"]:
            wrong.append(f"finished: {counted['finished']}, not {served['finished']} and some of {served['left']}")
        if counted.total() != served["requests"]:
            wrong.append(f"requests: {counted.total()}, not {served['requests']}")
        tokens = int(proxy.metrics.generation_tokens._value.get())
        is_exact = served["finished"] == served["requests"] and not served["with stop strings"]
        if tokens < served["tokens"] or (tokens > served["tokens"] and is_exact):
            wrong.append(f"tokens: {tokens}, not {served['tokens']}")
        return "; ".join(wrong) or None

    async def _read(
        self,
        served: Counter[str],
        request: Request,
        check: AnswerCheck,
        proxy: SimulatedProxy,
        deltas: AsyncGenerator[TextDelta, None],
    ) -> bool:
        """Checks what comes. Returns whether the client has stayed to the end."""
        async for delta in deltas:
            proxy.refusals.on_token(request, delta.index)
            await asyncio.sleep(request.read_s)
            served["tokens"] += len(delta.tokens)
            check.add(delta)
            if delta.finish_reason is not None:
                self._num_open[proxy.proxy_id] -= 1
                if (num := proxy.dispatcher.num_running) > self._num_open[proxy.proxy_id]:
                    details = f"request {request.number}: {proxy.name} holds {num} sequences"
                    self._report("a sequence goes on behind its end", details)
            if request.stops_after is not None and check.num_tokens(delta.index) > request.stops_after:
                return False
        return True

    def end(self, request: Request, outcome: str) -> None:
        """A client has its answer."""
        if request.number in self.outcomes:
            self._report("two ends", f"request {request.number}: {self.outcomes[request.number]}, then {outcome}")
        self.outcomes[request.number] = outcome
        self._note("request %d: %s", request.number, outcome)


def client_of(request: Request) -> str:
    return f"client {request.number % 3}"


def _wanted(request: Request, block_size: int) -> GenerationRequest:
    """Returns what the proxy's readers make of a request."""
    wishes = request.wishes
    adapter = NamedAdapter("adapter", AdapterRef(wishes.adapter, "/adapters")) if wishes.adapter else None
    hasher = BlockHasher(block_size, MODEL, wishes.salt, (), adapter.ref if adapter is not None else None)
    prompts: list[Prompt] = []
    for prompt in request.prompts:
        token_ids = pack_token_ids(list(prompt))
        prompts.append(Prompt(token_ids, len(prompt), prefix_hashes=pack_short_hashes(hasher.prompt_hashes(token_ids))))
    return GenerationRequest(
        prompt=RenderedPrompts(prompts),
        max_tokens=request.max_tokens,
        max_tokens_param="max_tokens",
        base_sampling=wishes.params,
        n=request.num_sequences,
        seed=wishes.seed,
        priority=request.priority,
        timeout=request.timeout_s,
        stop=list(wishes.stop),
        include_stop_str_in_output=wishes.shows_stop,
        stop_token_ids=list(wishes.stop_token_ids),
        ignore_eos=wishes.ignore_eos,
        min_tokens=wishes.min_tokens,
        cache_salt=wishes.salt,
        adapter=adapter,
        num_prompt_logprobs=wishes.num_prompt_logprobs,
    )
