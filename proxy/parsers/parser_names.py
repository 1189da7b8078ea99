"""Names of parsers as the command line takes them, and the choice by the chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tandem.proxy.parsers.reasoning import ReasoningFamilyName, ReasoningFormat, detect_reasoning_family
from tandem.proxy.parsers.tool_families import ToolFamilyName
from tandem.proxy.parsers.tool_formats import ToolFormat, detect_tool_family

if TYPE_CHECKING:
    from tandem.proxy.text.model_text import ModelText  # imports transformers; the command line needs the names only

ToolParserName = Literal["auto", ToolFamilyName]
ReasoningParserName = Literal["auto", "none", ReasoningFamilyName]


def tool_format(name: ToolParserName, text: ModelText) -> ToolFormat:
    """auto: the family whose markers the chat template has; hermes if it has none."""
    family = detect_tool_family(text.chat_template) if name == "auto" else name
    return ToolFormat.of(family, text.tokenizer)


def reasoning_format(name: ReasoningParserName, text: ModelText) -> ReasoningFormat | None:
    """auto: the family whose markers the chat template has, if any. none: thinking stays part of the answer."""
    if name == "none":
        return None
    family = detect_reasoning_family(text.chat_template) if name == "auto" else name
    return None if family is None else ReasoningFormat.of(family, text.tokenizer)
