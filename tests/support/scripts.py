"""Tests of state machines as text: events in, actions and state out, as in etcd/raft's `testdata`.

A script is a list of steps, divided by blank lines. A step has events, one a line, then a line of dashes, and what the
machine does for them:

    reserve t pair
    ----
    allocate t

Lines that begin with # are comments. `check` compares. `python -m tests.support.scripts` writes what the machines do
now into all scripts, so that a change can be read as a diff.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RULER = "----"
SCRIPTS = {
    "unit/engine/tiers/scripts": "tests.unit.engine.tiers.test_prefix_tiers",
    "unit/handover/pairs/scripts": "tests.unit.handover.pairs.test_scripts",
    "unit/handover/scripts": "tests.unit.handover.test_scripts",
    "unit/proxy/cluster/scripts": "tests.unit.proxy.cluster.test_scripts",
    "unit/proxy/dispatch/scripts": "tests.unit.proxy.dispatch.test_scripts",
    "unit/vllm_worker/scheduler/scripts": "tests.unit.vllm_worker.scheduler.test_scripts",
    "unit/worker/scripts": "tests.unit.worker.test_scripts",
}
"""Folders of scripts, and the modules whose `machine_of(file)` returns the function that plays an event."""

Play = Callable[[str], list[str]]
"""Takes an event, and returns lines of what the machine does."""


class Step(NamedTuple):
    comments: list[str]
    events: list[str]
    expected: list[str]


class Words:
    """The words of an event: `now` of `allocate t now for=2` is a flag, `for` an option."""

    def __init__(self, event: str) -> None:
        words = event.split()
        self.options = dict(word.split("=", 1) for word in words if "=" in word)
        self.words = [word for word in words if "=" not in word]

    def flag(self, name: str) -> bool:
        """Removes the word, and returns whether it was there."""
        if name not in self.words:
            return False
        self.words.remove(name)
        return True


def numbers(text: str) -> list[int]:
    """Returns the numbers of "1,2"; none of "-"."""
    return [] if text == "-" else [int(each) for each in text.split(",")]


def listed(values: Iterable[object]) -> str:
    return " ".join(map(str, values)) or "none"


def parse(text: str) -> list[Step]:
    """Raises ValueError for a step without a ruler."""
    steps = []
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        comments = [line for line in lines if line.startswith("#")]
        rest = lines[len(comments) :]
        if not rest and comments:
            steps.append(Step(comments, [], []))
            continue
        if RULER not in rest[1:]:
            raise ValueError(f"a step without {RULER}: {block}")
        ruler = rest.index(RULER)
        steps.append(Step(comments, rest[:ruler], rest[ruler + 1 :]))
    return steps


def played(text: str, play: Play) -> str:
    """Returns the script with what the machine does now."""
    blocks = []
    for step in parse(text):
        done = [line for event in step.events for line in play(event)]
        done = [*step.events, RULER, *done] if step.events else []
        blocks.append("\n".join([*step.comments, *done]))
    return "\n\n".join(blocks) + "\n"


def check(file: Path, play: Play) -> None:
    text = file.read_text()
    assert played(text, play) == text, "python -m tests.support.scripts writes what happens now into the scripts"


def rewrite() -> None:
    for folder, module in SCRIPTS.items():
        machine_of = importlib.import_module(module).machine_of
        for file in sorted((ROOT / folder).glob("*.txt")):
            before = file.read_text()
            after = played(before, machine_of(file))
            if after != before:
                file.write_text(after)
                print(file.relative_to(ROOT.parent))


if __name__ == "__main__":
    sys.exit(rewrite())
