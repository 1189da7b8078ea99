"""Records of requests for their clients: the header X-Tandem-Record, by which a client asks for one and learns where it
will be, and the route there."""

from __future__ import annotations

from typing import BinaryIO
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from tandem.proxy.admission.budgets import ClientSlots
from tandem.proxy.answers.http_answers import Download, id_header
from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.http.app_state import AppState
from tandem.proxy.http.starlette_app import ApiRoute, client_of, owner_of
from tandem.proxy.reading.body_reader import BodyKind
from tandem.proxy.records.record_store import RecordNotFound, RecordStore
from tandem.runtime.errors import InvalidRequest

RECORD_HEADER = "x-tandem-record"
PATH = "/v1/tandem/records"


def wants_record(value: str | None, kind: BodyKind, store: RecordStore | None) -> bool:
    """value: of the request's header. Raises InvalidRequest unless it is 0, 1 or missing, and for a record that cannot
    be made."""
    if value not in (None, "0", "1"):
        raise InvalidRequest(f"X-Tandem-Record must be 1 or 0, not {value[:100]!r}.", RECORD_HEADER)
    if value != "1":
        return False
    if kind == "embedding":
        raise InvalidRequest(
            "X-Tandem-Record is for generated answers; an embedding has no tokens to record.", RECORD_HEADER
        )
    if store is None:
        raise InvalidRequest("This server has no folder for records; leave X-Tandem-Record out.", RECORD_HEADER)
    return True


def check_recorded(request: GenerationRequest) -> None:
    """Raises InvalidRequest for an answer whose tokens do not follow from its record."""
    if request.use_beam_search:
        raise InvalidRequest("X-Tandem-Record is not supported with use_beam_search; leave one out.", RECORD_HEADER)


def record_header(request_id: str) -> dict[str, str]:
    """Returns the header of an answer whose record can be fetched when the answer is complete."""
    return {RECORD_HEADER: f"{PATH}/{quote(request_id, safe='')}"}


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
