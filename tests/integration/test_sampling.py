"""Sampling options through a whole cluster in float32 agree with the logits that transformers computes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tandem.proxy.text.token_text import TokenText
from tests.support.cluster import MODEL, Cluster

NUM_NEW = 20


@pytest.fixture(scope="module")
def client(float32_cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{float32_cluster.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def model(noise_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(noise_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(noise_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(noise_model / "tokenizer.json"))


def expected_logprobs(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities [len(token_ids), vocab_size]; row i predicts token i + 1."""
    with torch.inference_mode():
        logprobs: torch.Tensor = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    return logprobs


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    extra: dict[str, Any] = {
        key: fields.pop(key)
        for key in ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "prompt_logprobs",
                    "truncate_prompt_tokens", "stop_token_ids")
        if key in fields
    }  # fmt: skip
    wanted = {"max_tokens": NUM_NEW, "temperature": 0, **fields}
    body = {"return_token_ids": True, "ignore_eos": True, **extra}
    return client.completions.create(model=MODEL, prompt=prompt, extra_body=body, **wanted)


def random_prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 2048) for _ in range(length)]


def test_logprobs_of_output_prompt_and_echo(client: openai.OpenAI, model: Any, tokenizer: Tokenizer) -> None:
    prompt = random_prompt(1, 130)
    answer = complete(client, prompt, logprobs=3, echo=True, prompt_logprobs=2)
    [choice] = answer.choices
    token_ids = prompt + choice.token_ids
    expected = expected_logprobs(model, token_ids)
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    texts = TokenText(tokenizer)
    assert logprobs.tokens == [texts.name(token_id) for token_id in token_ids]
    assert any(name.startswith("bytes:") for name in logprobs.tokens), "parts of characters"
    for i in range(1, len(token_ids)):
        assert logprobs.token_logprobs[i] == pytest.approx(float(expected[i - 1, token_ids[i]]), abs=1e-3)
        top = expected[i - 1].topk(3).values.tolist()
        assert 3 <= len(logprobs.top_logprobs[i]) <= 4, "each token has a name of its own"
        allowed = [*top, logprobs.token_logprobs[i]]
        assert all(any(abs(value - p) < 1e-3 for p in allowed) for value in logprobs.top_logprobs[i].values())
    assert choice.text.startswith(tokenizer.decode(prompt))
    assert choice.prompt_logprobs[0] is None and len(choice.prompt_logprobs) == len(prompt)
    for i, by_id in enumerate(choice.prompt_logprobs[1:], start=1):
        own = by_id[str(prompt[i])]
        assert own["logprob"] == pytest.approx(float(expected[i - 1, prompt[i]]), abs=1e-3)
        assert own["rank"] == 1 + int((expected[i - 1] > expected[i - 1, prompt[i]]).sum())
        assert 2 <= len(by_id) <= 3


def test_streamed_logprobs_equal_unstreamed_ones(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"logprobs": 2, "echo": True, "temperature": 0.9, "seed": 4, "n": 2}
    whole = complete(client, random_prompt(2, 40), **fields)
    pieces: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in complete(client, random_prompt(2, 40), stream=True, **fields):
        for choice in chunk.choices:
            pieces[choice.index].append(choice)
    for choice in whole.choices:
        parts = pieces[choice.index]
        assert "".join(part.text for part in parts) == choice.text
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            joined = [value for part in parts for value in getattr(part.logprobs, name)]
            assert joined == getattr(choice.logprobs, name)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    wanted: dict[str, Any] = {
        "model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 12, "seed": 5,
        "logprobs": True, "top_logprobs": 4,
    }  # fmt: skip
    answer = client.chat.completions.create(**wanted)
    [choice] = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    text = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
    assert text.decode(errors="replace").rstrip("�") == (choice.message.content or "").rstrip("�")
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 4 and token.logprob <= token.top_logprobs[0].logprob
    streamed = [
        token
        for chunk in client.chat.completions.create(**wanted, stream=True)
        for piece in chunk.choices
        if piece.logprobs is not None
        for token in piece.logprobs.content or []
    ]
    assert [token.token for token in streamed] == [token.token for token in choice.logprobs.content]


def test_penalties_bias_and_minimum(client: openai.OpenAI, model: Any) -> None:
    """Each greedy token has the highest logit after penalties and bias are applied to transformers' logits."""
    prompt = random_prompt(3, 70)
    bias = {"17": 4.0, "900": -100.0}
    answer = complete(
        client,
        prompt,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias=bias,
        max_tokens=30,
    )
    output: list[int] = answer.choices[0].token_ids
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0]
    for i, token_id in enumerate(output):
        row = logits[len(prompt) - 1 + i].clone()
        for biased, amount in bias.items():
            row[int(biased)] += amount
        for seen in set(prompt + output[:i]):
            row[seen] = row[seen] / 1.3 if row[seen] > 0 else row[seen] * 1.3
        for seen in set(output[:i]):
            row[seen] -= 0.5 + 0.4 * output[:i].count(seen)
        assert row[token_id] >= row.max() - 1e-3
    plain = complete(client, prompt).choices[0].token_ids
    assert plain != output[:NUM_NEW]
    assert complete(client, prompt, temperature=1.0, min_p=1.0, seed=1).choices[0].token_ids == plain
    # The first token becomes a stop token; min_tokens then suppresses it.
    stopped = complete(client, prompt, stop_token_ids=[plain[0]]).choices[0]
    assert (stopped.token_ids, stopped.finish_reason) == ([plain[0]], "stop")
    held = complete(client, prompt, stop_token_ids=[plain[0]], min_tokens=5).choices[0].token_ids
    assert len(held) >= 5 and plain[0] not in held[:5]


def test_truncated_prompts(client: openai.OpenAI) -> None:
    """A truncated prompt is answered like its tail and does not affect later requests."""
    prompt = random_prompt(4, 60)
    cut = complete(client, prompt, truncate_prompt_tokens=20)
    assert cut.usage.prompt_tokens == 20
    assert cut.choices[0].token_ids == complete(client, prompt[-20:]).choices[0].token_ids
    assert complete(client, prompt).usage.prompt_tokens == 60


def test_usage_reports_cached_tokens(client: openai.OpenAI) -> None:
    prompt = random_prompt(5, 100)
    assert complete(client, prompt).usage.prompt_tokens_details.cached_tokens == 0
    assert complete(client, prompt).usage.prompt_tokens_details.cached_tokens == 96
