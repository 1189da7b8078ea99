"""Cases in text files: what a model wrote, and the parts that clients must get.

A case begins with a line of words divided by |. Below it stand the text, the thinking, the content and each call with
its arguments; what has no line is empty, and `no call` means that all of the text is content. ⏎ is a line feed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "cases"


class Case(NamedTuple):
    words: list[str]
    text: str
    thinking: str
    content: str
    calls: list[tuple[str, Any]]


def read_cases(name: str) -> list[Case]:
    """Raises KeyError for a case without a text."""
    lines = (FOLDER / f"{name}.txt").read_text().split("\n")
    cases = []
    for block in "\n".join(line for line in lines if not line.startswith("#")).strip().split("\n\n"):
        head, *rest = block.split("\n")
        calls = [line.removeprefix("call: ").partition(" ") for line in rest if line.startswith("call: ")]
        parts = dict(line.partition(": ")[::2] for line in rest)
        parts = {key: value.replace("⏎", "\n") for key, value in parts.items()}
        content = parts["text"] if "no call" in parts else parts.get("content", "")
        found = [(called, json.loads(arguments)) for called, _, arguments in calls]
        cases.append(Case(head.split(" | "), parts["text"], parts.get("thinking", ""), content, found))
    return cases
