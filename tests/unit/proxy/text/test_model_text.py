"""What a model's folder says of its chats and tokens, in the layouts of transformers' tokenisers and processors."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading.body_reader import BodyReader
from tandem.proxy.text.model_text import ModelText
from tandem.proxy.text.prompt import ChatPrompt
from tandem.runtime.errors import ConfigError, InvalidRequest
from tests.support.tokenizers import SPECIAL, byte_level

PLAIN = "plain {{ messages[0].content }}"
WITH_TOOLS = "{{ (tools or []) | length }} tools {{ messages[0].content }}"
PICTURES = "picture {{ messages[0].content }}"
TOOL = {"type": "function", "function": {"name": "f"}}


def model(folder: Path, files: dict[str, Any], config: Any = None) -> ModelText:
    """files: contents by name; texts, or JSON."""
    byte_level().save(str(folder / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL}
    contents = {"config.json": config or {}, **files}
    contents["tokenizer_config.json"] = tokenizer | contents.get("tokenizer_config.json", {})
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return ModelText(str(folder))


def shown(text: ModelText, *tools: Any) -> str:
    prompt = ChatPrompt([{"role": "user", "content": "hi"}], add_generation_prompt=True, tools=[*tools] or None)
    return text.render_chat(prompt).partition(" hi")[0]


NAMED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": WITH_TOOLS}]
LAYOUTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a text of the tokeniser": ({"tokenizer_config.json": {"chat_template": WITH_TOOLS}}, "0 tools", "1 tools"),
    "names of the tokeniser": ({"tokenizer_config.json": {"chat_template": NAMED}}, "plain", "1 tools"),
    "a file": ({"chat_template.jinja": PLAIN, "tokenizer_config.json": {"chat_template": PICTURES}}, "plain", "plain"),
    "files": (
        {"chat_template.jinja": PLAIN, "additional_chat_templates/tool_use.jinja": WITH_TOOLS},
        "plain",
        "1 tools",
    ),
    "a file for tools only": (
        {"additional_chat_templates/tool_use.jinja": WITH_TOOLS, "tokenizer_config.json": {"chat_template": PLAIN}},
        "plain",
        "1 tools",
    ),
    "only the processor's": ({"chat_template.json": {"chat_template": PICTURES}}, "picture", "picture"),
    "the processor's of a model for pictures": (
        {
            "chat_template.json": {"chat_template": PICTURES},
            "preprocessor_config.json": {},
            "tokenizer_config.json": {"chat_template": PLAIN},
        },
        "picture",
        "picture",
    ),
    "the processor's of a model for text": (
        {"chat_template.json": {"chat_template": PICTURES}, "tokenizer_config.json": {"chat_template": PLAIN}},
        "plain",
        "plain",
    ),
    "the processor's configuration": (
        {
            "processor_config.json": {"chat_template": {"default": PICTURES, "tool_use": WITH_TOOLS}},
            "tokenizer_config.json": {"chat_template": PLAIN},
        },
        "picture",
        "1 tools",
    ),
    "the image processor's": ({"preprocessor_config.json": {"chat_template": PICTURES}}, "picture", "picture"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_template_is_found(name: str, tmp_path: Path) -> None:
    files, without_tools, with_tools = LAYOUTS[name]
    text = model(tmp_path, files)
    assert (shown(text), shown(text, TOOL)) == (without_tools, with_tools)


@pytest.mark.parametrize("name", ["a text of the tokeniser", "names of the tokeniser", "a file", "files"])
def test_the_template_is_the_one_of_transformers(name: str, tmp_path: Path) -> None:
    text = model(tmp_path, LAYOUTS[name][0])
    reference: Any = TokenizersBackend.from_pretrained(str(tmp_path))
    for tools in (None, [TOOL]):
        expected = reference.apply_chat_template([{"role": "user", "content": "hi"}], tools=tools, tokenize=False)
        assert shown(text, *(tools or [])) == expected.partition(" hi")[0]


def test_a_model_without_a_default_says_which_templates_it_has(tmp_path: Path) -> None:
    text = model(tmp_path, {"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": PLAIN}]}})
    with pytest.raises(InvalidRequest, match="no chat template of the name 'default', only rag"):
        shown(text)
    with pytest.raises(InvalidRequest, match="no chat template; use"):
        shown(model(tmp_path, {}))


@pytest.mark.parametrize("content", ["[1", '{"chat_template": 5}', '{"chat_template": [{"name": "a"}]}'])
def test_a_broken_template_is_named_when_the_model_is_loaded(content: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chat_template\.json"):
        model(tmp_path, {"chat_template.json": content})


@pytest.mark.parametrize(
    ("name", "content", "without_tools", "with_tools"),
    [
        ("own.jinja", WITH_TOOLS, "0 tools", "1 tools"),
        ("own.json", json.dumps({"chat_template": NAMED}), "plain", "1 tools"),
        ("own.txt", "{% if messages %}{{ raise_exception('no') }}{% endif %}", "refused", "refused"),
    ],
)
def test_a_given_template_takes_the_place_of_the_models(
    name: str, content: str, without_tools: str, with_tools: str, tmp_path: Path
) -> None:
    model(tmp_path, {"chat_template.jinja": PICTURES})
    (tmp_path / name).write_text(content)
    text = ModelText(str(tmp_path), chat_template=str(tmp_path / name))
    assert "picture" not in (text.chat_template or "")
    for tools, wanted in (((), without_tools), ((TOOL,), with_tools)):
        try:
            assert shown(text, *tools) == wanted
        except InvalidRequest:
            assert wanted == "refused"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("own.jinja", "{% if %}", r"the template 'default' in .*own\.jinja is not valid Jinja, at line 1: Expected"),
        ("own.jinja", "\n{{ messages | nothing }}", "not valid Jinja, at line 2: No filter named 'nothing'"),
        ("own.jinja", "Hello", "is no Jinja template: it has neither {{ nor {%"),
        ("own.jinja", b"\xff{{ a }}", "cannot read .*own.jinja: .*utf-8"),
        ("own.json", "{}", "has no chat_template"),
        ("own.json", "[1", r"cannot read .*own\.json"),
        ("own.json", {"chat_template": {"rag": "{% endif %}"}}, "the template 'rag' in"),
        ("missing.jinja", None, r"there is no file .*missing\.jinja"),
    ],
)
def test_a_given_template_that_cannot_be_used_is_refused(name: str, content: Any, reason: str, tmp_path: Path) -> None:
    model(tmp_path, {})
    if content is not None:
        data = json.dumps(content) if isinstance(content, dict) else content
        (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ConfigError, match=reason):
        ModelText(str(tmp_path), chat_template=str(tmp_path / name))


def test_tools_that_the_template_does_not_show_are_logged_once(tmp_path: Path, caplog: Any) -> None:
    text = model(tmp_path, {"chat_template.jinja": PLAIN})
    with caplog.at_level(logging.WARNING):
        shown(text)
        assert not caplog.messages
        shown(text, TOOL)
        shown(text, TOOL)
    assert len(caplog.messages) == 1 and "shows no tools" in caplog.messages[0]


@pytest.mark.parametrize("config", [{"vocab_size": 500}, {"text_config": {"vocab_size": 500}}, {}], ids=str)
def test_padded_ids_have_no_text(config: dict[str, Any], tmp_path: Path) -> None:
    text = model(tmp_path, {}, config)
    reader = BodyReader(text, ProxyConfig("proxy-0", "", "m", "m"))
    num_known = text.tokenizer.get_vocab_size()
    last = 499 if config else num_known - 1
    first = text.tokenizer.encode("a").ids

    def detokenized(*token_ids: int) -> Any:
        return msgspec.json.decode(reader.detokenize(msgspec.json.encode({"tokens": token_ids})))

    assert detokenized(*first, *([last, num_known] if config else []), *first) == {"prompt": "aa"}
    with pytest.raises(InvalidRequest, match=f"ids are 0 to {last}"):
        detokenized(last + 1)


def test_numbers_that_only_python_writes_do_not_stop_the_start(tmp_path: Path) -> None:
    numbers = {"time_step_limit": [0.0, float("inf")], "scale": float("nan")}
    text = model(
        tmp_path, {"generation_config.json": {"eos_token_id": [3, 4]} | numbers}, {"vocab_size": 500} | numbers
    )
    assert text.num_token_ids == 500 and text.eos_token_ids >= {3, 4}
