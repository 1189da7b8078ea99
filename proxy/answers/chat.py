"""Answers of /v1/chat/completions without tools."""

from __future__ import annotations

from tandem.proxy.answers.answers import Answers
from tandem.proxy.answers.logprobs import chat_logprobs
from tandem.proxy.api.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
)
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.dispatch.sequence_text import TextDelta

_NO_CONTENT = ChatDelta()


class ChatAnswers(Answers):
    _ID_PREFIX = "chatcmpl"
    _CHUNK = ChatCompletionChunk

    def __init__(self, generation: Generation, model: str) -> None:
        super().__init__(generation, model)
        self._begun: set[int] = set()  # sequences whose role was sent

    def chunk(self, delta: TextDelta) -> bytes:
        """Returns the events for one delta. The first chunk of a choice holds its role, as in OpenAI's API."""
        events = b""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            events = self._event([ChatChunkChoice(delta.index, ChatDelta("assistant", ""))], self._chunk_usage())
        content, finish_reason = self._content(delta)
        if content == _NO_CONTENT and finish_reason is None and not self._shows_tokens:
            return events
        logprobs, token_ids = self._logprobs(delta), self._token_ids(delta.tokens)
        choice = ChatChunkChoice(delta.index, content, finish_reason, logprobs, token_ids)
        return events + self._event([choice], self._chunk_usage())

    def _whole(self, sequences: list[TextDelta]) -> ChatCompletionResponse:
        choices = []
        for sequence in sequences:
            message, finish_reason = self._message(sequence)
            logprobs, token_ids = self._logprobs(sequence), self._token_ids(sequence.tokens)
            choices.append(ChatChoice(sequence.index, message, finish_reason, logprobs, token_ids))
        return ChatCompletionResponse(
            self._id,
            self._generation.created,
            self._model,
            choices,
            self._usage(),
            self._prompt_logprobs(sequences[0].prompt),
        )

    def _content(self, delta: TextDelta) -> tuple[ChatDelta, ChatFinishReason | None]:
        """Returns what a chunk shows of a delta."""
        return ChatDelta(content=delta.text) if delta.text else _NO_CONTENT, delta.finish_reason

    def _message(self, sequence: TextDelta) -> tuple[AssistantMessage, ChatFinishReason | None]:
        """Returns what a whole answer shows of a sequence."""
        return AssistantMessage(sequence.text), sequence.finish_reason

    def _logprobs(self, delta: TextDelta) -> ChatLogprobs | None:
        if self._num_top is None:
            return None
        return chat_logprobs(self._token_text, delta.tokens[: delta.num_shown], self._num_top)
