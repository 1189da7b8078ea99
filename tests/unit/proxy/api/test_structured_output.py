"""Structured output: from the fields of a request to its grammar, and errors."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from tandem.engine.sampling.grammar_process import compile_grammar, make_tokenizer
from tandem.engine.sampling.grammars import read_tokenizer
from tandem.protocol.messages.grammar import MAX_GRAMMAR_BYTES
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.api.request_settings import RequestSettings
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading.body_reader import BodyReader
from tandem.proxy.reading.reader_pool import ReaderPool
from tandem.proxy.text.model_text import ModelText
from tandem.runtime.errors import InvalidRequest
from tandem.runtime.processes.sandbox import result_decoder

LIMITS = ModelLimits(max_model_len=2048, vocab_size=2048)
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"const": 1}}}},
}
OTHER = {"type": "function", "function": {"name": "g"}}


@pytest.fixture(scope="module")
def text(noise_model: Path) -> ModelText:
    return ModelText(str(noise_model))


@pytest.fixture(scope="module")
def reader(text: ModelText) -> BodyReader:
    return BodyReader(text, ProxyConfig("proxy-0", "", "m", "m"))


@pytest.fixture(scope="module")
def tokenizer(noise_model: Path) -> Any:
    read = read_tokenizer(str(noise_model), 2048)
    return make_tokenizer(read.tokenizer_json.decode(), read.vocab_size, read.eos_token_id)


def read(reader: BodyReader, fields: dict[str, Any]) -> GenerationRequest:
    return reader.read(msgspec.json.encode(CHAT | fields), "chat", LIMITS)


def schema(value: Any, strict: bool | None = None) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value, "strict": strict}}


@pytest.mark.parametrize(
    ("fields", "taken", "not_taken"),
    [
        ({"response_format": {"type": "json_object"}},
         ['{"a": [1]}', "{}", '{\n    "a":\n        2\n}'], ["[]", '{"a"  :1}']),
        ({"response_format": schema({"enum": ["é", 2]})}, ['"é"', "2"], ["1"]),
        ({"response_format": schema({"type": "array", "uniqueItems": True}, strict=False)}, ["[1, 1]"], ["{}"]),
        ({"response_format": schema({"type": "array", "uniqueItems": True})}, ["[1, 1]"], ["{}"]),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, ["-12"], ["1.5"]),
        ({"structured_outputs": {"regex": r'a/b\d"[/]'}}, ['a/b1"/'], ["a/bx"]),
        ({"structured_outputs": {"choice": ['a "b"', "ü\n"]}}, ['a "b"', "ü\n"], ["a"]),
        ({"structured_outputs": {"grammar": 'start: "a"+'}}, ["aaa"], ["b", ""]),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, ["a", "b"], ["c"]),
        ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
        ({"tools": [TOOL, OTHER], "tool_choice": "required"},
         ['<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
          "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in "gf")],
         ["Hello", '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>']),
        ({"tools": [TOOL, OTHER], "tool_choice": {"type": "function", "function": {"name": "g"}}},
         ['<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'],
         ['<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>']),
        ({"tools": [OTHER], "response_format": {"type": "json_object"}},
         ["{}", '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'], ["Hello"]),
        ({"tools": [OTHER]}, ["Hello", ""], ["<tool_call>\nHello"]),
    ],
)  # fmt: skip
def test_the_grammar_accepts_what_the_fields_request(
    reader: BodyReader, tokenizer: Any, fields: dict[str, Any], taken: list[str], not_taken: list[str]
) -> None:
    request = read(reader, fields)
    assert request.base_sampling.grammar is not None
    assert (request.tool_format is not None) == ("tools" in fields)

    def takes(text: str) -> bool:
        matcher: LLMatcher = compile_grammar(tokenizer, request.base_sampling.grammar or "")
        ids = tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert [takes(text) for text in taken] == [True] * len(taken)
    assert [takes(text) for text in not_taken] == [False] * len(not_taken)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "tools": None, "tool_choice": None},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [TOOL], "tool_choice": "none"},
    ],
)
def test_requests_without_constraints_have_no_grammar(reader: BodyReader, fields: dict[str, Any]) -> None:
    request = read(reader, fields)
    assert request.base_sampling.grammar is None and request.tool_format is None


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "requires json_schema"),
        ({"response_format": schema({"uniqueItems": True}, True)}, "response_format.json_schema.schema", "uniqueItems"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
        ({"structured_outputs": {"json": "[1"}}, "structured_outputs.json", "must be a JSON schema"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "look-around"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar", "neither a Lark nor a GBNF"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar", "unknown name"),
        ({"structured_outputs": {"choice": ["x" * 65536, "y" * 65536]}}, "structured_outputs.choice",
         f"at most {MAX_GRAMMAR_BYTES}"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs.regex",
         "exclude each other"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a"}, "bad_words": ["b"]}, "bad_words", "exclude each other"),
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]}, "allowed_token_ids", "exclude each other"),
        ({"tool_choice": "required"}, "tool_choice", "requires tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
        ({"tools": [TOOL, TOOL | {"function": {"name": TOOL["function"]["name"]}}]}, "tools", "two different tools"),
        ({"tools": [TOOL], "structured_outputs": {"regex": "a"}}, "structured_outputs.regex",
         "cannot be combined with tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "regex"),
    ],
)  # fmt: skip
def test_errors_name_the_field(reader: BodyReader, fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read(reader, fields)
    assert says in raised.value.message and "\n" not in raised.value.message
    assert raised.value.param == param


ODD = {"type": "object", "properties": {"a": {"type": "float"}, "b": {"$ref": "#/nothing"}}, "required": None}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["chat", "message", "response"])
def test_a_tool_with_an_odd_schema_is_served_by_all_apis(
    reader: BodyReader, tokenizer: Any, kind: Any, strict: bool
) -> None:
    function = {"name": "odd", "strict": strict, "parameters": ODD}
    fine = {"name": "fine", "parameters": TOOL["function"]["parameters"]}
    bodies: dict[str, Any] = {
        "chat": CHAT | {"tools": [{"type": "function", "function": each} for each in (function, fine)]},
        "message": CHAT | {"max_tokens": 9, "tools": [
            {"name": each["name"], "input_schema": each["parameters"], "strict": each.get("strict")}
            for each in (function, fine)
        ]},
        "response": {"input": "Hello", "tools": [{"type": "function"} | each for each in (function, fine)]},
    }  # fmt: skip
    body = msgspec.json.encode({"model": "m"} | bodies[kind])
    if strict:
        with pytest.raises(
            InvalidRequest, match=r"tool 'odd' cannot be enforced, at parameters\.properties\.a: Invalid type: float"
        ):
            reader.read(body, kind, LIMITS)
        return
    request = reader.read(body, kind, LIMITS)
    assert request.num_free_tools == {"invalid": 1} and request.output_grammar is None
    assert request.base_sampling.is_grammar_optional

    def takes(name: str, arguments: str) -> bool:
        matcher: LLMatcher = compile_grammar(tokenizer, request.base_sampling.grammar or "")
        ids = tokenizer.tokenize_str(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert takes("odd", '{"a": [1.5]}') and not takes("odd", "[]") and not takes("other", "{}")
    assert takes("fine", '{"a": 1}') and not takes("fine", '{"a": 2}')


@pytest.mark.parametrize(
    ("fields", "is_optional"),
    [
        ({"tools": [TOOL]}, True),
        ({"tools": [TOOL], "tool_choice": "auto"}, True),
        ({"tools": [TOOL], "tool_choice": "required"}, False),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, False),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, False),
        ({"tools": [{"type": "function", "function": TOOL["function"] | {"strict": True}}]}, False),
        ({"response_format": {"type": "json_object"}}, False),
    ],
)
def test_workers_may_give_up_only_what_nobody_asked_for(
    reader: BodyReader, fields: dict[str, Any], is_optional: bool
) -> None:
    request = read(reader, fields)
    assert request.base_sampling.grammar and request.base_sampling.is_grammar_optional == is_optional
    for field in ({"bad_words": ["no"]}, {"allowed_token_ids": [5, 6]}):
        if is_optional:
            assert read(reader, fields | field).base_sampling.grammar is None
        else:
            with pytest.raises(InvalidRequest, match="exclude each other"):
                read(reader, fields | field)


def test_a_model_without_an_end_token_gets_tools_without_a_grammar(
    text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "eos_token_ids", frozenset())
    endless = BodyReader(text, ProxyConfig("proxy-0", "", "m", "m"))
    request = read(endless, {"tools": [TOOL]})
    assert request.base_sampling.grammar is None and request.tool_format is not None
    request.stop_conditions(5, LIMITS, frozenset())
    assert read(endless, {"tools": [TOOL], "stop_token_ids": [7]}).base_sampling.grammar is not None
    forced = read(endless, {"tools": [TOOL], "tool_choice": "required"})
    with pytest.raises(InvalidRequest, match="give one in stop_token_ids"):
        forced.stop_conditions(5, LIMITS, frozenset())


def test_ignored_keywords_of_a_schema_are_logged_once(reader: BodyReader, caplog: pytest.LogCaptureFixture) -> None:
    fields = {"response_format": schema({"type": "array", "uniqueItems": True, "maxItems": 7})}
    with caplog.at_level(logging.WARNING):
        read(reader, fields)
        read(reader, fields)
        read(reader, {"response_format": schema({"type": "array", "maxItems": 7})})
    [message] = caplog.messages
    assert "response_format.json_schema.schema" in message and "strict" in message
    assert "uniqueItems" not in message, "a keyword's name is text of the client"


def test_a_grammar_requires_a_token_that_ends_the_answer(reader: BodyReader, text: ModelText) -> None:
    request = read(reader, {"structured_outputs": {"regex": "a"}, "ignore_eos": True})
    assert request.stop_conditions(5, LIMITS, text.eos_token_ids).stop_token_ids == text.eos_token_ids != frozenset()
    with pytest.raises(InvalidRequest, match="give one in stop_token_ids"):
        request.stop_conditions(5, LIMITS, frozenset())
    given = read(reader, {"structured_outputs": {"regex": "a"}, "stop_token_ids": [7]})
    assert given.stop_conditions(5, LIMITS, frozenset()).stop_token_ids == {7}


def test_the_template_sees_tools_that_may_be_called(reader: BodyReader) -> None:
    def num_tokens(**fields: Any) -> int:
        prompt: Any = read(reader, fields).prompt
        return int(prompt.prompts[0].num_tokens)

    assert num_tokens(tools=[TOOL]) > num_tokens() + 10
    assert num_tokens(tools=[TOOL], tool_choice="none") == num_tokens()


@pytest.fixture(scope="module")
def unknown(text: ModelText) -> BodyReader:
    """Reads requests for a model whose calls are of no known format."""
    return BodyReader(text, ProxyConfig("proxy-0", "", "m", "m", requests=RequestSettings(tool_call_parser="none")))


def test_calls_of_no_known_format_are_read_where_a_grammar_forces_them(unknown: BodyReader, tokenizer: Any) -> None:
    free = read(unknown, {"tools": [TOOL]})
    assert free.base_sampling.grammar is None and free.tool_format is None
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        forced = read(unknown, {"tools": [TOOL], "tool_choice": choice})
        assert forced.tool_format is not None and forced.base_sampling.grammar is not None
        assert not LLMatcher(tokenizer, forced.base_sampling.grammar).is_error()
        parsed = forced.tool_format.parser().push('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
        assert parsed.names == {0: "f"}
    both = read(unknown, {"tools": [TOOL], "response_format": {"type": "json_object"}})
    assert both.base_sampling.grammar is not None and both.tool_format is None


class _NoRendering(BodyReader):
    def render(self, request: GenerationRequest, limits: ModelLimits) -> GenerationRequest:
        raise AssertionError("on the loop")


def test_grammars_are_compiled_off_the_loop(
    text: ModelText, reader: BodyReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = _NoRendering(text, ProxyConfig("proxy-0", "", "m", "m"))
    pool = ReaderPool(here, ProxyConfig("proxy-0", "", "m", "m"), 2)
    ran: list[str] = []

    async def run(job: Any, *arguments: Any, client: str) -> Any:
        ran.append(job.__name__)
        return result_decoder(job).decode(msgspec.msgpack.encode(reader.read(*arguments)))

    monkeypatch.setattr(pool, "run", run)
    body = msgspec.json.encode(CHAT | {"tools": [TOOL]})
    request = asyncio.run(pool.read("chat", body, LIMITS))
    assert ran == ["read"] and request == reader.read(body, "chat", LIMITS)
    with pytest.raises(AssertionError, match="on the loop"):
        asyncio.run(pool.read("chat", msgspec.json.encode(CHAT), LIMITS))
