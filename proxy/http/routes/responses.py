"""Routes of stored responses."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from tandem.proxy.api.response_store import ResponseNotFound, ResponseStore
from tandem.proxy.api.responses_answer import DeletedResponse, InputItemList
from tandem.proxy.http.app_state import AppState
from tandem.proxy.http.listing import page
from tandem.proxy.http.starlette_app import ApiRoute, answer, cache_scope_of, json_answer
from tandem.runtime.errors import InvalidRequest


def response_routes(state: AppState) -> list[ApiRoute]:
    store = state.responses

    async def show(request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise InvalidRequest("A stored response is not streamed; leave stream out.", "stream")
        stored = await asyncio.to_thread(_store(store).load, cache_scope_of(request), _id(request))
        return answer(request, bytes(stored.response))

    async def show_input(request: Request) -> Response:
        items = await asyncio.to_thread(_store(store).input_items, cache_scope_of(request), _id(request))
        return json_answer(request, InputItemList(*page(request, items[::-1])))

    async def delete(request: Request) -> Response:
        await asyncio.to_thread(_store(store).delete, cache_scope_of(request), _id(request))
        return json_answer(request, DeletedResponse(_id(request)))

    return [
        ApiRoute("GET", "/v1/responses/{response_id}", show),
        ApiRoute("GET", "/v1/responses/{response_id}/input_items", show_input),
        ApiRoute("DELETE", "/v1/responses/{response_id}", delete),
    ]


def _store(store: ResponseStore | None) -> ResponseStore:
    if store is None:
        raise ResponseNotFound("This server keeps no responses.", "response_id")
    return store


def _id(request: Request) -> str:
    return str(request.path_params["response_id"])
