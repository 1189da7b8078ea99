"""Logging setup shared by all processes: one line per record on stderr, as text or JSON, with the process's name.

Records that are logged while a request is served carry its request_id, see `serving`. Extra fields are passed as
`extra={"fields": {...}}` and follow the message as name=value.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from typing import Annotated, Any, Literal

import msgspec

from tandem.runtime.settings import setting

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
_request_id: ContextVar[str] = ContextVar("request_id", default="")

_QUIET = ("uvicorn", "httpx", "httpcore", "urllib3", "filelock", "huggingface_hub", "transformers", "asyncio")
"""Libraries whose records below WARNING are dropped."""


class LogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which records a process logs, and how."""

    # fmt: off
    log_level: Annotated[LogLevel, setting("logging", "Minimum level of the log lines of every process.")] = "info"
    log_format: Annotated[LogFormat, setting("logging", description=
        "text writes lines for people; json writes one object per line.")] = "text"
    # fmt: on


def serving(request_id: str) -> None:
    """Adds this request_id to all later records of the calling task and of the tasks it starts."""
    _request_id.set(request_id)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    request_id = _request_id.get()
    return {"request_id": request_id, **fields} if request_id else fields


def _one_line(text: object) -> str:
    """Escapes line breaks, so that client text cannot forge a log line."""
    return str(text).replace("\n", "\\n").replace("\r", "\\r")


class _OneLine(logging.Formatter):
    """Text format. Tracebacks keep their line breaks."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's name
        fields = "".join(f" {name}={_one_line(value)}" for name, value in _fields(record).items())
        record.message = _one_line(record.message) + fields
        return super().formatMessage(record)


class _Json(logging.Formatter):
    """JSON format, one object per line: unix_s, process, level, logger, message, extra fields, and traceback if any."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "unix_s": round(record.created, 6),
            "process": self._process_name,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup_logging(process_name: str, settings: LogSettings = LogSettings()) -> None:  # noqa: B008  # frozen
    """Configures the root logger."""
    number = getattr(logging, settings.log_level.upper())
    name = process_name.replace("%", "%%")
    handler = logging.StreamHandler(sys.stderr)
    if settings.log_format == "json":
        handler.setFormatter(_Json(process_name))
    else:
        layout = f"%(asctime)s.%(msecs)03d {name} %(levelname).1s %(name)s: %(message)s"
        handler.setFormatter(_OneLine(layout, "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for library in _QUIET:
        logging.getLogger(library).setLevel(max(number, logging.WARNING))
