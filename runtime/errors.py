"""The error tree. Each error has a wire code, so that it can cross a socket.

  TandemError
    InvalidRequest      the request can never succeed as it is
    Overloaded          no capacity at present: try again later
      ClientShareExceeded  the client holds its share of something; others are served
    WorkerLost          a worker died or went silent while it held the request
    KVLayoutMismatch    two workers' KV caches are incompatible; the pair is refused
    KVTransferFailed    the KV cache did not arrive
      KVPathRefused     a connector cannot open a path, and another attempt would meet the same
    RequestAborted      the client disconnected, or the server stops
      DeadlineExceeded  the request's deadline or the server's time limit has passed
    ProtocolError       bytes on a socket that are not a Tandem message
      InvalidMessage    a message of a known type with values that no Tandem process sends
    ConfigError         the operator's configuration cannot work (never sent over a socket)
    InternalError       a defect in Tandem

Only `proxy` maps these to HTTP status codes. Answers to clients have `for_client` in place of the message, which names
no file or folder of the server; logs have the message.
"""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec


class TandemError(Exception):
    """Base class of all errors that a client or an operator may see. `str(error)` is written for that reader."""

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def for_client(self) -> str:
        """The message without files and folders of the server."""
        return without_paths(self.message)


class InvalidRequest(TandemError):
    """The request can never succeed as it is.

    The message may quote what the client has sent, which may look like a path. So text of other libraries' exceptions
    is put into it by `client_reason` only.
    """

    code = "invalid_request"

    @property
    def for_client(self) -> str:
        return self.message


class Overloaded(TandemError):
    """retry_after_s: whole seconds after which a retry may succeed."""

    code = "overloaded"
    retry_after_s: int = 1
    is_lasting: bool = False
    """Whether a retry would be refused as well, although nothing else runs, as far as is known."""


class ClientShareExceeded(Overloaded):
    """One client holds as much of something as one client may. Others are not refused."""

    code = "client_share_exceeded"


class WorkerLost(TandemError):
    code = "worker_lost"


class KVLayoutMismatch(TandemError):
    code = "kv_layout_mismatch"


class KVTransferFailed(TandemError):
    code = "kv_transfer_failed"


class KVPathRefused(KVTransferFailed):
    """Another attempt with the same connector would fail too. Stays within the worker, so it has no wire code."""


class RequestAborted(TandemError):
    code = "request_aborted"


class DeadlineExceeded(RequestAborted):
    code = "deadline_exceeded"


class ProtocolError(TandemError):
    code = "protocol_error"


class InvalidMessage(ProtocolError):
    """A message of the right type whose values no Tandem process would send."""


class ConfigError(TandemError):
    code = "config_error"


class InternalError(TandemError):
    code = "internal_error"


_BY_CODE: dict[str, type[TandemError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        Overloaded,
        ClientShareExceeded,
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
    """An error in a message. code: names the class; message: the text that the client or operator sees."""

    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: TandemError) -> ErrorInfo:
        return cls(code=error.code, message=error.message, param=error.param)

    def to_error(self) -> TandemError:
        """Returns the exception again. An unknown code becomes InternalError."""
        return _BY_CODE.get(self.code, InternalError)(self.message, self.param)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its class.

    A line that ends with a colon only announces the reason, as those of transformers' checks of configs do. The message
    of a KeyError is only the key.
    """
    kind = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [kind]
    if isinstance(error, KeyError) and error.args:
        return f"{kind}: {lines[0]}"
    return f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


_A_FILE = "(a file of the server)"
_PATHS = re.compile(
    r"""(?P<quote>["'`])(?:(?:file|ipc|unix):/*)?[~.]{0,2}/(?:(?!(?P=quote))[^\n])*(?P=quote)"""  # with spaces
    r"""|(?<![\w./~<-])(?!(?<=:)//)(?:(?:file|ipc|unix):/*)?(?:~|\.{1,2})?/[^\s"'`,;:()\[\]<>]+"""
)
"""Absolute paths, and relative ones that say so. A slash within a word, as in tokens/s, or in a URL of a host, begins
none. A quoted path goes on to the same quote, also over other quotes: if it ended there, what is left would look like a
path when those are replaced."""


def without_paths(text: str) -> str:
    """Returns a text in which no path of a file or folder is left."""
    return _PATHS.sub(_A_FILE, text)


def client_reason(error: BaseException) -> str:
    """Returns why another library's call failed, for a message that a client gets: `first_line` without paths."""
    if isinstance(error, OSError) and error.strerror:
        return without_paths(error.strerror)
    return without_paths(first_line(error))
