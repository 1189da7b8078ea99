"""Names of parsers as the command line takes them, and the choice by the chat template."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

import msgspec

from tandem.proxy.parsers.reasoning import ReasoningFamilyName, ReasoningFormat, detect_reasoning_family
from tandem.proxy.parsers.tool_families import ToolFamilyName
from tandem.proxy.parsers.tool_formats import DEFAULT_FAMILY, ToolFormat, detect_tool_family

if TYPE_CHECKING:
    from tandem.proxy.text.model_text import ModelText  # imports transformers; the command line needs the names only

ToolParserName = Literal["auto", "none", ToolFamilyName]
ReasoningParserName = Literal["auto", "none", ReasoningFamilyName]


log = logging.getLogger(__name__)


def log_formats(tools: ToolParserName, reasoning: ReasoningParserName, text: ModelText) -> None:
    """Logs in which formats calls and thinking are read from answers. Warns if that of calls is not known."""
    family = detect_tool_family(text.chat_template) if tools == "auto" else tools
    thinking = detect_reasoning_family(text.chat_template) if reasoning == "auto" else reasoning
    log.info("formats of answers: tool calls %s, thinking %s", family or "none known", thinking or "none")
    if family is None:
        log.warning(
            "the chat template has tools, but how the model writes calls is not known: with tool_choice auto they stay "
            "in the answer's content. If it writes them in a known format, name it with --tool-call-parser."
        )


def tool_format(name: ToolParserName, text: ModelText) -> ToolFormat:
    """auto: the family whose markers the chat template has. none, or a template of no known family: calls are read only
    where a grammar forces them."""
    family = detect_tool_family(text.chat_template) if name == "auto" else None if name == "none" else name
    known = ToolFormat.of(family or DEFAULT_FAMILY, text.tokenizer)
    return known if family is not None else msgspec.structs.replace(known, is_known=False)


def reasoning_format(name: ReasoningParserName, text: ModelText) -> ReasoningFormat | None:
    """auto: the family whose markers the chat template has, if any. none: thinking stays part of the answer."""
    if name == "none":
        return None
    family = detect_reasoning_family(text.chat_template) if name == "auto" else name
    return None if family is None else ReasoningFormat.of(family, text.tokenizer)
