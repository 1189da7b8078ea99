"""Log lines of every process: one line each, to stderr, with the process's name in it."""

from __future__ import annotations

import logging
import sys

_QUIET = ("uvicorn", "httpx", "httpcore", "urllib3", "filelock", "huggingface_hub", "transformers", "asyncio")
"""Libraries whose ordinary lines say nothing about serving: from them, warnings and worse alone are shown."""


class _OneLine(logging.Formatter):
    """A traceback keeps its lines, but a message that holds line breaks (a client's text, say) cannot forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage().replace("\n", "\\n").replace("\r", "\\r")
        line = self.formatMessage(record) if not self.usesTime() else self._with_time(record)
        if record.exc_info and record.exc_info[0] is not None:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line

    def _with_time(self, record: logging.LogRecord) -> str:
        record.asctime = self.formatTime(record, self.datefmt)
        return self.formatMessage(record)


def setup_logging(process_name: str, level: str = "info") -> None:
    """Send this process's logging to stderr. level: debug, info, warning or error; else ValueError."""
    number = logging.getLevelName(level.upper())
    if not isinstance(number, int):
        raise ValueError(f"log level {level!r} is none of debug, info, warning, error")
    name = process_name.replace("%", "%%")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(f"%(asctime)s.%(msecs)03d {name} %(levelname).1s %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for library in _QUIET:
        logging.getLogger(library).setLevel(max(number, logging.WARNING))
