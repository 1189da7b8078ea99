"""The error tree. Each error has a wire code and says whether the same request may succeed when it is sent again.

TandemError
  InvalidRequest      the request can never succeed as it is
  Overloaded          no room at present: try again later
  WorkerLost          a worker died or went silent while it held the request
  KVLayoutMismatch    two workers' KV caches do not fit together; the pair is refused
  KVTransferFailed    the KV cache did not arrive
  RequestAborted      the client went away, or the server stops
    DeadlineExceeded  the request's own time, or the server's limit, has passed
  ProtocolError       bytes on a socket that are not one of our messages
    InvalidMessage  one that none of our processes would send
  ConfigError         the operator's configuration cannot work (never travels)
  InternalError       our own fault

Only `proxy` maps these to HTTP status codes.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class TandemError(Exception):
    """Base of all errors that a request or an operator may see; `str(error)` is written for that person."""

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(TandemError):
    code = "invalid_request"


class Overloaded(TandemError):
    """retry_after_s: whole seconds after which the request may be served."""

    code = "overloaded"
    retryable = True
    retry_after_s: int = 1


class WorkerLost(TandemError):
    code = "worker_lost"
    retryable = True


class KVLayoutMismatch(TandemError):
    code = "kv_layout_mismatch"


class KVTransferFailed(TandemError):
    code = "kv_transfer_failed"
    retryable = True


class RequestAborted(TandemError):
    code = "request_aborted"


class DeadlineExceeded(RequestAborted):
    code = "deadline_exceeded"


class ProtocolError(TandemError):
    code = "protocol_error"


class InvalidMessage(ProtocolError):
    """Of the right type, and still nothing that one of our processes would send."""


class ConfigError(TandemError):
    code = "config_error"


class InternalError(TandemError):
    code = "internal_error"
    retryable = True


_BY_CODE: dict[str, type[TandemError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        Overloaded,
        WorkerLost,
        KVLayoutMismatch,
        KVTransferFailed,
        RequestAborted,
        DeadlineExceeded,
        ProtocolError,
        InternalError,
    )
}


class ErrorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error as it travels: the code names the class, the message is for the person who sees it."""

    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: TandemError) -> ErrorInfo:
        return cls(code=error.code, message=error.message, param=error.param)

    def to_error(self) -> TandemError:
        """The exception again; a code that this version does not know becomes InternalError."""
        return _BY_CODE.get(self.code, InternalError)(self.message, self.param)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
