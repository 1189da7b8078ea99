"""A request's body, from bytes to a checked request with its prompts tokenised. Pure; runs wherever there is time."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from proxy.model_text import ModelText
from proxy.openai_answers import DetokenizeResponse, TokenizeResponse
from proxy.registry import ModelLimits
from proxy.rendering import RenderedPrompts, Renderer
from proxy.structured_output import checked_grammar
from proxy.tool_formats import ToolFormat, ToolFormatName
from proxy.validation import BodyDecoder, GenerationRequest

BodyKind = Literal["completion", "chat"]


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
    ) -> BodyReader:
        tool_format = ToolFormat.of(tool_call_parser, text.tokenizer)
        return cls(BodyDecoder(served_model_name, trust_chat_template, tool_format), Renderer(text))

    @classmethod
    def load(
        cls,
        model: str,
        served_model_name: str,
        trust_chat_template: bool = False,
        tool_call_parser: ToolFormatName = "hermes",
    ) -> BodyReader:
        """In a process that has nothing yet. Raises ConfigError."""
        return cls.of(ModelText(model), served_model_name, trust_chat_template, tool_call_parser)

    def decode(self, kind: BodyKind, body: bytes) -> GenerationRequest:
        """Checked, but for what needs the prompts' tokens. Raises InvalidRequest."""
        return self._decoder.chat(body) if kind == "chat" else self._decoder.completion(body)

    def read(self, kind: BodyKind, body: bytes, limits: ModelLimits) -> GenerationRequest:
        """With `RenderedPrompts`. Raises InvalidRequest."""
        return self.render(self.decode(kind, body), limits)

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
