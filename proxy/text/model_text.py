"""The text side of the served model: tokeniser, chat template, end-of-sequence ids, and the defaults in its files.

Loads no weights and no torch: `TokenizersBackend` reads tokenizer.json and chat templates, and unlike transformers'
AutoTokenizer it imports no torch.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from jinja2 import TemplateSyntaxError
from msgspec import Meta
from tokenizers import Tokenizer

from tandem.protocol.messages.sampling import Pooling
from tandem.proxy.text.model_files import PROCESSOR_FILES, find_model
from tandem.proxy.text.prompt import ChatPrompt
from tandem.proxy.text.template_habits import TemplateHabits, with_parts
from tandem.runtime.errors import ConfigError, InvalidRequest, first_line
from tandem.runtime.files.model_json import read_model_json
from tandem.runtime.files.regular_file import read_regular
from tandem.runtime.files.tokenizer_files import load_tokenizer
from tandem.runtime.files.user_paths import expanded

log = logging.getLogger(__name__)


@functools.cache
def reserved_variables() -> frozenset[str]:
    """Returns the template variables that the server sets itself."""
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    parameters = signature(TokenizersBackend.apply_chat_template).parameters
    return frozenset({*parameters, "conversations", "messages", "raise_exception"})


_SHORT_CHAT = [{"role": "user", "content": "Hello"}]


class ModelText:
    """tokenizer: never changed after loading, so threads may share it.

    eos_token_ids: tokens that end a sequence unless the request ignores them. generation_config: see
    `SamplingDefaults.read`; it does not change eos_token_ids. chat_template: file with templates in place of the
    model's; empty for the model's own.
    """

    def __init__(self, model: str, generation_config: str = "auto", chat_template: str = "") -> None:
        """Raises ConfigError if there is no such model, or if its tokeniser or a given template cannot be read."""
        folder = self.folder = find_model(model)
        try:
            self._backend = load_tokenizer(str(folder))
        except Exception as error:
            raise ConfigError(
                f"cannot read the tokeniser of model {model!r} (tokenizer.json): {first_line(error)}"
            ) from error
        self.tokenizer: Tokenizer = self._backend.backend_tokenizer
        self._templates = ChatTemplates.given(expanded(chat_template)) if chat_template else ChatTemplates.read(folder)
        self._habits: dict[str, TemplateHabits] = {}  # by template
        if chat_template:
            self._check_syntax(chat_template)
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

    def _check_syntax(self, file: str) -> None:
        """Raises ConfigError for what does not compile. Templates may refuse the chat that they are tried with."""
        for name, source in self._templates.by_name.items():
            try:
                self._backend.apply_chat_template(_SHORT_CHAT, tokenize=False, chat_template=source)
            except TemplateSyntaxError as error:
                raise ConfigError(
                    f"--chat-template: the template {name!r} in {file} is not valid Jinja, at line {error.lineno}: "
                    f"{first_line(error)}"
                ) from error
            except Exception as error:
                log.debug("the chat template %r refuses a chat of one turn: %s", name, error)

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


DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of the template for chats, and of that for chats with tools."""
_FILES = "*.jinja"
_MAX_FILE_BYTES = 64 << 20
_TOOLS = re.compile(r"\b(?:\w+_)?tools\b")


class ChatTemplates:
    """The model's templates by name, from all files in which transformers' tokenisers and processors look for them.

    Most models have one, whose name is `default`.
    """

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

    @classmethod
    def given(cls, file: Path) -> ChatTemplates:
        """Reads the templates of `--chat-template`: Jinja, or JSON as in tokenizer_config.json. Raises ConfigError."""
        if not file.is_file():
            raise ConfigError(f"--chat-template: there is no file {file}")
        found = _of_config(file) if file.suffix == ".json" else {DEFAULT: _read(file)}
        if not found:
            raise ConfigError(f"--chat-template: {file} has no chat_template")
        for source in found.values():
            if "{{" not in source and "{%" not in source:
                raise ConfigError(f"--chat-template: {file} is no Jinja template: it has neither {{{{ nor {{%")
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
    return {name: _read(file) for name, file in files.items() if file.is_file()}


def _of_config(file: Path) -> dict[str, str]:
    """Returns the `chat_template` of a JSON file: a text, a list of templates with names, or an object of them."""
    given: Any = (read_model_json(file, dict[str, Any]) or {}).get("chat_template")
    try:
        if isinstance(given, list):
            given = {each["name"]: each["template"] for each in given}
        return msgspec.convert({DEFAULT: given} if isinstance(given, str) else given or {}, dict[str, str])
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise ConfigError(f"cannot read the chat template in {file}: {error}") from error


def _read(file: Path) -> str:
    try:
        return read_regular(file, _MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error


FILE_NAME = "generation_config.json"

F = TypeVar("F", bound=msgspec.Struct)


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Defaults for fields that a request leaves out or sets to null; None leaves the server's own default.

    max_new_tokens: of chats, as in vLLM.
    """

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None

    @classmethod
    def read(cls, model_folder: Path, source: str = "auto") -> SamplingDefaults:
        """Reads generation_config.json. Raises ConfigError for values that cannot be used.

        source: "auto" for the one in the model's folder, if there is one; "vllm" for none; else the folder, or the
        file, that has one.
        """
        if source == "vllm":
            return cls()
        given = expanded(source)
        file = model_folder / FILE_NAME if source == "auto" else given / FILE_NAME if given.is_dir() else given
        defaults = read_model_json(file, cls)
        if defaults is None:
            if source == "auto":
                return cls()
            raise ConfigError(f"--generation-config: there is no file {file}; give auto, vllm or a folder")
        for name, value in defaults.known().items():
            if not math.isfinite(value):
                raise ConfigError(f"cannot read {file}: {name} is {value}, but must be a finite number")
        return defaults

    def known(self) -> dict[str, float]:
        """Returns the defaults that are set, by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    def fill(self, request: F) -> F:
        """Returns the request with these defaults in the fields that it leaves out."""
        missing = {name: value for name, value in self.known().items() if getattr(request, name, value) is None}
        return msgspec.structs.replace(request, **missing) if missing else request


class EmbeddingDefaults(msgspec.Struct, frozen=True):
    """Defaults of one model's embeddings, from sentence-transformers' modules.json, and Matryoshka in config.json.

    As in vLLM, a decoder without such files gives the last token's hidden state, scaled to length 1.

    unsupported: the pooling that the files ask for, if Tandem does not have it. is_matryoshka: embeddings may be
    shortened, to one of matryoshka_dimensions if there are any, else to any number up to size.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    unsupported: str = ""
    is_matryoshka: bool = False
    matryoshka_dimensions: list[int] = []
    size: int = 0

    @classmethod
    def read(cls, folder: Path) -> EmbeddingDefaults:
        """Reads the files in the model's folder that are there. Raises ConfigError for one that cannot be read."""
        config = read_model_json(folder / "config.json", dict[str, Any]) or {}
        known: list[int] = config.get("matryoshka_dimensions") or []
        defaults = cls(
            is_matryoshka=bool(known or config.get("is_matryoshka")),
            matryoshka_dimensions=known,
            size=_size(config),
        )
        modules = read_model_json(folder / "modules.json", list[dict[str, Any]])
        if modules is None:
            return defaults
        kinds = {str(module.get("type", "")).rsplit(".", 1)[-1]: module for module in modules}
        defaults = msgspec.structs.replace(defaults, normalize="Normalize" in kinds)
        if "Pooling" not in kinds:
            return defaults
        path = kinds["Pooling"].get("path", "1_Pooling")
        pooling = read_model_json(folder / path / "config.json", dict[str, Any]) or {}
        modes = [key.removeprefix("pooling_mode_") for key, value in pooling.items() if value is True]
        modes = [mode for mode in (pooling.get("pooling_mode"), *modes) if isinstance(mode, str)]
        names: dict[str, Pooling] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
        found = [names[mode] for mode in modes if mode in names]
        others = [mode for mode in modes if mode in ("cls_token", "cls", "max_tokens", "max", "weightedmean_tokens")]
        if found:
            return msgspec.structs.replace(defaults, pooling=found[0])
        return msgspec.structs.replace(defaults, unsupported=others[0]) if others else defaults

    def check(self) -> None:
        """Raises InvalidRequest if the model's embeddings are not supported."""
        if self.unsupported:
            raise InvalidRequest(
                f"This model's embeddings use {self.unsupported} pooling; only the last token's and the mean are "
                "supported."
            )

    def check_dimensions(self, dimensions: int) -> None:
        """Raises InvalidRequest. All values of an embedding may be asked for from any model."""
        if dimensions == self.size:
            return
        if not self.is_matryoshka:
            raise InvalidRequest(
                f"dimensions is {dimensions}, but this model's embeddings cannot be shortened; leave it out.",
                "dimensions",
            )
        known = self.matryoshka_dimensions
        if (known and dimensions not in known) or (self.size and dimensions > self.size):
            allowed = f"one of {', '.join(map(str, known))}" if known else f"at most {self.size}"
            raise InvalidRequest(f"dimensions is {dimensions}, but must be {allowed}.", "dimensions")


def _size(config: dict[str, Any]) -> int:
    """Returns the number of values that the model's hidden states have; 0 if the config does not say it."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for name in ("hidden_size", "n_embd", "d_model"):
            if isinstance(size := part.get(name), int | float) and math.isfinite(size):
                return int(size)
    return 0
