"""The header by which a client asks for the record of its request, and the one that says where the record will be."""

from __future__ import annotations

from urllib.parse import quote

from tandem.proxy.api.generation_request import GenerationRequest
from tandem.proxy.reading.body_reader import BodyKind
from tandem.proxy.records.record_store import RecordStore
from tandem.runtime.errors import InvalidRequest

HEADER = "x-tandem-record"
PATH = "/v1/tandem/records"


def wants_record(value: str | None, kind: BodyKind, store: RecordStore | None) -> bool:
    """value: of the request's header. Raises InvalidRequest unless it is 0, 1 or missing, and for a record that cannot
    be made."""
    if value not in (None, "0", "1"):
        raise InvalidRequest(f"X-Tandem-Record must be 1 or 0, not {value[:100]!r}.", HEADER)
    if value != "1":
        return False
    if kind == "embedding":
        raise InvalidRequest("X-Tandem-Record is for generated answers; an embedding has no tokens to record.", HEADER)
    if store is None:
        raise InvalidRequest("This server has no folder for records; leave X-Tandem-Record out.", HEADER)
    return True


def check_recorded(request: GenerationRequest) -> None:
    """Raises InvalidRequest for an answer whose tokens do not follow from its record."""
    if request.use_beam_search:
        raise InvalidRequest("X-Tandem-Record is not supported with use_beam_search; leave one out.", HEADER)


def record_header(request_id: str) -> dict[str, str]:
    """Returns the header of an answer whose record can be fetched when the answer is complete."""
    return {HEADER: f"{PATH}/{quote(request_id, safe='')}"}
