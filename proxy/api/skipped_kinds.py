"""Tools, items and blocks of kinds that this server cannot run or show: they are skipped, and logged once per kind."""

from __future__ import annotations

import logging
import re

log = logging.getLogger(__name__)

MAX_LOGGED = 64
"""Kinds that one process logs. The names come from clients, so neither their number nor their form may be theirs."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_logged: set[tuple[str, str]] = set()


def log_skipped(what: str, kind: str) -> None:
    """Logs that parts of requests are skipped. what: kind of part, such as "tools". kind: their type, as clients name
    it."""
    name = kind if _NAME.fullmatch(kind) else "another"
    if (what, name) in _logged or len(_logged) >= MAX_LOGGED:
        return
    _logged.add((what, name))
    log.warning("%s of type %s are skipped: this server does not support them (said once)", what, name)
