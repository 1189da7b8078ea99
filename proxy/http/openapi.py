"""The OpenAPI document, made from the routes and the types of their bodies, and an HTML page of it without scripts."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.proxy.answers.errors import RETRY_STATUSES
from tandem.proxy.api.answer_bodies import HealthResponse
from tandem.proxy.api.messages_api.messages_response import MessageEvent
from tandem.proxy.api.responses_api.responses_answer import ResponseEvent
from tandem.proxy.http.starlette_app import ApiRoute, answer, json_answer
from tandem.runtime.version import own_version

Json = dict[str, Any]

ERRORS = {
    400: "the request is wrong; param names the field",
    401: "the API key is missing or wrong",
    403: "the page that sends the request is of a site that is not allowed; see --cors-origin",
    404: "there is no such model, stored response or path",
    405: "the path does not take this method",
    408: "the body arrived too slowly",
    413: "the body is too large",
    415: "the body is compressed (Content-Encoding)",
    429: "this client has too many running requests; see Retry-After",
    431: "the headers or trailers are too large or too many",
    500: "the server failed",
    501: "the server was started without --data-dir, or the body has a transfer coding besides chunked",
    503: "no worker could take the request in time, or too many attempts failed; see Retry-After",
    504: "the request was not finished in time",
    507: "the disk is full",
}
_REQUIRED_TOGETHER: dict[str, Json] = {
    "ContentPart": {
        "anyOf": [
            {"required": [kind], "properties": {"type": {"const": kind}, kind: {"type": "string"}}}
            for kind in ("text", "refusal")
        ]
    },
    "ChatMessage": {
        "anyOf": [
            {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
            {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
        ]
    },
    "TokenizeRequest": {
        "oneOf": [
            {"required": [field], "properties": {field: {"type": kind}, other: {"type": "null"}}}
            for field, kind, other in (("prompt", "string", "messages"), ("messages", "array", "prompt"))
        ]
    },
}
"""Conditions between fields that msgspec types cannot express."""


def document_routes(routes: Sequence[ApiRoute], served_model_name: str, has_api_key: bool) -> list[ApiRoute]:
    """Returns the routes of the OpenAPI document of `routes`, and of these two."""

    async def show(request: Request) -> Response:
        return json_answer(request, document)

    async def show_page(request: Request) -> Response:
        return answer(request, shown, "text/html")

    own = [
        ApiRoute("GET", "/openapi.json", show, "This description.", is_open=True),
        ApiRoute("GET", "/docs", show_page, "This description as a page.", "text/html", is_open=True),
    ]
    document = openapi_document([*routes, *own], served_model_name, has_api_key)
    shown = docs_page(document)
    return own


def openapi_document(routes: Sequence[ApiRoute], served_model_name: str, has_api_key: bool) -> Json:
    """Returns an OpenAPI 3.1 document of the routes that have a summary."""
    routes = [route for route in routes if route.summary]
    types = {
        kind
        for route in routes
        for kinds in (route.answer, route.chunk, route.body, route.form, route.error)
        for kind in _members(kinds)
    }
    ordered = sorted(types, key=lambda kind: kind.__name__)
    references, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(ordered, references, strict=True))
    for name, component in components.items():
        component.update(_REQUIRED_TOGETHER.get(name, {}))
        model = component.get("properties", {}).get("model", {})
        if {"type": "null"} in model.pop("anyOf", ()):  # of a request
            model["enum"] = [None, "", served_model_name]
    paths: Json = {}
    for route in routes:
        paths.setdefault(documented_path(route), {})[route.method.lower()] = _operation(route, schema_of, has_api_key)
    document: Json = {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": own_version()},
        "paths": paths,
        "components": {"schemas": components},
    }
    if has_api_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def documented_path(route: ApiRoute) -> str:
    return route.path.replace(":path}", "}")


def _operation(route: ApiRoute, schema_of: dict[type, Json], has_api_key: bool) -> Json:
    content = _content(route.answer, schema_of)
    if route.chunk is not None:
        chunk = " or a ".join(kind.__name__ for kind in _members(route.chunk))
        has_done = route.chunk not in (MessageEvent, ResponseEvent)
        end = "the last one [DONE], " if has_done else ""
        description = f"with stream: events whose data is a {chunk}, {end}or an {route.error.__name__}"
        content["text/event-stream"] = {"schema": {"description": description}}
    header = {"X-Request-Id": {"schema": {"type": "string"}, "description": "the request's own, or a new one"}}
    responses: Json = {"200": {"description": "OK", "content": content, "headers": header}}
    for status in route.errors:
        if status == 401 and not has_api_key:
            continue
        kind = HealthResponse if route.answer is HealthResponse and status == 503 else route.error
        headers = dict(header)
        if status in RETRY_STATUSES and kind is route.error:
            headers["Retry-After"] = {"schema": {"type": "string"}, "description": "seconds"}
        responses[str(status)] = {
            "description": ERRORS[status],
            "content": _content(kind, schema_of),
            "headers": headers,
        }
    operation: Json = {"summary": route.summary, "responses": responses}
    if "{" in route.path:
        name = documented_path(route).partition("{")[2].partition("}")[0]
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.body, schema_of)}
    if route.form is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": schema_of[route.form]}},
        }
    if has_api_key and not route.is_open:
        operation["security"] = [{"key": []}]
    return operation


def _members(kinds: type | UnionType | str | None) -> tuple[type, ...]:
    """Returns the structs of a union, or the one that is none."""
    if isinstance(kinds, UnionType):
        return get_args(kinds)
    return (kinds,) if isinstance(kinds, type) else ()


def _content(kind: type | UnionType | str, schema_of: dict[type, Json]) -> Json:
    if not isinstance(kind, str):
        schemas = [schema_of[each] for each in _members(kind)]
        return {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}
    return {kind: {"schema": {} if kind == "application/json" else {"type": "string"}}}


# ---- the page at /docs


_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "minProperties": "at least {} entries",
    "maxProperties": "at most {} entries",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "pattern": "matching {}",
}
"""JSON schema's keywords in words."""


@dataclass(frozen=True)
class FieldRow:
    """One field of a body in words."""

    name: str
    values: str
    default: str
    description: str


def field_rows(document: Json, schema_name: str) -> list[FieldRow]:
    schema = document["components"]["schemas"][schema_name]
    required = schema.get("required", [])
    return [
        FieldRow(
            name,
            _in_words(field),
            "required" if name in required else msgspec.json.encode(field.get("default")).decode(),
            field.get("description", ""),
        )
        for name, field in schema.get("properties", {}).items()
    ]


def _in_words(schema: Json) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[1]
    if "anyOf" in schema:
        return " or ".join(_in_words(s) for s in schema["anyOf"] if s.get("type") != "null")
    if "enum" in schema:
        return " or ".join(msgspec.json.encode(value).decode() for value in schema["enum"])
    match schema.get("type", "anything"):
        case "array":
            words = f"list of {_in_words(schema.get('items', {}))}"
        case "object" if "additionalProperties" in schema:
            words = f"object of {_in_words(schema['additionalProperties'] or {})}"
        case kind:
            words = str(kind)
    limits = ", ".join(limit.format(schema[key]) for key, limit in _LIMITS.items() if key in schema)
    return f"{words} ({limits})" if limits else words


_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:70em;margin:2em auto;padding:0 1em}table{border-collapse:collapse}"
    "td,th{border:1px solid #bbb;padding:.2em .6em;text-align:left;vertical-align:top}code{background:#eee}"
)


def docs_page(document: Json) -> str:
    schemas = document["components"]["schemas"]

    def linked(words: str) -> str:
        link = lambda word: f'<a href="#{word[0]}">{word[0]}</a>' if word[0] in schemas else word[0]  # noqa: E731
        return re.sub(r"\w+", link, html.escape(words))

    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Tandem</title><style>{_STYLE}</style>",
        f"<h1>Tandem {html.escape(document['info']['version'])}</h1>",
        "<p>For programs: <a href=openapi.json>openapi.json</a>.</p>",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{operation['summary']}</p><ul>")
            body = {"body": operation["requestBody"]} if "requestBody" in operation else {}
            for name, message in (body | operation["responses"]).items():
                kinds = ", ".join(_in_words(content["schema"]) for content in message["content"].values())
                parts.append(f"<li>{name}: {html.escape(message.get('description', ''))} ({linked(kinds)})")
            parts.append("</ul>")
    for name in schemas:
        parts.append(f'<h2 id="{name}">{name}</h2><table><tr><th>field<th>values<th>default<th>meaning')
        for row in field_rows(document, name):
            meaning = html.escape(row.description)
            parts.append(f"<tr><td><code>{row.name}</code><td>{linked(row.values)}<td>{row.default}<td>{meaning}")
        parts.append("</table>")
    return "\n".join(parts)
