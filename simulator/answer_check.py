"""Compares what the client of a simulated cluster gets with the only right answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from tandem.protocol.messages.packed import unpack_logprobs
from tandem.proxy.dispatch.generation import TextDelta
from tandem.simulator.answers import answer_of, prompt_logprobs_of
from tandem.simulator.sampling import after, start_state
from tandem.simulator.scenario import Request
from tandem.telemetry.request_log import RequestRecord


class AnswerCheck:
    """The answer to one request. report(rule, details): called when a rule is broken."""

    def __init__(self, request: Request, report: Callable[[str, str], None]) -> None:
        self._request = request
        self._report = report
        self._answers = [
            answer_of(prompt, request.max_tokens, request.wishes, number)
            for prompt in request.prompts
            for number in range(request.num_sequences)
        ]
        self._num_tokens = [0] * len(self._answers)
        self._num_shown = [0] * len(self._answers)
        self._texts = [""] * len(self._answers)
        self._ended: set[int] = set()

    @property
    def num_open(self) -> int:
        """Number of sequences whose last delta has not come."""
        return len(self._answers) - len(self._ended)

    @property
    def errors(self) -> set[str]:
        """Codes of the errors with which the request may end, because it deserves them."""
        return {answer.error for answer in self._answers if answer.error is not None}

    def num_tokens(self, index: int) -> int:
        """Returns how many tokens of a sequence have come."""
        return self._num_tokens[index]

    def add(self, delta: TextDelta) -> None:
        """Checks the next piece of a sequence."""
        index, answer = delta.index, self._answers[delta.index]
        num_before = self._num_tokens[index]
        num_tokens = self._num_tokens[index] = num_before + len(delta.tokens)
        self._num_shown[index] += delta.num_shown
        self._texts[index] += delta.text
        text = self._texts[index].strip()
        if index in self._ended:
            self._wrong("a delta behind the last one", index, delta.tokens)
        if delta.tokens != (wanted := answer.tokens[num_before:num_tokens]):
            self._wrong("wrong tokens", index, f"{delta.tokens} instead of {wanted} behind {num_before}")
        if not answer.text.strip().startswith(text):
            self._wrong("wrong text", index, f"{text!r} is no part of {answer.text!r}")
        if delta.prompt is not None and self._request.wishes.num_prompt_logprobs is not None:
            prompt = self._request.prompts[index // self._request.num_sequences]
            logprobs = [each for piece in delta.prompt.logprobs for each in unpack_logprobs(piece)]
            if logprobs != prompt_logprobs_of(prompt, self._request.wishes):
                self._wrong("wrong logprobs of a prompt", index, f"{len(logprobs)} of {len(prompt)} tokens")
        if delta.finish_reason is None:
            return
        self._ended.add(index)
        if answer.error is not None:
            self._wrong("an error is not told", index, answer.error)
        if num_tokens != len(answer.tokens):
            self._wrong("a short answer", index, f"{num_tokens} of {len(answer.tokens)} tokens")
        end = delta.finish_reason, delta.stop_reason, text, self._num_shown[index]
        num_hidden = answer.finish_reason == "stop" and not isinstance(answer.stop_reason, str)
        if end != (
            wanted_end := (answer.finish_reason, answer.stop_reason, answer.text.strip(), num_tokens - num_hidden)
        ):
            self._wrong("a wrong end", index, f"{end} instead of {wanted_end}")

    def check_usage(self, record: RequestRecord, num_cached_tokens: Mapping[str, int]) -> None:
        """Checks the counts of a request that is answered.

        num_cached_tokens: found in caches, by attempt. It is not known of which attempt a client gets the figure if
        there were several.
        """
        counts = record.num_prompt_tokens, record.num_completion_tokens
        wanted = sum(map(len, self._request.prompts)), sum(len(answer.tokens) for answer in self._answers)
        if counts != wanted:
            self._report("wrong usage", f"request {self._request.number}: {counts} tokens instead of {wanted}")
        if len(record.sequences) < len(self._answers):
            return  # it names the first ones only
        attempts = [each._attempts for each in record.sequences[:: self._request.num_sequences]]
        if all(len(of_prompt) == 1 for of_prompt in attempts):
            found = sum(num_cached_tokens[of_prompt[0].attempt_id] for of_prompt in attempts)
            if record.num_cached_tokens != found:
                details = f"request {self._request.number}: {record.num_cached_tokens} cached tokens, {found} were"
                self._report("wrong usage", details)

    def sequences(self) -> list[list[int]]:
        """Returns the tokens of all sequences, each with its prompt."""
        return [
            [*self._request.prompts[index // self._request.num_sequences], *answer.token_ids]
            for index, answer in enumerate(self._answers)
        ]

    def _wrong(self, rule: str, index: int, details: object) -> None:
        self._report(rule, f"request {self._request.number}, sequence {index}: {details}")


class KnownPrefixes:
    """The prefixes that workers may have cached: of what was sent before with the same salt and adapter."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._owners: defaultdict[tuple[str, int], set[int]] = defaultdict(set)  # requests by salt and state

    def add(self, request: Request, check: AnswerCheck, block_size: int) -> bool:
        """Notes the prefixes of a request and of its answers. Returns whether it is the first time."""
        is_first = True
        for token_ids in check.sequences():
            for state in _block_states(token_ids, request.wishes.adapter, block_size):
                owners = self._owners[request.wishes.salt, state]
                is_first = is_first and request.number not in owners
                if len(owners) < 2:
                    owners.add(request.number)
        return is_first

    def check(self, request: Request, num_cached_tokens: int, block_size: int) -> None:
        """Checks how many tokens of a request's only prompt, computed for the first time, were found in caches."""
        limit = 0
        for state in _block_states(request.prompt, request.wishes.adapter, block_size):
            if self._owners[request.wishes.salt, state] <= {request.number}:
                break
            limit += block_size
        if num_cached_tokens > limit:
            details = f"request {request.number}: {num_cached_tokens} tokens, {limit} were computed before"
            self._report("a prefix was found in a cache that never was there", details)


def _block_states(token_ids: list[int] | tuple[int, ...], adapter: str, block_size: int) -> list[int]:
    """Returns the state behind each full block."""
    state, states = start_state(adapter), list[int]()
    for number, token_id in enumerate(token_ids, start=1):
        state = after(state, token_id)
        if number % block_size == 0:
            states.append(state)
    return states
