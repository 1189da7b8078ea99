"""How families of models write their thinking, and the incremental parser that separates it from the answer. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import msgspec
from tokenizers import Tokenizer

from tandem.protocol.messages.sampling import Thinking
from tandem.protocol.messages.token_ids import unpack_token_ids
from tandem.proxy.parsers.held_text import MAX_SPACE_CHARACTERS, SPACE, HeldText, Markers, start_of_space

ReasoningFamilyName = Literal["deepseek_r1", "qwen3", "glm45", "kimi_k2", "kimi_vl", "mistral", "openai_gptoss"]


@dataclass(frozen=True)
class ReasoningFamily:
    """One way to write thinking."""

    opening: str
    """Text before the thinking."""
    ending: str
    """Text after the thinking; the answer follows it."""
    hints: tuple[str, ...]
    """Parts of chat templates, all of which must occur."""
    to_answer: str = ""
    """Text that a forced ending adds, so that the model cannot think again."""


_THINK = ("<think>", "</think>")
REASONING_FAMILIES: dict[ReasoningFamilyName, ReasoningFamily] = {
    "openai_gptoss": ReasoningFamily(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant",
        ("<|channel|>analysis<|message|>",),
        "<|channel|>final<|message|>",
    ),
    "mistral": ReasoningFamily("[THINK]", "[/THINK]", ("[THINK]",)),
    "kimi_vl": ReasoningFamily("◁think▷", "◁/think▷", ("◁think▷",)),
    "kimi_k2": ReasoningFamily(*_THINK, ("</think>", "<|im_middle|>")),
    "glm45": ReasoningFamily(*_THINK, ("</think>", "<|observation|>")),
    "deepseek_r1": ReasoningFamily(*_THINK, ("</think>", "<｜Assistant｜>")),
    "qwen3": ReasoningFamily(*_THINK, ("</think>",)),
}
"""`detect_reasoning_family` tries them in this order: a hint of an earlier family is more specific."""

_NUM_LAST_TOKENS = 32
"""Tokens at the end of a prompt in which an opening is looked for."""
_NO_SPACE = re.compile(f"[^{SPACE}]")


def detect_reasoning_family(chat_template: str | None) -> ReasoningFamilyName | None:
    """Chooses the family whose markers occur in the chat template; None for models that do not think."""
    for name, family in REASONING_FAMILIES.items():
        if all(part in (chat_template or "") for part in family.hints):
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
        return text.rstrip(SPACE).endswith(REASONING_FAMILIES[self.name].opening)

    def thinking(self, is_open: bool, max_tokens: int | None, is_constrained: bool) -> Thinking:
        """Returns what workers need to know. is_constrained: a grammar or tools decide how the answer begins."""
        forced = self.ending_ids if is_constrained else self.forced_ids
        return Thinking(is_open, self.opening_ids, self.ending_ids, forced, max_tokens)

    def parser(self, is_open: bool) -> ReasoningParser:
        family = REASONING_FAMILIES[self.name]
        return ReasoningParser(family.opening, family.ending, is_open)


class ReasoningParser:
    """Separates one sequence's thinking from its answer. is_open: the prompt ends with the opening."""

    def __init__(self, opening: str, ending: str, is_open: bool) -> None:
        self._opening = opening
        self._ending = ending
        self._endings = Markers([ending])
        self._held = HeldText()
        self._may_repeat = is_open  # some models write the opening again
        self._state: Literal["before", "begun", "thinking", "ended", "answer"] = "begun" if is_open else "before"

    def push(self, text: str, is_end: bool = False) -> tuple[str, str]:
        """Returns what the text adds to the thinking and to the answer. Space around the thinking is layout.

        is_end: the text of the sequence ends here, so nothing is held back.
        """
        if self._state == "answer":
            return "", text
        held = self._held
        held.push(text)
        if self._state == "before":
            start = _after_space(held)
            is_layout = start - held.at <= MAX_SPACE_CHARACTERS
            if is_layout and held.text.startswith(self._opening, start):
                held.at = start + len(self._opening)
                self._state = "begun"
            elif is_layout and self._may_open(start) and not is_end:
                return "", ""
            else:
                return "", self._answer()
        if self._state == "begun":
            held.at = _after_space(held)
            if self._may_repeat and held.text.startswith(self._opening, held.at):
                self._may_repeat = False
                held.at += len(self._opening)
                held.at = _after_space(held)
            elif self._may_repeat and self._may_open(held.at) and not is_end:
                return "", ""
            if not held.num_left:
                return "", ""
            self._state = "thinking"
        reasoning = ""
        if self._state == "thinking":
            found = self._endings.find(held)
            if found is None:
                end = len(held.text)
                if not is_end:
                    end = start_of_space(held.text, held.at, self._endings.end_of_certain(held))
                return held.take(end), ""
            reasoning = held.take(start_of_space(held.text, held.at, found.start()))
            held.at = found.end()
            self._state = "ended"
        held.at = _after_space(held)
        return reasoning, self._answer() if held.num_left else ""

    def _may_open(self, start: int) -> bool:
        """Returns whether the rest of the text may be the beginning of the opening. start: of the rest."""
        return self._opening.startswith(self._held.text[start : start + len(self._opening)])

    def _answer(self) -> str:
        self._state = "answer"
        return self._held.take()


def _after_space(held: HeldText) -> int:
    """Returns where the white space at the beginning of the unparsed text ends."""
    found = _NO_SPACE.search(held.text, held.at)
    return len(held.text) if found is None else found.start()


class ReasoningCounter:
    """Counts the tokens of one sequence's thinking, without the tokens of its markers."""

    def __init__(self, reasoning_format: ReasoningFormat, is_open: bool) -> None:
        self._opening = reasoning_format.opening_ids
        self._ending = reasoning_format.ending_ids
        self._is_open = is_open
        self._last: tuple[int, ...] = ()
        self._may_open = True
        self._repeats = reasoning_format.name == "openai_gptoss"
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
