"""Fake workers behind a real proxy that answer chats by a script: a tool call first, a text once it has a result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.support.fake_workers import FakeWorkers, Proxy, make_tokenizer
from tests.support.tokenizers import token_id

MODEL = "scripted"
_TEMPLATE = (
    "{% if tools %}<|tools|>{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Script = Callable[[str], str]
"""From the rendered prompt to the answer."""


def tool_call(name: str, **arguments: object) -> str:
    """Returns a call as models of the Hermes family write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tools_of(prompt: str) -> list[str]:
    """Returns the names of the tools that a prompt offers."""
    if not prompt.startswith("<|tools|>"):
        return []
    return prompt.removeprefix("<|tools|>").partition("<|")[0].split()


class ScriptedWorkers(FakeWorkers):
    def __init__(self, folder: Path, controls: list[str], tokenizer: Tokenizer, script: Script) -> None:
        self._tokenizer, self._script = tokenizer, script
        self.prompts: list[str] = []
        super().__init__(folder, controls, max_model_len=2**20, step_s=0, sticks=False)

    def reply(self, token_ids: list[int]) -> list[int]:
        prompt = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        self.prompts.append(prompt)
        return [*self._tokenizer.encode(self._script(prompt)).ids, token_id(self._tokenizer, "</s>")]


@contextmanager
def scripted_model(
    folder: Path,
    script: Script,
    name: str = MODEL,
    template: str = _TEMPLATE,
    markers: Sequence[str] = (),
    **settings: Any,
) -> Iterator[tuple[str, ScriptedWorkers]]:
    """Yields the URL of a proxy that serves the script under a name, and its workers.

    markers: special tokens. settings: of the proxy.
    """
    tokenizer = make_tokenizer(folder, template, markers)
    with Proxy(folder, served_model_name=name, max_body_mib=64, **settings) as proxy:
        workers = ScriptedWorkers(folder, [proxy.control], tokenizer, script)
        try:
            proxy.wait_for(200)
            yield proxy.url, workers
        finally:
            workers.stop()
