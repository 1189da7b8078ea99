"""Tools, items and blocks of kinds that this server cannot run or show: they are skipped, and logged once per kind."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from typing import Any

log = logging.getLogger(__name__)

_KNOWN = {
    "agent_message", "apply_patch", "bash_code_execution", "code_execution", "code_interpreter", "compaction",
    "compaction_trigger", "computer", "computer_use", "computer_use_preview", "container_upload",
    "context_compaction", "file_search", "ghost_snapshot", "image_generation", "local_shell", "mcp",
    "mcp_approval_request", "mcp_approval_response", "mcp_list_tools", "mcp_servers", "mcp_toolset",
    "reasoning", "server_tool_use", "shell", "text_editor_code_execution", "tool_search", "tool_search_tool_bm25",
    "tool_search_tool_regex", "web_fetch", "web_search", "web_search_preview",
}  # fmt: skip
_VARIANT = re.compile(r"(_call|_call_output|_output|_tool_result|_2[0-9]{3}_?[0-9]{2}_?[0-9]{2})$")
"""Endings of a tool's name: its calls, their results, and the date of its version."""
_logged: set[tuple[str, str]] = set()


def log_skipped(what: str, kind: str) -> None:
    """Logs that parts of requests are skipped. what: kind of part, such as "tools". kind: their type, as clients name
    it. It is text of clients, which is not logged, so types that are not known here have no name in the log.
    """
    name = _VARIANT.sub("", kind)
    said = f"type {name}" if name in _KNOWN else "another type"
    if (what, said) not in _logged:
        _logged.add((what, said))
        log.warning("%s of %s are skipped: this server does not support them (said once)", what, said)


def keep_types(parts: Any, known: Collection[str]) -> bool:
    """Leaves the objects of unknown types in a list nothing but their type, so that their fields may have any form.

    Returns whether there was one with more fields.
    """
    found = False
    for number, part in enumerate(parts if isinstance(parts, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in known and len(part) > 1:
            parts[number] = {"type": kind}
            found = True
    return found
