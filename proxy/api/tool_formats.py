"""The formats in which models write tool calls: the grammar that enforces a format, and its parser.

hermes: `<tool_call>`, a line of JSON with name and arguments, `</tool_call>` (Hermes 2 Pro, Qwen 2.5 and 3).
llama3_json: the answer is JSON with name and parameters, and nothing else (Llama 3.1 and later).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from tokenizers import Tokenizer

from tandem.proxy.api.tool_parser import ToolParser

ToolFormatName = Literal["hermes", "llama3_json"]
_OPENING, _CLOSING = "<tool_call>", "</tool_call>"


class ToolFormat(msgspec.Struct, frozen=True):
    """One format with one tokeniser.

    opening, closing: the markers as grammar terms: quoted text, or a token id if the tokeniser has a token for it.
    text_tokens: ids of added tokens that are part of text (such as `<think>`); a grammar must list them explicitly.
    has_special_markers: the markers are special tokens, so detokenising must not skip those.
    """

    name: ToolFormatName = "hermes"
    opening: str = json.dumps(_OPENING)
    closing: str = json.dumps(_CLOSING)
    text_tokens: tuple[int, ...] = ()
    has_special_markers: bool = False

    @classmethod
    def of(cls, name: ToolFormatName, tokenizer: Tokenizer) -> ToolFormat:
        added = tokenizer.get_added_tokens_decoder()
        texts = (_OPENING, _CLOSING) if name == "hermes" else ()
        markers = {token.content: i for i, token in added.items() if token.content in texts}
        opening, closing = (f"<[{markers[m]}]>" if m in markers else json.dumps(m) for m in (_OPENING, _CLOSING))
        text_tokens = sorted(i for i, token in added.items() if not token.special and i not in markers.values())
        has_special_markers = any(added[i].special for i in markers.values())
        return cls(name, opening, closing, tuple(text_tokens), has_special_markers)

    def grammar(
        self,
        tools: Mapping[str, dict[str, Any]],
        *,
        is_required: bool,
        is_parallel: bool,
        content: str | None = None,
    ) -> str:
        """Returns a grammar in llguidance's Lark.

        tools: the JSON schema of the arguments, with llguidance's options, by the name of the tool. is_required: the
        answer consists of calls only. content: the grammar rule for answers without calls; None allows any text.
        """
        rules = self._calls(is_parallel)
        if is_required:
            start = "calls"
        elif content is not None:
            start = "calls | content"
            rules.append(f"content: {content}")
        else:
            start, more = self._free_text(is_parallel)
            rules += more
        options = " | ".join(f"call_{number}" for number in range(len(tools)))
        rules += [f"call: {options}", *(self._call(number, *tool) for number, tool in enumerate(tools.items()))]
        return "\n".join(["%llguidance {}", f"start: {start}", *rules])

    def _call(self, number: int, name: str, parameters: dict[str, Any]) -> str:
        key = "arguments" if self.name == "hermes" else "parameters"
        before = json.dumps(f'{{"name": {json.dumps(name)}, "{key}": ')
        return f'call_{number}: {before} %json {json.dumps(parameters, ensure_ascii=False)} "}}"'

    def _calls(self, is_parallel: bool) -> list[str]:
        if self.name == "llama3_json":
            return ['calls: call ("; " call)*' if is_parallel else "calls: call"]
        rest = f'rest: "\\n" call "\\n" {self.closing}'
        marked = f"marked: {self.opening} rest"
        return [r'calls: marked ("\n" marked)*' if is_parallel else "calls: marked", marked, rest]

    def _free_text(self, is_parallel: bool) -> tuple[str, list[str]]:
        """Returns the start expression and rules for any text in which every call that is begun is valid."""
        tokens = "".join(f" | <[{token_id}]>" for token_id in self.text_tokens)
        if self.name == "llama3_json":
            return "calls | text", [f"text: (TEXT{tokens})*", r'TEXT: /(.|\n)+/ & ~/\{"name": "(.|\n)*/']
        if self.opening.startswith("<["):
            begun = [f"begun: text {self.opening}"]
        elif tokens:
            token_set = ",".join(map(str, self.text_tokens))
            begun = [f"begun: (TEXT? <[{token_set}]>)* last", f"last[lazy]: TEXT? {self.opening}"]
        else:
            begun = [f"begun[lazy]: TEXT? {self.opening}"]
        rules = [*begun, f"text: (TEXT{tokens})*", r"TEXT: /(.|\n)+/"]
        return ("(begun rest)* text" if is_parallel else "begun rest | text"), rules

    def parser(self) -> ToolParser:
        return ToolParser(_OPENING, _CLOSING) if self.name == "hermes" else ToolParser("", ";")
