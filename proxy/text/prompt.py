"""Prompts, from what a request contains to token ids."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from tandem.protocol.messages.dispatch import AdapterRef
from tandem.protocol.messages.media import MediaItem, MediaKind, MediaTensor
from tandem.protocol.messages.sampling import Pooling
from tandem.proxy.media.source import MediaSource
from tandem.runtime.errors import InvalidRequest

Message = dict[str, Any]
"""A message as chat templates take it."""

_TOKEN_IDS = re.compile(rb"\s*\[[\s\[]*\d")
_STRINGS = re.compile(rb"\s*\[\s*\"")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or prompt and output together, do not fit the model."""

    code = "context_length_exceeded"


class ChatPrompt(msgspec.Struct, frozen=True, tag=True):
    """A chat before its template is applied."""

    messages: list[Message]
    add_generation_prompt: bool
    add_special_tokens: bool = False
    continue_final_message: bool = False
    template: str | None = None
    """Jinja from the client; None means the model's."""
    variables: dict[str, Any] = {}
    """Additional template variables."""
    reasoning_effort: str | None = None
    """One more variable, unless `variables` has it. A template that refuses this effort gets the nearest one."""
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    media: list[MediaSource] = []
    """Images and videos among the content parts, in order."""

    @property
    def answer_role(self) -> str:
        """The role of the answer's message: the last message's if the answer continues it, else the assistant's."""
        role: str = "assistant" if self.add_generation_prompt else self.messages[-1]["role"]
        return role

    @property
    def last_text(self) -> str:
        """The text of the last message if that has the answer's role, else ""."""
        last = self.messages[-1]
        if last["role"] != self.answer_role:
            return ""
        content = last["content"]
        return content if isinstance(content, str) else "\n".join(p["text"] for p in content if p["type"] == "text")


class CompletionPrompt(msgspec.Struct, frozen=True, tag=True):
    """json: the request's `prompt`, not decoded yet because it may contain a million token ids. param: its field."""

    json: msgspec.Raw
    add_special_tokens: bool = True
    param: str = "prompt"

    def num_prompts(self, max_prompts: int) -> int:
        """Counts the prompts without decoding them, up to one more than `max_prompts`."""
        data = bytes(self.json)
        if _STRINGS.match(data):
            return sum(1 for _ in islice(_STRING.finditer(data), max_prompts + 1))
        return max(1, min(data.count(b"[") - 1, max_prompts + 1)) if _TOKEN_IDS.match(data) else 1


class CachedMedia(msgspec.Struct, frozen=True):
    """An item whose tensors are in the media cache."""

    kind: MediaKind
    digest: bytes
    segment: str
    tensors: tuple[MediaTensor, ...]
    num_tokens: int
    """Number of its placeholder tokens in the prompt."""
    replacement: str = ""
    """Text that replaces its placeholder in the rendered chat, with `num_tokens` placeholders."""


class MediaPlaceholder(msgspec.Struct, frozen=True):
    """The placeholder of a kind of media in a rendered chat."""

    text: str
    token_id: int


class MediaPrompt(msgspec.Struct, frozen=True, tag=True):
    """A rendered chat in which each placeholder is repeated as its item needs. placeholder_ids: token ids by kind."""

    text: str
    media: list[CachedMedia]
    placeholder_ids: dict[MediaKind, int]
    add_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt. Fields without a comment are those of StartPrefill."""

    token_ids: bytes
    """Packed, see `tandem.protocol.messages.packed`."""
    num_tokens: int
    num_prompt_logprobs: int | None = None
    cache_salt: str = ""
    priority: int = 0
    prefix_hashes: bytes = b""
    """Hashes of the full blocks, packed; the router finds cached prefixes by them."""
    media: tuple[MediaItem, ...] = ()
    """Readable until the sequence is dropped."""
    is_text: bool = True
    """Whether the client sent text, so that an echo has no special tokens."""
    adapter: AdapterRef | None = None
    pooling: Pooling | None = None


class RenderedPrompts(msgspec.Struct, frozen=True, tag=True):
    """The tokenised prompts of a request: one for a chat, one or more for a completion."""

    prompts: list[Prompt]


AnyPrompt = ChatPrompt | MediaPrompt | CompletionPrompt | RenderedPrompts


def has_token_ids(prompt: AnyPrompt) -> bool:
    """Returns whether the prompt consists of token ids, so that there is nothing to tokenise."""
    return isinstance(prompt, CompletionPrompt) and _TOKEN_IDS.match(bytes(prompt.json)) is not None


def has_media(prompt: AnyPrompt) -> bool:
    return isinstance(prompt, ChatPrompt) and bool(prompt.media)


def has_own_template(prompt: AnyPrompt) -> bool:
    """Returns whether the client brings its own template, which may take long to render."""
    return isinstance(prompt, ChatPrompt) and prompt.template is not None
