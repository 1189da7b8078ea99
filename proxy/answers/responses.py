"""Answers of OpenAI's Responses API."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import msgspec
from msgspec.structs import replace

from tandem.proxy.answers.chat import ParsedAnswers
from tandem.proxy.answers.errors import status_of
from tandem.proxy.answers.json_parts import Part, encode
from tandem.proxy.answers.messages import encode_event
from tandem.proxy.api.responses_api.response_store import ResponseStore, StoredResponse
from tandem.proxy.api.responses_api.responses_answer import (
    RESPONSE_ID_PREFIX,
    ArgumentsDone,
    ArgumentsPiece,
    CustomCallItem,
    CustomInputDone,
    CustomInputPiece,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemAdded,
    ItemDone,
    ItemEvent,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTextDone,
    OutputTextPiece,
    OutputTokensDetails,
    PartAdded,
    PartDone,
    ReasoningDone,
    ReasoningItem,
    ReasoningPiece,
    ReasoningText,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseFailure,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseObject,
    ResponseUsage,
    item_id,
)
from tandem.proxy.api.responses_api.responses_request import CalledTool
from tandem.proxy.dispatch.generation import Generation, TextDelta
from tandem.proxy.parsers.parsed import Parsed
from tandem.proxy.text.tool_calls import new_call_id
from tandem.runtime.errors import TandemError

log = logging.getLogger("proxy")

MAX_SEPARATE_ITEMS = 256
"""Items of text and thinking in one answer. After them all text, also thinking, goes to messages, so that an answer
that alternates between the two does not become an item for every few tokens. `MAX_TOOL_CALLS` bounds the calls."""
_ITEM_BYTES = 1024
"""Memory of an item besides its text."""


class ItemWriter:
    """Makes the events of output items from parsed text, and keeps the items. Only one item is open at a time."""

    def __init__(
        self, called: Mapping[str, CalledTool] | None = None, response_id: str = "", has_short_ids: bool = False
    ) -> None:
        """called: what the answer calls functions, by the names that the model knows, where it is not the same.

        has_short_ids: see `tool_calls.new_call_id`.
        """
        self._called = called or {}
        self._has_short_ids = has_short_ids
        self._response_id = response_id
        self._items: list[OutputItem] = []
        self._pieces: list[str] = []  # of the open item, not added to its text yet
        self._num_separate = 0  # items of text and thinking
        self._open: str | int | None = None  # "reasoning", "message" or the number of a call

    @property
    def items(self) -> list[OutputItem]:
        """All items. Joins the text of the open one, so it is not for each piece."""
        self._join()
        return self._items

    @property
    def num_items(self) -> int:
        return len(self._items)

    def push(self, parsed: Parsed) -> Iterator[ItemEvent]:
        if parsed.reasoning:
            yield from self._begin("reasoning" if self._num_separate < MAX_SEPARATE_ITEMS else "message", parsed)
            yield from self._grow(parsed.reasoning)
        if parsed.content:
            yield from self._begin("message", parsed)
            yield from self._grow(parsed.content)
        for number in sorted(parsed.names.keys() | parsed.arguments.keys()):
            if number in parsed.names:
                yield from self._begin(number, parsed)
            arguments = parsed.arguments.get(number)
            if arguments and self._open == number:
                yield from self._grow(arguments)

    def end(self, status: ItemStatus = "completed") -> Iterator[ItemEvent]:
        """Ends the item that is open."""
        if self._open is None:
            return
        self._open = None
        self._join()
        item, index = self._items[-1], len(self._items) - 1
        item.status = status
        match item:
            case FunctionCallItem():
                yield ArgumentsDone(item_id=item.id, output_index=index, name=item.name, arguments=item.arguments)
            case CustomCallItem():
                yield CustomInputDone(item_id=item.id, output_index=index, input=item.input)
            case OutputMessage(content=[part]):
                yield OutputTextDone(item_id=item.id, output_index=index, text=part.text)
                yield PartDone(item_id=item.id, output_index=index, part=part)
            case ReasoningItem(content=[thought]):
                yield ReasoningDone(item_id=item.id, output_index=index, text=thought.text)
                yield PartDone(item_id=item.id, output_index=index, part=thought)
        yield ItemDone(output_index=index, item=item)

    def _begin(self, kind: str | int, parsed: Parsed) -> Iterator[ItemEvent]:
        if self._open == kind:
            return
        yield from self.end()
        self._open = kind
        index = len(self._items)
        if isinstance(kind, int):
            call_id = parsed.ids.get(kind) or new_call_id("call_", self._has_short_ids)
            name = parsed.names[kind]
            tool = self._called.get(name) or CalledTool(name)
            item: FunctionCallItem | CustomCallItem
            if tool.is_custom:
                item = CustomCallItem(self._new_id("ctc"), call_id, tool.name, namespace=tool.namespace)
            else:
                item = FunctionCallItem(self._new_id("fc"), call_id, tool.name, namespace=tool.namespace)
            self._items.append(item)
            yield ItemAdded(output_index=index, item=item)
            return
        self._num_separate += 1
        if kind == "message":
            message = OutputMessage(self._new_id("msg"))
            self._items.append(message)
            yield ItemAdded(output_index=index, item=message)
            message.content = [OutputText()]
            yield PartAdded(item_id=message.id, output_index=index, part=message.content[0])
        else:
            thinking = ReasoningItem(self._new_id("rs"))
            self._items.append(thinking)
            yield ItemAdded(output_index=index, item=thinking)
            thinking.content = [ReasoningText()]
            yield PartAdded(item_id=thinking.id, output_index=index, part=thinking.content[0])

    def _new_id(self, kind: str) -> str:
        return item_id(kind, len(self._items), self._response_id)

    def _grow(self, text: str) -> Iterator[ItemEvent]:
        self._pieces.append(text)
        item, index = self._items[-1], len(self._items) - 1
        match item:
            case FunctionCallItem():
                yield ArgumentsPiece(item_id=item.id, output_index=index, delta=text)
            case CustomCallItem():
                yield CustomInputPiece(item_id=item.id, output_index=index, delta=text)
            case OutputMessage():
                yield OutputTextPiece(item_id=item.id, output_index=index, delta=text)
            case ReasoningItem():
                yield ReasoningPiece(item_id=item.id, output_index=index, delta=text)

    def _join(self) -> None:
        """Adds the pieces to the item's text, all at once: added one by one, they would take quadratic time."""
        if not self._pieces:
            return
        text, self._pieces = "".join(self._pieces), []
        match self._items[-1]:
            case FunctionCallItem() as call:
                call.arguments += text
            case CustomCallItem() as custom:
                custom.input += text
            case OutputMessage(content=[part]) | ReasoningItem(content=[part]):
                part.text += text


class ResponseAnswers(ParsedAnswers):
    END: ClassVar[bytes] = b""

    def __init__(self, generation: Generation, model: str, store: ResponseStore | None, cache_scope: str) -> None:
        """cache_scope: of the client's API key. store: None keeps no responses."""
        super().__init__(generation, model)
        self._id = RESPONSE_ID_PREFIX + generation.record.request_id
        self._store, self._scope = store, cache_scope
        assert self._request.response is not None
        self._options = self._request.response
        self._writer = ItemWriter(self._options.called, self._id, self._request.has_short_call_ids)
        self._num_events = 0
        self._is_incomplete = False

    async def whole(self) -> list[Part]:
        parts = await super().whole()
        try:
            await self._save(b"".join(parts))
        except BaseException:
            self.release()
            raise
        return parts

    def chunk(self, delta: TextDelta) -> Iterable[bytes]:
        if not self._has_begun:
            self._has_begun = True
            self._hold_shown()
            yield self._encoded(ResponseCreated(self._object("in_progress")))
            yield self._encoded(ResponseInProgress(self._object("in_progress")))
        self._held.grow(len(delta.text.encode()))  # the last event repeats the text
        num_items = self._writer.num_items
        parsed, finish_reason = self._parse(delta)
        for event in self._writer.push(parsed):
            yield self._encoded(event)
        self._held.grow(_ITEM_BYTES * (self._writer.num_items - num_items))
        if finish_reason is not None:
            for event in self._ended(finish_reason):
                yield self._encoded(event)

    async def _ending(self) -> bytes:
        response = self._object("incomplete" if self._is_incomplete else "completed")
        await self._save(encode(response))
        return self._encoded((ResponseIncomplete if self._is_incomplete else ResponseCompleted)(response))

    def _error_event(self, error: TandemError) -> bytes:
        status = status_of(error)
        code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = "server_error"
        if status < 500:
            code = "rate_limit_exceeded" if status == 429 else "invalid_prompt"
        failure = ResponseFailure(code, error.for_client)
        return self._encoded(ResponseFailed(replace(self._object("failed"), error=failure)))

    def _hold_shown(self) -> None:
        """Counts what the answer repeats of the request, such as tools."""
        self._held.grow(sum(map(len, self._options.shown.values())))

    def _whole(self, choices: list[Any]) -> list[Part]:
        [choice] = choices
        self._hold_shown()
        parsed, _ = choice.parsed()
        for _ in self._writer.push(parsed):
            pass
        for _ in self._ended(choice.finish_reason):
            pass
        return [encode(self._object("incomplete" if self._is_incomplete else "completed"))]

    def _ended(self, finish_reason: str) -> Iterator[ItemEvent]:
        self._is_incomplete = finish_reason == "length"
        return self._writer.end("incomplete" if self._is_incomplete else "completed")

    def _encoded(self, event: ResponseEvent) -> bytes:
        event.sequence_number = self._num_events
        self._num_events += 1
        return encode_event(event)

    def _object(self, status: Literal["in_progress", "completed", "incomplete", "failed"]) -> ResponseObject:
        has_ended = status in ("completed", "incomplete")
        shown: dict[str, Any] = {name: msgspec.Raw(value) for name, value in self._options.shown.items()}
        return ResponseObject(
            id=self._id,
            created_at=self._generation.created,
            model=self._model,
            output=self._writer.items,
            status=status,
            completed_at=int(time.time()) if has_ended else None,
            incomplete_details=IncompleteDetails() if self._is_incomplete else None,
            usage=self._response_usage() if has_ended else None,
            store=self._options.store,
            **shown,
        )

    def _response_usage(self) -> ResponseUsage:
        record = self._generation.record
        num_input, num_output = record.num_prompt_tokens, record.num_completion_tokens
        return ResponseUsage(
            num_input,
            InputTokensDetails(record.num_cached_tokens),
            num_output,
            OutputTokensDetails(self._num_reasoning()),
            num_input + num_output,
        )

    async def _save(self, response: bytes) -> None:
        """Keeps the response if it is to be stored. Without room it is not kept, which is logged."""
        if self._store is None or not self._options.store:
            return
        stored = StoredResponse(response, self._options.input, self._options.previous_response_id or "")
        save = partial(self._store.save, self._scope, self._id, stored)
        try:
            if not await self._store.threads.run(save):
                log.warning("the response %s is too large to be stored", self._id)
        except OSError as error:
            log.error("cannot store the response %s: %s", self._id, error.strerror)
