"""Routes of stored responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from tandem.proxy.admission.budgets import ClientSlots
from tandem.proxy.api.responses_api.response_store import ResponseNotFound, ResponseStore
from tandem.proxy.api.responses_api.responses_answer import DeletedResponse, ResponseObject
from tandem.proxy.api.responses_api.responses_request import InputItem
from tandem.proxy.http.app_state import AppState
from tandem.proxy.http.listing import Page, PageQuery, page
from tandem.proxy.http.starlette_app import ApiRoute, answer, cache_scope_of, client_of, json_answer
from tandem.runtime.errors import InvalidRequest

MAX_READS, MAX_READS_PER_CLIENT = 64, 16
"""Calls of these routes at a time on one proxy. Each holds at most one response of 16 MiB while it is read; four read
at the same time."""

T = TypeVar("T")


class InputItemList(Page, frozen=True, kw_only=True):
    data: list[InputItem]


def response_routes(state: AppState) -> list[ApiRoute]:
    slots = ClientSlots(MAX_READS, MAX_READS_PER_CLIENT, state.descriptors)

    async def run(request: Request, work: Callable[[ResponseStore, str, str], T]) -> T:
        """Calls `work` with the store, the client's scope and the response's id."""
        if (store := state.responses) is None:
            raise ResponseNotFound("This server keeps no responses.", "response_id")
        scope, response_id = cache_scope_of(request), request.path_params["response_id"]
        with slots.hold(client_of(request)):
            return await store.threads.run(lambda: work(store, scope, response_id))

    async def show(request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise InvalidRequest("A stored response is not streamed; leave stream out.", "stream")
        return answer(request, await run(request, ResponseStore.load))

    async def show_input(request: Request) -> Response:
        query = PageQuery.of(request)

        def read(store: ResponseStore, scope: str, response_id: str) -> bytes:
            with store.input_items(scope, response_id) as items:
                return page(query, items.ids, items.item)

        return answer(request, await run(request, read))

    async def delete(request: Request) -> Response:
        await run(request, ResponseStore.delete)
        return json_answer(request, DeletedResponse(request.path_params["response_id"]))

    return [
        ApiRoute("GET", "/v1/responses/{response_id}", show, "A stored response.", ResponseObject, more_errors=(404,)),
        ApiRoute("GET", "/v1/responses/{response_id}/input_items", show_input, "The input of a stored response.",
            InputItemList, more_errors=(404,)),
        ApiRoute("DELETE", "/v1/responses/{response_id}", delete, "Remove a stored response.", DeletedResponse,
            more_errors=(404,)),
    ]  # fmt: skip
