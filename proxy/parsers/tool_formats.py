"""The format in which the served model writes tool calls: the grammar that enforces it, and its parser."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

from tandem.proxy.parsers.argument_types import ToolArguments
from tandem.proxy.parsers.tool_families import TOOL_FAMILIES, ToolFamilyName
from tandem.proxy.parsers.tool_parser import ToolParser
from tandem.proxy.parsers.tool_shapes import Marked, Parameters, Writing

DEFAULT_FAMILY: ToolFamilyName = "hermes"
"""Family for chat templates without tools, and for calls that a grammar forces where the family is not known."""
_CHOICES = {"INDEX": "/[0-9]+/", "BOOLEAN": "/true|false/"}
_TOOLS = re.compile(r"\btools\b")


def detect_tool_family(chat_template: str | None) -> ToolFamilyName | None:
    """Chooses the family whose markers occur in the chat template; None if it has tools, but of no known family."""
    template = chat_template or ""
    for name, family in TOOL_FAMILIES.items():
        if any(all(_occurs(part, template) for part in hint) for hint in family.hints):
            return name
    return None if _TOOLS.search(template) else DEFAULT_FAMILY


def _occurs(part: str, template: str) -> bool:
    return part.removeprefix("!") not in template if part.startswith("!") else part in template


class ToolFormat(msgspec.Struct, frozen=True):
    """One family with one tokeniser."""

    name: ToolFamilyName = DEFAULT_FAMILY
    tokens: dict[str, int] = {}
    """Ids of added tokens, by text; a grammar must name them by id."""
    text_tokens: tuple[int, ...] = ()
    """Added tokens that are part of text (such as `<think>`)."""
    has_special_markers: bool = False
    """Whether the markers are special tokens, which detokenising then must not skip."""
    tools: dict[str, ToolArguments] | None = None
    """Tools of one request, by name; None if they are not known yet."""
    is_known: bool = True
    """Whether the model writes calls in this format by itself; if not, it does so only where a grammar forces it."""

    @classmethod
    def of(cls, name: ToolFamilyName, tokenizer: Tokenizer) -> ToolFormat:
        family = TOOL_FAMILIES[name]
        writing = family.writing
        written = "".join((writing.first, writing.before, writing.between, writing.after, writing.last))
        for shape in family.shapes:
            written += "".join(shape.arguments.markers) if isinstance(shape.arguments, (Parameters, Marked)) else ""
        added = tokenizer.get_added_tokens_decoder()
        tokens = {token.content: i for i, token in added.items() if token.content and token.content in written}
        text_tokens = sorted(i for i, token in added.items() if not token.special and i not in tokens.values())
        special = {token.content for token in added.values() if token.special}
        has_special = not special.isdisjoint((*tokens, *family.markers, *family.slips))
        return cls(name, tokens, tuple(text_tokens), has_special)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that begin calls."""
        return TOOL_FAMILIES[self.name].markers

    @property
    def layout(self) -> tuple[str, ...]:
        """Texts that are no part of the answer at its end."""
        return TOOL_FAMILIES[self.name].layout

    def parser(self) -> ToolParser:
        return ToolParser(TOOL_FAMILIES[self.name], self.tools)

    def with_tools(self, tools: Mapping[str, dict[str, Any]]) -> ToolFormat:
        """Returns the format with the tools of a request. tools: JSON schemas of arguments, by name."""
        has_types = any(isinstance(shape.arguments, (Parameters, Marked)) for shape in TOOL_FAMILIES[self.name].shapes)
        known = {name: ToolArguments.of(schema) if has_types else ToolArguments() for name, schema in tools.items()}
        return msgspec.structs.replace(self, tools=known)

    def grammar(
        self,
        tools: Mapping[str, dict[str, Any]],
        *,
        is_required: bool,
        is_parallel: bool,
        content: str | None = None,
    ) -> str | None:
        """Returns a grammar in llguidance's Lark, or None where the format cannot be enforced (`is_constrained`).

        tools: the JSON schema of the arguments, with llguidance's options, by the name of the tool. Tools with the same
        schema share a rule. is_required: the answer consists of calls only. content: the grammar rule for answers
        without calls; None allows any text. Arguments that are not written as JSON are free text up to the end of each,
        or of the call.
        """
        family, writing, is_json = TOOL_FAMILIES[self.name], self.writing, self.writes_json
        opening = family.markers[0] if family.markers else ""  # without a marker, calls begin the answer
        if not is_required and content is not None and not self.is_known:
            return f"%llguidance {{}}\nstart: {content}"
        if not self.is_constrained(is_required=is_required, has_content=content is not None):
            return None
        if self.name == "openai":
            is_parallel = False  # a call ends the answer
            if content is not None:
                content = f"{self._terms('<|channel|>final<|message|>')} {content}"
        # `rest` is a call, or all calls, without the marker that begins it.
        between = self._terms(writing.between)
        if writing.first or not opening:
            more = f"({between} call)*" if is_parallel else ""
            first = self._terms(writing.first.removeprefix(opening))
            rules = [f"rest: {first} call {more} {self._terms(writing.last)}"]
            calls = f"calls: {self._terms(opening)} rest"
            before = writing.before
        else:
            rules = ["rest: call"]
            more = f"({between} {self._terms(opening)} rest)*" if is_parallel else ""
            calls = f"calls: {self._terms(opening)} rest {more}"
            before = writing.before.removeprefix(opening)
        if is_required:
            start = "calls"
            rules.append(calls)
        elif content is not None:
            start = "calls | content"
            rules += [calls, f"content: {content}"]
        else:
            start, text_rules = self._free_text(opening, is_parallel)
            rules += [*text_rules, *([] if opening else [calls])]
        names_of: dict[str, list[str]] = {}
        for name, schema in tools.items():
            rule = f"%json {json.dumps(schema, ensure_ascii=False)}" if is_json else "arguments"
            names_of.setdefault(rule, []).append(name)
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(names_of))))
        after = self._terms(writing.after) if is_json else ""
        for number, (arguments, names) in enumerate(names_of.items()):
            rules.append(f"call_{number}: {self._terms(before, names)} {arguments} {after}")
        if not is_json:
            rules += self._arguments(writing.after)
        return "\n".join(["%llguidance {}", f"start: {start}", *rules])

    def is_constrained(self, *, is_required: bool, has_content: bool) -> bool:
        """Returns whether a grammar can enforce calls.

        In free text it can only if the format is known, arguments are written as JSON, and text shows where a call
        begins.
        """
        if is_required or has_content:
            return True
        family, writing = TOOL_FAMILIES[self.name], self.writing
        is_marked = bool(family.markers) or (not writing.first and not writing.before.startswith("NAME"))
        return self.is_known and self.writes_json and self.name != "openai" and is_marked

    @property
    def writes_json(self) -> bool:
        """Whether arguments are written as JSON, so that a grammar can enforce their schemas."""
        return self.name == "openai" or TOOL_FAMILIES[self.name].shapes[0].arguments == "json"

    @property
    def writing(self) -> Writing:
        writing = TOOL_FAMILIES[self.name].writing
        if self.name == "mistral" and "[ARGS]" not in self.tokens:  # tokenisers before version 11
            return Writing('{"name": "NAME", "arguments": ', "}", "[TOOL_CALLS][", ", ", "]")
        return writing

    def _terms(self, text: str, names: Sequence[str] = ()) -> str:
        """Returns grammar terms for a text: quoted pieces, token ids of added tokens.

        NAME stands for one of the names, INDEX for a number.
        """
        markers = "|".join(re.escape(token) for token in sorted(self.tokens, key=len, reverse=True))
        terms = []
        for piece in re.split(f"({markers})", text) if markers else [text]:
            if piece in self.tokens:
                terms.append(f"<[{self.tokens[piece]}]>")
                continue
            for part in re.split("(NAME|INDEX|BOOLEAN)", piece):
                if part == "NAME":
                    terms.append(f"({' | '.join(map(_quoted, names))})")
                elif part in _CHOICES:
                    terms.append(_CHOICES[part])
                elif part:
                    terms.append(_quoted(part))
        return " ".join(terms)

    def _free_text(self, opening: str, is_parallel: bool) -> tuple[str, list[str]]:
        """Returns the start expression and rules for any text in which every call that is begun is valid."""
        tokens = "".join(f" | <[{token_id}]>" for token_id in self.text_tokens)
        if not opening:
            call = re.escape(self.writing.before.partition("NAME")[0]).replace(r"\ ", " ")
            return "calls | text", [f"text: (TEXT{tokens})*", rf"TEXT: /(.|\n)+/ & ~/{call}(.|\n)*/"]
        term = self._terms(opening)
        if term.startswith("<["):
            begun = [f"begun: text {term}"]
        elif tokens:
            token_set = ",".join(map(str, self.text_tokens))
            begun = [f"begun: (TEXT? <[{token_set}]>)* last", f"last[lazy]: TEXT? {term}"]
        else:
            begun = [f"begun[lazy]: TEXT? {term}"]
        rules = [*begun, f"text: (TEXT{tokens})*", r"TEXT: /(.|\n)+/"]
        return ("(begun rest)* text" if is_parallel else "begun rest | text"), rules

    def _arguments(self, after: str) -> list[str]:
        """Returns rules for arguments that are not JSON, and for the text that ends a call."""
        arguments = TOOL_FAMILIES[self.name].shapes[0].arguments
        if not isinstance(arguments, Parameters):
            return self._until("arguments", after)
        opening, between, closing = arguments.written
        return [
            f"arguments: parameter* {self._terms(after)}",
            f"parameter: {self._terms(opening)} KEY {self._terms(between)} value",
            r'KEY: /[^<>="\n]{1,256}/',
            *self._until("value", closing),
        ]

    def _until(self, rule: str, end: str) -> list[str]:
        """Returns rules for any text up to an end. rule: name of the rule for both."""
        terms = self._terms(end)
        added = [str(i) for text, i in self.tokens.items() if text not in end] + list(map(str, self.text_tokens))
        if terms.startswith("<["):
            return [f"{rule}: free {terms}", f"free: (ANY{''.join(f' | <[{i}]>' for i in added)})*", r"ANY: /(.|\n)+/"]
        first, is_token, rest = terms.partition(" <[")
        tokens = f"(ANY? <[{','.join(added)}]>)* " if added else ""
        # The text before a token may also occur where the token does not follow.
        closing = f"closing+ <[{rest}" if is_token else "closing"
        return [f"{rule}: {tokens}{closing}", f"closing[lazy]: ANY? {first}", r"ANY: /(.|\n)+/"]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
