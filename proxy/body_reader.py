"""A request's body, from bytes to a checked request with its prompts tokenised. Pure; runs wherever there is time."""

from __future__ import annotations

from typing import Literal

import msgspec

from proxy.model_text import ModelText
from proxy.registry import ModelLimits
from proxy.rendering import RenderedPrompts, Renderer
from proxy.validation import BodyDecoder, GenerationRequest

BodyKind = Literal["completion", "chat"]


class BodyReader:
    def __init__(self, decoder: BodyDecoder, renderer: Renderer) -> None:
        self._decoder = decoder
        self._renderer = renderer

    @classmethod
    def of(cls, text: ModelText, served_model_name: str) -> BodyReader:
        return cls(BodyDecoder(served_model_name), Renderer(text))

    @classmethod
    def load(cls, model: str, served_model_name: str) -> BodyReader:
        """In a process that has nothing yet. Raises ConfigError."""
        return cls.of(ModelText(model), served_model_name)

    def decode(self, kind: BodyKind, body: bytes) -> GenerationRequest:
        """Checked, but for what needs the prompts' tokens. Raises InvalidRequest."""
        return self._decoder.chat(body) if kind == "chat" else self._decoder.completion(body)

    def read(self, kind: BodyKind, body: bytes, limits: ModelLimits) -> GenerationRequest:
        """With `RenderedPrompts`. Raises InvalidRequest."""
        return self.render(self.decode(kind, body), limits)

    def render(self, request: GenerationRequest, limits: ModelLimits) -> GenerationRequest:
        """The second half of `read`. Raises InvalidRequest."""
        prompts = self._renderer.render(request.prompt, limits, request.max_prompt_tokens(limits), request.cache_salt)
        return msgspec.structs.replace(request, prompt=RenderedPrompts(prompts))

    def text_of(self, token_ids: list[int]) -> str:
        return self._renderer.text_of(token_ids)
