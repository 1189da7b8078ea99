"""Structured output and tool calls through a real cluster. Random weights show that the grammar decides."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest

from tests.support.cluster import MODEL, Cluster

BLOCK_SIZE = 16
NUM_BLOCKS = 64
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog", "Ünicorn"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,4}$"}, "minItems": 1, "maxItems": 3},
        "owner": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/owner"}]},
    },
    "required": ["name", "kind", "age", "tags", "owner"],
    "additionalProperties": False,
    "$defs": {"owner": {"type": "object", "properties": {"id": {"const": 7}}, "required": ["id"]}},
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
WEATHER_ARGUMENTS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Łódź"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER_ARGUMENTS},
    },
    {"type": "function", "function": {"name": "get_time"}},
]
CHAT: list[Any] = [{"role": "user", "content": "Tell me about a pet."}]


@pytest.fixture(scope="module")
def cluster(noise_model: Path) -> Iterator[Cluster]:
    config = json.loads((noise_model / "config.json").read_text())
    block_bytes = 4 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * BLOCK_SIZE
    gib = block_bytes * NUM_BLOCKS / (1 << 30)
    with Cluster("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--kv-cache-gib", str(gib),
                 "--max-model-len", "1000") as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    wanted: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_completion_tokens": 700, **fields}
    return client.chat.completions.create(**wanted)


def joined(stream: Any) -> dict[int, dict[str, Any]]:
    """Returns content, tool calls and finish_reason of a stream, by choice."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            result = choices.setdefault(choice.index, {"content": "", "calls": [], "finish_reason": None})
            result["content"] += choice.delta.content or ""
            for piece in choice.delta.tool_calls or []:
                if piece.index == len(result["calls"]):
                    assert piece.id and piece.type == "function"
                    result["calls"].append({"id": piece.id, "name": piece.function.name, "arguments": ""})
                else:
                    assert piece.id is None and piece.function.name is None
                result["calls"][piece.index]["arguments"] += piece.function.arguments
            result["finish_reason"] = choice.finish_reason or result["finish_reason"]
    return choices


def check_pet(choice: Any) -> None:
    assert choice.finish_reason == "stop"
    jsonschema_rs.validate(SCHEMA, json.loads(choice.message.content))


def test_output_always_matches_the_schema(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda seed: chat(client, response_format=FORMAT, seed=seed, n=3), range(8)))
    by_seed: dict[int, set[str]] = {}
    for first_seed, answer in enumerate(answers):
        for choice in answer.choices:
            check_pet(choice)
            by_seed.setdefault(first_seed + choice.index, set()).add(choice.message.content)
    # A seed gives the same text in any batch; different seeds give different texts within the schema.
    assert {len(texts) for texts in by_seed.values()} == {1}
    assert len(set[str]().union(*by_seed.values())) == len(by_seed) == 10


def test_grammars_survive_preemption(client: openai.OpenAI, cluster: Cluster) -> None:
    """Each sequence needs the whole KV pool; one of them has no grammar. Preempted ones resume correctly."""
    list_schema = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 999},
        "minItems": 60,
        "maxItems": 60,
    }
    before = cluster.worker("decode-0").load.num_preempted

    def run(seed: int) -> str:
        if seed == 0:
            return str(chat(client, seed=seed, max_completion_tokens=300).choices[0].message.content)
        fields = {
            "seed": seed,
            "max_completion_tokens": 700,
            "extra_body": {"structured_outputs": {"json": list_schema}},
        }
        if seed % 2:
            [result] = joined(chat(client, stream=True, **fields)).values()
            assert result["finish_reason"] == "stop"
            return str(result["content"])
        [choice] = chat(client, **fields).choices
        assert choice.finish_reason == "stop"
        return str(choice.message.content)

    with ThreadPoolExecutor(7) as pool:
        together = list(pool.map(run, range(7)))
    for content in together[1:]:
        jsonschema_rs.validate(list_schema, json.loads(content))
    cluster.wait_for(lambda: cluster.worker("decode-0").load.num_preempted > before)
    assert run(3) == together[3]  # the same text without preemption


def test_other_kinds_of_grammar(client: openai.OpenAI) -> None:
    def complete(**extra: Any) -> str:
        answer = client.completions.create(model=MODEL, prompt="Say:", max_tokens=200, extra_body=extra)
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    assert re.fullmatch(
        r"[A-Z]{3}-\d{2}é?", complete(structured_outputs={"regex": r"[A-Z]{3}-[0-9]{2}é?"}, ignore_eos=True)
    )
    assert complete(structured_outputs={"choice": ['yes "sir"', "no"]}) in ('yes "sir"', "no")
    assert complete(structured_outputs={"choice": ["left", "right"]}, top_k=5, repetition_penalty=1.5) in (
        "left",
        "right",
    )
    assert re.fullmatch(r"(ab)+c", complete(structured_outputs={"grammar": 'start: "ab"~1..5 "c"'}, min_tokens=3))
    assert re.fullmatch(
        r"[01]{4}", complete(structured_outputs={"grammar": 'root ::= bit bit bit bit\nbit ::= "0" | "1"'})
    )
    cut_off = client.completions.create(
        model=MODEL, prompt="Say:", max_tokens=30, extra_body={"structured_outputs": {"regex": r"\{[a-z]{300,}\}"}}
    )
    assert cut_off.choices[0].finish_reason == "length" and re.fullmatch(r"\{[a-z]{28,}", cut_off.choices[0].text)
    an_object = client.completions.create(
        model=MODEL, prompt="Say:", max_tokens=100, extra_body={"structured_outputs": {"json_object": True}}
    ).choices[0]
    assert an_object.text.startswith("{")
    if an_object.finish_reason == "stop":  # otherwise the object is incomplete
        assert isinstance(json.loads(an_object.text), dict)


def test_logprobs_ignore_the_grammar(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="Say:",
        max_tokens=9,
        logprobs=3,
        extra_body={"structured_outputs": {"choice": ["forty-two"]}},
    )
    result = answer.choices[0].logprobs
    assert result is not None and result.token_logprobs is not None and result.top_logprobs is not None
    assert answer.choices[0].text == "forty-two"
    assert all(
        logprob is not None and logprob < -1 for logprob in result.token_logprobs
    )  # unlikely for the model, though the grammar allows nothing else
    assert all(max(top.values()) > -20 and len(top) >= 3 for top in result.top_logprobs)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_required_tool_calls_are_made(client: openai.OpenAI, choice: Any) -> None:
    for seed in range(3):
        fields = {"tools": TOOLS, "tool_choice": choice, "seed": seed, "max_completion_tokens": 600}
        if choice == "required":
            fields["parallel_tool_calls"] = False
        [whole] = chat(client, **fields).choices
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        [call] = whole.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert call.type == "function" and call.id
        if call.function.name == "get_weather":
            jsonschema_rs.validate(WEATHER_ARGUMENTS, arguments)
        else:
            assert (choice, call.function.name, arguments) == ("required", "get_time", {})
        [result] = joined(chat(client, stream=True, **fields)).values()
        assert (result["finish_reason"], result["content"]) == ("tool_calls", "")
        [streamed] = result["calls"]
        assert (streamed["name"], streamed["arguments"]) == (call.function.name, call.function.arguments)


def test_tool_results_are_accepted_in_the_next_turn(client: openai.OpenAI) -> None:
    """The call returns to the chat with its result. Random weights call a tool only if forced."""
    [first] = chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=1).choices
    call = first.message.tool_calls[0]
    messages = [*CHAT, first.message, {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}]
    fields = {"messages": messages, "max_completion_tokens": 8, "seed": 1}
    with_tools = chat(client, tools=TOOLS, **fields)
    assert with_tools.choices[0].message.tool_calls is None and with_tools.choices[0].message.content
    without = chat(client, **fields)
    not_to_be_called = chat(client, tools=TOOLS, tool_choice="none", **fields)
    assert with_tools.usage.prompt_tokens > without.usage.prompt_tokens + 30
    assert not_to_be_called.usage.prompt_tokens == without.usage.prompt_tokens


def test_optional_tool_calls_match_their_schema(client: openai.OpenAI, noise_model: Path) -> None:
    """The bias makes the model begin a call; the grammar then constrains its arguments."""
    format_of_call = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "never"}}}
    [whole] = chat(
        client, tools=TOOLS[:1], tool_choice="auto", parallel_tool_calls=False, response_format=format_of_call,
        logit_bias={str(token): -100.0 for token in quotes(noise_model)}, seed=2,
    ).choices  # fmt: skip
    [call] = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and call.function.name == "get_weather"
    jsonschema_rs.validate(WEATHER_ARGUMENTS, json.loads(call.function.arguments))


def quotes(noise_model: Path) -> list[int]:
    """Token ids that begin with a quote; without them the answer "never" cannot begin."""
    vocabulary = json.loads((noise_model / "tokenizer.json").read_text())["model"]["vocab"]
    return [token_id for token, token_id in vocabulary.items() if token.startswith('"')]


def test_grammars_with_unknown_tokens_are_refused_by_the_worker(client: openai.OpenAI) -> None:
    """Only workers compile grammars with the model's vocabulary."""
    with pytest.raises(openai.BadRequestError, match="token"):
        chat(client, extra_body={"structured_outputs": {"grammar": "start: <|no_such_token|>"}})
    assert chat(client, max_completion_tokens=3).usage.completion_tokens == 3


def test_a_tool_with_an_odd_schema_is_served_and_counted(client: openai.OpenAI, cluster: Cluster) -> None:
    odd: Any = {"type": "object", "properties": {"a": {"type": "float", "pattern": "(?=a)b"}}, "required": None}
    tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "parameters": odd}}]

    def num_free(reason: str) -> float:
        text = httpx.get(f"{cluster.admin_url}/metrics", timeout=60).text
        [found] = re.findall(rf'tandem_unconstrained_tools_total\{{reason="{reason}"\}} (\S+)', text)
        return float(found)

    before = num_free("invalid")
    answer = chat(client, tools=tools, max_completion_tokens=5, seed=1)
    assert answer.usage.completion_tokens == 5
    assert num_free("invalid") == before + 1 and num_free("size") == 0
    for choice in ("required", {"type": "function", "function": {"name": "odd"}}):
        with pytest.raises(
            openai.BadRequestError, match=r"tool 'odd' cannot be enforced, at parameters\.properties\.a: "
        ):
            chat(client, tools=tools, tool_choice=choice)
