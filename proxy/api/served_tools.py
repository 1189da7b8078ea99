"""Leaves out of a request the tools that only a server of the API's vendor could run, such as a web search."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from tandem.proxy.api.output_fields import SERVED_TOOLS, NamedToolChoice, Tool
from tandem.proxy.api.schema import ChatCompletionRequest, TokenizeRequest
from tandem.proxy.api.skipped_kinds import keep_types, log_skipped

ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | None
_MODES: dict[str, Literal["none", "auto", "required"]] = {
    "none": "none", "auto": "auto", "required": "required", "any": "required",
}  # fmt: skip
"""Choices that some clients send as an object with this type, as in Anthropic's API."""


def keep_served_tools(request: ChatCompletionRequest | TokenizeRequest) -> None:
    """Removes tools of types that are not served, and the choice of one."""
    given = request.tools or []
    for tool in given:
        if not tool.is_served:
            log_skipped("tools", tool.type)
    request.tools = [tool for tool in given if tool.is_served] or None
    if isinstance(request, ChatCompletionRequest):
        has_skipped = len(request.tools or ()) < len(given)
        request.tool_choice = served_choice(request.tool_choice, request.tools or [], has_skipped=has_skipped)


def served_choice(
    choice: ToolChoice,
    tools: Sequence[Tool],
    *,
    has_skipped: bool,
    skipped_names: Collection[str] = (),
) -> ToolChoice:
    """Returns what remains of a choice if some tools were skipped: the model decides where it named one of those.

    skipped_names: names of skipped tools, where those have names.
    """
    if isinstance(choice, str):
        return "auto" if choice == "required" and has_skipped and not tools else choice
    if choice is None:
        return None
    if choice.type in _MODES:
        return served_choice(_MODES[choice.type], tools, has_skipped=has_skipped)
    if not choice.is_served:
        log_skipped("tool choices", choice.type)
        return "auto"
    if choice.type == "function":
        is_skipped = choice.function is not None and choice.function.name in skipped_names
        return "auto" if is_skipped else choice
    if (allowed := choice.allowed_tools) is None:
        return choice
    served = [tool for tool in allowed.tools if tool.is_served]
    if not served:
        return "none"  # the answer may call nothing that this server could call
    return replace(choice, allowed_tools=replace(allowed, tools=served))


def without_unknown_tools(body: bytes) -> bytes | None:
    """Returns the body whose tools of unknown types have no field but their type; None if there is none to leave out.

    Providers have tools that look like functions, such as Moonshot's `builtin_function` of the name `$web_search`. It
    decodes and encodes the whole body, so it is for bodies that were refused.
    """
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    found = isinstance(document, dict) and keep_types(document.get("tools"), SERVED_TOOLS)
    return msgspec.json.encode(document) if found else None


def custom_names(request: ChatCompletionRequest) -> list[str]:
    """Returns the names of the custom tools."""
    return [tool.function.name for tool in request.tools or () if tool.type == "custom"]
