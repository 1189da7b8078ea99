"""What vLLM's scheduler may put into a step, so that one client's requests do not take all of it.

vLLM computes the requests of a step by priority and age, whatever they cost and whose they are. Here some wait before
they reach its scheduler (`HeldRequests`), and some that run skip a step: those whose adapter has no turn, and those
whose client's grammars have taken too long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.request import Request

from tandem.protocol.prefix_hash import client_of
from tandem.vllm_worker.engine.held_requests import MAX_CLIENT_ROWS, ROWS_PER_PROMPT, HeldRequests, Share
from tandem.vllm_worker.engine.vllm_grammars import VllmGrammars
from tandem.vllm_worker.engine.vllm_sampling import wants_prompt_logprobs
from tandem.vllm_worker.scheduler.engine_orders import AddRequest

Held = tuple[AddRequest, list[bytes]]
"""An order, and the hashes of its blocks."""


class StepShares:
    """Of the engine's thread. waiting: requests that have begun and wait for their grammars to compile."""

    def __init__(self, scheduler: Any, waiting: Mapping[str, Request], grammars: VllmGrammars) -> None:
        self._scheduler = scheduler
        self._waiting = waiting
        self._grammars = grammars
        lora_config = scheduler.lora_config
        self._held: HeldRequests[Held] = HeldRequests(lora_config.max_loras if lora_config is not None else 1)
        self._clients: dict[str, str] = {}  # of requests in vLLM's scheduler with an adapter or prompt logprobs
        self._max_rows = ROWS_PER_PROMPT
        # vLLM has one limit on chunks for all requests, but lets this method shorten the chunk of each.
        self._shorten = scheduler._reserve_prefill_lookahead
        scheduler._reserve_prefill_lookahead = self._shortened

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def may_change(self) -> bool:
        """Whether a request may compute later that cannot now."""
        return bool(self._held or self._clients or self._scheduler.running)

    def must_wait(self, order: AddRequest, hashes: list[bytes], now: float) -> bool:
        """Whether the order waits until `take` returns it.

        One whose KV comes from another worker never does: that worker keeps blocks for it.
        """
        message = order.message
        num_rows = len(order.token_ids) if wants_prompt_logprobs(message, order.number, order.num_generated) else 0
        adapter = message.adapter.digest if message.adapter is not None else None
        if adapter is None and not num_rows:
            return False
        client = client_of(message.cache_salt)
        if order.receives:
            self._clients[order.engine_id] = client
            return False
        self._held.hold(order.engine_id, message.priority, Share(client, adapter, num_rows), (order, hashes), now)
        return True

    def forget(self, engine_id: str) -> None:
        """Drops an order that waits."""
        self._held.forget(engine_id)

    def take(self, now: float) -> list[Held]:
        """Returns orders to carry out before the next step, and lets requests skip it."""
        for request in self._grammars.too_slow_now(now, self._scheduler.running):
            self._skip_step(request)
        if not self._held and not self._clients:
            return []
        found = {each: self._scheduler.requests.get(each) or self._waiting.get(each) for each in self._clients}
        active = {each: request for each, request in found.items() if request and not request.is_finished()}
        self._clients = {each: self._clients[each] for each in active}
        shares = {each: self._share(each, request) for each, request in active.items()}
        taken = self._held.take(now, shares.values())
        for order, _ in taken:
            self._clients[order.engine_id] = client_of(order.message.cache_salt)
        for engine_id, request in active.items():
            adapter = shares[engine_id].adapter
            if adapter is not None and adapter not in self._held.adapters:
                self._skip_step(request)
        num_with_rows = sum(share.num_rows > 0 for share in shares.values()) + sum(
            wants_prompt_logprobs(order.message, order.number, order.num_generated) for order, _ in taken
        )
        self._max_rows = ROWS_PER_PROMPT if num_with_rows > 1 else MAX_CLIENT_ROWS
        return taken

    def _skip_step(self, request: Request) -> None:
        request.next_decode_eligible_step = self._scheduler.current_step + 2  # it counts before it looks at requests

    def _share(self, engine_id: str, request: Request) -> Share:
        lora, params = request.lora_request, request.sampling_params
        num_rows = request.num_prompt_tokens - request.num_computed_tokens if params.prompt_logprobs is not None else 0
        return Share(self._clients[engine_id], lora.lora_name if lora is not None else None, max(0, num_rows))

    def _shortened(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Returns the size of the request's next chunk, which is short while it has rows."""
        params = request.sampling_params
        if (
            params is not None
            and params.prompt_logprobs is not None
            and num_computed_tokens < request.num_prompt_tokens
        ):
            num_new_tokens = min(num_new_tokens, self._max_rows)
        return int(self._shorten(request, num_computed_tokens, num_new_tokens))
