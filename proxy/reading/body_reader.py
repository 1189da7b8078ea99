"""Turns a request body into a validated request with tokenised prompts. Pure; runs in any process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from tandem.protocol.messages.media import MediaKind
from tandem.protocol.messages.packed import unpack_token_ids
from tandem.protocol.prefix_hash import scoped_salt
from tandem.proxy.api.answer_bodies import DetokenizeResponse, TokenizeResponse
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.api.grammar_checks import GrammarChecks
from tandem.proxy.api.messages_api.messages_response import TokenCount
from tandem.proxy.api.responses_api.response_store import ItemLookup
from tandem.proxy.api.responses_api.responses_request import InputItem
from tandem.proxy.api.structured_output import CallGrammar, OutputGrammar
from tandem.proxy.api.validation import BodyDecoder, ModelFormats
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.media.source import MAX_URL_CHARACTERS, FoundMedia, SentMedia, decode_data_url, is_data_url
from tandem.proxy.parsers.parser_names import reasoning_format, tool_format
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.text.detokenizer import decode_whole
from tandem.proxy.text.model_text import ModelText
from tandem.proxy.text.prompt import CachedMedia, ChatPrompt, MediaPlaceholder, RenderedPrompts, has_media
from tandem.proxy.text.rendering import Renderer, Room, media_prompt
from tandem.runtime.errors import InvalidRequest, TandemError
from tandem.runtime.garbage_collection import collection_paused

MAX_TOKENIZED_BYTES = 4 << 20
"""UTF-8 that `/tokenize` takes: about a million tokens of text. At one token a byte it takes 600 MB for 4 s."""
MAX_DETOKENIZED_CHARACTERS = 16 << 20
"""Text that `/detokenize` returns."""

BodyKind = Literal["completion", "chat", "embedding", "message", "count", "response"]
"""message: of Anthropic's Messages API. count: of its tokens. response: of OpenAI's Responses API."""

_STORED = (b'"previous_response_id"', b'"item_reference"', b"\\u")
"""A key may be written with escapes too."""


def reads_files(kind: BodyKind, body: bytes) -> bool:
    """Returns whether decoding may read stored responses, and so must not happen on an event loop."""
    return kind == "response" and any(mark in body for mark in _STORED)


class HasMedia(TandemError):
    """The request has images or video, which `proxy.reading.media_pool` reads. Clients never see this error."""

    code = "has_media"


class BodyReader:
    def __init__(self, text: ModelText, config: ProxyConfig) -> None:
        self._decoder = BodyDecoder(
            config.served_model_name,
            config.requests,
            config.admission,
            ModelFormats(
                tool_format(config.requests.tool_call_parser, text),
                reasoning_format(config.requests.reasoning_parser, text),
                text.sampling_defaults,
                text.embedding_defaults,
                text.requires_short_call_ids,
            ),
            config.adapter_table(),
            config.media.max_media_items if config.media_cache_endpoint else 0,
        )
        self._settings = config.requests
        self._media_limits = config.media
        self._soonest_priority = config.admission.soonest_priority
        self._tokenizer = text.tokenizer
        self._num_token_ids = text.num_token_ids
        self._eos_token_ids = text.eos_token_ids
        self.renderer = Renderer(text)
        self._grammars = GrammarChecks()
        self._responses = config.response_store()

    @classmethod
    def load(cls, config: ProxyConfig) -> BodyReader:
        """Loads the model's text files. Raises ConfigError."""
        return cls(ModelText(config.model, config.requests.generation_config, config.requests.chat_template), config)

    def decode(self, body: bytes, kind: BodyKind, cache_scope: str = "") -> GenerationRequest:
        """Validates everything except what depends on the prompt's tokens. Raises InvalidRequest.

        cache_scope: of the client's API key; part of the request's cache_salt. A priority sooner than clients may have
        counts as the soonest that they may have.
        """
        decode: dict[str, Callable[[bytes], GenerationRequest]] = {
            "completion": self._decoder.completion,
            "chat": self._decoder.chat,
            "embedding": self._decoder.embedding,
            "message": self._decoder.message,
            "count": self._decoder.count,
            "response": lambda body: self._decoder.response(
                body, partial(self._history, cache_scope), self._find_item(cache_scope)
            ),
        }
        with _decoding():
            request = decode[kind](body)
        return msgspec.structs.replace(
            request,
            cache_salt=scoped_salt(cache_scope, request.cache_salt),
            priority=max(request.priority, self._soonest_priority),
        )

    def _find_item(self, cache_scope: str) -> Callable[[str], InputItem | None]:
        return (lambda _: None) if self._responses is None else ItemLookup(self._responses, cache_scope).find

    def _history(self, cache_scope: str, response_id: str) -> list[InputItem]:
        if self._responses is None:
            raise InvalidRequest("This server keeps no responses; send the whole conversation.", "previous_response_id")
        return self._responses.history(cache_scope, response_id)

    def read(self, body: bytes, kind: BodyKind, limits: ModelLimits, cache_scope: str = "") -> GenerationRequest:
        """Returns a request with `RenderedPrompts`. Raises InvalidRequest, HasMedia."""
        request = self.decode(body, kind, cache_scope)
        if has_media(request.prompt):
            raise HasMedia("the request has images or video")
        return self.render(request, limits)

    def find_media(self, body: bytes, kind: BodyKind, cache_scope: str, path: str) -> FoundMedia:
        """Returns the images and videos of a request, and writes the bytes of those in data URLs to the file `path`.

        Raises InvalidRequest, InvalidMedia.
        """
        request = self.decode(body, kind, cache_scope)
        assert isinstance(request.prompt, ChatPrompt)
        items, offset = [], 0
        with Path(path).open("wb") as file:  # empties it: a process that died may have written a part
            for source in request.prompt.media:
                if not is_data_url(source):
                    if len(source.url) > MAX_URL_CHARACTERS:
                        raise source.refused(f"its URL has more than {MAX_URL_CHARACTERS} characters")
                    items.append(SentMedia(source))
                    continue
                data = decode_data_url(source, self._media_limits)
                file.write(data)
                items.append(SentMedia(msgspec.structs.replace(source, url=""), offset, len(data)))
                offset += len(data)
        return FoundMedia(items, request.cache_salt)

    def read_with_media(
        self,
        body: bytes,
        kind: BodyKind,
        limits: ModelLimits,
        cache_scope: str,
        media: list[CachedMedia],
        placeholders: dict[MediaKind, MediaPlaceholder],
    ) -> GenerationRequest:
        """Like `read`, of a request whose images and videos are in the media cache. Raises InvalidRequest."""
        request = self.decode(body, kind, cache_scope)
        prompt = request.prompt
        assert isinstance(prompt, ChatPrompt)
        expanded = media_prompt(self.renderer.chat_text(prompt), media, placeholders, prompt.add_special_tokens)
        return self.render(msgspec.structs.replace(request, prompt=expanded), limits)

    def render(self, request: GenerationRequest, limits: ModelLimits) -> GenerationRequest:
        """Tokenises a decoded request, and checks its grammar if it has one. Raises InvalidRequest."""
        if request.output_grammar is not None:
            request = self._with_grammar(request, request.output_grammar)
        request = request.with_vocabulary(limits.vocab_size, self._settings)
        max_tokens = request.max_prompt_tokens(limits)
        room = None if max_tokens is None else Room(max_tokens, request.truncation_side == "left")
        adapter = request.adapter.ref if request.adapter is not None else None
        prompts = self.renderer.render(request.prompt, limits, room, request.cache_salt, adapter)
        request.check_answer_size([prompt.num_tokens for prompt in prompts])
        request = msgspec.structs.replace(request, prompt=RenderedPrompts(prompts))
        if (reasoning := request.reasoning) is not None:
            begins = [reasoning.is_open(prompt.token_ids, self._tokenizer) for prompt in prompts]
            request = msgspec.structs.replace(request, begins_thinking=begins)
            budget, is_constrained = request.thinking_token_budget, request.base_sampling.grammar is not None
            if budget is not None or is_constrained:
                if any(begin != begins[0] for begin in begins):
                    raise InvalidRequest(
                        "Some of the prompts end within thinking and others do not; send them in separate requests.",
                        "messages",
                    )
                has_tools = is_constrained or request.tool_format is not None
                request = _with_sampling(request, thinking=reasoning.thinking(begins[0], budget, has_tools))
        if request.bad_words:
            request = _with_sampling(request, bad_words=self.renderer.bad_words(request.bad_words))
        return request

    def _with_grammar(self, request: GenerationRequest, wanted: OutputGrammar) -> GenerationRequest:
        is_optional = isinstance(wanted, CallGrammar) and wanted.is_optional
        request = msgspec.structs.replace(request, output_grammar=None)
        if is_optional and not (request.stop_token_ids or self._eos_token_ids):
            return request  # without a token that ends the answer, it could not end where the grammar does
        with _decoding():
            checked = self._grammars.checked(wanted)
        request = msgspec.structs.replace(request, num_free_tools=checked.num_free_tools)
        return _with_sampling(request, grammar=checked.text, is_grammar_optional=is_optional)

    def tokenize(self, body: bytes, max_model_len: int | None) -> bytes:
        """Returns the JSON answer of `/tokenize`. Raises InvalidRequest."""
        with _decoding():
            prompt, add_special_tokens, with_strings = self._decoder.tokenize(body)
        token_ids = self._encode(prompt, add_special_tokens)
        strings = [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids] if with_strings else None
        return msgspec.json.encode(TokenizeResponse(len(token_ids), max_model_len, token_ids, strings))

    def count_tokens(self, body: bytes) -> bytes:
        """Returns the JSON answer of `/v1/messages/count_tokens`. Raises InvalidRequest, HasMedia."""
        with _decoding():
            prompt = self._decoder.count(body).prompt
        assert isinstance(prompt, ChatPrompt)
        if prompt.media:
            raise HasMedia("the request has images")
        return msgspec.json.encode(TokenCount(len(self._encode(prompt, prompt.add_special_tokens))))

    def _encode(self, prompt: str | ChatPrompt, add_special_tokens: bool) -> list[int]:
        text = prompt if isinstance(prompt, str) else self.renderer.chat_text(prompt)
        if (num_bytes := len(text.encode(errors="surrogatepass"))) > MAX_TOKENIZED_BYTES:
            raise InvalidRequest(
                f"The text has {num_bytes} bytes, but at most {MAX_TOKENIZED_BYTES} are tokenised for their number "
                "alone. Send it in parts.",
                "prompt",
            )
        return self.renderer.encode(text, add_special_tokens, "prompt").ids

    def detokenize(self, body: bytes) -> bytes:
        """Returns the JSON answer of `/detokenize`. Raises InvalidRequest."""
        token_ids = self._decoder.detokenize(body)
        if (largest := max(token_ids, default=0)) >= self._num_token_ids:
            raise InvalidRequest(
                f"Token id {largest} is out of range: this model's ids are 0 to {self._num_token_ids - 1}.", "tokens"
            )
        text = decode_whole(self._tokenizer, token_ids, skip_special_tokens=False)
        if len(text) > MAX_DETOKENIZED_CHARACTERS:
            raise InvalidRequest(
                f"The text has {len(text)} characters; the limit of /detokenize is {MAX_DETOKENIZED_CHARACTERS}. "
                "Send the tokens in parts.",
                "tokens",
            )
        return msgspec.json.encode(DetokenizeResponse(text))

    def text_of(self, token_ids: bytes, skip_special_tokens: bool = True) -> str:
        """Returns the text of a prompt. token_ids: packed."""
        return decode_whole(self._tokenizer, unpack_token_ids(token_ids), skip_special_tokens)


@contextmanager
def _decoding() -> Iterator[None]:
    """Refuses bodies with schemas, arguments of calls and the like that are nested too deeply to be converted."""
    try:
        with collection_paused():
            yield
    except RecursionError as error:
        raise InvalidRequest("The body has values that are nested too deeply; send flatter ones.") from error


def _with_sampling(request: GenerationRequest, **changes: Any) -> GenerationRequest:
    return msgspec.structs.replace(request, base_sampling=msgspec.structs.replace(request.base_sampling, **changes))
