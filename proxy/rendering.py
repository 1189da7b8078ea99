"""Prompts to token ids, on a pool of threads: templates, tokenising, checking, packing. Never on the event loop.

`encode_batch_fast` releases the GIL (`encode` holds it throughout). No state of the tokeniser is
changed, so threads share it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from protocol.errors import InvalidRequest
from protocol.token_ids import pack_token_ids
from proxy.dispatcher import Prompt
from proxy.model_text import ModelText
from proxy.registry import ModelLimits

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]

_PROBE_CHARACTERS_PER_TOKEN = 8
"""A text over twice `max_model_len` times this is first tried by that much of it: few texts are denser than half."""
_PROBE_SLACK_TOKENS = 16
"""Cutting a text may change the tokens around the cut, so the probe must be over the limit by more than that."""


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or prompt and output together, do not fit the model."""

    code = "context_length_exceeded"


class ChatPrompt(msgspec.Struct, frozen=True):
    """messages: as the template takes them, content flattened to text. The template writes its own special tokens."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    add_special_tokens: bool = False


class CompletionPrompt(msgspec.Struct, frozen=True):
    """json: the request's `prompt` as it came. It may hold a million ids, so that decoding it is left to a thread."""

    json: msgspec.Raw
    add_special_tokens: bool = True


class Renderer:
    def __init__(self, text: ModelText, num_threads: int) -> None:
        self._text = text
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="render")

    async def render(
        self, prompt: ChatPrompt | CompletionPrompt, limits: ModelLimits, max_tokens: int | None = None
    ) -> list[Prompt]:
        """One prompt for a chat, one or more for a completion.

        max_tokens: longer prompts lose their beginning; None refuses those that do not fit. Raises InvalidRequest.
        """
        loop = asyncio.get_running_loop()
        add_special_tokens = prompt.add_special_tokens
        if isinstance(prompt, ChatPrompt):
            return [await loop.run_in_executor(self._threads, self._render_chat, prompt, limits, max_tokens)]
        items = await loop.run_in_executor(self._threads, split_prompt, prompt.json)
        # One job each, so that a list of prompts uses all threads and lets others in between.
        jobs = [
            loop.run_in_executor(self._threads, self._render_item, item, limits, max_tokens, add_special_tokens)
            for item in items
        ]
        try:
            return [await job for job in jobs]
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def text_of(self, token_ids: list[int]) -> str:
        """What a prompt says, special tokens left out."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._text.tokenizer.decode, token_ids)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- on the threads

    def _render_chat(self, prompt: ChatPrompt, limits: ModelLimits, max_tokens: int | None) -> Prompt:
        text = self._text.render_chat(prompt.messages, prompt.add_generation_prompt)
        return self._tokenize(text, limits, max_tokens, prompt.add_special_tokens, "messages")

    def _render_item(
        self, item: str | list[int], limits: ModelLimits, max_tokens: int | None, add_special_tokens: bool
    ) -> Prompt:
        if isinstance(item, str):
            return self._tokenize(item, limits, max_tokens, add_special_tokens, "prompt")
        if max_tokens is not None:
            item = item[-max_tokens:]
        check_prompt_length(len(item), limits, "prompt")
        return _pack(item, limits)

    def _tokenize(
        self, text: str, limits: ModelLimits, max_tokens: int | None, add_special_tokens: bool, param: str
    ) -> Prompt:
        probe = limits.max_model_len * _PROBE_CHARACTERS_PER_TOKEN
        if len(text) > 2 * probe and max_tokens is None:
            num_tokens = self._num_tokens(text[:probe])
            if num_tokens > limits.max_model_len + _PROBE_SLACK_TOKENS:
                raise ContextLengthExceeded(
                    f"The prompt has far more than {limits.max_model_len} tokens (its first {probe} of {len(text)} "
                    f"characters alone have {num_tokens}), but this model's limit is {limits.max_model_len} tokens "
                    f"for prompt and output together.",
                    param,
                )
        try:
            [encoding] = self._text.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"The prompt is not valid Unicode: {error.reason}.", param) from error
        # Its length is asked before its ids: a list of them need not be made for a prompt that is refused.
        check_prompt_length(min(len(encoding), max_tokens or len(encoding)), limits, param)
        # Cut here, and not by the tokeniser's own truncation, which is state that all threads share.
        return _pack(encoding.ids if max_tokens is None else encoding.ids[-max_tokens:], limits)

    def _num_tokens(self, text: str) -> int:
        [encoding] = self._text.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return len(encoding)


def check_prompt_length(num_tokens: int, limits: ModelLimits, param: str) -> None:
    if num_tokens == 0:
        raise InvalidRequest("The prompt is empty.", param)
    if num_tokens >= limits.max_model_len:
        raise ContextLengthExceeded(
            f"The prompt has {num_tokens} tokens, but this model's limit is {limits.max_model_len} tokens for prompt "
            f"and output together, at least one of them output.",
            param,
        )


def _pack(token_ids: list[int], limits: ModelLimits) -> Prompt:
    if (largest := max(token_ids)) >= limits.vocab_size:
        raise InvalidRequest(
            f"Token id {largest} is out of range: this model's ids are 0 to {limits.vocab_size - 1}.", "prompt"
        )
    return Prompt(pack_token_ids(token_ids), len(token_ids))


def split_prompt(raw: msgspec.Raw) -> Sequence[str | list[int]]:
    """The prompts of a string, a list of strings, a list of token ids or a list of those. Raises InvalidRequest."""
    data = bytes(raw)
    inner = data[1:].lstrip()[:1]
    kind: Any
    if data[:1] == b'"':
        kind = str
    elif inner == b'"':
        kind = list[str]
    elif inner == b"[":
        kind = list[list[TokenId]]
    else:
        kind = list[TokenId]
    if data[:1] not in (b'"', b"["):
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids.", "prompt"
        )
    try:
        decoded = msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"prompt: {error}".replace("`$[...]`", "one of its items"), "prompt") from error
    prompts: list[str | list[int]] = [decoded] if kind in (str, list[TokenId]) else decoded
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise InvalidRequest("The prompt is empty.", "prompt")
    return prompts
