"""Orders of turns that chat templates refuse or leave out, and the forms in which such chats are rendered."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.proxy.api.validation import BodyDecoder
from tandem.proxy.text.model_text import ModelText
from tandem.proxy.text.prompt import ChatPrompt
from tandem.proxy.text.template_habits import (
    TemplateHabits,
    is_system,
    with_answers_to_results,
    with_joined_turns,
    with_one_system,
    with_results_behind_calls,
    with_single_calls,
    with_system_of_user,
    with_text_in_thoughts,
)
from tandem.runtime.errors import InvalidRequest
from tests.support import chat_templates
from tests.support.tokenizers import SPECIAL, byte_level

Chat = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    byte_level().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text("{}")
    return folder


def text_of(folder: Path, name: str) -> ModelText:
    (folder / "chat_template.jinja").write_text(getattr(chat_templates, name))
    return ModelText(str(folder))


def turn(role: str, content: str = "", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def chat(*turns: str) -> Chat:
    """turns: s, d, u, a or t for the role, and the text."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    return [turn(roles[each[0]], each[1:]) for each in turns]


def call(*ids: str | None, content: str = "") -> dict[str, Any]:
    calls = [
        ({} if each is None else {"id": each}) | {"type": "function", "function": {"name": "f", "arguments": {}}}
        for each in ids
    ]
    return turn("assistant", content, tool_calls=calls)


def result(call_id: str, content: str = "r") -> dict[str, Any]:
    return turn("tool", content, tool_call_id=call_id)


CASES: list[tuple[str, Chat, str]] = [
    # The model gets the chat as it is where its template takes it.
    ("CHATML", chat("sA", "sB", "uC", "sD"), "<system>A</system><system>B</system><user>C</user><system>D</system>"),
    ("CHATML", chat("uA", "uB"), "<user>A</user><user>B</user>"),
    ("LEADING_SYSTEMS", chat("sA", "sB", "uC"), "<system>A</system><system>B</system><user>C</user>"),
    ("DEEPSEEK_V3_1", chat("sA", "uB", "sC"), "A\n\nC\n\n<user>B</user></think>"),
    ("GPT_OSS", chat("dA", "uB"), "<developer>A</developer><user>B</user>"),
    ("LLAMA_3_TOOLS", [*chat("uA"), call("1"), result("1")], "<user>A</user><call>1</call><tool>r</tool>"),
    ("MISTRAL_SMALL", chat("sA", "uB"), "[SYSTEM]A[/SYSTEM][INST]B[/INST]"),
    # Claude Code's turn at the end, Codex's instructions with a developer item, two systems, and a system in between.
    (
        "QWEN_3_5",
        chat("sA", "uB", "aC", "uD", "sE"),
        "<system>A\n\nE</system><user>B</user><assistant>C</assistant><user>D</user>",
    ),
    ("QWEN_3_5", chat("sA", "dB", "uC"), "<system>A\n\nB</system><user>C</user>"),
    ("QWEN_3_5", chat("sA", "sB", "uC"), "<system>A\n\nB</system><user>C</user>"),
    ("QWEN_3_5", chat("uA", "dB"), "<system>B</system><user>A</user>"),
    ("QWEN_3_5", chat("sA", "uB", "s", "uC", "sD"), "<system>A\n\nD</system><user>B</user><user>C</user>"),
    ("MISTRAL_SMALL", chat("sA", "uB", "sC"), "[SYSTEM]A\n\nC[/SYSTEM][INST]B[/INST]"),
    ("MISTRAL_SMALL", chat("sA", "uB", "sC", "uD"), "[SYSTEM]A\n\nC[/SYSTEM][INST]B\n\nD[/INST]"),
    ("LLAMA_2", chat("sA", "sB", "uC"), "[INST] <<SYS>>A\n\nB<</SYS>>C [/INST]"),
    # Turns that are left out without a word.
    ("GPT_OSS", chat("sA", "dB", "uC"), "<developer>A\n\nB</developer><user>C</user>"),
    ("GPT_OSS", chat("dA", "uB", "dC"), "<developer>A\n\nC</developer><user>B</user>"),
    ("GPT_OSS", chat("uA", "sB"), "<developer>B</developer><user>A</user>"),
    ("LEADING_SYSTEMS", chat("sA", "sB", "uC", "sD"), "<system>A\n\nB\n\nD</system><user>C</user>"),
    ("WITHOUT_SYSTEM", chat("sA", "uB"), "<user>A\n\nB</user>"),
    # No system turns at all.
    ("GEMMA_2", chat("sA", "uB"), "<user>A\n\nB</user>"),
    (
        "GEMMA_2",
        chat("sA", "sB", "uC", "aD", "uE", "dF"),
        "<user>A\n\nB\n\nF\n\nC</user><assistant>D</assistant><user>E</user>",
    ),
    ("GEMMA_2", chat("sA", "aB", "uC"), "<user>A</user><assistant>B</assistant><user>C</user>"),
    ("GEMMA_2", chat("sA"), "<user>A</user>"),
    # No turn of the user, or none before the assistant's.
    ("QWEN_3_5", chat("sA", "dB"), "<user>A\n\nB</user>"),
    (
        "QWEN_3_5",
        [*chat("sA"), call("1", content="B"), result("1"), *chat("sC")],
        "<user>A\n\nC</user><assistant>B</assistant><tool>r</tool>",
    ),
    ("LLAMA_2", chat("sA", "aB", "uC"), "[INST] A [/INST]B[INST] C [/INST]"),
    # Roles that must alternate.
    ("GEMMA_2", chat("uA", "uB", "aC", "aD", "uE"), "<user>A\n\nB</user><assistant>C\n\nD</assistant><user>E</user>"),
    ("MISTRAL_SMALL", chat("uA", "aB", "uC", "uD"), "[SYSTEM][/SYSTEM][INST]A[/INST]B</s>[INST]C\n\nD[/INST]"),
    (
        "MISTRAL_SMALL",
        [*chat("uA"), call("Abcdefgh1"), result("Abcdefgh1"), *chat("uB")],
        "[SYSTEM][/SYSTEM][INST]A[/INST][CALL]f#Abcdefgh1[RESULT]r#Abcdefgh1Understood.</s>[INST]B[/INST]",
    ),
    # Turns of the assistant that say nothing.
    ("MISTRAL_SMALL", chat("uA", "a", "uB"), "[SYSTEM][/SYSTEM][INST]A\n\nB[/INST]"),
    ("CHATML", chat("uA", "a", "uB"), "<user>A</user><assistant></assistant><user>B</user>"),
    # Content that must be in parts.
    ("PARTS_ONLY", chat("sA", "uB", "sC"), "<system>A\n\nC</system><user>B</user>"),
    # Chats without a turn of the user.
    ("GEMMA_3", chat("sA"), "<user>A</user>"),
    ("GEMMA_3", chat("sA", "dB"), "<user>A\n\nB</user>"),
    ("GEMMA_3", chat("sA", "uB"), "<user>AB</user>"),
    # Results of the time before calls had ids.
    ("GPT_OSS", [*chat("uA"), turn("function", "r", name="f")], "<user>A</user><tool>r</tool>"),
    ("CHATML", [*chat("uA"), turn("function", "r", name="f")], "<user>A</user><function>r</function>"),
    # Calls and results that are left out without a word, or have no name.
    (
        "HARMONY_CALLS",
        [*chat("uA"), call("1", "2"), result("2", "two"), result("1", "one")],
        "<user>A</user><call>f1</call><tool>one</tool><call>f2</call><tool>two</tool>",
    ),
    (
        "HARMONY_CALLS",
        [*chat("uA"), call("1", "2", content="B") | {"reasoning": "T", "reasoning_content": "T"}, result("1")],
        "<user>A</user><analysis>T\n\nB</analysis><call>f1</call><tool>r</tool><call>f2</call>",
    ),
    (
        "HARMONY_CALLS",
        [*chat("uA"), call("1") | {"reasoning": "T", "reasoning_content": "T"}, call("2", content="B")],
        "<user>A</user><analysis>T</analysis><call>f1</call><analysis>B</analysis><call>f2</call>",
    ),
    (
        "GEMMA_4",
        [*chat("uA"), call("1", "2"), result("1", "one"), *chat("uB"), result("2", "two")],
        "<user>A</user><assistant><call>f</call><call>f</call><tool>f:one</tool><tool>f:two</tool></assistant><user>B</user>",
    ),
    (
        "GEMMA_4",
        [*chat("uA"), call("1"), *chat("sB"), result("1")],
        "<user>A</user><assistant><call>f</call><tool>f:r</tool></assistant><system>B</system>",
    ),
    (
        "GEMMA_4",
        [*chat("uA"), call("1"), call("2"), result("1", "one"), result("2", "two")],
        "<user>A</user><assistant><call>f</call><tool>f:one</tool></assistant>"
        "<assistant><call>f</call><tool>f:two</tool></assistant>",
    ),
    (
        "GEMMA_4",
        [*chat("uA"), call("1"), turn("tool", "r")],
        "<user>A</user><assistant><call>f</call><tool>f:r</tool></assistant>",
    ),
    # Calls that must be alone in their turn.
    (
        "LLAMA_3_TOOLS",
        [*chat("uA"), call("1", "2", content="B"), result("2", "two"), result("1", "one"), *chat("uC")],
        "<user>A</user><call>B1</call><tool>one</tool><call>2</call><tool>two</tool><user>C</user>",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("template", "messages", "expected"), CASES)
def test_what_a_template_shows_of_a_chat(template: str, messages: Chat, expected: str, folder: Path) -> None:
    text = text_of(folder, template)
    before = json.dumps(messages)
    for _ in range(2):
        assert text.render_chat(ChatPrompt(messages, True)) == expected
    assert json.dumps(messages) == before


@pytest.mark.parametrize("template", ["QWEN_3_5", "MISTRAL_SMALL"])
def test_the_error_is_that_of_the_chat_as_it_is(template: str, folder: Path) -> None:
    text = text_of(folder, template)
    with pytest.raises(InvalidRequest) as refused:
        text.render_chat(ChatPrompt([*chat("sA", "uB", "sC"), turn("teacher", "D"), *chat("uE")], True))
    own = {"QWEN_3_5": "must be at the beginning", "MISTRAL_SMALL": "alternate"}
    assert own[template] in str(refused.value)


def test_a_system_turn_that_the_answer_continues_stays_last(folder: Path) -> None:
    text = text_of(folder, "QWEN_3_5")
    with pytest.raises(InvalidRequest, match="at the beginning"):
        text.render_chat(ChatPrompt(chat("sA", "uB", "sC"), False, continue_final_message=True))
    prompt = ChatPrompt(chat("sA", "uB", "sC", "aD"), False, continue_final_message=True)
    assert text.render_chat(prompt) == "<system>A\n\nC</system><user>B</user><assistant>D"


def test_images_of_the_system_stay_in_their_order(folder: Path) -> None:
    image = {"role": "system", "content": [{"type": "image"}]}
    text = text_of(folder, "QWEN_3_5")
    assert text.render_chat(ChatPrompt([image, *chat("uB", "sC")], True)).startswith(
        "<system>[{'type': 'image'}, {'type': 'text', 'text': 'C'}]</system>"
    )
    assert text.render_chat(ChatPrompt([*chat("sA", "uB"), image, *chat("sC")], True)) == (
        "<system>A\n\nC</system><user>B</user><user>[{'type': 'image'}]</user>"
    )


def test_tools_may_need_a_turn_of_the_user(folder: Path) -> None:
    text = text_of(folder, "LLAMA_3_1")
    assert text.render_chat(ChatPrompt(chat("sA"), True)) == "<system>A</system>"
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    prompt = ChatPrompt(chat("sA"), True, tools=tools)
    assert text.render_chat(prompt) == "<system></system><tools>f</tools><user>A</user>"


def test_results_with_images_stay_in_their_order() -> None:
    image = [{"type": "image"}]
    first = turn("user", image)  # type: ignore[arg-type]
    second = turn("tool", image, tool_call_id="1")  # type: ignore[arg-type]
    assert with_results_behind_calls([call("1"), first, second]) == [call("1"), first, second | {"name": "f"}]
    assert with_results_behind_calls([call("1"), first, result("1")]) == [call("1"), result("1") | {"name": "f"}, first]


def test_a_template_of_the_client_gets_what_it_takes(folder: Path) -> None:
    """It may leave turns out, but what it refuses is changed as for the model's template."""
    text = text_of(folder, "CHATML")
    prompt = ChatPrompt(chat("sA", "uB", "sC"), True, template=chat_templates.GPT_OSS)
    assert text.render_chat(prompt) == "<developer>A</developer><user>B</user>"
    prompt = ChatPrompt(chat("sA", "uB", "sC"), True, template=chat_templates.QWEN_3_5)
    assert text.render_chat(prompt) == "<system>A\n\nC</system><user>B</user>"


# ---- ids of calls

SHORT = "Abcdefgh1"
USUAL = "call_0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("template", "is_short"),
    [
        ("MISTRAL_SMALL", True),
        ("MISTRAL_OF_LONG_IDS", True),
        ("CHATML", False),
        ("LLAMA_3_TOOLS", False),
        ("DEEPSEEK_V3_1", False),
        ("GEMMA_2", False),
    ],
)
def test_which_templates_need_short_ids(template: str, is_short: bool, folder: Path) -> None:
    assert text_of(folder, template).requires_short_call_ids is is_short


def test_the_template_for_tools_decides_about_ids(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model/additional_chat_templates").mkdir()
    (tmp_path / "model/additional_chat_templates/tool_use.jinja").write_text(chat_templates.MISTRAL_SMALL)
    assert text_of(tmp_path / "model", "CHATML").requires_short_call_ids
    assert not text_of(folder, "CHATML").requires_short_call_ids


@pytest.mark.parametrize("template", ["MISTRAL_SMALL", "MISTRAL_OF_LONG_IDS"])
@pytest.mark.parametrize("call_id", [USUAL, "toolu_01A09q90qw90lq917835lq9", "1", "chatcmpl-tool-5f", "call 1é23"])
def test_ids_from_elsewhere_are_mapped(template: str, call_id: str, folder: Path) -> None:
    text = text_of(folder, template)
    messages = [*chat("uA"), call(call_id, SHORT), result(call_id), result(SHORT)]
    shown = text.render_chat(ChatPrompt(messages, True))
    mapped = shown.partition("[CALL]f#")[2][:9]
    assert mapped.isascii() and mapped.isalnum() and mapped != SHORT
    assert shown.endswith(f"[CALL]f#{mapped}[CALL]f#{SHORT}[RESULT]r#{mapped}[RESULT]r#{SHORT}")
    longer = [*messages, *chat("aB", "uC"), call("another"), result("another")]
    assert text.render_chat(ChatPrompt(longer, True)).startswith(shown), "a later turn finds the prefix in the cache"


def test_other_templates_get_the_ids_as_they_are(folder: Path) -> None:
    messages = [*chat("uA"), call(USUAL), result(USUAL)]
    assert USUAL in text_of(folder, "LLAMA_3_TOOLS").render_chat(ChatPrompt(messages, True))


# ---- thinking


def thinking(folder: Path, template: str, **fields: Any) -> str:
    """Returns what the template shows after a chat of one word."""
    body = json.dumps({"messages": chat("uA"), **fields}).encode()
    prompt = BodyDecoder("m").chat(body).prompt
    assert isinstance(prompt, ChatPrompt)
    assert BodyDecoder("m").tokenize(body)[0] == prompt
    return text_of(folder, template).render_chat(prompt).partition("</user>")[2]


OTHER_EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")


@pytest.mark.parametrize(
    ("template", "off", "on", "default"),
    [
        ("QWEN_3", "<think></think>", "<think>", "<think>"),
        ("DEEPSEEK_V3_1", "</think>", "<think>", "</think>"),
        ("GRANITE_3_3", "", "<think>", ""),
        ("CHATML", "", "", ""),
    ],
)
def test_the_effort_switches_thinking(template: str, off: str, on: str, default: str, folder: Path) -> None:
    assert thinking(folder, template) == thinking(folder, template, reasoning_effort=None) == default
    assert thinking(folder, template, reasoning_effort="none") == off
    assert [thinking(folder, template, reasoning_effort=each) for each in OTHER_EFFORTS] == [on] * 6
    for name in ("enable_thinking", "thinking"):
        for is_on in (True, False):
            explicit = thinking(folder, template, chat_template_kwargs={name: is_on})
            for effort in ("none", "high"):
                fields = {"chat_template_kwargs": {name: is_on}, "reasoning_effort": effort}
                assert thinking(folder, template, **fields) == explicit


def test_an_effort_that_the_template_refuses_becomes_the_nearest(folder: Path) -> None:
    shown = [thinking(folder, "MISTRAL_MEDIUM_3_5", reasoning_effort=each) for each in ("none", *OTHER_EFFORTS)]
    assert shown == ["none", *["high"] * 6]
    with pytest.raises(InvalidRequest, match="must be none or high"):
        thinking(folder, "MISTRAL_MEDIUM_3_5", reasoning_effort="enormous")
    with pytest.raises(InvalidRequest, match="must be none or high"):
        thinking(folder, "MISTRAL_MEDIUM_3_5", chat_template_kwargs={"reasoning_effort": "low"})


# ---- for any chat

environment = ImmutableSandboxedEnvironment()


def fail(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


environment.globals["raise_exception"] = fail


def habits_of(source: str) -> TemplateHabits:
    template = environment.from_string(source)
    return TemplateHabits(lambda messages: template.render(messages=messages))


PURE = {name: habits_of(source) for name, source in vars(chat_templates).items() if name.isupper()}
ids = st.sampled_from(["1", "2", SHORT, USUAL])
turns = st.one_of(
    st.builds(turn, st.sampled_from(["system", "developer", "user", "assistant"]), st.text("xyz", max_size=2)),
    st.lists(st.none() | ids, min_size=1, max_size=3, unique=True).map(lambda given: call(*given)),
    st.builds(result, ids),
)


@example([turn("assistant")], "MISTRAL_SMALL", False, False)
@given(st.lists(turns, min_size=1, max_size=8), st.sampled_from(sorted(PURE)), st.booleans(), st.booleans())
def test_no_form_loses_text(messages: Chat, template: str, keeps_last: bool, is_own: bool) -> None:
    before = json.dumps(messages)
    forms = list(PURE[template].forms(messages, keeps_last, is_own))
    assert 1 <= len(forms) <= 6
    for form in forms:
        assert form and sorted(words(form)) == sorted(words(messages))
        assert num_calls(form) == num_calls(messages)
        if not any(map(is_system, messages)) and (keeps_last or messages[-1]["role"] != "tool"):
            assert form[-1]["content"].endswith(messages[-1]["content"])
    assert json.dumps(messages) == before


@given(st.lists(turns, min_size=1, max_size=8))
def test_each_change_is_complete(messages: Chat) -> None:
    one = with_one_system(messages, "system")
    assert [is_system(each) for each in one] == [is_system(each) for each in one[:1]] + [False] * len(one[1:])
    if is_system(one[0]):
        assert not any(map(is_system, with_system_of_user(one)))
    assert all(len(each.get("tool_calls", ())) < 2 for each in with_single_calls(messages))
    answered = with_answers_to_results(messages)
    assert not any(a["role"] == "tool" and b["role"] == "user" for a, b in pairwise(answered))
    for before, after in pairwise(with_joined_turns(messages)):
        assert before["role"] != after["role"] or before["role"] not in ("user", "assistant") or "tool_calls" in before
    assert with_text_in_thoughts(messages) == messages
    for change in (with_single_calls, with_results_behind_calls, with_answers_to_results, with_joined_turns):
        assert change(change(messages)) == change(messages)


@given(st.lists(turns, min_size=1, max_size=8))
def test_results_keep_their_calls(messages: Chat) -> None:
    """Where ids are mapped, a result has the id of a call exactly if it had it before."""
    [form, *_] = PURE["MISTRAL_SMALL"].forms(
        [each for each in messages if not is_system(each)] or chat("uA"), False, False
    )
    before = [each for each in messages if not is_system(each)] or chat("uA")
    pairs = [(old, new) for old, new in zip(all_ids(before), all_ids(form), strict=True) if old is not None]
    assert len({old for old, _ in pairs}) == len({new for _, new in pairs}) == len(set(pairs))
    assert all(new is not None and len(new) == 9 and new.isalnum() for new in all_ids(form))


def all_ids(messages: Chat) -> list[str | None]:
    return [
        each.get(field)
        for message in messages
        for field, each in [
            *[("id", each) for each in message.get("tool_calls", ())],
            *([("tool_call_id", message)] if message["role"] == "tool" else []),
        ]
    ]


def words(messages: Chat) -> list[str]:
    return [word for each in messages for word in each["content"].split("\n\n") if word not in ("", "Understood.")]


def num_calls(messages: Chat) -> int:
    return sum(len(message.get("tool_calls", ())) for message in messages)
