"""Random bodies for each route that generates or tokenises: valid ones in the forms of many clients, then damaged."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 4.0, 2**63, -(2**63), 1e308, "", "x", "\ud800", "é" * 50, [], {}, [[]], [None],
    {"a": {}}, [1, -1, 2**31], "a" * 3000, [{"role": "user", "content": 1}], [{"role": "?", "content": "x"}],
    "auto", "none", "required", {"type": "function", "name": "f"}, {"type": "allowed_tools", "tools": []},
)  # fmt: skip
_FIELDS = (
    "prompt", "messages", "input", "model", "max_tokens", "max_output_tokens", "temperature", "top_p", "n", "stop",
    "stream", "seed", "logprobs", "top_logprobs", "logit_bias", "tools", "tool_choice", "response_format",
    "structured_outputs", "chat_template", "chat_template_kwargs",
    "documents", "reasoning_effort", "priority", "user", "tokens", "echo", "unknown_field", "stream_options", "min_p",
    "min_tokens", "ignore_eos", "bad_words", "cache_salt", "timeout", "store", "verbosity", "truncation", "text",
    "reasoning", "thinking", "system", "instructions", "previous_response_id", "prompt_logprobs", "use_beam_search",
    "allowed_token_ids", "best_of", "suffix", "dimensions", "encoding_format", "truncate_prompt_tokens", "metadata",
    "add_generation_prompt", "continue_final_message", "parallel_tool_calls", "stop_sequences", "output_config",
)  # fmt: skip
_ARGUMENTS: tuple[Any, ...] = (
    "{}", '{"a": 1}', '{"a": "cut o', "[]", "null", '"x"', "", " ", "1e999", {"a": 1}, None,
    '{"a":' * 60 + "1" + "}" * 60,
)  # fmt: skip
"""Arguments of calls as clients send them back, also those that max_tokens has cut off."""


def _references(length: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/r0", "$defs": {**definitions, f"r{length}": {}}}


def _rules(length: int, start: str = "start", sign: str = ":") -> str:
    rules = [f"r{i} {sign} r{i + 1}" for i in range(length)]
    return "\n".join([f"{start} {sign} r0", *rules, f'r{length} {sign} "a"'])


_SCHEMAS: tuple[Any, ...] = (
    {},
    {"type": "object", "properties": {"zip": {"type": ["string", "null"]}, "is_new": {"type": "boolean"}}},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "integer"}}},
    _references(80),
    _references(1040),
    _references(3000),  # the latter overflowed a stack
    {"$ref": "#"},
    {"anyOf": [{"anyOf": [{"anyOf": [{"type": "null"}]}]}, {"type": "string", "format": "date"}]},
    {"type": "string", "pattern": "^(a|b)*c{1,3}$", "maxLength": 5},
    {"type": "integer", "multipleOf": 3, "minimum": -(2**70)},
    {"not": {}},
    "{}",
)
_GRAMMARS = (
    'start: "a"', 'root ::= "a" | "b"', _rules(80), _rules(2677), _rules(5000), _rules(3000, "root", "::="),
    "start: " + "a? " * 300 + '\na: "a"', "\n" * 3000 + 'start: "a"', 'start: start "a" | "a"', "start: /(/",
    "start: x", "%llguidance {}\nstart: %json {}",
)  # fmt: skip
_TEMPLATES = (
    "{% for m in messages %}{{ m.content }}{% endfor %}", "{{ messages", "{% for i in range(10**9) %}{% endfor %}",
    "{{ ''.__class__ }}", "{{ raise_exception('no') }}", "{{ tools | tojson }}",
)  # fmt: skip
_WORDS = ("hello", "<tool_call>", '{"name": "f"}', "<think>", "</think>", "\x00", "é", "\U0001f600", "<|end|>")


def random_body(rng: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    """Returns a path and a body for it."""
    path, make = rng.choice(_ROUTES)
    body = {"model": model, "stream": rng.random() < 0.2, **make(rng)}
    if rng.random() < 0.1:  # one of many fields, but the one by which most requests did harm
        body["structured_outputs"] = _typed("structured_outputs", rng)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        field = rng.choice(_FIELDS)
        body[field] = _typed(field, rng) if rng.random() < 0.5 else rng.choice(_VALUES)
    return path, body


def _typed(field: str, rng: random.Random) -> Any:
    """Returns a value that the field may take."""
    match field:
        case "tools":
            return [_tool(rng) for _ in range(rng.randrange(1, 4))]
        case "response_format":
            return {"type": "json_schema", "json_schema": {"name": "a", "schema": rng.choice(_SCHEMAS)}}
        case "structured_outputs":
            return rng.choice([{"json": rng.choice(_SCHEMAS)}, {"grammar": rng.choice(_GRAMMARS)}, {"regex": "(a|b)+"}])
        case "chat_template":
            return rng.choice(_TEMPLATES)
        case "stop" | "stop_sequences" | "bad_words":
            return [rng.choice(_WORDS) for _ in range(rng.randrange(1, 4))]
        case "logit_bias":
            return {str(rng.randrange(3000)): rng.choice((-100, 100, 1.5)) for _ in range(rng.randrange(20))}
        case "text":
            return {"format": {"type": "json_schema", "name": "a", "schema": rng.choice(_SCHEMAS)}, "verbosity": "low"}
    return rng.choice((0, 1, 2, 0.5, True, "low", {"type": "enabled", "budget_tokens": 1024}))


def _tool(rng: random.Random) -> dict[str, Any]:
    function = {"name": rng.choice(("f", "g", "h", "")), "parameters": rng.choice(_SCHEMAS)}
    flat = {"type": "function", **function}  # of responses; Anthropic's have an input_schema
    anthropic = {"name": function["name"], "input_schema": function["parameters"]}
    return rng.choice([{"type": "function", "function": function}, flat, anthropic])


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(_WORDS) for _ in range(rng.randrange(1, 5)))


def _completion(rng: random.Random) -> dict[str, Any]:
    return {"prompt": rng.choice([_text(rng), [_text(rng)] * 2, [1, 2, 3], [[1], [2, 3]]]), "max_tokens": 2}


def _chat(rng: random.Random) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": rng.choice(_ARGUMENTS)}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": _text(rng)}]
    if rng.random() < 0.4:
        messages += [
            {"role": "assistant", "content": rng.choice([None, "", _text(rng)]), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": rng.choice([_text(rng), [{"type": "text", "text": "1"}]])},
        ]
    if rng.random() < 0.2:
        messages.insert(0, {"role": rng.choice(("system", "developer")), "content": _text(rng)})
    return {"messages": messages, "max_tokens": 2}


def _message(rng: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": _text(rng)}]}]
    if rng.random() < 0.4:
        use = {"type": "tool_use", "id": "c", "name": "f", "input": rng.choice(_ARGUMENTS)}
        content = rng.choice(
            [_text(rng), [{"type": "text", "text": "1"}, {"type": "tool_reference", "tool_name": "f"}]]
        )
        result = {"type": "tool_result", "tool_use_id": "c", "content": content}
        messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return {"messages": messages, "max_tokens": 2}


def _response(rng: random.Random) -> dict[str, Any]:
    items: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "input_text", "text": _text(rng)}]}]
    if rng.random() < 0.4:
        items += [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": rng.choice(_ARGUMENTS)},
            {"type": "function_call_output", "call_id": "c", "output": _text(rng)},
            {"type": "item_reference", "id": "msg_1"},
        ][: rng.randrange(1, 4)]
    return {"input": rng.choice([_text(rng), items]), "max_output_tokens": 2, "store": rng.random() < 0.5}


def _embedding(rng: random.Random) -> dict[str, Any]:
    return {"input": rng.choice([_text(rng), [_text(rng)] * 3, [[1, 2], [3]]])}


def _tokens(rng: random.Random) -> dict[str, Any]:
    return {"tokens": [rng.randrange(2048) for _ in range(rng.randrange(5))]}


_ROUTES: tuple[tuple[str, Callable[[random.Random], dict[str, Any]]], ...] = (
    ("/v1/completions", _completion),
    ("/v1/chat/completions", _chat),
    ("/v1/chat/completions", _chat),
    ("/v1/messages", _message),
    ("/v1/messages/count_tokens", _message),
    ("/v1/responses", _response),
    ("/v1/embeddings", _embedding),
    ("/tokenize", _chat),
    ("/tokenize", _completion),
    ("/detokenize", _tokens),
)


def encoded(rng: random.Random, body: dict[str, Any]) -> bytes:
    """Returns the body as JSON, at times cut off or with a wrong byte."""
    data = bytearray(json.dumps(body).encode())
    if rng.random() < 0.15:
        del data[rng.randrange(len(data)) :]
    if rng.random() < 0.15 and data:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)
