"""Grammars for calls leave out what cannot be enforced and nobody asked for; what was asked for is refused by name."""

from __future__ import annotations

import json
import logging
import random
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.messages.grammar import MAX_GRAMMAR_BYTES, GrammarCheck, check_grammar, grammar_bytes
from tandem.proxy.api.grammar_checks import MAX_CHECKS, Check, CheckedGrammar, GrammarChecks
from tandem.proxy.api.json_schemas import without_annotations
from tandem.proxy.api.structured_output import CallGrammar, TextGrammar
from tandem.proxy.parsers.argument_types import ToolArguments, typed_value
from tandem.proxy.parsers.tool_families import TOOL_FAMILIES, ToolFamilyName
from tandem.proxy.parsers.tool_formats import ToolFormat
from tandem.runtime.errors import InvalidRequest

GOOD: dict[str, Any] = {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"]}
A_RULE = '"day"'
JSON_FAMILIES: list[ToolFamilyName] = [name for name in TOOL_FAMILIES if ToolFormat(name).writes_json]
AUTO_FAMILIES: list[ToolFamilyName] = [
    name for name in JSON_FAMILIES if ToolFormat(name).is_constrained(is_required=False, has_content=False)
]


def argument(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}}


FAULTY: dict[str, tuple[Any, str]] = {
    "required: null": ({"type": "object", "required": None}, "parameters:"),
    "required: true": ({"type": "object", "required": True}, "parameters:"),
    "properties: null": ({"type": "object", "properties": None}, "parameters:"),
    "properties: []": ({"type": "object", "properties": []}, "parameters:"),
    "others: null": ({"type": "object", "additionalProperties": None}, "parameters.additionalProperties:"),
    "a property that cannot be": ({"type": "object", "required": ["b"], "additionalProperties": False}, "parameters:"),
    "type: OBJECT": ({"type": "OBJECT"}, "parameters.type:"),
    "type: array": ({"type": "array"}, "parameters.type:"),
    "type: null": ({"type": None}, "parameters.type:"),
    "type: []": ({"type": []}, "parameters.type:"),
    "type: {}": ({"type": {}}, "parameters.type:"),
    "a type within: any": (argument({"type": "any"}), "parameters.properties.a:"),
    "a type within: float": (argument({"type": "float"}), "parameters.properties.a:"),
    "a type within: String": (argument({"type": "String"}), "parameters.properties.a:"),
    "a type within: null": (argument({"type": None}), "parameters.properties.a:"),
    "types with null": (argument({"type": ["string", None]}), "parameters.properties.a:"),
    "types with an object": (argument({"type": ["string", {}]}), "parameters.properties.a:"),
    "enum: null": (argument({"enum": None}), "parameters.properties.a:"),
    "enum: a string": (argument({"enum": "x"}), "parameters.properties.a:"),
    "anyOf: null": (argument({"anyOf": None}), "parameters.properties.a:"),
    "items: null": (argument({"type": "array", "items": None}), "parameters.properties.a.items:"),
    "a schema: a string": (argument("string"), "parameters.properties.a:"),
    "a schema: null": (argument(None), "parameters.properties.a:"),
    "a schema: a list": (argument([{"type": "string"}]), "parameters.properties.a:"),
    "minLength: a string": (argument({"type": "string", "minLength": "5"}), "parameters.properties.a:"),
    "minLength: below 0": (argument({"type": "string", "minLength": -1}), "parameters.properties.a:"),
    "minimum: a string": (argument({"type": "integer", "minimum": "5"}), "parameters.properties.a:"),
    "minimum: below 64 bits": (argument({"type": "integer", "minimum": -(2**70)}), "parameters.properties.a:"),
    "multipleOf: 0": (argument({"type": "integer", "multipleOf": 0}), "parameters.properties.a:"),
    "format: null": (argument({"type": "string", "format": None}), "parameters.properties.a:"),
    "pattern: null": (argument({"type": "string", "pattern": None}), "parameters.properties.a:"),
    "look-ahead": (argument({"type": "string", "pattern": "^(?=a)b"}), "parameters.properties.a:"),
    "look-behind": (argument({"type": "string", "pattern": "(?<!a)b"}), "parameters.properties.a:"),
    "back-reference": (argument({"type": "string", "pattern": r"(a)\1"}), "parameters.properties.a:"),
    r"\Z": (argument({"type": "string", "pattern": r"a\Z"}), "parameters.properties.a:"),
    "an open bracket": (argument({"type": "string", "pattern": "[a"}), "parameters.properties.a:"),
    "names": (argument({"type": "object", "patternProperties": {"(?=a)": {}}}), "parameters.properties.a:"),
    "$ref to nothing": (argument({"$ref": "#/$defs/x"}), "parameters.properties.a:"),
    "$ref to components": (argument({"$ref": "#/components/schemas/X"}), "parameters.properties.a:"),
    "$ref elsewhere": (argument({"$ref": "https://example.com/x.json"}), "parameters.properties.a:"),
    "$ref: a number": (argument({"$ref": 5}), "parameters.properties.a:"),
    "$schema: unknown": ({"$schema": "my-schema", "type": "object"}, "parameters:"),
    "in a definition": (
        {"$defs": {"x": {"type": "object", "properties": {"é b": {"type": "int"}}}}} | argument({"$ref": "#/$defs/x"}),
        "parameters.$defs.x.properties['é b']:",
    ),
    "in a member": (
        argument({"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "float"}]}}),
        "parameters.properties.a.items.anyOf[1]:",
    ),
    "too deep": (json.loads('{"properties":{"a":' * 300 + "{}" + "}}" * 300), "parameters"),
}  # fmt: skip


def calls(schemas: dict[str, Any], name: ToolFamilyName = "hermes", **options: Any) -> CallGrammar:
    given: dict[str, Any] = {"strict": frozenset(), "is_required": False, "is_parallel": True} | options
    return CallGrammar(tool_format=ToolFormat(name), schemas=schemas, **given)


class CountingChecks:
    """refused: what a refused grammar has; None for the library's checks. max_checks: after which one is over time."""

    def __init__(self, refused: str | None = None, max_checks: int = MAX_CHECKS) -> None:
        self._refused = refused
        self._max_checks = max_checks
        self.texts: list[str] = []

    def __call__(self, text: str) -> GrammarCheck:
        self.texts.append(text)
        if self._refused is None:
            return check_grammar(text)
        if len(self.texts) == self._max_checks + 1:
            return GrammarCheck("it takes too long", is_over_time=True)
        return GrammarCheck("too complex" if self._refused in text else "")


def checks_with(check: Check = check_grammar) -> GrammarChecks:
    """Returns checks in this process."""
    return GrammarChecks(lambda: nullcontext(check))


@pytest.mark.parametrize("kind", FAULTY)
def test_a_faulty_schema_frees_the_arguments_of_its_tool_only(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    schema = FAULTY[kind][0]
    with caplog.at_level(logging.WARNING):
        checked = checks_with().checked(calls({"before": GOOD, "odd": schema, "after": GOOD}))
    text = checked.text or ""
    assert A_RULE in text
    assert checked == CheckedGrammar(
        calls({"before": GOOD, "odd": schema, "after": GOOD}).text({"odd"}), {"invalid": 1}
    )
    assert check_grammar(text).error == ""
    [message] = caplog.messages
    assert "'odd'" in message and "before" not in message and len(message) < 300 and message.isprintable()


@pytest.mark.parametrize("kind", FAULTY)
@pytest.mark.parametrize("asked", ["strict", "required"])
def test_where_it_is_asked_for_the_error_names_tool_place_and_reason(kind: str, asked: str) -> None:
    schema, place = FAULTY[kind]
    options: dict[str, Any] = {"strict": frozenset({"odd"})} if asked == "strict" else {"is_required": True}
    with pytest.raises(InvalidRequest) as raised:
        checks_with().checked(calls({"fine": GOOD, "odd": schema}, **options))
    message = raised.value.message
    assert raised.value.param == "tools" and "'odd'" in message and f"at {place}" in message
    assert len(message) < 600 and message.isprintable()
    assert f"leave out {'strict' if asked == 'strict' else 'tool_choice'}" in message


def test_a_format_that_was_asked_for_does_not_make_tools_asked_for() -> None:
    wanted = calls({"fine": GOOD, "odd": argument({"type": "float"})}, content=TextGrammar("p", schema={"enum": [1]}))
    assert not wanted.is_optional
    assert checks_with().checked(wanted) == CheckedGrammar(wanted.text({"odd"}), {"invalid": 1})


def test_a_strict_tool_does_not_need_the_others_to_be_valid() -> None:
    schemas = {"fine": GOOD, "odd": argument({"type": "float"})}
    wanted = calls(schemas, strict=frozenset({"fine"}))
    assert not wanted.is_optional
    assert checks_with().checked(wanted) == CheckedGrammar(wanted.text({"odd"}), {"invalid": 1})


@pytest.mark.parametrize("kind", FAULTY)
def test_a_response_format_is_refused_with_place_and_reason(kind: str) -> None:
    schema, place = FAULTY[kind]
    if kind in ("type: array", "type: []"):
        return  # an answer may be an array
    param = "response_format.json_schema.schema"
    with pytest.raises(InvalidRequest) as raised:
        checks_with().checked(TextGrammar(param, schema=schema, is_strict=False))
    inner = place.removeprefix("parameters").rstrip(":").removesuffix(".type")
    assert raised.value.message.startswith(f"{param}{inner} ") or kind == "too deep"
    assert raised.value.param == param and "cannot be served as a grammar: " in raised.value.message
    with_tools = calls({"f": GOOD}, content=TextGrammar(param, schema=schema, is_strict=False))
    with pytest.raises(InvalidRequest) as raised:
        checks_with().checked(with_tools)
    assert raised.value.param == param


@pytest.mark.parametrize("name", AUTO_FAMILIES)
@pytest.mark.parametrize(("num_tools", "num_bytes"), [(128, 1500), (90, 2048), (1, 200_000), (1000, 150)])
def test_many_tools_are_served_with_the_largest_schemas_left_out(
    name: ToolFamilyName, num_tools: int, num_bytes: int
) -> None:
    schemas = {f"tool_{i}": argument({"const": f"{i}" + "x" * num_bytes}) for i in range(num_tools)} | {"small": GOOD}
    checked = checks_with().checked(calls(schemas, name))
    assert checked.text is not None and grammar_bytes(checked.text) <= MAX_GRAMMAR_BYTES
    assert all(f"{tool}" in checked.text for tool in schemas), "the names stay constrained"
    num_free = checked.num_free_tools["size"]
    assert 0 < num_free <= num_tools and A_RULE in checked.text
    assert num_free == 1 or grammar_bytes(checked.text) > MAX_GRAMMAR_BYTES - num_bytes - 500, "no more than needed"


def test_descriptions_take_no_room() -> None:
    described = {"type": "string", "description": "x" * 3000, "title": "A", "default": None, "examples": ["b"]}
    schemas = {
        f"tool_{i}": {
            "description": "x" * 1000,
            "properties": {"description": described, "n": {"anyOf": [described, {"const": {"title": i}}]}},
            "$defs": {"title": described},
        }
        for i in range(128)
    }
    checked = checks_with().checked(calls(schemas))
    assert checked.num_free_tools == {} and "xxx" not in (checked.text or "")
    plain = {"type": "string"}
    assert without_annotations(schemas["tool_7"]) == {
        "properties": {"description": plain, "n": {"anyOf": [plain, {"const": {"title": 7}}]}},
        "$defs": {"title": plain},
    }


@pytest.mark.parametrize("options", [{"is_required": True}, {"content": TextGrammar("response_format", schema=GOOD)}])
def test_a_forced_call_of_many_tools_is_served_too(options: dict[str, Any]) -> None:
    schemas = {f"tool_{i}": argument({"const": f"{i}" + "x" * 2000}) for i in range(100)}
    assert checks_with().checked(calls(schemas, **options)).num_free_tools["size"] < 60
    schemas["largest"] = argument({"const": "x" * 9999})
    with pytest.raises(InvalidRequest, match=f"tools is too large: .* at most {MAX_GRAMMAR_BYTES}.*'largest'"):
        checks_with().checked(calls(schemas, strict=frozenset(schemas), **options))


def test_if_even_the_names_are_too_many_there_is_no_grammar() -> None:
    checks = CountingChecks()
    schemas = {f"{i}" + "n" * 120: GOOD for i in range(2000)}
    checked = checks_with(checks).checked(calls(schemas))
    assert checked == CheckedGrammar(None, {"size": 2000}) and not checks.texts
    with pytest.raises(InvalidRequest, match="too large"):
        checks_with().checked(calls(schemas, is_required=True))


def test_many_slow_schemas_cost_a_bounded_number_of_checks() -> None:
    slow = {f"tool_{i}": argument({"pattern": f"slow{i}"}) for i in range(128)}
    checks = CountingChecks(refused="slow", max_checks=0)
    checked = checks_with(checks).checked(calls(slow))
    assert checked.num_free_tools == {"limits": 128} and checked.text is not None and "slow" not in checked.text
    assert len(checks.texts) == 2, "of all, and of the names"
    checks = CountingChecks(refused="slow", max_checks=8)
    assert checks_with(checks).checked(calls(slow)).num_free_tools == {"invalid": 7, "limits": 121}
    assert len(checks.texts) == 1 + 8 + 1
    # All are valid alone, and fail together.
    checks = CountingChecks(refused="call_1")
    assert checks_with(checks).checked(calls(slow)).num_free_tools == {"limits": 128}
    assert len(checks.texts) == 1 + 128 + 1 < MAX_CHECKS
    checks = CountingChecks(refused="")
    assert checks_with(checks).checked(calls(slow)) == CheckedGrammar(None, {"invalid": 128})
    with pytest.raises(InvalidRequest, match="too complex"):
        checks_with(checks).checked(calls(slow, is_required=True))


def test_what_was_asked_for_and_takes_too_long_is_refused_by_its_field() -> None:
    slow = {"heavy": argument({"pattern": "slow"}), "fast": GOOD}
    for wanted in (calls(slow, is_required=True), calls(slow, strict=frozenset({"heavy"}))):
        with pytest.raises(InvalidRequest, match=r"tools cannot be served as a grammar: .*too") as raised:
            checks_with(CountingChecks(refused="slow", max_checks=0)).checked(wanted)
        assert raised.value.param == "tools"
    checked = checks_with(CountingChecks(refused="slow", max_checks=0)).checked(calls(slow, strict=frozenset({"fast"})))
    assert checked.num_free_tools == {"limits": 1} and A_RULE in (checked.text or "")
    text = TextGrammar("response_format", schema={"pattern": "slow"})
    with pytest.raises(InvalidRequest, match="response_format cannot be served as a grammar: it takes too long"):
        checks_with(CountingChecks(refused="slow", max_checks=0)).checked(text)


def test_a_conversation_is_checked_once(caplog: pytest.LogCaptureFixture) -> None:
    checks = CountingChecks()
    kept = checks_with(checks)
    tools = {"fine": GOOD, "odd": argument({"type": "float"})}
    with caplog.at_level(logging.WARNING):
        first = kept.checked(calls(tools))
        num_checks = len(checks.texts)
        assert [kept.checked(calls(tools)) for _ in range(3)] == [first] * 3
    assert len(checks.texts) == num_checks and len(caplog.messages) == 1
    for number in range(40):
        kept.checked(calls({f"f{number}": GOOD}))
    kept.checked(calls(tools))
    assert len(checks.texts) == 2 * num_checks + 40
    reordered = GOOD | {"properties": {"b": {}, "a": {}}}
    assert kept.checked(calls({"f": reordered})) != kept.checked(
        calls({"f": GOOD | {"properties": {"a": {}, "b": {}}}})
    ), "the order of properties is the order of the answer"


def test_a_log_line_is_bounded_and_escaped(caplog: pytest.LogCaptureFixture) -> None:
    schemas = {f"odd_{i}": argument({"type": f"\x1b[31m\u2028evil\r\n{i}" + "x" * 5000}) for i in range(200)}
    with caplog.at_level(logging.WARNING):
        checks_with().checked(calls(schemas))
    [message] = caplog.messages
    assert message.isprintable() and len(message) < 2000 and "and 195 more" in message


@pytest.mark.parametrize("name", JSON_FAMILIES)
def test_tools_with_the_same_schema_share_a_rule(name: ToolFamilyName) -> None:
    schemas = {f"get_{i}": GOOD for i in range(50)} | {"get": GOOD, "get_1_more": argument({"type": "string"})}
    text = calls(schemas, name, is_required=True).text()
    assert text.count(A_RULE) == 2, "as a property and as a required one"
    assert check_grammar(text).error == ""


_NAMES = st.sampled_from(["a", "b", "type", "$ref", "properties"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["string", "object", "OBJECT", "null", "#/a", "#", "(", "#/$defs/b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "properties", "items", "anyOf", "allOf", "enum", "const", "required", "$ref", "$defs",
                         "additionalProperties", "pattern", "minLength", "nullable", "a", "b"]),
        inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(_NAMES, _VALUES, max_size=2), st.dictionaries(_NAMES, _VALUES, max_size=3))
def test_any_schema_is_served_and_its_arguments_are_read(properties: dict[str, Any], more: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": properties} | more
    checked = checks_with().checked(calls({"f": schema, "g": GOOD}))
    assert checked.text is not None and A_RULE in checked.text and check_grammar(checked.text).error == ""
    types = ToolArguments.of(schema)
    for name in (*properties, "unknown"):
        json.loads(typed_value("5", types.of_argument(name)))
    with_place = calls({"f": schema, "g": GOOD}, is_required=True)
    if checked.num_free_tools:
        with pytest.raises(InvalidRequest, match="'f' cannot be enforced, at parameters"):
            checks_with().checked(with_place)
    else:
        assert checks_with().checked(with_place).num_free_tools == {}


def test_arguments_are_read_by_faulty_schemas_too() -> None:
    rng = random.Random(1)
    for schema, _ in FAULTY.values():
        types = ToolArguments.of(schema)
        for text in ("5", "true", "null", "[1", '{"a": 1}', "x" * rng.randint(1, 9)):
            json.loads(typed_value(text, types.of_argument("a")))
