"""Answers of /v1/embeddings."""

from __future__ import annotations

import base64
from contextlib import aclosing

import numpy as np

from tandem.proxy.answers.json_parts import Part, encode
from tandem.proxy.api.answer_bodies import Embedding, EmbeddingResponse, EmbeddingUsage, PromptTokensDetails
from tandem.proxy.api.generation_request import EmbeddingOptions
from tandem.proxy.dispatch.generation import Generation


class EmbeddingAnswer:
    """Makes the answer to one request from the embeddings of its inputs."""

    def __init__(self, generation: Generation, model: str) -> None:
        self._generation = generation
        self._model = model

    async def whole(self) -> list[Part]:
        """Returns the body. The caller calls `release` when it is sent."""
        generation, options = self._generation, self._generation.request.embedding
        assert options is not None
        found: dict[int, Embedding] = {}
        try:
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    assert delta.embedding is not None
                    value = encode_embedding(delta.embedding, options)
                    generation.held.grow(len(value) * (1 if isinstance(value, str) else 24))
                    found[delta.index] = Embedding(delta.index, value)
            record = generation.record
            num_tokens = record.num_prompt_tokens
            usage = EmbeddingUsage(num_tokens, num_tokens, PromptTokensDetails(record.num_cached_tokens))
            data = [embedding for _, embedding in sorted(found.items())]
            name = f"embd-{record.request_id}"
            return [encode(EmbeddingResponse(name, generation.created, self._model, data, usage))]
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Ends counting the answer's memory."""
        self._generation.held.release()


def encode_embedding(packed: bytes, options: EmbeddingOptions) -> list[float] | str:
    """packed: float32 values of the worker. Shortens and scales them as the request wants."""
    values = np.frombuffer(packed, np.float32)[: options.dimensions]
    if options.normalize:
        values = values / max(float(np.linalg.norm(values.astype(np.float64))), 1e-12)
    values = values.astype("<f4")
    if options.as_base64:
        return base64.b64encode(values.tobytes()).decode()
    numbers: list[float] = values.tolist()
    return numbers
