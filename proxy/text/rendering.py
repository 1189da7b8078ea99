"""Prompts to token ids: templates, tokenising, checking, packing. Pure; `proxy.reading.reader_pool` keeps it off the
loop.

No state of the tokeniser is changed. A prompt that cannot fit is refused before it is tokenised whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from tokenizers import Encoding

from tandem.protocol.messages.media import MediaItem, MediaKind, MediaTensor
from tandem.protocol.messages.token_ids import pack_token_ids, unpack_token_ids
from tandem.protocol.prefix_hash import BlockHasher, pack_short_hashes
from tandem.proxy.cluster.registry import ModelLimits
from tandem.proxy.media.source import MediaSource
from tandem.proxy.text.cpu_time import cpu_time_limit
from tandem.proxy.text.model_text import ModelText
from tandem.proxy.text.prompt import Prompt
from tandem.proxy.text.token_size import max_characters_per_token
from tandem.runtime.errors import InvalidRequest

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]

_PROBE_CHARACTERS_PER_TOKEN = 5
"""The first probe of a long text is that much of it times `max_model_len`: few texts have more characters per token."""
TEMPLATE_CPU_S = 2.0
"""For a template that a client brings; a model's own takes milliseconds."""
_IDS = re.compile(rb"\s*\[[\s\[]*\d")
_PROBE_SLACK_TOKENS = 16
"""Cutting a text may change the tokens around the cut, so the probe must be over the limit by more than that."""


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or prompt and output together, do not fit the model."""

    code = "context_length_exceeded"


class ChatPrompt(msgspec.Struct, frozen=True, tag=True):
    """messages: as the template takes them, content flattened to text. The template writes its own special tokens.

    template: jinja from the client, None for the model's. variables: what the template sees beside its usual ones.
    tools: as templates take them. media: what the messages' parts of type image and video stand for, in order.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    add_special_tokens: bool = False
    continue_final_message: bool = False
    template: str | None = None
    variables: dict[str, Any] = {}
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    media: list[MediaSource] = []


class CachedMedia(msgspec.Struct, frozen=True):
    """An item whose tensors are in the media cache. num_tokens: placeholders in the prompt that stand for it."""

    kind: MediaKind
    digest: bytes
    segment: str
    tensors: tuple[MediaTensor, ...]
    num_tokens: int


class MediaPrompt(msgspec.Struct, frozen=True, tag=True):
    """A rendered chat with every placeholder repeated as often as its item needs. placeholder_ids: their token ids."""

    text: str
    media: list[CachedMedia]
    placeholder_ids: dict[MediaKind, int]
    add_special_tokens: bool = False


class CompletionPrompt(msgspec.Struct, frozen=True, tag=True):
    """json: the request's `prompt` as it came. It may hold a million ids, so that decoding it is left to a thread."""

    json: msgspec.Raw
    add_special_tokens: bool = True


class RenderedPrompts(msgspec.Struct, frozen=True, tag=True):
    """What the others become."""

    prompts: list[Prompt]


AnyPrompt = ChatPrompt | MediaPrompt | CompletionPrompt | RenderedPrompts
Spans = tuple[tuple[int, int], ...]
"""(start, length) of each, ascending."""


class Renderer:
    def __init__(self, text: ModelText) -> None:
        self._text = text
        self._max_characters_per_token = max_characters_per_token(text.tokenizer)

    def render(
        self,
        prompt: AnyPrompt,
        limits: ModelLimits,
        max_tokens: int | None = None,
        cache_salt: str = "",
    ) -> list[Prompt]:
        """One prompt for a chat, one or more for a completion; with the hashes of their prefixes.

        max_tokens: longer prompts lose their beginning; None refuses those that do not fit. Raises InvalidRequest.
        """
        hashed = []
        for rendered in self._tokens(prompt, limits, max_tokens):
            hasher = BlockHasher(limits.block_size, limits.model_id, cache_salt, rendered.media)
            hashed.append(replace(rendered, prefix_hashes=pack_short_hashes(hasher.prompt_hashes(rendered.token_ids))))
        return hashed

    def _tokens(self, prompt: AnyPrompt, limits: ModelLimits, max_tokens: int | None) -> list[Prompt]:
        match prompt:
            case RenderedPrompts(prompts):
                return prompts
            case ChatPrompt():
                text = self.chat_text(prompt)
                return [self._tokenize(text, limits, max_tokens, prompt.add_special_tokens, "messages")]
            case MediaPrompt():
                return [self._tokenize_media(prompt, limits, max_tokens)]
            case CompletionPrompt(json, add_special_tokens):
                items = split_prompt(json)
                return [self._render_item(item, limits, max_tokens, add_special_tokens) for item in items]

    def chat_text(self, prompt: ChatPrompt) -> str:
        """Raises InvalidRequest."""
        with cpu_time_limit(TEMPLATE_CPU_S) if prompt.template is not None else nullcontext():
            return self._text.render_chat(
                prompt.messages,
                prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                template=prompt.template,
                variables=prompt.variables,
                documents=prompt.documents,
                tools=prompt.tools,
            )

    def tokens_of(self, text: str, add_special_tokens: bool) -> list[int]:
        """Of any length. Raises InvalidRequest."""
        token_ids: list[int] = self._encode(text, add_special_tokens, "prompt").ids
        return token_ids

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """As the vocabulary writes them."""
        return [self._text.tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences to avoid: each word as it is written at a beginning, and after a space, as vLLM does."""
        texts = [space + word.lstrip() for word in words for space in ("", " ")]
        encodings = self._text.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return tuple(dict.fromkeys(tuple(encoding.ids) for encoding in encodings if len(encoding)))

    def text_of(self, token_ids: list[int]) -> str:
        """What a prompt says, special tokens left out."""
        text: str = self._text.tokenizer.decode(token_ids)
        return text

    def text_with_specials(self, token_ids: list[int]) -> str:
        """Raises InvalidRequest for ids that the tokeniser does not have."""
        largest, num_known = max(token_ids, default=0), self._text.tokenizer.get_vocab_size()
        if largest >= num_known:
            raise InvalidRequest(
                f"Token id {largest} is out of range: this tokeniser's ids are 0 to {num_known - 1}.", "tokens"
            )
        text: str = self._text.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

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
        if max_tokens is None:
            self._refuse_what_cannot_fit(text, limits, param)
        encoding = self._encode(text, add_special_tokens, param)
        # Its length is asked before its ids: a list of them need not be made for a prompt that is refused.
        check_prompt_length(min(len(encoding), max_tokens or len(encoding)), limits, param)
        # Cut here, and not by the tokeniser's own truncation, which is state that all threads share.
        return _pack(encoding.ids if max_tokens is None else encoding.ids[-max_tokens:], limits)

    def _tokenize_media(self, prompt: MediaPrompt, limits: ModelLimits, max_tokens: int | None) -> Prompt:
        rendered = self._tokenize(prompt.text, limits, None, prompt.add_special_tokens, "messages")
        if max_tokens is not None and rendered.num_tokens > max_tokens:
            raise InvalidRequest(
                f"The prompt has {rendered.num_tokens} tokens and would be cut to {max_tokens}; a prompt with images "
                "or video cannot be cut.",
                "truncate_prompt_tokens",
            )
        return replace(rendered, media=place_media(rendered.token_ids, prompt.media, prompt.placeholder_ids))

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> Encoding:
        try:
            [encoding] = self._text.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"The prompt is not valid Unicode: {error.reason}.", param) from error
        return encoding

    def _refuse_what_cannot_fit(self, text: str, limits: ModelLimits, param: str) -> None:
        """Raises ContextLengthExceeded for a text that is too long for sure, at a small part of the cost of tokenising.

        By its length when that alone proves it, else by tokenising a beginning of it, then one of twice the length, and
        so on: never more than half of the text altogether, so that one which fits in the end costs half more.
        """
        limit, most = limits.max_model_len, self._max_characters_per_token
        reason = ""
        if most is not None and len(text) > limit * most:
            reason = f"it has {len(text)} characters, and no token has more than {most}"
        num_probed = limit * _PROBE_CHARACTERS_PER_TOKEN
        while not reason and 4 * num_probed <= len(text):
            num_tokens = self._num_tokens(text[:num_probed])
            if num_tokens > limit + _PROBE_SLACK_TOKENS:
                reason = f"the first {num_probed} of its {len(text)} characters have {num_tokens}"
            num_probed *= 2
        if reason:
            raise ContextLengthExceeded(
                f"The prompt has far more than {limit} tokens ({reason}), but this model's limit is {limit} tokens for "
                f"prompt and output together.",
                param,
            )

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


def place_media(
    packed: bytes, media: Sequence[CachedMedia], placeholder_ids: dict[MediaKind, int]
) -> tuple[MediaItem, ...]:
    """The items with the places of their placeholders in the packed prompt.

    Raises InvalidRequest when there are more or less of these than the items need.
    """
    token_ids = unpack_token_ids(packed)
    spans: dict[MediaKind, Iterator[Spans]] = {}
    for kind, placeholder_id in placeholder_ids.items():
        lengths = [item.num_tokens for item in media if item.kind == kind]
        spans[kind] = iter(placeholder_spans(token_ids, placeholder_id, lengths))
    return tuple(MediaItem(i.digest, i.kind, next(spans[i.kind]), i.segment, i.tensors) for i in media)


def placeholder_spans(token_ids: list[int], placeholder_id: int, lengths: list[int]) -> list[Spans]:
    """The runs of the placeholder, as (start, length), shared out among items of that many tokens each."""
    positions = [place for place, token_id in enumerate(token_ids) if token_id == placeholder_id]
    if len(positions) != sum(lengths):
        raise InvalidRequest(
            f"The prompt has {len(positions)} placeholder tokens where its images and videos need {sum(lengths)}; "
            "is one of them written into the text?",
            "messages",
        )
    shared, begin = [], 0
    for length in lengths:
        runs: list[tuple[int, int]] = []
        for place in positions[begin : begin + length]:
            if runs and sum(runs[-1]) == place:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((place, 1))
        shared.append(tuple(runs))
        begin += length
    return shared


def has_token_ids(prompt: AnyPrompt) -> bool:
    """True where nothing is left to tokenise."""
    return isinstance(prompt, CompletionPrompt) and _IDS.match(bytes(prompt.json)) is not None


def has_media(prompt: AnyPrompt) -> bool:
    """True where there is more to it than text."""
    return isinstance(prompt, ChatPrompt) and bool(prompt.media)


def has_own_template(prompt: AnyPrompt) -> bool:
    """True where a client's code decides how long rendering takes."""
    return isinstance(prompt, ChatPrompt) and prompt.template is not None


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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"prompt: {error}".replace("`$[...]`", "one of its items"), "prompt") from error
    prompts: list[str | list[int]] = [decoded] if kind in (str, list[TokenId]) else decoded
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise InvalidRequest("The prompt is empty.", "prompt")
    return prompts
