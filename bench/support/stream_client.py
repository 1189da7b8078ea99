"""A client that streams completions of token ids, one at a time."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, field

import httpx

from bench.support.servers import MODEL
from tests.support.sse import events_of


@dataclass
class StreamedTokens:
    """Tokens of a completion, the seconds from sending to each of them, and the prompt tokens that were cached."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    num_cached: int = 0


class StreamClient:
    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60)
        self._rng = random.Random(1)

    def stream(self, num_prompt_tokens: int, max_tokens: int) -> list[float]:
        """Streams a new random prompt. Returns the seconds to each token."""
        return self.complete(self.random_prompt(num_prompt_tokens), max_tokens).times_s

    def random_prompt(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(4, 2048) for _ in range(num_tokens)]

    def complete(self, prompt: list[int], max_tokens: int) -> StreamedTokens:
        """Raises SystemExit on an error or too few tokens."""
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
        }  # fmt: skip
        found = StreamedTokens()
        started = time.perf_counter()
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                sys.exit(f"error: the server answered {answer.status_code}: {answer.read().decode()}")
            for event in events_of(answer.iter_lines()):
                if "error" in event:
                    sys.exit(f"error: {event['error']}")
                token_ids = [i for choice in event["choices"] for i in choice.get("token_ids") or ()]
                found.token_ids += token_ids
                found.times_s += [time.perf_counter() - started] * len(token_ids)
                if usage := event.get("usage"):
                    found.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if len(found.token_ids) != max_tokens:
            sys.exit(f"error: expected {max_tokens} tokens, got {len(found.token_ids)}")
        return found
