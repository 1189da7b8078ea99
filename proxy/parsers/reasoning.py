"""How families of models write their thinking, and the incremental parser that separates it from the answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from tokenizers import Tokenizer

from tandem.protocol.messages.packed import unpack_token_ids
from tandem.protocol.messages.sampling import Thinking
from tandem.proxy.parsers.held_text import (
    MAX_SPACE_CHARACTERS,
    SPACE,
    HeldText,
    Markers,
    after_space,
    start_of_space,
)
from tandem.proxy.parsers.parsed import Cut

ReasoningFamilyName = Literal[
    "apertus",
    "apriel",
    "cohere",
    "deepseek_r1",
    "ernie45",
    "exaone",
    "gemma4",
    "glm45",
    "granite",
    "hunyuan_a13b",
    "kimi_k2",
    "kimi_vl",
    "minicpm3",
    "minimax_m2",
    "mistral",
    "openai_gptoss",
    "qwen3",
    "seed_oss",
]


@dataclass(frozen=True)
class ReasoningFamily:
    """One way to write thinking."""

    opening: str
    """Text before the thinking."""
    ending: str
    """Text after the thinking; the answer follows it."""
    hints: tuple[tuple[str, ...], ...]
    """Parts of chat templates that tell the family. All parts of one hint must occur."""
    to_answer: str = ""
    """Text that a forced ending adds, so that the model cannot think again."""
    openings: tuple[str, ...] = ()
    """Other texts before the thinking."""
    endings: tuple[str, ...] = ()
    """Other texts after the thinking."""
    repeats: bool = False
    """Whether the opening, which is no text, begins thinking in the middle of an answer, too."""
    answer_openings: tuple[str, ...] = ()
    """Texts before the answer that are no part of it."""
    answer_closings: tuple[str, ...] = ()
    """Texts after the answer that are no part of it."""


_THINK = ("<think>", "</think>")
REASONING_FAMILIES: dict[ReasoningFamilyName, ReasoningFamily] = {
    "openai_gptoss": ReasoningFamily(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant",
        (("<|channel|>analysis<|message|>",),),
        "<|channel|>final<|message|>",
        repeats=True,
    ),
    "mistral": ReasoningFamily("[THINK]", "[/THINK]", (("[THINK]",),)),
    "kimi_vl": ReasoningFamily("◁think▷", "◁/think▷", (("◁think▷",),)),
    "gemma4": ReasoningFamily(
        "<|channel>thought\n", "<channel|>", (("<|channel>",), ("<|think|>", "<|turn>")), repeats=True
    ),
    "cohere": ReasoningFamily(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        (("<|START_THINKING|>",),),
        repeats=True,
        answer_openings=("<|START_RESPONSE|>", "<|START_TEXT|>"),
        answer_closings=("<|END_RESPONSE|>", "<|END_TEXT|>"),
    ),
    "apertus": ReasoningFamily("<|inner_prefix|>", "<|inner_suffix|>", (("<|inner_prefix|>",),), repeats=True),
    "seed_oss": ReasoningFamily(
        "<seed:think>",
        "</seed:think>",
        (("<seed:think>",),),
        openings=("<seed:think><seed:cot_budget_reflect>",),  # of prompts that allow no thinking
    ),
    "minicpm3": ReasoningFamily("<|thought_start|>", "<|thought_end|>", (("<|thought_start|>",),)),
    "granite": ReasoningFamily(
        "Here is my thought process:",
        "Here is my response:",
        (("Here is my thought process:",),),
        openings=("Here's my thought process:",),
        endings=("Here's my response:",),
    ),
    "apriel": ReasoningFamily(
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        (("[BEGIN FINAL RESPONSE]",),),
        answer_closings=("[END FINAL RESPONSE]", "<|end|>"),
    ),
    "exaone": ReasoningFamily("<thought>", "</thought>", (("<thought>", "</thought>"),)),
    "minimax_m2": ReasoningFamily(*_THINK, (("</think>", "<minimax:tool_call>"),)),
    "hunyuan_a13b": ReasoningFamily(
        *_THINK,
        (("</think>", "<answer>"), ("</think>", "助手：")),
        answer_openings=("<answer>", "助手："),
        answer_closings=("</answer>",),
    ),
    "ernie45": ReasoningFamily(
        *_THINK, (("</think>", "<response>"),), answer_openings=("<response>",), answer_closings=("</response>",)
    ),
    "kimi_k2": ReasoningFamily(*_THINK, (("</think>", "<|im_middle|>"),)),
    "glm45": ReasoningFamily(*_THINK, (("</think>", "<|observation|>"),)),
    "deepseek_r1": ReasoningFamily(*_THINK, (("</think>", "<｜Assistant｜>"),)),
    "qwen3": ReasoningFamily(*_THINK, (("</think>",),)),
}
"""`detect_reasoning_family` tries them in this order: a hint of an earlier family is more specific."""

_NUM_LAST_TOKENS = 32
"""Tokens at the end of a prompt in which an opening is looked for."""


def detect_reasoning_family(chat_template: str | None) -> ReasoningFamilyName | None:
    """Chooses the family whose markers occur in the chat template; None for models that do not think."""
    for name, family in REASONING_FAMILIES.items():
        if any(all(part in (chat_template or "") for part in hint) for hint in family.hints):
            return name
    return None


class ReasoningFormat(msgspec.Struct, frozen=True):
    """One family with one tokeniser."""

    name: ReasoningFamilyName
    opening_ids: tuple[int, ...]
    """Token ids of the family's opening."""
    ending_ids: tuple[int, ...]
    """Token ids of the family's ending."""
    forced_ids: tuple[int, ...]
    """Token ids that end the thinking at once."""
    has_special_markers: bool
    """Whether they include special tokens, which detokenising then must not skip."""

    @classmethod
    def of(cls, name: ReasoningFamilyName, tokenizer: Tokenizer) -> ReasoningFormat:
        family = REASONING_FAMILIES[name]

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

        special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        opening, ending = ids(family.opening), ids(family.ending)
        forced = ids(family.ending + family.to_answer)
        return cls(name, opening, ending, forced, not special.isdisjoint((*opening, *ending)))

    def is_open(self, prompt_token_ids: bytes, tokenizer: Tokenizer) -> bool:
        """Returns whether the prompt ends with the opening, so that the answer begins with thinking.

        prompt_token_ids: packed.
        """
        last = unpack_token_ids(prompt_token_ids[-4 * _NUM_LAST_TOKENS :])
        text = tokenizer.decode(last, skip_special_tokens=False)
        family = REASONING_FAMILIES[self.name]
        return text.rstrip(SPACE).endswith(tuple(opening.rstrip() for opening in (family.opening, *family.openings)))

    def thinking(self, is_open: bool, max_tokens: int | None, is_constrained: bool) -> Thinking:
        """Returns what workers need to know. is_constrained: a grammar or tools decide how the answer begins."""
        forced = self.ending_ids if is_constrained else self.forced_ids
        return Thinking(is_open, self.opening_ids, self.ending_ids, forced, max_tokens)

    @property
    def answer_marks(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Texts before and after the answer that are no part of it."""
        family = REASONING_FAMILIES[self.name]
        return family.answer_openings, family.answer_closings

    def later_thinking(self) -> LaterThinking | None:
        """Returns a parser of thinking within the answer, if the family repeats it."""
        family = REASONING_FAMILIES[self.name]
        return LaterThinking((family.opening, *family.openings), (family.ending,)) if family.repeats else None

    def parser(self, is_open: bool) -> ReasoningParser:
        family = REASONING_FAMILIES[self.name]
        openings = sorted((family.opening, *family.openings), key=len, reverse=True)
        return ReasoningParser(openings, (family.ending, *family.endings), is_open)


class ReasoningParser:
    """Separates one sequence's thinking from its answer. is_open: the prompt ends with the opening."""

    def __init__(self, openings: Sequence[str], endings: Sequence[str], is_open: bool) -> None:
        self._openings = openings
        self._endings = Markers(endings)
        self._held = HeldText()
        self._may_repeat = is_open  # some models write the opening again
        self._state: Literal["before", "begun", "thinking", "ended", "answer"] = "begun" if is_open else "before"

    @property
    def has_ended(self) -> bool:
        """Whether the thinking has ended, or there is none."""
        return self._state in ("ended", "answer")

    def push(self, text: str, is_end: bool = False, cut: Cut | None = None) -> tuple[str, str]:
        """Returns what the text adds to the thinking and to the answer. Space around the thinking is layout.

        is_end: the text of the sequence ends here, so nothing is held back. cut: what ended it, if not the model.
        """
        if self._state == "answer":
            return "", text
        held = self._held
        held.push(text)
        if self._state == "before":
            start = after_space(held)
            is_layout = start - held.at <= MAX_SPACE_CHARACTERS
            may_open = is_layout and self._may_open(start)
            opening = self._opening_at(start) if is_layout else None
            if opening is not None and (is_end or not may_open):
                held.at = start + len(opening)
                self._state = "begun"
            elif (may_open and not is_end) or (may_open and cut == "length" and start < len(held.text)):
                return "", ""
            else:
                return "", self._answer()
        if self._state == "begun":
            held.at = after_space(held)
            may_open = self._may_open(held.at)
            opening = self._opening_at(held.at)
            if self._may_repeat and opening is not None and (is_end or not may_open):
                self._may_repeat = False
                held.at += len(opening)
                held.at = after_space(held)
            elif self._may_repeat and may_open and (not is_end or cut == "length"):
                return "", ""
            if not held.num_left:
                return "", ""
            self._state = "thinking"
        reasoning = ""
        if self._state == "thinking":
            found = self._endings.find(held)
            if found is None:
                certain = self._endings.end_of_certain(held)
                if is_end and (cut != "length" or certain == len(held.text)):
                    return held.take(), ""
                return held.take(start_of_space(held.text, held.at, certain)), ""
            reasoning = held.take(start_of_space(held.text, held.at, found.start()))
            held.at = found.end()
            self._state = "ended"
        held.at = after_space(held)
        return reasoning, self._answer() if held.num_left else ""

    def _may_open(self, start: int) -> bool:
        """Returns whether more text may make the rest an opening, or a longer one. start: of the rest."""
        rest = self._held.text[start : start + len(self._openings[0])]
        return any(opening.startswith(rest) and opening != rest for opening in self._openings)

    def _opening_at(self, start: int) -> str | None:
        """Returns the longest opening at a place in the text."""
        return next((opening for opening in self._openings if self._held.text.startswith(opening, start)), None)

    def _answer(self) -> str:
        self._state = "answer"
        return self._held.take()


class LaterThinking:
    """Separates thinking that begins in the middle of one sequence's answer."""

    def __init__(self, openings: Sequence[str], endings: Sequence[str]) -> None:
        self._openings, self._endings = Markers(openings), Markers(endings)
        self._is_thinking = False
        self._held = HeldText()

    def push(self, content: str, is_end: bool = False, cut: Cut | None = None) -> tuple[str, str]:
        """Returns what the content adds to the thinking and to the answer."""
        held = self._held
        held.push(content)
        thinking, answer = list[str](), list[str]()
        while True:
            markers, part = (self._endings, thinking) if self._is_thinking else (self._openings, answer)
            found = markers.find(held)
            if found is None:
                break
            part.append(held.take(found.start()))
            held.at = found.end()
            self._is_thinking = not self._is_thinking
        part.append(held.take(None if is_end and cut != "length" else markers.end_of_certain(held)))
        return "".join(thinking), "".join(answer)


class ReasoningCounter:
    """Counts the tokens of one sequence's thinking, without the tokens of its markers."""

    def __init__(self, reasoning_format: ReasoningFormat, is_open: bool) -> None:
        self._opening = reasoning_format.opening_ids
        self._ending = reasoning_format.ending_ids
        self._is_open = is_open
        self._last: tuple[int, ...] = ()
        self._may_open = True
        self._repeats = REASONING_FAMILIES[reasoning_format.name].repeats
        self.num_tokens = 0

    def add(self, token_id: int) -> None:
        if not (self._is_open or self._may_open):
            return
        marker = self._ending if self._is_open else self._opening
        self._last = (*self._last, token_id)[-len(marker) :]
        self.num_tokens += self._is_open
        if self._last != marker:
            return
        if self._is_open:
            self.num_tokens -= len(marker)
            self._may_open = self._repeats
        self._is_open, self._last = not self._is_open, ()
