"""Grammars of vLLM's requests, each in a process of its own, as those of Tandem's engine (`engine.sampling.grammars`).

vLLM compiles and follows them in the engine's process, where nothing bounds the time of a mask, and lets a request
whose grammar fails go on without it.

A request that is in a step of vLLM must get its mask there. So those that are expected to exceed their client's share
of the time skip the step beforehand (`too_slow_now`), and those that exceed it by far in the step end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.request import Request

from tandem.engine.batch import Sample
from tandem.engine.sampling.grammar import TOO_SLOW, GrammarState, copy_of
from tandem.engine.sampling.grammar_mask import MaskBudgets, compute_masks, fitting
from tandem.engine.sampling.grammar_messages import Mask
from tandem.engine.sampling.grammars import Grammars
from tandem.protocol.messages.sampling import SamplingParams
from tandem.protocol.prefix_hash import client_of
from tandem.runtime.errors import TandemError
from tandem.vllm_worker.engine.vllm_sampling import GRAMMAR_OPTIONS

_NO_PARAMETERS = SamplingParams()
_MAX_STEP_CPU_S = 2.0
"""Processor time that the masks of a client, and of one grammar, may take in a step, whatever was expected of them."""


class VllmGrammars:
    """Takes the place of vLLM's StructuredOutputManager. Call it on the engine's thread.

    model: a folder or a hub id. vocab_size: of the logits. on_compiled: called after each compilation, on
    another thread.
    """

    def __init__(self, model: str, vocab_size: int, on_compiled: Callable[[], object]) -> None:
        self._grammars = Grammars(model, vocab_size, on_compiled)
        self._num_words = -(-vocab_size // 32)
        self._errors: dict[str, TandemError] = {}
        self._budgets = MaskBudgets()

    def too_slow_now(self, now: float, running: Sequence[Request]) -> list[Request]:
        """Returns the requests that must skip the next step, because their clients' masks have taken too long.

        running: all requests of the next step, but for those that begin in it.
        """
        states = {
            id(each.structured_output_request.grammar): each
            for each in running
            if each.use_structured_output and not each.structured_output_request.grammar.has_failed
        }
        if not states:
            return []
        by_client: dict[str, list[tuple[GrammarState, Request]]] = {}
        for request in states.values():
            state = request.structured_output_request.grammar
            by_client.setdefault(state.client, []).append((state, request))
        budgets_s = self._budgets.begin_step(now, by_client.keys(), len(states) < len(running))
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
        state = request.structured_output_request.grammar
        if state.is_optional:
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
        """Begins to compile. The request's state is ready when it has been compiled. Raises Overloaded.

        The state frees the tokens of the thinking, so vLLM's own reasoning parsers are not needed.
        """
        params = request.sampling_params
        thinking, is_optional = params.extra_args[GRAMMAR_OPTIONS]
        client = client_of(request.cache_salt or "")
        grammar = self._grammars.get(params.structured_outputs.grammar, client, is_optional)
        assert grammar is not None
        state = grammar.new_state(params.all_stop_token_ids, thinking, is_optional, client)
        request.structured_output_request.grammar = state

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
        samples = [
            Sample(
                _NO_PARAMETERS, output_token_ids=each.output_token_ids, grammar=each.structured_output_request.grammar
            )
            for each in found
        ]
        limits_s = {each.structured_output_request.grammar.client: _MAX_STEP_CPU_S for each in found}
        masks = compute_masks(samples, list(range(len(samples))), budgets_s=limits_s)
        self._budgets.spend(masks.cpu_s)
        self._errors |= {engine_ids[row]: error.to_error() for row, error in masks.errors.items()}
        for row in masks.late:
            state = found[row].structured_output_request.grammar
            if state.is_optional:
                state.give_up(TOO_SLOW.message)
            else:
                self._errors[engine_ids[row]] = copy_of(TOO_SLOW)
        num_rows = [1 + len(drafts.get(each, ())) for each in engine_ids]
        starts = np.cumsum([0, *num_rows])
        bits = np.full((starts[-1], self._num_words), -1, np.int32)
        if masks.rows:
            # A tokeniser may have more tokens than the logits.
            bits[starts[masks.rows]] = masks.bits.view(np.int32)[masks.mask_rows, : self._num_words]
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
