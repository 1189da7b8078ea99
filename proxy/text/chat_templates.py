"""The model's chat templates, from all files in which transformers' tokenisers and processors look for them."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import msgspec

from tandem.proxy.text.model_files import PROCESSOR_FILES
from tandem.runtime.errors import ConfigError
from tandem.runtime.files.model_json import read_model_json
from tandem.runtime.files.regular_file import read_regular

log = logging.getLogger(__name__)

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of the template for chats, and of that for chats with tools."""
_FILES = "*.jinja"
_MAX_FILE_BYTES = 64 << 20
_TOOLS = re.compile(r"\b(?:\w+_)?tools\b")


class ChatTemplates:
    """Templates by name. Most models have one, whose name is `default`."""

    def __init__(self, by_name: dict[str, str]) -> None:
        self.by_name = by_name
        self._has_warned = False

    @classmethod
    def read(cls, folder: Path) -> ChatTemplates:
        """Reads the templates in transformers' order. Raises ConfigError.

        A processor's come first where the model has a processor: they show images. A later source is used only where
        those before it have no default.
        """
        tokenizer, processor = [_FILES, "tokenizer_config.json"], ["processor_config.json", "chat_template.json"]
        has_processor = any((folder / name).is_file() for name in PROCESSOR_FILES)
        sources = [*processor, *tokenizer] if has_processor else [*tokenizer, *processor]
        found: dict[str, str] = {}
        for source in [*sources, "preprocessor_config.json"]:
            if DEFAULT not in found:
                found = (_files(folder) if source == _FILES else _of_config(folder / source)) | found
        return cls(found)

    def choose(self, has_tools: bool) -> str | None:
        """Returns the template for a chat, or None if the model has none."""
        source = self.by_name.get(DEFAULT)
        if has_tools:
            source = self.by_name.get(TOOL_USE, source)
            if source is not None and not self._has_warned and not _TOOLS.search(source):
                self._has_warned = True
                log.warning("the model's chat template shows no tools: the model does not see those of requests")
        return source


def _files(folder: Path) -> dict[str, str]:
    """Returns the templates that are files of their own."""
    files = {DEFAULT: folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    return {name: _read(file).decode() for name, file in files.items() if file.is_file()}


def _of_config(file: Path) -> dict[str, str]:
    """Returns the `chat_template` of a JSON file: a text, a list of templates with names, or an object of them."""
    given: Any = (read_model_json(file, dict[str, Any]) or {}).get("chat_template")
    try:
        if isinstance(given, list):
            given = {each["name"]: each["template"] for each in given}
        return msgspec.convert({DEFAULT: given} if isinstance(given, str) else given or {}, dict[str, str])
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise ConfigError(f"cannot read the chat template in {file}: {error}") from error


def _read(file: Path) -> bytes:
    try:
        return read_regular(file, _MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
