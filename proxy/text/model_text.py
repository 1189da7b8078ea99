"""The text side of the served model: tokeniser, chat template and end-of-sequence ids. Loads no weights and no torch.

`TokenizersBackend` reads tokenizer.json and chat templates; unlike transformers' AutoTokenizer it imports no torch.
"""

from __future__ import annotations

import logging
from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from tandem.proxy.text.call_arguments import with_object_arguments
from tandem.proxy.text.embedding_defaults import EmbeddingDefaults
from tandem.proxy.text.model_files import find_model
from tandem.proxy.text.prompt import ChatPrompt
from tandem.proxy.text.sampling_defaults import SamplingDefaults
from tandem.runtime.errors import ConfigError, InvalidRequest, first_line
from tandem.runtime.regular_file import read_regular

log = logging.getLogger(__name__)

RESERVED_VARIABLES = frozenset(
    {*signature(TokenizersBackend.apply_chat_template).parameters, "conversations", "messages", "raise_exception"}
)
"""Template variables that the server sets itself."""

_PROBE_TEXT = "tandem"
_MAX_CONFIG_BYTES = 16 << 20
"""Size of tokenizer_config.json where it is shown to clients."""


class ModelText:
    """tokenizer: never changed after loading (no truncation, no padding), so threads may share it.

    eos_token_ids: tokens that end a sequence unless the request ignores them. generation_config: see
    `SamplingDefaults.read`; it does not change eos_token_ids.
    """

    def __init__(self, model: str, generation_config: str = "auto") -> None:
        """Raises ConfigError if there is no such model or its tokeniser cannot be read."""
        folder = self.folder = find_model(model)
        try:
            self._backend: Any = TokenizersBackend.from_pretrained(str(folder))
        except Exception as error:
            raise ConfigError(
                f"cannot read the tokeniser of model {model!r} (tokenizer.json): {first_line(error)}"
            ) from error
        self.tokenizer: Tokenizer = self._backend.backend_tokenizer
        self._needs_parts: bool | None = None  # found out with the first chat
        self.eos_token_ids = _eos_token_ids(folder, self._backend.eos_token_id)
        self.sampling_defaults = SamplingDefaults.read(folder, generation_config)
        self.embedding_defaults = EmbeddingDefaults.read(folder)
        if not self.eos_token_ids:
            log.warning("model %s has no end-of-sequence token: sequences end only at max_tokens", model)

    @property
    def chat_template(self) -> str | None:
        """The model's template; all of them if it has several."""
        template = self._backend.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def tokenizer_info(self) -> dict[str, Any]:
        """Returns tokenizer_config.json with the chat template and the texts of special tokens. Raises ConfigError."""
        try:
            content = read_regular(self.folder / "tokenizer_config.json", _MAX_CONFIG_BYTES)
            info = msgspec.json.decode(content, type=dict[str, Any])
        except FileNotFoundError:
            info = {}
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"cannot read {self.folder / 'tokenizer_config.json'}: {error}") from error
        for name, value in info.items():
            if name.endswith("_token") and isinstance(value, dict):
                info[name] = value.get("content")
        info.setdefault("tokenizer_class", type(self._backend).__name__)
        added = self.tokenizer.get_added_tokens_decoder()
        info["added_tokens_decoder"] = {str(token_id): token.content for token_id, token in added.items()}
        info["chat_template"] = self._backend.chat_template
        return info

    def render_chat(self, prompt: ChatPrompt) -> str:
        """Renders the chat in transformers' jinja sandbox. Raises InvalidRequest."""
        if prompt.template is None and not self._backend.chat_template:
            raise InvalidRequest("This model has no chat template; use /v1/completions.", "messages")
        messages = prompt.messages
        try:
            source = self._backend.get_chat_template(prompt.template)
            if "developer" not in source:  # OpenAI's newer name of the role, which few templates support
                messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
            if prompt.template is None and self._requires_parts(source):
                messages = [_with_parts(message) for message in messages]
            try:
                text = self._apply(source, messages, prompt)
            except Exception:  # many templates iterate over arguments of calls, and fail where they are text
                if (with_objects := with_object_arguments(messages)) is None:
                    raise
                text = self._apply(source, with_objects, prompt)
        except InvalidRequest:
            raise
        except Exception as error:  # templates call raise_exception, or fail in any way on unusual messages
            whose, param = ("model's", "messages") if prompt.template is None else ("request's", "chat_template")
            raise InvalidRequest(f"The {whose} chat template refuses these messages: {error}", param) from error
        assert isinstance(text, str)
        return text

    def _apply(self, source: str, messages: list[dict[str, Any]], prompt: ChatPrompt) -> Any:
        return self._backend.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            chat_template=source,
            documents=prompt.documents,
            tools=prompt.tools,
            **prompt.variables,
        )

    def _requires_parts(self, source: str) -> bool:
        """Returns whether the model's template drops content that is a string and renders it as a list of parts."""
        if self._needs_parts is None:
            message = {"role": "user", "content": _PROBE_TEXT}
            self._needs_parts = not self._renders(source, message) and self._renders(source, _with_parts(message))
        return self._needs_parts

    def _renders(self, source: str, message: dict[str, Any]) -> bool:
        try:
            return _PROBE_TEXT in self._backend.apply_chat_template([message], tokenize=False, chat_template=source)
        except Exception:  # any error of the template
            return False


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return message | {"content": [{"type": "text", "text": content}]}


class _EosConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None
    text_config: _EosConfig | None = None


def _eos_token_ids(folder: Path, tokenizer_eos: int | None) -> frozenset[int]:
    """Reads generation_config.json (chat models list several ids there), else config.json; adds the tokeniser's own."""
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
