"""The OpenAPI document, made from the routes and the types of their bodies."""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.proxy.answers.errors import RETRY_STATUSES
from tandem.proxy.api.answer_bodies import HealthResponse
from tandem.proxy.api.messages_api.messages_response import MessageEvent
from tandem.proxy.api.responses_api.responses_answer import ResponseEvent
from tandem.proxy.http.starlette_app import ApiRoute, json_answer
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
    501: "the server was started without --data-dir",
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


def document_route(routes: Sequence[ApiRoute], served_model_name: str, has_api_key: bool) -> ApiRoute:
    """Returns the route of the OpenAPI document of `routes`, and of this one."""

    async def show(request: Request) -> Response:
        return json_answer(request, document)

    own = ApiRoute("GET", "/openapi.json", show, "This description.", is_open=True)
    document = openapi_document([*routes, own], served_model_name, has_api_key)
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
            model["enum"] = [None, served_model_name]
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
