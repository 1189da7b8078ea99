"""The clients of a simulated cluster: each sends one request to a proxy, and checks what it gets."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

from tandem.protocol.messages.generation import SamplingParams, StopConditions
from tandem.protocol.messages.token_ids import pack_token_ids
from tandem.protocol.prefix_hash import BlockHasher, pack_short_hashes
from tandem.proxy.dispatch.sequence import DispatchedSequence
from tandem.proxy.text.prompt import Prompt
from tandem.runtime.errors import TandemError
from tandem.runtime.tasks import start
from tandem.simulator.engine import answer
from tandem.simulator.processes import SimulatedProxy
from tandem.simulator.scenario import NO_TIMEOUT_S, Request

EXPECTED_ERRORS = {"deadline_exceeded", "no_worker_ready"}
"""Codes that a client may get. A lost worker alone costs no request."""


class Clients:
    """All clients of one run. outcomes: what each request came to, by its number.

    report(rule, details): called when a rule is broken. note: gets a line of the log.
    """

    def __init__(self, report: Callable[[str, str], None], note: Callable[[str], None]) -> None:
        self.outcomes: dict[int, str] = {}
        self._of_proxies: defaultdict[str, set[int]] = defaultdict(set)  # requests by proxy
        self._report = report
        self._note = note

    def send(self, request: Request, proxy: SimulatedProxy) -> None:
        if proxy.loop.is_dead:
            self._end(request, "connection refused")
            return
        self._of_proxies[proxy.name].add(request.number)
        proxy.loop.call_soon(lambda: start(self._serve(request, proxy)))

    def on_proxy_killed(self, name: str) -> None:
        """Clients of a dead proxy see their connections break."""
        for number in self._of_proxies.pop(name, set()):
            if number not in self.outcomes:
                self.outcomes[number] = "connection broke"

    async def _serve(self, request: Request, proxy: SimulatedProxy) -> None:
        """Does what `proxy.dispatch.generation` does: reads the sequences of one prompt to their ends."""
        token_ids, dispatcher = pack_token_ids(list(request.prompt)), proxy.dispatcher
        hashes = pack_short_hashes(BlockHasher(proxy.block_size, "simulated").prompt_hashes(token_ids))
        prompt = Prompt(token_ids, len(request.prompt), priority=request.priority, prefix_hashes=hashes)
        ready: asyncio.Queue[DispatchedSequence] = asyncio.Queue()
        tokens: dict[DispatchedSequence, list[int]] = {}
        outcome = "finished"
        wanted = answer(request.prompt, request.max_tokens)
        try:
            samplings = [SamplingParams(temperature=0.0)] * request.num_sequences
            stop = StopConditions(request.max_tokens)
            sequences = dispatcher.start(prompt, samplings, stop, request.timeout_s, ready.put_nowait)
            tokens = {sequence: [] for sequence in sequences}
            num_open = len(sequences)
            while num_open:
                sequence = await ready.get()
                if (delta := dispatcher.take(sequence)) is None:
                    continue
                got = tokens[sequence]
                got += [token.token_id for token in delta.tokens]
                if got != wanted[: len(got)]:
                    self._report("wrong tokens", f"request {request.number}: {got} instead of {wanted[: len(got)]}")
                if delta.finish_reason is not None:
                    num_open -= 1
                    if len(got) != len(wanted):
                        self._report("a short answer", f"request {request.number}: {len(got)} of {len(wanted)} tokens")
                    dispatcher.drop(sequence)
                if request.stops_after is not None and len(got) > request.stops_after:
                    outcome = "client left"
                    break
        except TandemError as error:
            outcome = error.code
            if outcome not in EXPECTED_ERRORS or (outcome == "deadline_exceeded" and request.timeout_s == NO_TIMEOUT_S):
                self._report("an unexpected error", f"request {request.number}: {outcome}: {error.message}")
        finally:
            for sequence in tokens:
                dispatcher.drop(sequence)
        self._end(request, outcome)

    def _end(self, request: Request, outcome: str) -> None:
        if request.number in self.outcomes:
            self._report("two ends", f"request {request.number}: {self.outcomes[request.number]}, then {outcome}")
        self.outcomes[request.number] = outcome
        self._note(f"request {request.number}: {outcome}")
