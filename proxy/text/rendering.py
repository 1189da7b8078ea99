"""Renders prompts: applies chat templates, tokenises, checks lengths and packs the token ids.

The state of the tokeniser is never changed. A prompt that cannot fit is refused before all of it is tokenised.

A client's own template is rendered in a sandbox, which the kernel ends at a limit on CPU time or memory: one
instruction of a template (`7 ** 4000000`, `'%999999999d' % 1`) may take minutes or gigabytes. A template is also
compiled there, because jinja computes constants when it compiles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta
from tokenizers import Encoding

from tandem.protocol.messages.dispatch import AdapterRef
from tandem.protocol.messages.media import MediaItem, MediaKind
from tandem.protocol.messages.packed import pack_token_ids, unpack_token_ids
from tandem.protocol.prefix_hash import BlockHasher, pack_short_hashes
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.text.model_text import ModelText
from tandem.proxy.text.prompt import (
    AnyPrompt,
    CachedMedia,
    ChatPrompt,
    CompletionPrompt,
    ContextLengthExceeded,
    MediaPlaceholder,
    MediaPrompt,
    Prompt,
    RenderedPrompts,
)
from tandem.runtime.errors import InvalidRequest
from tandem.runtime.processes.sandbox import ForkedSandbox, Limits, SandboxLost

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]

Spans = tuple[tuple[int, int], ...]
"""(start, length) of runs of placeholder tokens, ascending."""

_PROBE_CHARACTERS_PER_TOKEN = 5
"""Size of the first probe of a long text, per token of the limit; few texts have more characters per token."""
_PROBE_SLACK_TOKENS = 16
"""Tokens by which a probe must exceed the limit, because cutting a text may change the tokens around the cut."""


class Room(NamedTuple):
    """The room for a prompt: a longer one is cut to `max_tokens`. keeps_end: it loses its beginning."""

    max_tokens: int
    keeps_end: bool = True

    def cut(self, token_ids: list[int]) -> list[int]:
        return token_ids[-self.max_tokens :] if self.keeps_end else token_ids[: self.max_tokens]


class Renderer:
    def __init__(self, text: ModelText) -> None:
        self._text = text

    def render(
        self,
        prompt: AnyPrompt,
        limits: ModelLimits,
        room: Room | None = None,
        cache_salt: str = "",
        adapter: AdapterRef | None = None,
    ) -> list[Prompt]:
        """Returns one prompt for a chat, or one or more for a completion, with their prefix hashes.

        room: None refuses prompts that do not fit. Raises InvalidRequest.
        """
        prompts = []
        for rendered in self._tokens(prompt, limits, room):
            hasher = BlockHasher(limits.block_size, limits.model_id, cache_salt, rendered.media, adapter)
            prompts.append(replace(rendered, prefix_hashes=pack_short_hashes(hasher.prompt_hashes(rendered.token_ids))))
        return prompts

    def chat_text(self, prompt: ChatPrompt) -> str:
        """Applies the chat template. Raises InvalidRequest."""
        if prompt.template is None:
            return self._text.render_chat(prompt)
        return render_apart(partial(self._text.render_chat, prompt))

    def encode(self, text: str, add_special_tokens: bool, param: str) -> Encoding:
        """Tokenises a text of any length. Raises InvalidRequest."""
        try:
            [encoding] = self._text.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"The prompt is not valid Unicode: {error.reason}.", param) from error
        return encoding

    def bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """Returns the token sequences to avoid: each word with and without a leading space, as vLLM does."""
        texts = [space + word.lstrip() for word in words for space in ("", " ")]
        encodings = self._text.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return tuple(dict.fromkeys(tuple(encoding.ids) for encoding in encodings if len(encoding)))

    def _tokens(self, prompt: AnyPrompt, limits: ModelLimits, room: Room | None) -> list[Prompt]:
        match prompt:
            case RenderedPrompts(prompts):
                return prompts
            case ChatPrompt():
                text = self.chat_text(prompt)
                return [self._tokenize(text, limits, room, prompt.add_special_tokens, "messages")]
            case MediaPrompt():
                return [self._tokenize_media(prompt, limits, room)]
            case CompletionPrompt(json, add_special_tokens, param):
                items = split_prompt(json, param)
                return [self._render_item(item, limits, room, add_special_tokens, param) for item in items]

    def _render_item(
        self, item: str | list[int], limits: ModelLimits, room: Room | None, add_special_tokens: bool, param: str
    ) -> Prompt:
        if isinstance(item, str):
            return self._tokenize(item, limits, room, add_special_tokens, param)
        if room is not None:
            item = room.cut(item)
        check_prompt_length(len(item), limits, param)
        return replace(_pack(item, limits, param), is_text=False)

    def _tokenize(
        self, text: str, limits: ModelLimits, room: Room | None, add_special_tokens: bool, param: str
    ) -> Prompt:
        if room is None:
            self._refuse_if_too_long(text, limits, param)
        encoding = self.encode(text, add_special_tokens, param)
        # The length is checked first, so that a refused prompt needs no list of ids.
        num_tokens = len(encoding) if room is None else min(len(encoding), room.max_tokens)
        check_prompt_length(num_tokens, limits, param)
        # Truncates the ids, because the tokeniser's own truncation is state that threads share.
        return _pack(encoding.ids if room is None else room.cut(encoding.ids), limits)

    def _tokenize_media(self, prompt: MediaPrompt, limits: ModelLimits, room: Room | None) -> Prompt:
        rendered = self._tokenize(prompt.text, limits, None, prompt.add_special_tokens, "messages")
        if room is not None and rendered.num_tokens > room.max_tokens:
            raise InvalidRequest(
                f"The prompt has {rendered.num_tokens} tokens; prompts with images or video cannot be truncated to "
                f"{room.max_tokens}. Leave truncate_prompt_tokens out or send less.",
                "truncate_prompt_tokens",
            )
        return replace(rendered, media=place_media(rendered.token_ids, prompt.media, prompt.placeholder_ids))

    def _refuse_if_too_long(self, text: str, limits: ModelLimits, param: str) -> None:
        """Raises ContextLengthExceeded for a text that certainly does not fit, at a fraction of the cost of tokenising.

        Tokenises prefixes of doubling length, in total at most half of the text.
        """
        limit = limits.max_model_len
        num_probed = limit * _PROBE_CHARACTERS_PER_TOKEN
        while 4 * num_probed <= len(text):
            num_tokens = len(self.encode(text[:num_probed], False, param))
            if num_tokens > limit + _PROBE_SLACK_TOKENS:
                raise _too_long(f"about {num_tokens * len(text) // num_probed}", limit, param)
            num_probed *= 2


def check_prompt_length(num_tokens: int, limits: ModelLimits, param: str) -> None:
    """Raises InvalidRequest for an empty prompt, ContextLengthExceeded if there is no room for one token of output."""
    if num_tokens == 0:
        raise InvalidRequest("The prompt is empty.", param)
    if num_tokens >= limits.max_model_len:
        raise _too_long(str(num_tokens), limits.max_model_len, param)


def _too_long(num_tokens: str, limit: int, param: str) -> ContextLengthExceeded:
    """Coding agents compact a conversation when an error has one of these phrases: the first is Anthropic's, the second
    OpenAI's."""
    return ContextLengthExceeded(
        f"The prompt is too long: {num_tokens} tokens > {limit - 1} maximum. This model's maximum context length is "
        f"{limit} tokens for prompt and output together.",
        param,
    )


def _pack(token_ids: list[int], limits: ModelLimits, param: str = "prompt") -> Prompt:
    if (largest := max(token_ids)) >= limits.vocab_size:
        raise InvalidRequest(
            f"Token id {largest} is out of range: this model's ids are 0 to {limits.vocab_size - 1}.", param
        )
    return Prompt(pack_token_ids(token_ids), len(token_ids))


def split_prompt(raw: msgspec.Raw, param: str = "prompt") -> Sequence[str | list[int]]:
    """Decodes a string, a list of strings, a list of token ids or a list of such lists. Raises InvalidRequest."""
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
            f"{param} must be a string, a list of strings, a list of token ids or a list of lists of token ids.", param
        )
    try:
        decoded = _decoded_prompts(data, kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{param}: {error}".replace("`$[...]`", "one of its items"), param) from error
    prompts: list[str | list[int]] = [decoded] if kind in (str, list[TokenId]) else decoded
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise InvalidRequest("The prompt is empty.", param)
    return prompts


def _decoded_prompts(data: bytes, kind: Any) -> Any:
    """Raises msgspec.DecodeError, UnicodeDecodeError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        if not str(error).startswith("Expected `int`, got `float`"):
            raise
        # Some clients write each number as a float: 4.0.
        numbers = msgspec.json.decode(data, type=list[list[float]] if kind == list[list[TokenId]] else list[float])
        return msgspec.convert(_whole(numbers), kind)


def _whole(number: Any) -> Any:
    if isinstance(number, list):
        return [_whole(each) for each in number]
    return int(number) if number.is_integer() else number


def place_media(
    packed_token_ids: bytes, media: Sequence[CachedMedia], placeholder_ids: dict[MediaKind, int]
) -> tuple[MediaItem, ...]:
    """Returns the items with the positions of their placeholders.

    Raises InvalidRequest if the prompt has more or fewer placeholders than the items need.
    """
    token_ids = unpack_token_ids(packed_token_ids)
    spans: dict[MediaKind, Iterator[Spans]] = {}
    for kind, placeholder_id in placeholder_ids.items():
        lengths = [item.num_tokens for item in media if item.kind == kind]
        spans[kind] = iter(_spans(token_ids, placeholder_id, lengths))
    return tuple(MediaItem(i.digest, i.kind, next(spans[i.kind]), i.segment, i.tensors) for i in media)


def _spans(token_ids: list[int], placeholder_id: int, lengths: list[int]) -> list[Spans]:
    """Assigns the placeholders to items of these numbers of tokens, in order."""
    positions = [position for position, token_id in enumerate(token_ids) if token_id == placeholder_id]
    if len(positions) != sum(lengths):
        raise InvalidRequest(
            f"The prompt has {len(positions)} placeholder tokens, but its images and videos need {sum(lengths)}; "
            "remove placeholder tokens from the text.",
            "messages",
        )
    rest, spans = iter(positions), []
    for length in lengths:
        runs: list[tuple[int, int]] = []
        for position in islice(rest, length):
            if runs and sum(runs[-1]) == position:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((position, 1))
        spans.append(tuple(runs))
    return spans


def media_prompt(
    text: str,
    media: Sequence[CachedMedia],
    placeholders: Mapping[MediaKind, MediaPlaceholder],
    add_special_tokens: bool,
) -> MediaPrompt:
    """Replaces each placeholder in the rendered chat by its item's replacement, like transformers' processors.

    Raises InvalidRequest if there are more or fewer than the items need.
    """
    replacements: dict[str, Iterator[str]] = {}
    for kind, placeholder in placeholders.items():
        wanted = [item.replacement for item in media if item.kind == kind]
        if (num_found := text.count(placeholder.text)) != len(wanted):
            raise InvalidRequest(
                f"The rendered chat has {num_found} {kind} placeholders ({placeholder.text}) for {len(wanted)} "
                f"{kind}s; send media as content parts and write no placeholders into the text.",
                "messages",
            )
        replacements[placeholder.text] = iter(wanted)
    pattern = "|".join(re.escape(each) for each in replacements)
    expanded = re.sub(pattern, lambda found: next(replacements[found[0]]), text)
    token_ids = {kind: placeholder.token_id for kind, placeholder in placeholders.items()}
    return MediaPrompt(expanded, list(media), token_ids, add_special_tokens)


TEMPLATE_CPU_S = 2
"""CPU time for a client's own template; a model's template takes milliseconds."""
TEMPLATE_MEMORY_BYTES = 256 << 20
"""Memory that rendering a client's own template may take."""
MAX_RENDERED_CHARACTERS = 16 << 20
"""Length of the text that a client's own template may render: as much as the largest body by default."""
_DEADLINE_S = 30.0
"""Elapsed time, much longer than the CPU time because the machine may be busy."""
_PARAM = "chat_template"


def render_apart(render: Callable[[], str]) -> str:
    """Returns what `render` returns in a sandbox. Blocks for 30 s at most.

    Raises InvalidRequest where `render` does, and if it exceeds a limit.
    """
    with ForkedSandbox(render) as sandbox:
        try:
            text = sandbox.call(_render, b"", Limits(TEMPLATE_CPU_S, TEMPLATE_MEMORY_BYTES, _DEADLINE_S))
        except TimeoutError as error:
            raise _refused(f"{_DEADLINE_S:g} s") from error
        except SandboxLost as lost:
            memory = f"{TEMPLATE_MEMORY_BYTES >> 20} MiB of memory"
            raise _refused(memory if lost.is_out_of_memory else f"{TEMPLATE_CPU_S} s of CPU time") from lost
        return text.decode(errors="surrogatepass")


def _refused(limit: str) -> InvalidRequest:
    return InvalidRequest(f"Rendering chat_template takes more than {limit}; send a simpler template.", _PARAM)


def _render(render: Callable[[], str], _data: bytes) -> bytes:
    """In the sandbox."""
    try:
        text = render()
    except InvalidRequest as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        raise InvalidRequest(error.message, _PARAM) from error
    if len(text) > MAX_RENDERED_CHARACTERS:
        raise InvalidRequest(
            f"chat_template renders {len(text)} characters; the limit is {MAX_RENDERED_CHARACTERS}.", _PARAM
        )
    return text.encode(errors="surrogatepass")
