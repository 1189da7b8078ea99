"""Constraints of vLLM's requests: grammars, each in a process of its own, and the forced end of thinking.

vLLM compiles and follows grammars in the engine's process, where nothing bounds the time of a mask, and lets a request
whose grammar fails go on without it. Here they are those of Tandem's engine (`engine.sampling.grammars`). vLLM's own
limit on thinking knows the markers of one parser for the whole engine, so a budget is a mask too: it follows from the
generated tokens alone, before and after a migration.

A request that is in a step of vLLM must get its mask there. So those that are expected to exceed their client's share
of the time skip the step beforehand (`too_slow_now`), and those that exceed it by far in the step end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.request import Request

from tandem.engine.batch import Sample
from tandem.engine.sampling.grammar import TOO_SLOW, GrammarState, copy_of
from tandem.engine.sampling.grammar_mask import MaskBudgets, compute_masks, fitting
from tandem.engine.sampling.grammar_messages import Mask
from tandem.engine.sampling.grammars import Grammars
from tandem.protocol.messages.sampling import SamplingParams, StopConditions, Thinking
from tandem.protocol.prefix_hash import client_of
from tandem.runtime.errors import TandemError
from tandem.runtime.processes.command_line import LAUNCHER_PYTHON
from tandem.vllm_worker.engine.vllm_sampling import CONSTRAINT

_NO_PARAMETERS = SamplingParams()
_ALL = np.uint32(0xFFFF_FFFF)
_MAX_STEP_CPU_S = 2.0
"""Processor time that the masks of a client, and of one grammar, may take in a step, whatever was expected of them."""


@dataclass(frozen=True)
class Constraint:
    """What decides which tokens one request may get. It takes the place of vLLM's compiled grammar."""

    state: GrammarState | None
    """State in the grammar; None without one."""
    thinking: Thinking | None
    stop: StopConditions

    @property
    def is_ready(self) -> bool:
        return self.state is None or self.state.is_ready


def constraint_of(request: Request) -> Constraint:
    """Returns the constraint of a request that uses structured output."""
    constraint: Constraint = request.structured_output_request.grammar
    return constraint


class VllmGrammars:
    """Takes the place of vLLM's StructuredOutputManager. Call it on the engine's thread.

    model: a folder or a hub id. vocab_size: of the logits. on_compiled: called after each compilation, on
    another thread.
    """

    def __init__(self, model: str, vocab_size: int, on_compiled: Callable[[], object]) -> None:
        # vLLM 0.32 needs llguidance 1.7, which lets white space repeat without end, and knows less of JSON schemas than
        # the version with which proxies have checked the grammar.
        python = os.environ.get(LAUNCHER_PYTHON, "")
        self._grammars = Grammars(model, vocab_size, on_compiled, python)
        self._num_words = -(-vocab_size // 32)
        self._errors: dict[str, TandemError] = {}
        self._budgets = MaskBudgets()

    def too_slow_now(self, now: float, running: Sequence[Request]) -> list[Request]:
        """Returns the requests that must skip the next step, because their clients' masks have taken too long.

        running: all requests of the next step, but for those that begin in it.
        """
        by_client: dict[str, list[tuple[GrammarState, Request]]] = {}
        for request in running:
            state = constraint_of(request).state if request.use_structured_output else None
            if state is not None and not state.has_failed:
                by_client.setdefault(state.client, []).append((state, request))
        if not by_client:
            return []
        num_followed = sum(map(len, by_client.values()))
        budgets_s = self._budgets.begin_step(now, by_client.keys(), num_followed < len(running))
        late: list[Request] = []
        for client, own in by_client.items():
            own.sort(key=lambda each: -each[0].num_late)
            num_fitting = fitting((state.expected_s for state, _ in own), budgets_s[client])
            for state, request in own[num_fitting:]:
                state.on_mask(Mask(is_late=True))
                late.append(request)
        return late

    def why_refused(self, request: Request) -> TandemError | None:
        """Returns why a grammar that is compiled cannot be served; None also if the request goes on without it."""
        state = constraint_of(request).state
        if state is None or state.is_optional:
            return None
        try:
            state.grammar.process()
        except TandemError as error:
            return error
        return None

    def take_error(self, engine_id: str) -> TandemError | None:
        """Returns why the grammar of a request could not be followed, once."""
        return self._errors.pop(engine_id, None)

    # ---- what vLLM calls

    def grammar_init(self, request: Request) -> None:
        """Begins to compile. The request's constraint is ready when its grammar has been compiled. Raises Overloaded.

        Grammar and budget know the tokens of the thinking, so vLLM's own reasoning parsers are not needed.
        """
        params = request.sampling_params
        given: SamplingParams
        given, stop = params.extra_args[CONSTRAINT]
        client, state = client_of(request.cache_salt or ""), None
        grammar = self._grammars.get(given.grammar, client, given.is_grammar_optional)
        if grammar is not None:
            state = grammar.new_state(params.all_stop_token_ids, given.thinking, given.is_grammar_optional, client)
        request.structured_output_request.grammar = Constraint(state, given.thinking, stop)

    def validate_tokens(self, request: Request, drafts: list[int]) -> list[int]:
        """Returns the draft tokens that vLLM may check in the next step: none of a request with a grammar.

        Their masks would take a step of the grammar's process each, which may be in vain.
        """
        return [] if request.use_structured_output else drafts

    def grammar_bitmask(
        self, requests: Mapping[str, Request], engine_ids: list[str], drafts: Mapping[str, list[int]]
    ) -> npt.NDArray[np.int32]:
        """Returns the tokens that may follow, one bit each, int32 [num_rows, num_words].

        A request has a row, and one more for each of its drafts. These are padding, which vLLM refuses
        (`validate_tokens`), so that any token may follow them.

        A request whose grammar fails may get any token, with which `accept_tokens` ends it unless the grammar is
        optional.
        """
        found = [requests[each] for each in engine_ids]
        constraints = list(map(constraint_of, found))
        samples = [
            Sample(
                _NO_PARAMETERS,
                output_token_ids=request.output_token_ids,
                banned_token_ids=constraint.stop.banned(len(request.output_token_ids)),
                grammar=constraint.state,
            )
            for request, constraint in zip(found, constraints, strict=True)
        ]
        states = {row: each.state for row, each in enumerate(constraints) if each.state is not None}
        limits_s = {state.client: _MAX_STEP_CPU_S for state in states.values()}
        masks = compute_masks(samples, list(states), budgets_s=limits_s)
        self._budgets.spend(masks.cpu_s)
        self._errors |= {engine_ids[row]: error.to_error() for row, error in masks.errors.items()}
        for row in masks.late:
            if states[row].is_optional:
                states[row].give_up(TOO_SLOW.message)
            else:
                self._errors[engine_ids[row]] = copy_of(TOO_SLOW)
        num_rows = [1 + len(drafts.get(each, ())) for each in engine_ids]
        starts = np.cumsum([0, *num_rows])
        bits = np.full((starts[-1], self._num_words), _ALL, np.uint32)
        if masks.rows:
            # A tokeniser may have more tokens than the logits.
            bits[starts[masks.rows]] = masks.bits.view(np.uint32)[masks.mask_rows, : self._num_words]
        followed = set(masks.rows)
        for row, sample in enumerate(samples):
            if row not in followed:
                bits[starts[row]] &= ~self._bits(sample.banned_token_ids)
            thinking = constraints[row].thinking
            forced = thinking.forced_token(sample.output_token_ids) if thinking is not None else None
            if forced is not None:
                bits[starts[row]] = self._bits([forced])
        return bits.view(np.int32)

    def _bits(self, token_ids: Collection[int]) -> npt.NDArray[np.uint32]:
        """Returns the bits of these tokens, without those beyond the vocabulary, uint32 [num_words]."""
        bits = np.zeros(self._num_words, np.uint32)
        for token_id in token_ids:
            if token_id < 32 * self._num_words:
                bits[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        return bits

    def accept_tokens(self, request: Request, _: Any) -> bool:
        """Returns whether the request may go on. Its grammar gets the tokens before the next mask."""
        return request.request_id not in self._errors

    def end_idle(self) -> None:
        """Ends processes that are unused for long. Call it on any thread."""
        self._grammars.end_idle()

    def clear_backend(self) -> None:
        """Ends all processes."""
        self._grammars.close()
