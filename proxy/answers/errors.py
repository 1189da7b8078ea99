"""Errors as HTTP: the one place that maps the error tree to status codes and OpenAI's error body."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException

from tandem.proxy.admission.admission import ClientLimitExceeded, QueueFull
from tandem.proxy.answers.request_id import id_header
from tandem.proxy.api.responses import ErrorDetail, ErrorResponse
from tandem.proxy.api.validation import ModelNotFound
from tandem.proxy.cluster.router import NoWorkerReady, SLOUnreachable
from tandem.proxy.media.source import InvalidMedia
from tandem.proxy.text.prompt import ContextLengthExceeded
from tandem.runtime.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KVTransferFailed,
    Overloaded,
    RequestAborted,
    TandemError,
    WorkerLost,
)

log = logging.getLogger("proxy")

RETRY_AFTER_S = "1"


class InvalidApiKey(InvalidRequest):
    """The client sends no key, or another than the server's."""

    code = "invalid_api_key"


class TooManyConnections(Overloaded):
    """This proxy has as many as it may have."""

    code = "too_many_connections"


class TooManyFromClient(TooManyConnections):
    """This address has as many as one may have; others may connect."""


class BodyTooLarge(InvalidRequest):
    """The body is larger than this server takes."""

    code = "body_too_large"


class HeadTooLarge(InvalidRequest):
    """The request line and the headers are larger than this server takes."""

    code = "head_too_large"


class ClientTooSlow(RequestAborted):
    """The request did not arrive in time."""

    code = "client_too_slow"


class UnknownRequest(InvalidRequest):
    """No proxy remembers a request of that id."""

    code = "unknown_request"


class ClientDisconnected(RequestAborted):
    """Nobody is left to read an answer."""


_STATUS: dict[type[TandemError], int] = {
    InvalidRequest: 400,
    ContextLengthExceeded: 400,
    InvalidMedia: 400,
    ModelNotFound: 404,
    UnknownRequest: 404,
    InvalidApiKey: 401,
    BodyTooLarge: 413,
    HeadTooLarge: 431,
    ClientTooSlow: 408,
    QueueFull: 503,
    ClientLimitExceeded: 429,
    Overloaded: 503,
    SLOUnreachable: 503,
    TooManyConnections: 503,
    TooManyFromClient: 429,
    NoWorkerReady: 503,
    WorkerLost: 503,
    KVTransferFailed: 503,
    RequestAborted: 504,
    DeadlineExceeded: 504,
    ClientDisconnected: 499,
}


def status_of(error: TandemError) -> int:
    return _STATUS.get(type(error), 500)


def error_body(error: TandemError) -> bytes:
    return _body(status_of(error), error.message, error.param, error.code)


def tandem_error_response(request: Request[Any, Any, Any], error: TandemError) -> Response[bytes]:
    status = status_of(error)
    headers = id_header(request)
    if status in (429, 503):
        headers["retry-after"] = str(error.retry_after_s) if isinstance(error, Overloaded) else RETRY_AFTER_S
    if status == 408:  # the rest of the body may still come
        headers["connection"] = "close"
    return _response(status, error_body(error), headers)


def http_exception_response(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """What Litestar itself refuses: unknown paths and wrong methods."""
    status = error.status_code
    message, code = error.detail or "The request was refused.", "invalid_request"
    if status == 404:
        message, code = f"There is no {request.scope['path']} here.", "not_found"
    elif status == 405:
        message, code = f"{request.method} is not allowed for {request.scope['path']}.", "method_not_allowed"
    elif status >= 500:
        log.error("litestar failed: %s", message)
        message, code = "the server failed", "internal_error"
    headers = id_header(request) | {
        key: value for key, value in (error.headers or {}).items() if key.lower() == "allow"
    }
    return _response(status, _body(status, message, None, code), headers)


def unexpected_error_response(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    log.error("a request failed", exc_info=error)
    return _response(500, error_body(InternalError("the server failed; its log tells more")), id_header(request))


def _body(status: int, message: str, param: str | None, code: str) -> bytes:
    if status == 429:
        kind = "rate_limit_error"
    elif status == 401:
        kind = "authentication_error"
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode(ErrorResponse(ErrorDetail(message, kind, param, code)))


def _response(status: int, body: bytes, headers: dict[str, str]) -> Response[bytes]:
    return Response(body, status_code=status, media_type="application/json", headers=headers)
