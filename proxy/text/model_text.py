"""The text side of the served model: tokeniser, chat template and end-of-sequence ids. Loads no weights and no torch.

`TokenizersBackend` reads tokenizer.json and chat templates; unlike transformers' AutoTokenizer it imports no torch.
"""

from __future__ import annotations

import functools
import logging
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from tandem.proxy.text.call_arguments import with_other_arguments
from tandem.proxy.text.chat_templates import DEFAULT, ChatTemplates
from tandem.proxy.text.embedding_defaults import EmbeddingDefaults
from tandem.proxy.text.model_files import find_model
from tandem.proxy.text.prompt import ChatPrompt
from tandem.proxy.text.sampling_defaults import SamplingDefaults
from tandem.proxy.text.whole_numbers import decode_whole
from tandem.runtime.errors import ConfigError, InvalidRequest, first_line

log = logging.getLogger(__name__)

_PROBE_TEXT = "tandem"


@functools.cache
def reserved_variables() -> frozenset[str]:
    """Returns the template variables that the server sets itself."""
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    parameters = signature(TokenizersBackend.apply_chat_template).parameters
    return frozenset({*parameters, "conversations", "messages", "raise_exception"})


class ModelText:
    """tokenizer: never changed after loading (no truncation, no padding), so threads may share it.

    eos_token_ids: tokens that end a sequence unless the request ignores them. generation_config: see
    `SamplingDefaults.read`; it does not change eos_token_ids.
    """

    def __init__(self, model: str, generation_config: str = "auto") -> None:
        """Raises ConfigError if there is no such model or its tokeniser cannot be read."""
        from transformers.tokenization_utils_tokenizers import TokenizersBackend  # takes a second or two

        folder = self.folder = find_model(model)
        try:
            self._backend: Any = TokenizersBackend.from_pretrained(str(folder))
        except Exception as error:
            raise ConfigError(
                f"cannot read the tokeniser of model {model!r} (tokenizer.json): {first_line(error)}"
            ) from error
        self.tokenizer: Tokenizer = self._backend.backend_tokenizer
        self._templates = ChatTemplates.read(folder)
        self._needs_parts: dict[str, bool] = {}  # by template; found out with its first chat
        self.eos_token_ids = _eos_token_ids(folder, self._backend.eos_token_id)
        # A model's vocabulary is often padded beyond its tokeniser's.
        self.num_token_ids = max(
            _config(folder, "config.json").vocab_size or 0, 1 + max(self.tokenizer.get_vocab().values(), default=-1)
        )
        self.sampling_defaults = SamplingDefaults.read(folder, generation_config)
        self.embedding_defaults = EmbeddingDefaults.read(folder)
        if not self.eos_token_ids:
            log.warning("model %s has no end-of-sequence token: sequences end only at max_tokens", model)

    @property
    def chat_template(self) -> str | None:
        """The model's template; all of them if it has several."""
        return "\n".join(self._templates.by_name.values()) or None

    def render_chat(self, prompt: ChatPrompt) -> str:
        """Renders the chat in transformers' jinja sandbox. Raises InvalidRequest."""
        templates = self._templates
        source = prompt.template or templates.choose(bool(prompt.tools))
        if source is None:
            others = f" of the name {DEFAULT!r}, only {', '.join(templates.by_name)}" if templates.by_name else ""
            raise InvalidRequest(f"This model has no chat template{others}; use /v1/completions.", "messages")
        source = templates.by_name.get(source, source)  # a client may name one
        messages = prompt.messages
        try:
            if "developer" not in source:  # OpenAI's newer name of the role, which few templates support
                messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
            if prompt.template is None and self._requires_parts(source):
                messages = [_with_parts(message) for message in messages]
            text = self._apply(source, messages, prompt)
        except InvalidRequest:
            raise
        except Exception as error:  # templates call raise_exception, or fail in any way on unusual messages
            whose, param = ("model's", "messages") if prompt.template is None else ("request's", "chat_template")
            raise InvalidRequest(f"The {whose} chat template refuses these messages: {error}", param) from error
        assert isinstance(text, str)
        return text

    def _apply(self, source: str, messages: list[dict[str, Any]], prompt: ChatPrompt) -> Any:
        """Templates take the arguments of calls in different forms, which only rendering shows."""
        options = {
            "tokenize": False,
            "add_generation_prompt": prompt.add_generation_prompt,
            "continue_final_message": prompt.continue_final_message,
            "chat_template": source,
            "documents": prompt.documents,
            "tools": prompt.tools,
            **prompt.variables,
        }
        try:
            return self._backend.apply_chat_template(messages, **options)
        except Exception:
            for others in with_other_arguments(messages):
                with suppress(Exception):
                    return self._backend.apply_chat_template(others, **options)
            raise

    def _requires_parts(self, source: str) -> bool:
        """Returns whether the model's template drops content that is a string and renders it as a list of parts."""
        if source not in self._needs_parts:
            message = {"role": "user", "content": _PROBE_TEXT}
            needs_parts = not self._renders(source, message) and self._renders(source, _with_parts(message))
            self._needs_parts[source] = needs_parts
        return self._needs_parts[source]

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


class _TokenConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None
    vocab_size: int | None = None
    text_config: _TokenConfig | None = None


_token_config = msgspec.json.Decoder(_TokenConfig)


def _config(folder: Path, name: str) -> _TokenConfig:
    """Returns what a configuration of the model says of its tokens, also for its text part. Raises ConfigError."""
    try:
        config: _TokenConfig = decode_whole(_token_config, (folder / name).read_bytes())
    except FileNotFoundError:
        return _TokenConfig()
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read {folder / name}: {error}") from error
    text = config.text_config or _TokenConfig()
    eos = text.eos_token_id if config.eos_token_id is None else config.eos_token_id
    return _TokenConfig(eos, max(config.vocab_size or 0, text.vocab_size or 0))


def _eos_token_ids(folder: Path, tokenizer_eos: int | None) -> frozenset[int]:
    """Reads generation_config.json (chat models list several ids there), else config.json; adds the tokeniser's own."""
    ids = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        if (found := _config(folder, name).eos_token_id) is not None:
            return frozenset(ids | ({found} if isinstance(found, int) else set(found)))
    return frozenset(ids)
