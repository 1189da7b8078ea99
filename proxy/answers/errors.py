"""Maps the error tree to HTTP: status codes, headers and OpenAI's error body."""

from __future__ import annotations

import logging

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tandem.proxy.admission.admission import ClientLimitExceeded
from tandem.proxy.admission.api_key import InvalidApiKey
from tandem.proxy.admission.browser_rules import OriginNotAllowed
from tandem.proxy.answers.http_answers import ClientDisconnected, id_header, is_anthropic, request_id_of
from tandem.proxy.answers.json_parts import encode
from tandem.proxy.api.answer_bodies import ErrorDetail, ErrorResponse
from tandem.proxy.api.messages_api.messages_response import MessagesError, MessagesErrorDetail
from tandem.proxy.api.responses_api.response_store import ResponseNotFound
from tandem.proxy.api.validation import ModelNotFound
from tandem.proxy.batches.batch_store import BatchNotFound
from tandem.proxy.batches.file_store import FileNotFound
from tandem.proxy.batches.json_files import StorageFull
from tandem.proxy.cluster.adapter_table import AdapterNotFound
from tandem.proxy.records.record_store import RecordNotFound
from tandem.runtime.errors import (
    ClientShareExceeded,
    InternalError,
    InvalidRequest,
    KVTransferFailed,
    Overloaded,
    RequestAborted,
    TandemError,
    WorkerLost,
)

log = logging.getLogger("proxy")

RETRY_STATUSES = (429, 503)
RETRY_AFTER_S = "1"
NO_RETRY = {"x-should-retry": "false"}
"""Header of a refusal that another attempt would meet again. OpenAI's and Anthropic's clients obey it."""
_JSON = "application/json"


class TooManyConnections(Overloaded):
    """This proxy has reached its limit of connections."""

    code = "too_many_connections"


class TooManyFromClient(TooManyConnections):
    """The client's address has reached its limit of connections; others may connect."""


class BodyTooLarge(InvalidRequest):
    """The request's body is larger than the server's limit."""

    code = "body_too_large"


class HeadTooLarge(InvalidRequest):
    """The request line and headers are larger than the server's limit."""

    code = "head_too_large"


class UnsupportedContentCoding(InvalidRequest):
    """The body is compressed."""

    code = "unsupported_content_coding"


class UnsupportedTransferCoding(InvalidRequest):
    """The body has a transfer coding besides chunked."""

    code = "unsupported_transfer_coding"


class ClientTooSlow(RequestAborted):
    """The request did not arrive in time."""

    code = "client_too_slow"


class UnknownRequest(InvalidRequest):
    """No proxy keeps a timeline of a request with this id."""

    code = "unknown_request"


class BatchesDisabled(InvalidRequest):
    """The server keeps no files."""

    code = "not_enabled"


class UnknownWorker(InvalidRequest):
    """No worker of this name is registered."""

    code = "unknown_worker"


class AdminAddressIsOpen(InvalidRequest):
    """The admin address is not on loopback and has no keys, so it changes nothing."""

    code = "admin_keys_missing"


class RoleRefused(InvalidRequest):
    """A worker cannot take a role now."""

    code = "role_refused"


_STATUS: dict[type[TandemError], int] = {
    InvalidRequest: 400,
    InvalidApiKey: 401,
    OriginNotAllowed: 403,
    AdminAddressIsOpen: 403,
    ModelNotFound: 404,
    AdapterNotFound: 404,
    UnknownRequest: 404,
    UnknownWorker: 404,
    ResponseNotFound: 404,
    RecordNotFound: 404,
    FileNotFound: 404,
    BatchNotFound: 404,
    BatchesDisabled: 501,
    UnsupportedTransferCoding: 501,
    StorageFull: 507,
    RoleRefused: 409,
    BodyTooLarge: 413,
    UnsupportedContentCoding: 415,
    HeadTooLarge: 431,
    Overloaded: 503,
    ClientLimitExceeded: 429,
    ClientShareExceeded: 429,
    TooManyFromClient: 429,
    WorkerLost: 503,
    KVTransferFailed: 503,
    RequestAborted: 504,
    ClientTooSlow: 408,
    ClientDisconnected: 499,
}
"""Statuses of errors and of their subclasses, unless those have their own. Other errors are the server's: 500."""

_HEADERS: dict[type, dict[str, str]] = {
    InvalidApiKey: {"www-authenticate": 'Bearer realm="tandem"'},
    UnsupportedContentCoding: {"accept-encoding": "identity"},
}
"""Headers that answers with these errors must have (RFC 9110)."""

_ANTHROPIC_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""Anthropic's names of errors, by status."""


def status_of(error: TandemError) -> int:
    return next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)


def error_body(error: TandemError) -> bytes:
    return _body(status_of(error), error.for_client, error.param, error.code)


def tandem_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    status = status_of(error)
    headers = id_header(request)
    headers |= next((_HEADERS[kind] for kind in type(error).__mro__ if kind in _HEADERS), {})
    if isinstance(error, Overloaded) and error.is_lasting:
        headers |= NO_RETRY
    elif status in RETRY_STATUSES:
        headers["retry-after"] = str(error.retry_after_s) if isinstance(error, Overloaded) else RETRY_AFTER_S
    return Response(_body_of(request, error), status, headers, _JSON)


def http_exception_response(request: Request, error: Exception) -> Response:
    """Answers for what Starlette refuses: unknown paths and methods that a path does not have."""
    assert isinstance(error, HTTPException)
    message, code = error.detail, "invalid_request"
    if error.status_code == 404:
        message, code = f"There is no {request.url.path} here.", "not_found"
    elif error.status_code == 405:
        message, code = f"{request.method} is not allowed for {request.url.path}.", "method_not_allowed"
    if is_anthropic(request):
        body = msgspec.json.encode(_messages_error(error.status_code, message, request_id_of(request)))
    else:
        body = _body(error.status_code, message, None, code)
    return Response(body, error.status_code, id_header(request) | dict(error.headers or {}), _JSON)


def unexpected_error_response(request: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return Response(_body_of(request, InternalError("The server failed; see its log.")), 500, id_header(request), _JSON)


def messages_error(error: TandemError, request_id: str | None = None) -> MessagesError:
    """Returns Anthropic's form of an error."""
    return _messages_error(status_of(error), error.for_client, request_id)


def _messages_error(status: int, message: str, request_id: str | None) -> MessagesError:
    kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return MessagesError(MessagesErrorDetail(kind, message), request_id)


def _body_of(request: Request, error: TandemError) -> bytes:
    """Returns the body of an error in the form of the API that the request is for."""
    if is_anthropic(request):
        return encode(messages_error(error, request_id_of(request)))
    return error_body(error)


def _body(status: int, message: str, param: str | None, code: str) -> bytes:
    if status == 429:
        kind = "rate_limit_error"
    elif status == 401:
        kind = "authentication_error"
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
    return encode(ErrorResponse(ErrorDetail(message, kind, param, code)))
