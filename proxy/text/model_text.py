"""The text side of the served model: its tokeniser, chat template and end-of-sequence ids. Loads no weights, no torch.

`TokenizersBackend` is the part of transformers that reads tokenizer.json and chat templates; unlike AutoTokenizer it
does not import torch (0.1 GB and 2 s in place of 0.6 GB and 5 s, measured).
"""

from __future__ import annotations

import logging
from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from tandem.proxy.text.model_files import find_model
from tandem.proxy.text.sampling_defaults import SamplingDefaults
from tandem.runtime.errors import ConfigError, InvalidRequest

log = logging.getLogger(__name__)

RESERVED_VARIABLES = frozenset(
    {*signature(TokenizersBackend.apply_chat_template).parameters, "conversations", "messages", "raise_exception"}
)
"""Of templates: what is passed by itself."""

_PROBE_TEXT = "tandem"


class ModelText:
    """tokenizer: never changed after loading (no truncation, no padding), so that threads may share it.

    eos_token_ids: these end a sequence unless the client ignores them.
    """

    def __init__(self, model: str) -> None:
        """Raises ConfigError when there is no such model or it has no tokeniser that can be read."""
        folder = self.folder = find_model(model)
        try:
            self._backend: Any = TokenizersBackend.from_pretrained(str(folder))
        except Exception as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"cannot read the tokeniser of model {model!r} (tokenizer.json): {first_line}") from error
        self.tokenizer: Tokenizer = self._backend.backend_tokenizer
        self._lists_only: bool | None = None  # whether its template takes content as a list of parts alone
        self.eos_token_ids = _eos_token_ids(folder, self._backend.eos_token_id)
        self.sampling_defaults = SamplingDefaults.read(folder)
        if not self.eos_token_ids:
            log.warning("model %s names no end-of-sequence token: sequences end by max_tokens alone", model)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        *,
        continue_final_message: bool = False,
        template: str | None = None,
        variables: dict[str, Any] | None = None,
        documents: list[dict[str, Any]] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The chat as the template writes it, in transformers' jinja sandbox. Raises InvalidRequest.

        template: in place of the model's.
        """
        if template is None and not self._backend.chat_template:
            raise InvalidRequest("This model has no chat template; use /v1/completions.", "messages")
        try:
            source = self._backend.get_chat_template(template)
            if "developer" not in source:  # OpenAI's newer name for it, which few templates know
                messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
            if template is None and self._takes_lists_only(source):
                messages = [_with_parts(message) for message in messages]
            text = self._backend.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=source,
                documents=documents,
                tools=tools,
                **(variables or {}),
            )
        except InvalidRequest:
            raise
        except Exception as error:  # templates refuse by raise_exception, and stumble in any way over odd messages
            whose, param = ("The model's", "messages") if template is None else ("The request's", "chat_template")
            raise InvalidRequest(f"{whose} chat template refuses these messages: {error}", param) from error
        assert isinstance(text, str)
        return text

    def _takes_lists_only(self, source: str) -> bool:
        """Templates of models that take media may lose a content that is a plain string."""
        if self._lists_only is None:
            message = {"role": "user", "content": _PROBE_TEXT}
            try:
                told = self._backend.apply_chat_template([message], tokenize=False, chat_template=source)
                self._lists_only = _PROBE_TEXT not in told
            except Exception:  # whatever a template stumbles over; does it take the other form?
                try:
                    told = self._backend.apply_chat_template(
                        [_with_parts(message)], tokenize=False, chat_template=source
                    )
                    self._lists_only = _PROBE_TEXT in told
                except Exception:
                    self._lists_only = False
        return self._lists_only


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return message | {"content": [{"type": "text", "text": content}]}


class _EosConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None
    text_config: _EosConfig | None = None


def _eos_token_ids(folder: Path, tokenizer_eos: int | None) -> frozenset[int]:
    """generation_config.json knows best (chat models list several), else config.json; the tokeniser's own is added."""
    ids = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        try:
            config = msgspec.json.decode((folder / name).read_bytes(), type=_EosConfig)
        except FileNotFoundError:
            continue
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"cannot read {folder / name}: {error}") from error
        found = config.eos_token_id
        if found is None and config.text_config is not None:
            found = config.text_config.eos_token_id
        if found is not None:
            return frozenset(ids | ({found} if isinstance(found, int) else set(found)))
    return frozenset(ids)
