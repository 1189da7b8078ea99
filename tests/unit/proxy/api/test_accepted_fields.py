"""What clients of OpenAI's and Anthropic's APIs send, and what is served or has no effect here, is not refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proxy.admission.admission import MAX_INPUTS, Admission
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.api.grammar_checks import GrammarChecks
from tandem.proxy.api.schema import MAX_FUNCTIONS
from tandem.proxy.api.structured_output import CallGrammar
from tandem.proxy.api.validation import BodyDecoder
from tandem.proxy.proxy_settings import AdmissionSettings
from tandem.proxy.text.prompt import ChatPrompt
from tandem.proxy.text.rendering import split_prompt
from tandem.runtime.errors import InvalidRequest

DECODER = BodyDecoder("tiny")
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in ("add", "find", "send")]


def chat(**fields: Any) -> GenerationRequest:
    return DECODER.chat(json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode())


def message(content: Any, **fields: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": content}]
    return DECODER.message(json.dumps({"max_tokens": 4, "messages": messages, **fields}).encode())


def response(**fields: Any) -> GenerationRequest:
    return DECODER.response(json.dumps({"input": "hi", **fields}).encode(), lambda _: [])


def prompt_of(request: GenerationRequest) -> ChatPrompt:
    assert isinstance(request.prompt, ChatPrompt)
    return request.prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"store": True, "metadata": {"a": "b"}, "verbosity": "low"},
        {"verbosity": "high"},
        {"service_tier": "priority"},
        {"service_tier": "flex", "prediction": {"type": "content", "content": "x"}},
    ],
    ids=str,
)
def test_fields_that_change_no_answer_are_accepted_in_chats(fields: dict[str, Any]) -> None:
    assert msgspec.structs.replace(chat(**fields), seed=1) == msgspec.structs.replace(chat(), seed=1)


@pytest.mark.parametrize(
    "fields",
    [
        {"truncation": "auto"},
        {"service_tier": "priority"},
        {"top_logprobs": 5},
        {"context_management": [{"type": "compaction", "compact_threshold": 1000}]},
    ],
    ids=str,
)
def test_fields_that_change_no_answer_are_accepted_in_responses(fields: dict[str, Any]) -> None:
    assert prompt_of(response(**fields)) == prompt_of(response())


def test_a_nucleus_of_nothing_is_the_most_likely_token() -> None:
    sampling = chat(top_p=0, temperature=1, top_k=50).base_sampling
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (1, 1.0, 1.0)
    assert response(top_p=0.0).base_sampling.top_k == message("hi", top_p=0).base_sampling.top_k == 1


INTEGERS: dict[str, Any] = {
    "max_tokens": 4, "n": 2, "seed": 7, "top_k": 5, "stop_token_ids": [1, 2], "min_tokens": 1, "top_logprobs": 2,
    "allowed_token_ids": [3], "priority": -1, "truncate_prompt_tokens": 9, "logprob_token_ids": [5, 6],
}  # fmt: skip


@given(st.sets(st.sampled_from(sorted(INTEGERS))))
def test_integers_may_have_a_fraction_of_zero(names: set[str]) -> None:
    def as_float(value: Any) -> Any:
        return [float(each) for each in value] if isinstance(value, list) else float(value)

    given = {name: as_float(value) if name in names else value for name, value in INTEGERS.items()}
    assert chat(logprobs=True, **given) == chat(logprobs=True, **INTEGERS)


def test_only_integers_lose_their_fraction() -> None:
    arguments = {"a": 1.0}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    body = {"messages": [call], "max_tokens": 4.0, "temperature": 1.0, "chat_template_kwargs": {"x": 2.0}}
    prompt = prompt_of(DECODER.chat(json.dumps(body).encode()))
    [rendered] = prompt.messages[0]["tool_calls"]
    assert isinstance(rendered["function"]["arguments"]["a"], float) and isinstance(prompt.variables["x"], float)
    request = DECODER.message(
        b'{"max_tokens": 4e0, "messages": [{"role": "user", "content": "a"}], "thinking": {"type": "enabled", '
        b'"budget_tokens": 2.0}}'
    )
    assert request.default_max_tokens == 4
    assert DECODER.detokenize(b'{"tokens": [1.0, 2]}') == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [(b"[1.0, 2]", [[1, 2]]), (b"[[1.0], [2.0, 3]]", [[1], [2, 3]])],
    ids=str,
)
def test_token_ids_may_have_a_fraction_of_zero(prompt: bytes, expected: list[list[int]]) -> None:
    assert list(split_prompt(msgspec.Raw(prompt))) == expected


@pytest.mark.parametrize("prompt", [b"[1.5]", b'[1.0, "a"]', b"[[1.0], [-1.0]]", b"[[1.0], 2]"], ids=str)
def test_other_numbers_are_no_token_ids(prompt: bytes) -> None:
    with pytest.raises(InvalidRequest):
        split_prompt(msgspec.Raw(prompt))


def test_as_many_inputs_as_in_openai_get_embeddings() -> None:
    body = json.dumps({"input": ["a"] * MAX_INPUTS}).encode()
    DECODER.embedding(body)
    with pytest.raises(InvalidRequest, match="more than 2048 inputs"):
        DECODER.embedding(json.dumps({"input": ["a"] * (MAX_INPUTS + 1)}).encode())
    admission = Admission(AdmissionSettings(1024), lambda: 0.0, max_alone=MAX_INPUTS)
    ticket = admission.admit("client", [1] * MAX_INPUTS)
    assert admission.num_waiting == MAX_INPUTS
    with pytest.raises(Exception, match="2048 requests are waiting already"):
        admission.admit("client", [1])
    ticket.close()
    admission.admit("client", [1])


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_allowed_tools_are_shown_and_called() -> None:
    request = chat(tools=TOOLS, tool_choice=allowed("auto", "find", "add"))
    assert [tool["function"]["name"] for tool in prompt_of(request).tools or ()] == ["add", "find"]
    grammar = request.output_grammar
    assert isinstance(grammar, CallGrammar) and list(grammar.schemas) == ["add", "find"]
    assert grammar != chat(tools=TOOLS, tool_choice=allowed("required", "find", "add")).output_grammar
    assert prompt_of(chat(tools=TOOLS, tool_choice="auto")).tools == prompt_of(chat(tools=TOOLS)).tools
    with pytest.raises(InvalidRequest, match="'other', which is not in tools"):
        chat(tools=TOOLS, tool_choice=allowed("auto", "other", "add"))


def test_allowed_tools_of_responses_are_those_of_chats() -> None:
    tools = [{"type": "function", "name": name} for name in ("add", "find", "send")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "find"}]}
    request = response(tools=tools, tool_choice=choice)
    wanted = chat(tools=TOOLS, tool_choice=allowed("required", "find")).output_grammar
    assert request.output_grammar == wanted is not None
    assert request.response is not None
    named = response(tools=tools, tool_choice={"type": "function", "name": "find"})
    function = {"type": "function", "function": {"name": "find"}}
    assert named.output_grammar == chat(tools=TOOLS, tool_choice=function).output_grammar is not None


def test_text_in_other_blocks_of_anthropic_is_text() -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [
            {"type": "tool_reference", "tool_name": "send"},
            {
                "type": "search_result",
                "source": "http://a",
                "title": "A",
                "content": [{"type": "text", "text": "found"}],
            },
        ],
    }
    document = {
        "type": "document",
        "title": "D",
        "context": "old",
        "source": {"type": "text", "media_type": "text/plain", "data": "body"},
    }
    prompt = prompt_of(message([result, document, {"type": "text", "text": "?"}]))
    assert [each["content"] for each in prompt.messages] == ["send\nA\nhttp://a\nfound", "D\nold\nbody\n?"]


def test_messages_of_older_clients_are_read() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "assistant", "content": None, "refusal": "no"},
    ]
    prompt = prompt_of(DECODER.chat(json.dumps({"messages": messages}).encode()))
    [call] = prompt.messages[1]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {"a": 1}}
    assert prompt.messages[2]["content"] == "no"


# ---- tools in other forms than the API's


def function_of(request: GenerationRequest) -> dict[str, Any]:
    [tool] = prompt_of(request).tools or []
    function: dict[str, Any] = tool["function"]
    return function


def with_parameters(parameters: Any, **fields: Any) -> list[GenerationRequest]:
    """Returns the same tool in a request of each API."""
    function = {"name": "f", "parameters": parameters, **fields}
    return [
        chat(tools=[{"type": "function", "function": function}]),
        response(tools=[{"type": "function", **function}]),
        message("hi", tools=[{"name": "f", "input_schema": parameters, **fields}]),
    ]


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("parameters", "shown"),
    [
        (json.dumps(SCHEMA), SCHEMA),
        (True, {"type": "object"}),
        ("a city", {"type": "object"}),
        (["a"], {"type": "object"}),
        ([], {"type": "object", "properties": {}}),
        ("", {"type": "object", "properties": {}}),
        ("null", {"type": "object", "properties": {}}),
        (False, {"type": "object", "properties": {}}),
        ("[" * 100_000, {"type": "object"}),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_parameters_that_are_no_object_are_read_or_leave_the_arguments_free(parameters: Any, shown: Any) -> None:
    for request in with_parameters(parameters):
        assert function_of(request)["parameters"] == shown
        assert isinstance(request.output_grammar, CallGrammar)
        checked = GrammarChecks().checked(request.output_grammar)
        is_free = parameters in ("a city", "[" * 100_000, ["a"])
        assert checked.text is not None and checked.num_free_tools == ({"invalid": 1} if is_free else {})


@pytest.mark.parametrize("parameters", ["a city", ["a"]], ids=repr)
def test_strict_parameters_that_are_no_schema_are_named(parameters: Any) -> None:
    for request in with_parameters(parameters, strict=True):
        assert isinstance(request.output_grammar, CallGrammar)
        with pytest.raises(
            InvalidRequest, match="The schema of tool 'f' cannot be enforced, at parameters: a JSON sch"
        ):
            GrammarChecks().checked(request.output_grammar)


@pytest.mark.parametrize("name", ["获取天气", "wetter_für.große-städte", "_", "x" * 128])
def test_names_of_tools_may_have_letters_of_any_script(name: str) -> None:
    assert function_of(chat(tools=[{"type": "function", "function": {"name": name}}]))["name"] == name
    assert function_of(response(tools=[{"type": "function", "name": name}]))["name"] == name
    assert function_of(message("hi", tools=[{"name": name, "input_schema": {}}]))["name"] == name


@pytest.mark.parametrize("name", ["", "a b", "a\n", "a\nb", "x" * 129, "a<b", 'a"b'])
def test_other_names_of_tools_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"name is .*matching regex"):
        chat(tools=[{"type": "function", "function": {"name": name}}])


@pytest.mark.parametrize("number", [129, MAX_FUNCTIONS])
def test_many_tools_are_served(number: int) -> None:
    functions = [{"name": f"f{n}", "parameters": SCHEMA} for n in range(number)]
    for request in (
        chat(tools=[{"type": "function", "function": each} for each in functions]),
        response(tools=[{"type": "function", **each} for each in functions]),
        message("hi", tools=[{"name": each["name"], "input_schema": SCHEMA} for each in functions]),
    ):
        assert len(prompt_of(request).tools or ()) == number
        assert isinstance(request.output_grammar, CallGrammar)
        GrammarChecks().checked(request.output_grammar)


def test_a_tool_that_is_listed_twice_is_shown_once() -> None:
    function = {"name": "f", "parameters": SCHEMA}
    assert function_of(chat(tools=[{"type": "function", "function": function}] * 2))["name"] == "f"
    assert function_of(response(tools=[{"type": "function", **function}] * 2))["name"] == "f"
    assert function_of(message("hi", tools=[{"name": "f", "input_schema": SCHEMA}] * 2))["name"] == "f"


@pytest.mark.parametrize(
    ("given", "kind"), [("none", "none"), ("auto", "auto"), ("required", "any"), ("required", "required")]
)
def test_a_tool_choice_may_be_an_object_with_a_mode(given: str, kind: str) -> None:
    assert chat(tools=TOOLS, tool_choice={"type": kind}) == chat(tools=TOOLS, tool_choice=given)
    functions = [{"type": "function", **tool["function"]} for tool in TOOLS]
    objects, strings = (response(tools=functions, tool_choice=each) for each in ({"type": kind}, given))
    assert (objects.output_grammar, prompt_of(objects)) == (strings.output_grammar, prompt_of(strings))


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "builtin_function", "function": {"name": "$web_search"}},
        {"type": "web_search", "web_search": {"enable": True}, "function": "x"},
        {"type": "retrieval", "custom": 3},
    ],
    ids=lambda tool: tool["type"],
)
def test_tools_of_other_types_may_have_any_fields(tool: dict[str, Any]) -> None:
    assert chat(tools=[tool, *TOOLS]) == chat(tools=TOOLS)
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "tools": [tool, *TOOLS]}).encode()
    prompt = DECODER.tokenize(body)[0]
    assert isinstance(prompt, ChatPrompt) and len(prompt.tools or ()) == len(TOOLS)


@pytest.mark.parametrize("number", [17, 256])
def test_many_stop_strings_are_served(number: int) -> None:
    strings = [f"stop {n}" for n in range(number)]
    assert chat(stop=strings).stop == message("hi", stop_sequences=strings).stop == strings


@pytest.mark.parametrize(("given", "taken"), [("NONE", "none"), ("High", "high"), ("", None)])
def test_efforts_are_read_in_any_case(given: str, taken: str | None) -> None:
    for request in (chat(reasoning_effort=given), response(reasoning={"effort": given})):
        assert prompt_of(request) == prompt_of(chat(reasoning_effort=taken))


def test_many_stop_strings_are_for_few_sequences() -> None:
    strings = [f"stop {n}" for n in range(256)]
    assert chat(stop=strings, n=8).n == 8 and chat(stop=strings[:16], n=128).n == 128
    with pytest.raises(InvalidRequest, match="stop has 256 strings for at least 9 sequences"):
        chat(stop=strings, n=9)
    with pytest.raises(InvalidRequest, match="stop has 256 strings for at least 12 sequences"):
        DECODER.completion(json.dumps({"prompt": ["a", "b", "c"], "stop": strings, "n": 4}).encode())
