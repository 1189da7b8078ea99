"""Answers of /v1/chat/completions without tools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import UNSET

from tandem.protocol.messages.sampling import SampledToken
from tandem.proxy.admission.answer_budget import HeldAnswer
from tandem.proxy.answers.answers import Answers, Choice
from tandem.proxy.answers.json_parts import Holes, JsonArray, JsonText, Part, pieces
from tandem.proxy.answers.logprobs import chat_logprobs
from tandem.proxy.api.answer_bodies import (
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

_NO_CONTENT, _EMPTY = ChatDelta(), ChatDelta(content="")


class EncodedChatChoice(Choice):
    def __init__(self, index: int, held: HeldAnswer) -> None:
        super().__init__(index, None, held)
        self.logprobs = JsonArray(held.grow)


class ChatAnswers(Answers):
    _ID_PREFIX = "chatcmpl"
    _CHUNK = ChatCompletionChunk

    def __init__(self, generation: Generation, model: str) -> None:
        super().__init__(generation, model)
        self._has_begun = False

    def chunk(self, delta: TextDelta) -> Iterable[bytes]:
        """Returns the events for one delta. A stream begins with a chunk for each choice that holds its role."""
        if not self._has_begun:
            self._has_begun = True
            yield from pieces(self._beginning(delta.index))
        content, finish_reason = self._content(delta)
        if content in (_NO_CONTENT, _EMPTY) and finish_reason is None and not self._shows_tokens:
            return
        choice = ChatChunkChoice(
            delta.index,
            content,
            finish_reason,
            self._logprobs(delta),
            self._token_ids(delta.tokens),
            UNSET if finish_reason is None else delta.stop_reason,
        )
        yield self._event([choice], self._chunk_usage(delta.index))

    def _beginning(self, first: int) -> list[Part]:
        """Returns the events before the first token. first: index of the sequence that has it."""
        parts: list[Part] = []
        for each in range(self._request.n):
            holes = Holes()
            choice = ChatChunkChoice(each, ChatDelta(self._request.role, ""))
            chunk = ChatCompletionChunk(
                self._id,
                self._generation.created,
                self._model,
                [choice],
                self._chunk_usage(each, 0),
                self._prompt_id_hole(self._prompt_of(first), holes),
            )
            parts += [b"data: ", *holes.fill(chunk), b"\n\n"]
        for each in range(self._request.n):
            if self._request.prefix:
                choice = ChatChunkChoice(each, ChatDelta(content=self._request.prefix))
                parts.append(self._event([choice], self._chunk_usage(each, 0)))
        return parts

    def _new_choice(self, index: int) -> EncodedChatChoice:
        return EncodedChatChoice(index, self._held)

    def _add_logprobs(self, choice: EncodedChatChoice, tokens: list[SampledToken], begins: bool) -> None:
        assert self._num_top is not None
        choice.logprobs.extend(chat_logprobs(self._token_text, tokens, self._num_top, begins).content)

    def _whole(self, choices: list[EncodedChatChoice]) -> list[Part]:
        holes = Holes()
        shown = []
        for choice in choices:
            message, finish_reason = self._message(choice, holes)
            logprobs: Any = None if self._num_top is None else ChatLogprobs(holes.array(choice.logprobs))
            token_ids = self._token_id_hole(choice, holes)
            shown.append(ChatChoice(choice.index, message, finish_reason, logprobs, choice.stop_reason, token_ids))
        return holes.fill(
            ChatCompletionResponse(
                self._id,
                self._generation.created,
                self._model,
                shown,
                self._usage(),
                self._prompt_logprobs_hole(self._prompt_of(0), holes),
                self._prompt_id_hole(self._prompt_of(0), holes),
            )
        )

    def _content(self, delta: TextDelta) -> tuple[ChatDelta, ChatFinishReason | None]:
        """Returns what a chunk shows of a delta."""
        return ChatDelta(content=delta.text), delta.finish_reason

    def _message(self, choice: Choice, holes: Holes) -> tuple[AssistantMessage, ChatFinishReason | None]:
        """Returns what a whole answer shows of a choice's text, and why the choice ends."""
        texts = [JsonText(self._held.grow), choice.text]
        texts[0].push(self._request.prefix)
        return AssistantMessage(holes.text(*texts), self._request.role), choice.finish_reason

    def _logprobs(self, delta: TextDelta) -> ChatLogprobs | None:
        if self._num_top is None:
            return None
        return chat_logprobs(self._token_text, delta.tokens[: delta.num_shown], self._num_top, delta.begins_text)
