"""Answers of /v1/completions."""

from __future__ import annotations

from tandem.protocol.messages.generation import SampledToken
from tandem.proxy.answers.answers import Answers
from tandem.proxy.answers.logprobs import completion_logprobs
from tandem.proxy.api.responses import CompletionChoice, CompletionLogprobs, CompletionResponse
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.dispatch.sequence_text import TextDelta


class CompletionAnswers(Answers):
    _ID_PREFIX = "cmpl"
    _CHUNK = CompletionResponse

    def __init__(self, generation: Generation, model: str) -> None:
        super().__init__(generation, model)
        self._offsets: dict[int, int] = {}  # characters of the tokens so far, by sequence

    def chunk(self, delta: TextDelta) -> bytes:
        if not delta.text and delta.finish_reason is None and not self._shows_tokens:
            return b""
        return self._event([self._choice(delta)], self._chunk_usage())

    def _whole(self, sequences: list[TextDelta]) -> CompletionResponse:
        choices = [self._choice(sequence) for sequence in sequences]
        return CompletionResponse(self._id, self._generation.created, self._model, choices, self._usage())

    def _choice(self, delta: TextDelta) -> CompletionChoice:
        return CompletionChoice(
            delta.index,
            delta.text,
            self._logprobs(delta),
            delta.finish_reason,
            self._token_ids(delta.tokens),
            self._prompt_logprobs(delta.prompt),
        )

    def _logprobs(self, delta: TextDelta) -> CompletionLogprobs | None:
        if self._num_top is None:
            return None
        tokens = delta.tokens[: delta.num_shown]
        if self._request.echo and delta.prompt is not None:
            with_logprobs = zip(delta.prompt.token_ids, [None, *delta.prompt.logprobs], strict=True)
            tokens = [*(SampledToken(token_id, logprobs) for token_id, logprobs in with_logprobs), *tokens]
        offset = self._offsets.get(delta.index, 0)
        self._offsets[delta.index] = offset + sum(len(self._token_text.plain(token.token_id)) for token in tokens)
        return completion_logprobs(self._token_text, tokens, self._num_top, offset)
