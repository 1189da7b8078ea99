"""The choice of parsers by flag and chat template, and what is said where no format is known."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import pytest
from tokenizers import Tokenizer, models

from tandem.proxy.parsers.parser_names import ToolParserName, tool_format, warn_of_unknown_tools
from tandem.proxy.text.model_text import ModelText

UNKNOWN = "{% for t in tools %}<call {{ t }}>{% endfor %}"


class Text(NamedTuple):
    chat_template: str | None
    tokenizer: Tokenizer = Tokenizer(models.BPE(vocab={}, merges=[]))


def text(template: str | None) -> ModelText:
    return cast(ModelText, cast(Any, Text(template)))


@pytest.mark.parametrize(
    ("name", "template", "expected"),
    [
        ("auto", UNKNOWN, ("hermes", False)),
        ("auto", "{{ tools }}<tool_call>", ("hermes", True)),
        ("auto", "{{ tools }}<|tool_call>", ("gemma4", True)),
        ("auto", None, ("hermes", True)),
        ("none", "{{ tools }}<tool_call>", ("hermes", False)),
        ("mistral", UNKNOWN, ("mistral", True)),
    ],
)
def test_the_flag_or_the_template_chooses_the_format(
    name: ToolParserName, template: str | None, expected: tuple[str, bool]
) -> None:
    found = tool_format(name, text(template))
    assert (found.name, found.is_known) == expected


def test_a_format_that_is_not_known_is_a_warning_that_names_the_flag(caplog: pytest.LogCaptureFixture) -> None:
    for name, template in (("mistral", UNKNOWN), ("none", UNKNOWN), ("auto", "<tool_call>{{ tools }}"), ("auto", None)):
        warn_of_unknown_tools(cast(ToolParserName, name), text(template))
    assert not caplog.records
    warn_of_unknown_tools("auto", text(UNKNOWN))
    [record] = caplog.records
    assert record.levelname == "WARNING" and "--tool-call-parser" in record.message
