"""Grammars and LoRA adapters of a simulated worker: they are ready after a while, and some fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from tandem.engine.lora.adapter import Adapter
from tandem.engine.sampling.grammar import TOO_SLOW, Grammar, MaskProcess, MaskRequest
from tandem.engine.sampling.grammar_messages import Mask
from tandem.protocol.messages.dispatch import AdapterRef
from tandem.runtime.errors import ErrorInfo
from tandem.simulator.sampling import grammar_digest, grammar_fails
from tandem.simulator.timeline import ProcessLoop

BROKEN_ADAPTER = "broken"
"""Digest of an adapter that no worker can load."""
ADAPTERS = ("one", "two", BROKEN_ADAPTER)
MAX_READY_S = 0.3
"""Until a grammar or an adapter is ready."""
_RESTART_SHARE = 0.02
"""Share of the masks before which a grammar's process is replaced by a new one, which knows no tokens."""


class SimulatedMasks:
    """Implements `engine.sampling.grammar.MaskProcess`. Its masks are digests of what it was told."""

    def __init__(self, text: str, restarts: Callable[[], bool]) -> None:
        self._text = text
        self._restarts = restarts
        self._number = 1  # of the process
        self._states: dict[int, tuple[list[int], list[int]]] = {}  # stop tokens and tokens so far, by state
        self._masks: list[Mask] = []

    def send(
        self, requests: Sequence[MaskRequest], ended_state_ids: list[int], timeout_s: float, budget_s: float
    ) -> None:
        if self._restarts():
            self._number += 1
            self._states.clear()
        for request in requests:
            fill = request.state.request(request, self._number)
            if fill.new_state is not None:
                self._states[fill.state_id] = fill.new_state.stop_token_ids, []
            stop_token_ids, token_ids = self._states[fill.state_id]
            token_ids += fill.token_ids
            if grammar_fails(self._text, len(token_ids)):
                self._masks.append(Mask(error=ErrorInfo.of(TOO_SLOW)))
            else:
                self._masks.append(Mask(grammar_digest(self._text, token_ids, stop_token_ids)))

    def receive(self, timeout_s: float) -> Mask:
        return self._masks.pop(0)

    def close(self) -> None:
        pass


class SimulatedGrammars:
    """Takes the place of `engine.sampling.grammars.Grammars`. on_ready: called when one is compiled."""

    def __init__(self, loop: ProcessLoop, rng: random.Random, on_ready: Callable[[], None]) -> None:
        self._loop, self._rng, self._on_ready = loop, rng, on_ready
        self._known: dict[str, Grammar] = {}

    def get(self, text: str | None, client: str = "", is_optional: bool = False) -> Grammar | None:
        if text is None:
            return None
        if (known := self._known.get(text)) is None:
            compiled: Future[MaskProcess] = Future()
            known = self._known[text] = Grammar(compiled, client)
            masks = SimulatedMasks(text, lambda: self._rng.random() < _RESTART_SHARE)
            _later(self._loop, self._rng, lambda: compiled.set_result(masks), self._on_ready)
        return known

    def end_idle(self) -> None:
        pass

    def close(self) -> None:
        pass


class SimulatedAdapters:
    """Takes the place of `engine.lora.adapters.Adapters`. An adapter's weights are its digest."""

    def __init__(self, loop: ProcessLoop, rng: random.Random, on_ready: Callable[[], None]) -> None:
        self._loop, self._rng, self._on_ready = loop, rng, on_ready
        self._known: dict[str, Adapter] = {}

    def get(self, ref: AdapterRef | None) -> Adapter | None:
        if ref is None:
            return None
        digest = ref.digest
        if (known := self._known.get(digest)) is None:
            loading: Future[Any] = Future()
            known = self._known[digest] = Adapter(loading)

            def end() -> None:
                if digest == BROKEN_ADAPTER:
                    loading.set_exception(OSError("its files are damaged"))
                else:
                    loading.set_result(digest)

            _later(self._loop, self._rng, end, self._on_ready)
        return known

    def close(self) -> None:
        pass


def attachments(loop: ProcessLoop, rng: random.Random, on_ready: Callable[[], None]) -> tuple[Any, Any]:
    """Returns the grammars and the adapters of a worker. on_ready: called when one of them can be used."""
    return SimulatedGrammars(loop, rng, on_ready), SimulatedAdapters(loop, rng, on_ready)


def _later(loop: ProcessLoop, rng: random.Random, end: Callable[[], None], on_ready: Callable[[], None]) -> None:
    def run() -> None:
        end()
        on_ready()

    loop.call_later(rng.uniform(0.0, MAX_READY_S), run)
