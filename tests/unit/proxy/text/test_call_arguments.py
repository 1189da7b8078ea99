"""Arguments of earlier calls that are no JSON object: taken by all three APIs, and rendered by chat templates.

vllm-project/vllm#47761 and #43995, mckaywrigley/chatbot-ui#2035: one such call makes every further request fail.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.proxy.answers.messages import BlockWriter, joined_blocks
from tandem.proxy.answers.responses import ItemWriter
from tandem.proxy.api.chat_prompts import template_message
from tandem.proxy.api.schema import ChatMessage, FunctionCall, ToolCall
from tandem.proxy.api.validation import BodyDecoder
from tandem.proxy.parsers.tool_formats import ToolFormat
from tandem.proxy.text.model_text import ModelText
from tandem.proxy.text.prompt import ChatPrompt
from tandem.proxy.text.tool_calls import template_arguments

# The ways in which the templates of these families write earlier calls.
TEMPLATES = {
    "hermes": '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}',
    "qwen3": "{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}",
    "qwen3_coder": (
        "{% if call.arguments is defined %}{% for name, value in call.arguments|items %}<parameter={{ name }}>\n"
        "{% set value = value | tojson | safe if value is mapping or (value is sequence and value is not string) "
        "else value | string %}{{ value }}\n</parameter>\n{% endfor %}{% endif %}"
    ),
    "glm45": (
        "{% set _args = call.arguments %}{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
        "{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>\n{% endfor %}"
    ),
    "llama3_json": '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}',
    "llama3_builtin": (
        "{% for arg_name, arg_val in call.arguments | items %}{{ arg_name + '=\"' + arg_val + '\"' }}{% endfor %}"
    ),
    "kimi_k2": (
        "{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}"
    ),
    "deepseek_v31": (
        "{% if call.arguments is string %}{{ 'x' + call.arguments + 'y' }}{% else %}"
        "{{ 'x' + (call.arguments | tojson) + 'y' }}{% endif %}"
    ),
    "deepseek_v3": "{{ 'f\n```json\n' + call['arguments'] + '\n```' }}",
    "mistral": "{{ call.arguments if call.arguments is string else call.arguments | tojson }}",
    "keys": "{% for name in call.arguments %}{{ name }}={{ call.arguments[name] | tojson }}{% endfor %}",
}
CUT_OFF = '{"city": "São \\"Pa'
OTHERS = ["[]", '"x"', "7", "true", "[1, 2", '{"a": NaN}', "{}{}"]
DEEP = ['{"items": ' * levels + "{}" + "}" * levels for levels in (200, 900, 5000)]
BLANK = [None, "", " \n", "null"]


@pytest.fixture(scope="module")
def model_text(noise_model: Path) -> ModelText:
    return ModelText(str(noise_model))


def rendered(model_text: ModelText, template: str, arguments: Any) -> str:
    source = (
        "{% for m in messages %}{% for tool_call in m.tool_calls %}{% set call = tool_call.function %}"
        + template
        + "{% endfor %}{% endfor %}"
    )
    message = ChatMessage("assistant", tool_calls=[ToolCall(FunctionCall("f", arguments))])
    prompt = ChatPrompt([template_message("messages[0]", message)], True, template=source)
    return model_text.render_chat(prompt)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("text", [CUT_OFF, *OTHERS, *DEEP])
def test_every_template_shows_the_text(name: str, text: str, model_text: ModelText) -> None:
    shown = rendered(model_text, TEMPLATES[name], text)
    assert text in shown or json.dumps(text, ensure_ascii=False) in shown


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_that_are_an_object_are_a_mapping(name: str, model_text: ModelText) -> None:
    arguments = {"city": "São", "days": 3} if name != "llama3_builtin" else {"city": "São"}
    given = [arguments, json.dumps(arguments)]
    assert [template_arguments(each) for each in given] == [arguments, arguments]
    assert "São" in rendered(model_text, TEMPLATES[name], json.dumps(arguments))


def test_an_object_of_many_levels_is_shown_as_text() -> None:
    given = json.loads(DEEP[0])
    assert template_arguments(given) == msgspec.json.encode(given).decode()
    assert template_arguments(given["items"]) == given["items"], "199 levels and the innermost object"


def test_nothing_is_an_empty_object() -> None:
    assert [template_arguments(each) for each in BLANK] == [{}] * len(BLANK)


# ---- the three APIs

ANSWER = '<tool_call>\n{"name": "f", "arguments": ' + CUT_OFF
"""max_tokens ends the answer here."""


def given_arguments(kind: str, item: dict[str, Any]) -> Any:
    """Returns what the template gets for the call in a message or item of the assistant."""
    decoder = BodyDecoder("m")
    if kind == "response":
        prompt = decoder.response(json.dumps({"input": [item]}).encode(), lambda _: []).prompt
    else:
        body = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", **item}, USER], "max_tokens": 1}
        prompt = (decoder.message if kind == "message" else decoder.chat)(json.dumps(body).encode()).prompt
    [call] = [call for message in prompt.messages for call in message.get("tool_calls", ())]
    return call["function"]["arguments"]


USER = {"role": "user", "content": "b"}


def item_of(kind: str, arguments: Any) -> dict[str, Any]:
    if kind == "response":
        return {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    if kind == "message":
        return {"content": [{"type": "tool_use", "id": "1", "name": "f", "input": arguments}]}
    return {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize("kind", ["chat", "message", "response"])
@pytest.mark.parametrize("arguments", [CUT_OFF, *OTHERS, DEEP[-1], *BLANK, '{"a": 1}'])
def test_all_apis_take_any_arguments(kind: str, arguments: Any) -> None:
    assert given_arguments(kind, item_of(kind, arguments)) == template_arguments(arguments)


@pytest.mark.parametrize("kind", ["chat", "message"])
@pytest.mark.parametrize("arguments", [[], ["x"], 7, True, {"a": 1}])
def test_values_that_are_no_strings_are_taken_too(kind: str, arguments: Any) -> None:
    expected = arguments if isinstance(arguments, dict) else json.dumps(arguments)
    assert given_arguments(kind, item_of(kind, arguments)) == expected


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_that_was_cut_off_is_taken_back(is_streamed: bool) -> None:
    """The answer's own form of the call, sent back, reaches the template as the text that the model wrote."""
    parser = ToolFormat("hermes").parser()
    pieces = [parser.push(piece) for piece in (ANSWER if is_streamed else [ANSWER])]
    pieces.append(parser.push("", is_end=True))
    arguments = "".join(piece.arguments.get(0, "") for piece in pieces)
    blocks, items = BlockWriter(True), ItemWriter()
    events = [event for piece in pieces for event in blocks.push(piece)]
    for piece in pieces:
        assert list(items.push(piece)) is not None
    [block], [item] = joined_blocks(events), items.items
    for kind, sent in (("chat", arguments), ("message", block.input), ("response", item.arguments)):
        assert given_arguments(kind, item_of(kind, sent)) == CUT_OFF
