"""The route of records, by which a client gets the record that it has asked for with X-Tandem-Record."""

from __future__ import annotations

from typing import BinaryIO

from starlette.requests import Request
from starlette.responses import Response

from tandem.proxy.admission.client_slots import ClientSlots
from tandem.proxy.answers.record_header import PATH
from tandem.proxy.answers.request_id import id_header
from tandem.proxy.http.app_state import AppState
from tandem.proxy.http.downloads import Download
from tandem.proxy.http.starlette_app import ApiRoute, client_of, owner_of
from tandem.proxy.records.record_store import RecordNotFound

MAX_READS, MAX_READS_PER_CLIENT = 64, 16
"""Calls at a time on one proxy that wait for a record."""
MEDIA_TYPE = "application/jsonl"


def record_routes(state: AppState) -> list[ApiRoute]:
    slots = ClientSlots(MAX_READS, MAX_READS_PER_CLIENT, state.descriptors)

    async def show(request: Request) -> Response:
        if (store := state.records) is None:
            raise RecordNotFound("This server keeps no records.", "request_id")
        client = client_of(request)

        async def open_file() -> BinaryIO:
            with slots.hold(client):
                return await store.open(owner_of(request), request.path_params["request_id"])

        return Download(open_file, state.descriptors, client, id_header(request), MEDIA_TYPE)

    return [
        ApiRoute("GET", f"{PATH}/{{request_id:path}}", show, "The record of a request that asked for one, as JSON "
            "lines, for `tandem replay`.", MEDIA_TYPE, more_errors=(404, 429)),
    ]  # fmt: skip
