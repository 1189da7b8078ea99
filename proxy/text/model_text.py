"""The text side of the served model: tokeniser, chat template and end-of-sequence ids. Loads no weights and no torch.

`TokenizersBackend` reads tokenizer.json and chat templates; unlike transformers' AutoTokenizer it imports no torch.
"""

from __future__ import annotations

import functools
import logging
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from tandem.proxy.text.chat_templates import DEFAULT, TOOL_USE, ChatTemplates
from tandem.proxy.text.chat_turns import with_parts
from tandem.proxy.text.embedding_defaults import EmbeddingDefaults
from tandem.proxy.text.model_files import find_model
from tandem.proxy.text.prompt import ChatPrompt
from tandem.proxy.text.sampling_defaults import SamplingDefaults
from tandem.proxy.text.template_habits import TemplateHabits
from tandem.runtime.errors import ConfigError, InvalidRequest, first_line
from tandem.runtime.files.model_json import read_model_json
from tandem.runtime.files.tokenizer_files import load_tokenizer

log = logging.getLogger(__name__)


@functools.cache
def reserved_variables() -> frozenset[str]:
    """Returns the template variables that the server sets itself."""
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    parameters = signature(TokenizersBackend.apply_chat_template).parameters
    return frozenset({*parameters, "conversations", "messages", "raise_exception"})


class ModelText:
    """tokenizer: never changed after loading, so threads may share it.

    eos_token_ids: tokens that end a sequence unless the request ignores them. generation_config: see
    `SamplingDefaults.read`; it does not change eos_token_ids.
    """

    def __init__(self, model: str, generation_config: str = "auto") -> None:
        """Raises ConfigError if there is no such model or its tokeniser cannot be read."""
        folder = self.folder = find_model(model)
        try:
            self._backend = load_tokenizer(str(folder))
        except Exception as error:
            raise ConfigError(
                f"cannot read the tokeniser of model {model!r} (tokenizer.json): {first_line(error)}"
            ) from error
        self.tokenizer: Tokenizer = self._backend.backend_tokenizer
        self._templates = ChatTemplates.read(folder)
        self._habits: dict[str, TemplateHabits] = {}  # by template
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
            text = self._apply(source, messages, prompt)
        except InvalidRequest:
            raise
        except Exception as error:  # templates call raise_exception, or fail in any way on unusual messages
            whose, param = ("model's", "messages") if prompt.template is None else ("request's", "chat_template")
            raise InvalidRequest(f"The {whose} chat template refuses these messages: {error}", param) from error
        assert isinstance(text, str)
        return text

    @property
    def requires_short_call_ids(self) -> bool:
        """Whether ids of tool calls must be nine letters and digits, so that the template takes them back."""
        source = self._templates.by_name.get(TOOL_USE, self._templates.by_name.get(DEFAULT))
        return source is not None and self._habits_of(source).requires_short_ids

    def _apply(self, source: str, messages: list[dict[str, Any]], prompt: ChatPrompt) -> Any:
        """Templates take chats in different forms, which only rendering shows. Raises the error of the first form."""
        is_own = prompt.template is not None
        habits = self._habits_of(source)
        variables = prompt.variables
        if prompt.reasoning_effort is not None and "reasoning_effort" in source:
            effort = habits.taken_effort(prompt.reasoning_effort)
            variables = ({} if effort is None else {"reasoning_effort": effort}) | variables
        options = {
            "tokenize": False,
            "add_generation_prompt": prompt.add_generation_prompt,
            "continue_final_message": prompt.continue_final_message,
            "chat_template": source,
            "documents": prompt.documents,
            "tools": prompt.tools,
            **variables,
        }
        first_error: Exception | None = None
        for form in habits.forms(messages, prompt.continue_final_message, is_own):
            if not is_own and habits.requires_parts:
                form = [with_parts(message) for message in form]
            try:
                return self._backend.apply_chat_template(form, **options)
            except Exception as error:
                first_error = first_error or error
        assert first_error is not None
        raise first_error

    def _habits_of(self, source: str) -> TemplateHabits:
        """A client's own template is rendered in a process that ends then, so that few are kept."""
        if source not in self._habits:
            render = partial(self._backend.apply_chat_template, tokenize=False, chat_template=source)
            self._habits[source] = TemplateHabits(render)
        return self._habits[source]


class _TokenConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None
    vocab_size: int | None = None
    text_config: _TokenConfig | None = None


def _config(folder: Path, name: str) -> _TokenConfig:
    """Returns what a configuration of the model says of its tokens, also for its text part. Raises ConfigError."""
    config = read_model_json(folder / name, _TokenConfig) or _TokenConfig()
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
