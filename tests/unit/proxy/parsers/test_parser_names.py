"""The choice of parsers by flag and chat template, and what is said where no format is known."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import pytest
from tokenizers import Tokenizer, models

from tandem.proxy.parsers.parser_names import ToolParserName, log_formats, tool_format
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


def test_the_start_says_the_formats_and_warns_if_that_of_calls_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for name, template, said in (
        ("mistral", UNKNOWN, "tool calls mistral, thinking none"),
        ("none", UNKNOWN, "tool calls none, thinking none"),
        ("auto", "<tool_call>{{ tools }}</think>", "tool calls hermes, thinking qwen3"),
        ("auto", None, "tool calls hermes, thinking none"),
    ):
        log_formats(cast(ToolParserName, name), "auto", text(template))
        [record] = caplog.records
        assert record.levelname == "INFO" and said in record.message
        caplog.clear()
    log_formats("auto", "none", text(UNKNOWN))
    info, warning = caplog.records
    assert "tool calls none known" in info.message
    assert warning.levelname == "WARNING" and "--tool-call-parser" in warning.message
