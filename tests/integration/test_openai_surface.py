"""Every field of OpenAI's API, sent by the openai client to a real cluster."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.cluster import MODEL, Cluster

KEY = "secret"
MAX_MODEL_LEN = 2048


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(
        "--max-logprobs", "-1", "--api-key", KEY, "--max-requests-per-client", "48", "--trust-request-chat-template"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
        yield client


def complete(
    client: openai.OpenAI, prompt: Any = "The quick", *, extra: dict[str, Any] | None = None, **fields: Any
) -> Any:
    wanted: dict[str, Any] = {"max_tokens": 8, "temperature": 0, **fields}
    body = {"return_token_ids": True, "ignore_eos": True, **(extra or {})}
    return client.completions.create(model=MODEL, prompt=prompt, extra_body=body, **wanted)


def chat(client: openai.OpenAI, *, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    wanted: dict[str, Any] = {
        "max_completion_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": "Hello"}], **fields,
    }  # fmt: skip
    body = {"ignore_eos": True, **(extra or {})}
    return client.chat.completions.create(model=MODEL, extra_body=body, **wanted)


def num_tokens(http: httpx.Client, **body: Any) -> int:
    count: int = http.post("/tokenize", json=body).json()["count"]
    return count


@pytest.mark.parametrize("prompt", ["The quick", ["The quick"], [5, 6, 7], [[5, 6, 7], [8, 9]]], ids=str)
def test_prompts_of_every_shape(client: openai.OpenAI, prompt: Any) -> None:
    answer = complete(client, prompt)
    assert len(answer.choices) == (2 if isinstance(prompt[0], list) else 1)
    assert all(len(choice.token_ids) == 8 for choice in answer.choices)


def test_content_as_string_or_parts_is_equivalent(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    joined = chat(client, messages=[{"role": "user", "content": parts}])
    assert (
        joined.choices[0].message.content
        == chat(client, messages=[{"role": "user", "content": "Hel\nlo"}]).choices[0].message.content
    )
    with pytest.raises(openai.BadRequestError, match="takes text only") as caught:
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        chat(client, messages=[{"role": "user", "content": [parts[0], image]}])
    assert caught.value.param == "messages[0].content[1]"


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_usage_in_streams(client: openai.OpenAI, kind: str) -> None:
    ask = complete if kind == "completion" else chat
    plain = list(ask(client, stream=True))
    assert all(chunk.usage is None for chunk in plain)
    last = list(ask(client, stream=True, stream_options={"include_usage": True}))[-1]
    assert last.choices == [] and last.usage.completion_tokens == 8
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 8
    assert (counts[0] == 0) == (kind == "chat"), "a chat begins with a chunk without tokens"
    assert all(chunk.usage.prompt_tokens == last.usage.prompt_tokens for chunk in chunks)


def test_n_best_of_and_seed(client: openai.OpenAI) -> None:
    wanted: dict[str, Any] = {"n": 3, "best_of": 3, "seed": 5, "temperature": 1, "max_tokens": 16}
    answer, again = complete(client, **wanted), complete(client, **wanted)
    texts = [choice.text for choice in answer.choices]
    assert texts == [choice.text for choice in again.choices] and len(set(texts)) == 3
    assert texts[1] == complete(client, seed=6, temperature=1, max_tokens=16).choices[0].text
    chat_answer = chat(client, n=2, temperature=1, seed=5)
    assert [choice.index for choice in chat_answer.choices] == [0, 1]
    streamed: dict[int, str] = {0: "", 1: "", 2: ""}
    for chunk in complete(client, **wanted, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == texts
    with pytest.raises(openai.BadRequestError, match="best_of must equal n"):
        complete(client, n=1, best_of=2)


def test_logprobs_of_completions_and_chats(client: openai.OpenAI) -> None:
    of_completion = complete(client, logprobs=3).choices[0]
    logprobs = of_completion.logprobs
    assert "".join(logprobs.tokens) == of_completion.text and logprobs.text_offset[0] == 0
    assert all(
        len(top) == 3 and max(top.values()) == own
        for top, own in zip(logprobs.top_logprobs, logprobs.token_logprobs, strict=True)
    )
    of_chat = chat(client, logprobs=True, top_logprobs=2, extra={"skip_special_tokens": False}).choices[0]
    assert [len(token.top_logprobs) for token in of_chat.logprobs.content] == [2] * 8
    assert all(token.logprob == token.top_logprobs[0].logprob for token in of_chat.logprobs.content)
    text = b"".join(bytes(token.bytes) for token in of_chat.logprobs.content).decode(errors="replace")
    assert text == of_chat.message.content
    as_ids = complete(client, logprobs=0, extra={"return_tokens_as_token_ids": True}).choices[0]
    assert as_ids.logprobs.tokens == [f"token_id:{token_id}" for token_id in as_ids.token_ids]
    assert as_ids.logprobs.text_offset == complete(client, logprobs=0).choices[0].logprobs.text_offset
    prompt = chat(client, extra={"prompt_logprobs": 1}).prompt_logprobs
    assert prompt[0] is None and all(prompt[1:])


def test_all_and_named_logprobs(client: openai.OpenAI, http: httpx.Client) -> None:
    vocab_size = len(complete(client, logprobs=-1, max_tokens=1).choices[0].logprobs.top_logprobs[0])
    assert vocab_size > 100, "tokens of the same text are one entry"
    top = (
        chat(client, logprobs=True, top_logprobs=-1, max_completion_tokens=1)
        .choices[0]
        .logprobs.content[0]
        .top_logprobs
    )
    assert len(top) >= vocab_size and [t.logprob for t in top] == sorted((t.logprob for t in top), reverse=True)
    prompt = chat(client, max_completion_tokens=1, extra={"prompt_logprobs": -1}).prompt_logprobs
    assert len(prompt[1]) == len(top)
    for stream in (False, True):
        extra = {"logprob_token_ids": [7, 9], "return_tokens_as_token_ids": True}
        answer = chat(client, logprobs=True, stream=stream, extra=extra)
        tokens = answer.choices[0].logprobs.content if not stream else [
            token for chunk in answer if (shown := chunk.choices[0].logprobs) for token in shown.content
        ]  # fmt: skip
        assert len(tokens) == 8
        for token in tokens:
            assert {t.token for t in token.top_logprobs} == {token.token, "token_id:7", "token_id:9"}


def test_beams_are_likelier_than_greedy_text(client: openai.OpenAI) -> None:
    def total(choice: Any) -> float:
        return float(sum(choice.logprobs.token_logprobs))

    prompts = ["The quick", "Once upon"]
    wanted: dict[str, Any] = {"prompt": prompts, "logprobs": 1, "max_tokens": 6}
    beams = complete(client, **wanted, n=3, extra={"use_beam_search": True}).choices
    greedy = complete(client, **wanted).choices
    assert [choice.index for choice in beams] == list(range(6))
    for number in range(2):
        own = beams[3 * number : 3 * number + 3]
        assert len({choice.text for choice in own}) == 3
        assert [total(choice) for choice in own] == sorted((total(choice) for choice in own), reverse=True)
        assert total(own[0]) >= total(greedy[number]) - 1e-3
    assert (
        complete(client, n=3, logprobs=1, max_tokens=6, extra={"use_beam_search": True}).choices[0].text
        == beams[0].text
    )
    with pytest.raises(openai.BadRequestError, match="stream is true, which is not supported with use_beam_search"):
        complete(client, stream=True, extra={"use_beam_search": True})


def test_truncation_sides(client: openai.OpenAI) -> None:
    for side, kept in (("left", [8, 9]), ("right", [5, 6])):
        extra = {"truncate_prompt_tokens": 2, "truncation_side": side}
        assert complete(client, [5, 6, 7, 8, 9], extra=extra).choices[0].prompt_token_ids == kept


def test_tokenize_shows_a_chats_tokens_and_the_models_limit(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    tokens = http.post("/tokenize", json={"messages": messages, "tools": tools, "return_token_strs": True}).json()
    assert tokens["max_model_len"] == MAX_MODEL_LEN and len(tokens["token_strs"]) == tokens["count"]


def test_echo_returns_the_prompt_and_its_logprobs(client: openai.OpenAI) -> None:
    alone = complete(client, echo=True, max_tokens=0, logprobs=2)
    [choice] = alone.choices
    assert (choice.text, choice.finish_reason, choice.token_ids) == ("The quick", "length", [])
    assert (alone.usage.completion_tokens, alone.usage.prompt_tokens) == (0, len(choice.logprobs.tokens))
    longer = complete(client, echo=True, max_tokens=3, logprobs=2).choices[0].logprobs
    assert choice.logprobs.token_logprobs[0] is None and "".join(choice.logprobs.tokens) == "The quick"
    assert longer.token_logprobs[:-3] == choice.logprobs.token_logprobs
    streamed = list(complete(client, echo=True, max_tokens=0, stream=True, stream_options={"include_usage": True}))
    shown = [choice for chunk in streamed for choice in chunk.choices]
    assert "".join(choice.text for choice in shown) == "The quick" and not any(choice.token_ids for choice in shown)
    assert streamed[-1].usage == alone.usage
    several = complete(client, ["The quick", "Once"], echo=True, max_tokens=0).choices
    assert [each.text for each in several] == ["The quick", "Once"]


def test_fields_that_restrict_tokens(client: openai.OpenAI, http: httpx.Client) -> None:
    free = complete(client, max_tokens=24).choices[0]
    assert set(complete(client, extra={"allowed_token_ids": [300, 301]}).choices[0].token_ids) <= {300, 301}
    assert complete(client, logit_bias={"300": 100}).choices[0].token_ids == [300] * 8
    for token_id in free.token_ids[1:4]:
        word = http.post("/detokenize", json={"tokens": [token_id]}).json()["prompt"].strip()
        if not word or "�" in word:
            continue
        banned = {tuple(http.post("/tokenize", json={"prompt": space + word}).json()["tokens"]) for space in ("", " ")}
        without = complete(client, max_tokens=24, extra={"bad_words": [word]}).choices[0].token_ids
        for ids in banned:
            assert all(tuple(without[i : i + len(ids)]) != ids for i in range(len(without)))
        assert without != free.token_ids
        break
    else:
        pytest.fail("the noise model writes a word")
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids"):
        complete(client, extra={"allowed_token_ids": [10**6]})
    repeated = complete(client, max_tokens=24, presence_penalty=2, frequency_penalty=2)
    assert len(set(repeated.choices[0].token_ids)) >= len(set(free.token_ids))


def test_a_bad_word_of_several_tokens(client: openai.OpenAI, http: httpx.Client) -> None:
    free = complete(client, max_tokens=32).choices[0].token_ids
    for pair in itertools.pairwise(free):
        text = http.post("/detokenize", json={"tokens": pair}).json()["prompt"]
        ids = http.post("/tokenize", json={"prompt": " " + text.lstrip()}).json()["tokens"]
        if tuple(ids) == pair and text.startswith(" "):
            break
    else:
        pytest.fail("the noise model writes two tokens that are a text of their own")
    without = complete(client, max_tokens=32, extra={"bad_words": [text]}).choices[0].token_ids
    assert pair not in list(itertools.pairwise(without))


def test_fields_that_end_the_text(client: openai.OpenAI) -> None:
    free = complete(client, max_tokens=32).choices[0]
    stop = free.text[8:11]
    cut = complete(client, max_tokens=32, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (free.text[: free.text.index(stop)], "stop")
    shown = complete(client, max_tokens=32, stop=stop, extra={"include_stop_str_in_output": True}).choices[0]
    assert shown.text == cut.text + stop
    stop_id = free.token_ids[3]
    first = free.token_ids.index(stop_id)
    assert len(complete(client, extra={"stop_token_ids": [stop_id]}).choices[0].token_ids) == first + 1
    late = complete(client, extra={"stop_token_ids": [stop_id], "min_tokens": first + 2}).choices[0]
    assert len(late.token_ids) >= first + 2


def test_templates(client: openai.OpenAI, http: httpx.Client) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is"}]
    for fields in (
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"chat_template": "{{ messages[0].content }}{{ mood }}{{ documents[0].text }}",
         "chat_template_kwargs": {"mood": "glad"}, "documents": [{"text": "doc"}]},
    ):  # fmt: skip
        answer = chat(client, messages=messages, extra=fields)
        assert answer.usage.prompt_tokens == num_tokens(http, messages=messages, **fields)
    assert num_tokens(http, prompt="Higladdoc") == answer.usage.prompt_tokens


def test_ignored_fields_are_accepted(client: openai.OpenAI) -> None:
    plain = complete(client)
    extra = {"priority": -3, "cache_salt": "me", "spaces_between_special_tokens": False, "metadata": {"a": "b"}}
    assert complete(client, user="me", extra=extra).choices[0].text == plain.choices[0].text
    assert complete(client, extra={"min_p": 0.5, "top_k": 5, "repetition_penalty": 1.0}).choices[0].text


async def _ask_mixed(cluster: Cluster, bodies: list[dict[str, Any]]) -> list[int | str]:
    limits = httpx.Limits(max_connections=32)
    http: Any
    async with (
        httpx.AsyncClient(limits=limits, timeout=60) as http,
        openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, max_retries=0, http_client=http) as client,
    ):

        async def ask(body: dict[str, Any]) -> int | str:
            if body.pop("stream"):
                options: Any = {"include_usage": True}
                stream = await client.completions.create(
                    model=MODEL, max_tokens=1, stream=True, stream_options=options, **body
                )
                chunks = [chunk async for chunk in stream]
                assert chunks[-1].usage is not None
                return chunks[-1].usage.prompt_tokens
            try:
                answer = await client.completions.create(model=MODEL, max_tokens=1, **body)
            except openai.BadRequestError as error:
                return str(error.code)
            assert answer.usage is not None
            return answer.usage.prompt_tokens

        return list(await asyncio.gather(*map(ask, bodies)))


def test_concurrent_requests_with_mixed_truncation_never_fail(cluster: Cluster, http: httpx.Client) -> None:
    """The tokeniser's own truncation is shared state, so no request may set it."""
    long, short = "word and " * 3000, "word and " * 20
    lengths = {text: num_tokens(http, prompt=text) for text in (long, short)}
    assert lengths[long] > MAX_MODEL_LEN > lengths[short] > 17
    bodies: list[dict[str, Any]] = []
    expected: list[int | str] = []
    for number in range(40):
        text = (long, short)[number % 2]
        truncate = (None, 1, 17, 100, -1)[number % 5]
        if truncate is None:
            expected.append(lengths[text] if text == short else "context_length_exceeded")
        else:
            expected.append(min(lengths[text], MAX_MODEL_LEN - 1 if truncate == -1 else truncate))
        stream = number % 3 == 0 and isinstance(expected[-1], int)
        bodies.append({"prompt": text, "stream": stream, "extra_body": {"truncate_prompt_tokens": truncate}})
    assert asyncio.run(_ask_mixed(cluster, bodies)) == expected


def test_errors_raise_the_clients_exception_classes(cluster: Cluster, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        complete(client, temperature=3)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature", "invalid_request", "invalid_request_error",
    )  # fmt: skip
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with (
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    with complete(client, n=40, max_tokens=1000, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as many:
            complete(client, n=40)
    assert many.value.response.headers["retry-after"]
    with pytest.raises(openai.APIStatusError) as large:
        complete(client, "x" * (17 << 20))
    assert large.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="context length is 2048"):
        complete(client, [5] * 3000)
    with pytest.raises(openai.BadRequestError, match="not supported"):
        complete(client, extra={"suffix": "x"})
