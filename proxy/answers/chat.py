"""Answers of /v1/chat/completions without tools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tandem.protocol.messages.generation import SampledToken
from tandem.proxy.admission.answer_budget import HeldAnswer
from tandem.proxy.answers.answers import Answers, Choice
from tandem.proxy.answers.json_parts import Holes, JsonArray, Part
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


class _Choice(Choice):
    def __init__(self, index: int, held: HeldAnswer) -> None:
        super().__init__(index, None, held)
        self.logprobs = JsonArray(held.grow)


class ChatAnswers(Answers):
    _ID_PREFIX = "chatcmpl"
    _CHUNK = ChatCompletionChunk

    def __init__(self, generation: Generation, model: str) -> None:
        super().__init__(generation, model)
        self._begun: set[int] = set()  # sequences whose role was sent

    def chunk(self, delta: TextDelta) -> Iterable[bytes]:
        """Returns the events for one delta. The first chunk of a choice holds its role, as in OpenAI's API."""
        events = b""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            events = self._event([ChatChunkChoice(delta.index, ChatDelta("assistant", ""))], self._chunk_usage())
        content, finish_reason = self._content(delta)
        if content == _NO_CONTENT and finish_reason is None and not self._shows_tokens:
            return (events,) if events else ()
        logprobs, token_ids = self._logprobs(delta), self._token_ids(delta.tokens)
        choice = ChatChunkChoice(delta.index, content, finish_reason, logprobs, token_ids)
        return (events + self._event([choice], self._chunk_usage()),)

    def _new_choice(self, index: int) -> _Choice:
        return _Choice(index, self._held)

    def _add_logprobs(self, choice: _Choice, tokens: list[SampledToken]) -> None:
        assert self._num_top is not None
        choice.logprobs.extend(chat_logprobs(self._token_text, tokens, self._num_top).content)

    def _whole(self, choices: list[_Choice]) -> list[Part]:
        holes = Holes()
        shown = []
        for choice in choices:
            message, finish_reason = self._message(choice, holes)
            logprobs: Any = None if self._num_top is None else ChatLogprobs(holes.array(choice.logprobs))
            shown.append(ChatChoice(choice.index, message, finish_reason, logprobs, self._token_id_hole(choice, holes)))
        return holes.fill(
            ChatCompletionResponse(
                self._id,
                self._generation.created,
                self._model,
                shown,
                self._usage(),
                self._prompt_logprobs_hole(self._prompt_of(0), holes),
            )
        )

    def _content(self, delta: TextDelta) -> tuple[ChatDelta, ChatFinishReason | None]:
        """Returns what a chunk shows of a delta."""
        return ChatDelta(content=delta.text) if delta.text else _NO_CONTENT, delta.finish_reason

    def _message(self, choice: Choice, holes: Holes) -> tuple[AssistantMessage, ChatFinishReason | None]:
        """Returns what a whole answer shows of a choice's text, and why the choice ends."""
        return AssistantMessage(holes.text(choice.text)), choice.finish_reason

    def _logprobs(self, delta: TextDelta) -> ChatLogprobs | None:
        if self._num_top is None:
            return None
        return chat_logprobs(self._token_text, delta.tokens[: delta.num_shown], self._num_top)
