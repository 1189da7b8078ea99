"""Types of arguments that models write without a type: they come from the tool's schema as a whole."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tandem.proxy.parsers.argument_types import ToolArguments, typed_value
from tandem.proxy.parsers.parsed import ParsedPieces
from tandem.proxy.parsers.tool_families import ToolFamilyName
from tandem.proxy.parsers.tool_formats import ToolFormat

DEFINITIONS = {
    "Zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "Nested": {"$ref": "#/$defs/Count"},
    "Count": {"type": ["integer", "null"]},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "string"}]},
    "a/b": {"type": "boolean"},
}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        # the report: "string or null" given a number
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "90210", "90210"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "null"]}, "90210", "90210"),
        ({"type": "string", "nullable": True}, "7", "7"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "5.5", "5.5"),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]}, "5", 5),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "5", "5"),
        ({"$ref": "#/$defs/Zip"}, "90210", "90210"),
        ({"$ref": "#/$defs/Nested"}, "None", None),
        ({"$ref": "#/$defs/a~1b"}, "TRUE", True),
        ({"$ref": "#/$defs/Loop"}, "5", 5),
        ({"$ref": "#/$defs/Nowhere"}, "5", 5),
        ({"$ref": "other.json"}, "five", "five"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2, None]}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"const": True}, "True", True),
        # other spellings, where no string is allowed
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, '"true"', True),
        ({"type": ["boolean", "string"]}, "True", "True"),
        ({"type": ["boolean", "string"]}, "true", True),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "object"}, "{'a': True, 'b': None}", {"a": True, "b": None}),
        ({"type": "object"}, '{"a": {"b": [1]}}', {"a": {"b": [1]}}),
        ({"type": "object"}, '"{\\"a\\": 1}"', {"a": 1}),
        ({"type": "array", "items": {"type": "string"}}, "['x', \"y\"]", ["x", "y"]),
        ({"type": "array"}, "(1, 2)", [1, 2]),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, " 3.5\n", 3.5),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({}, "5", 5),
        (True, "five", "five"),
        # what the schema does not allow stays what it is
        ({"type": "number"}, "three", "three"),
        ({"type": "integer"}, "NaN", "NaN"),
        ({"type": "boolean"}, "1", 1),
        ({"type": "object"}, "{'a': x}", "{'a': x}"),
        ({"type": "array"}, "[" * 100000, "[" * 100000),
    ],
)
def test_a_value_has_a_type_that_the_schema_allows(schema: Any, text: str, expected: Any) -> None:
    types = ToolArguments.of({"$defs": DEFINITIONS, "properties": {"a": schema}}).of_argument("a")
    value = json.loads(typed_value(text, types))
    assert value == expected and type(value) is type(expected)


def test_properties_may_be_anywhere_in_the_schema() -> None:
    schema = {
        "$ref": "#/$defs/Args",
        "allOf": [{"properties": {"b": {"type": "boolean"}}}, {"properties": {"b": {"type": ["boolean", "null"]}}}],
        "anyOf": [{"properties": {"c": {"type": "string"}}}, {"properties": {"c": {"type": "null"}}}],
        "$defs": {"Args": {"properties": {"a": {"type": "string"}}}},
        "additionalProperties": {"type": "string"},
    }
    found = ToolArguments.of(schema)
    assert found.types == {"a": ("string",), "b": ("boolean",), "c": ("null", "string")}
    assert found.of_argument("z") == ("string",)


@pytest.mark.parametrize("schema", [None, [], "x", {"properties": 5}, {"properties": {"a": 5}}, {"anyOf": [7, {}]}])
def test_any_schema_is_read(schema: Any) -> None:
    assert ToolArguments.of(schema).of_argument("a") == ()


def test_reading_a_schema_takes_linear_time() -> None:
    """Each definition refers to the next one twice; and a chain that is longer than the limit."""

    def twice(number: int) -> dict[str, Any]:
        reference = {"$ref": f"#/$defs/d{number + 1}"}
        return {"anyOf": [reference, reference], "allOf": [reference, reference], "properties": {"a": reference}}

    definitions = {f"d{number}": twice(number) for number in range(2000)} | {"d2000": {"type": "string"}}
    begun = time.process_time()
    found = ToolArguments.of({"$ref": "#/$defs/d0", "$defs": definitions})
    assert time.process_time() - begun < 1
    assert found.of_argument("a") == ()
    near = ToolArguments.of({"properties": {"a": {"$ref": "#/$defs/d1990"}}, "$defs": definitions})
    assert near.of_argument("a") == ("string",)


NAMED = {str(number): {} for number in range(5000)}


@pytest.mark.parametrize(
    "schema",
    [
        {"x": {"anyOf": [{}] * 9000}, "properties": {str(i): {"$ref": f"#{i}/x"} for i in range(5000)}},
        {"x": {"enum": [0] * 90_000}, "properties": {str(i): {"$ref": f"#{i}/x"} for i in range(5000)}},
        {"x": {"type": ["null"] * 90_000}, "properties": {str(i): {"$ref": f"#{i}/x"} for i in range(5000)}},
        {"x": {"properties": NAMED}, "allOf": [{"$ref": f"#{i}/x"} for i in range(5000)]},
        {"x": {"properties": NAMED}, "anyOf": [{"$ref": "#/x"}] * 5000},
    ],
    ids=["members", "values", "types", "names", "the same name"],
)
def test_references_that_repeat_much_of_a_schema_take_little_of_the_loop(schema: dict[str, Any]) -> None:
    """A tenth of these, in a body that is read on the event loop, took a second."""
    begun = time.thread_time()
    ToolArguments.of(schema)
    assert time.thread_time() - begun < 1


def test_a_large_schema_is_read_as_a_whole() -> None:
    schema = {"properties": {str(number): {"type": "string"} for number in range(9_000)}}
    assert set(ToolArguments.of(schema).types.values()) == {("string",)}


WRITTEN: dict[ToolFamilyName, str] = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=zip>\n90210\n</parameter>\n<parameter=exact>\nTrue\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>zip</arg_key>\n<arg_value>90210</arg_value>\n<arg_key>exact</arg_key>\n"
    "<arg_value>True</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_calls_in_tags_have_the_types_of_the_schema(name: ToolFamilyName, is_streamed: bool) -> None:
    schema = {"properties": {"zip": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "exact": {"type": "boolean"}}}
    parser, pieces = ToolFormat(name).with_tools({"f": schema}).parser(), ParsedPieces()
    for piece in [*WRITTEN[name], ""] if is_streamed else [WRITTEN[name]]:
        pieces.add(parser.push(piece))
    pieces.add(parser.push("", is_end=True))
    assert pieces.parsed().arguments == {0: '{"zip": "90210", "exact": true}'}
