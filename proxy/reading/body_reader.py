"""A request's body, from bytes to a checked request with its prompts tokenised. Pure; runs wherever there is time."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tandem.proxy.api.responses import DetokenizeResponse, TokenizeResponse
from tandem.proxy.api.structured_output import checked_grammar
from tandem.proxy.api.tool_formats import ToolFormat, ToolFormatName
from tandem.proxy.api.validation import BodyDecoder, GenerationRequest
from tandem.proxy.cluster.registry import ModelLimits
from tandem.proxy.text.model_text import ModelText
from tandem.proxy.text.rendering import ChatPrompt, MediaPrompt, RenderedPrompts, Renderer, has_media
from tandem.runtime.errors import TandemError

BodyKind = Literal["completion", "chat"]


class HasMedia(TandemError):
    """Its images and videos are fetched and processed where `proxy.reading.media_pool` says. Never told to a client."""


class BodyReader:
    def __init__(self, decoder: BodyDecoder, renderer: Renderer) -> None:
        self._decoder = decoder
        self._renderer = renderer

    @classmethod
    def of(
        cls,
        text: ModelText,
        served_model_name: str,
        trust_chat_template: bool = False,
        tool_call_parser: ToolFormatName = "hermes",
        max_media: int = 0,
    ) -> BodyReader:
        """max_media: as BodyDecoder's."""
        tool_format = ToolFormat.of(tool_call_parser, text.tokenizer)
        decoder = BodyDecoder(served_model_name, trust_chat_template, tool_format, max_media, text.sampling_defaults)
        return cls(decoder, Renderer(text))

    @classmethod
    def load(
        cls,
        model: str,
        served_model_name: str,
        trust_chat_template: bool = False,
        tool_call_parser: ToolFormatName = "hermes",
        max_media: int = 0,
    ) -> BodyReader:
        """In a process that has nothing yet. Raises ConfigError."""
        return cls.of(ModelText(model), served_model_name, trust_chat_template, tool_call_parser, max_media)

    def decode(self, kind: BodyKind, body: bytes) -> GenerationRequest:
        """Checked, but for what needs the prompts' tokens. Raises InvalidRequest."""
        return self._decoder.chat(body) if kind == "chat" else self._decoder.completion(body)

    def read(self, kind: BodyKind, body: bytes, limits: ModelLimits) -> GenerationRequest:
        """With `RenderedPrompts`. Raises InvalidRequest, or HasMedia for what another process must read."""
        request = self.decode(kind, body)
        if has_media(request.prompt):
            raise HasMedia("the request has images or video")
        return self.render(request, limits)

    def render(self, request: GenerationRequest, limits: ModelLimits) -> GenerationRequest:
        """The second half of `read`. Raises InvalidRequest. Off the loop where there is a grammar: it is compiled."""
        if request.base_sampling.grammar is not None:
            grammar = checked_grammar(request.base_sampling.grammar, request.grammar_param)
            request = _with_sampling(request, grammar=grammar)
        prompts = self._renderer.render(request.prompt, limits, request.max_prompt_tokens(limits), request.cache_salt)
        request = msgspec.structs.replace(request, prompt=RenderedPrompts(prompts))
        if request.bad_words:
            bad_words = self._renderer.bad_words(request.bad_words)
            request = _with_sampling(request, bad_words=bad_words)
        return request

    def chat_text(self, request: GenerationRequest) -> str:
        """Of a chat, as the template writes it: one placeholder for each item of its media. Raises InvalidRequest."""
        assert isinstance(request.prompt, ChatPrompt)
        return self._renderer.chat_text(request.prompt)

    def render_media(self, request: GenerationRequest, limits: ModelLimits, prompt: MediaPrompt) -> GenerationRequest:
        """In place of the request's prompt, whose media are cached now. Raises InvalidRequest."""
        return self.render(msgspec.structs.replace(request, prompt=prompt), limits)

    def tokenize(self, body: bytes, max_model_len: int | None) -> bytes:
        """The answer to `/tokenize`. Raises InvalidRequest."""
        request = self._decoder.tokenize(body)
        text = request.prompt if isinstance(request.prompt, str) else self._renderer.chat_text(request.prompt)
        token_ids = self._renderer.tokens_of(text, request.add_special_tokens)
        strings = self._renderer.token_strings(token_ids) if request.return_token_strs else None
        return msgspec.json.encode(TokenizeResponse(len(token_ids), max_model_len, token_ids, strings))

    def detokenize(self, body: bytes) -> bytes:
        """The answer to `/detokenize`. Raises InvalidRequest."""
        return msgspec.json.encode(
            DetokenizeResponse(self._renderer.text_with_specials(self._decoder.detokenize(body)))
        )

    def text_of(self, token_ids: list[int]) -> str:
        return self._renderer.text_of(token_ids)


def _with_sampling(request: GenerationRequest, **changes: Any) -> GenerationRequest:
    return msgspec.structs.replace(request, base_sampling=msgspec.structs.replace(request.base_sampling, **changes))
