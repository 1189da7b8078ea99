"""The prompts of the prefill role, by state and by the ids that messages name. Pure."""

from __future__ import annotations

from collections import Counter

from tandem.prefill_worker.prompt import PrefillPrompt
from tandem.protocol.messages.dispatch import StartPrefill


class PromptTable:
    """Prompts from their arrival until their blocks are released."""

    def __init__(self) -> None:
        self.waiting: dict[int, PrefillPrompt] = {}  # by number, in order of arrival
        self.computing: dict[int, PrefillPrompt] = {}
        self.by_attempt: dict[tuple[str, str], PrefillPrompt] = {}  # open attempts, by proxy and attempt id
        self.by_transfer: dict[str, PrefillPrompt] = {}  # all prompts

    @property
    def num_running(self) -> int:
        return len(self.by_transfer) - len(self.waiting)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def is_idle(self) -> bool:
        return not self.by_transfer

    def waiting_tokens(self) -> list[tuple[int, int]]:
        """Returns the prompt tokens still to be computed, as (priority, tokens)."""
        tokens: Counter[int] = Counter()
        for prompt in (*self.waiting.values(), *self.computing.values()):
            tokens[prompt.request.priority] += prompt.num_remaining_tokens
        return sorted(tokens.items())

    def holds(self, request: StartPrefill) -> bool:
        """Whether the transfer or an attempt of the request is known already."""
        keys = ((request.proxy_id, attempt_id) for attempt_id in request.attempt_ids)
        return request.transfer_id in self.by_transfer or any(key in self.by_attempt for key in keys)

    def add(self, prompt: PrefillPrompt) -> None:
        request = prompt.request
        self.by_attempt.update({(request.proxy_id, attempt_id): prompt for attempt_id in request.attempt_ids})
        self.by_transfer[request.transfer_id] = prompt
        self.waiting[prompt.number] = prompt

    def begin(self, prompt: PrefillPrompt) -> None:
        """Moves a waiting prompt to those that compute."""
        del self.waiting[prompt.number]
        self.computing[prompt.number] = prompt

    def end_attempt(self, proxy_id: str, attempt_id: str) -> PrefillPrompt | None:
        """Forgets an open attempt and returns its prompt; None if it is not known."""
        prompt = self.by_attempt.pop((proxy_id, attempt_id), None)
        if prompt is not None:
            prompt.open_ids.discard(attempt_id)
        return prompt

    def forget(self, prompt: PrefillPrompt) -> None:
        for attempt_id in prompt.open_ids:
            self.by_attempt.pop((prompt.request.proxy_id, attempt_id), None)
        del self.by_transfer[prompt.request.transfer_id]

    def of_proxy(self, proxy_id: str) -> list[PrefillPrompt]:
        return [prompt for prompt in self.by_transfer.values() if prompt.request.proxy_id == proxy_id]

    def late(self, now: float) -> list[PrefillPrompt]:
        """Returns the prompts whose deadline has passed."""
        return [prompt for prompt in self.by_transfer.values() if not prompt.ended and now >= prompt.late_at]
