"""Tests of state machines as text: events in, actions and state out, as in etcd/raft's `testdata`.

A script is a list of steps, divided by blank lines. A step has one event, a line of dashes, and what the machine does:

    reserve t pair
    ----
    allocate t

Lines that begin with # are comments. `check` compares. `python -m tests.support.scripts` writes what the machines do
now into all scripts, so that a change can be read as a diff.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RULER = "----"
SCRIPTS = {"unit/handover/scripts": "tests.unit.handover.test_scripts"}
"""Folders of scripts, and the modules whose `machine_of(file)` returns the function that plays an event."""

Play = Callable[[str], list[str]]
"""Takes an event, and returns lines of what the machine does."""


class Step(NamedTuple):
    comments: list[str]
    event: str
    expected: list[str]


def parse(text: str) -> list[Step]:
    """Raises ValueError for a step without a ruler."""
    steps = []
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        comments = [line for line in lines if line.startswith("#")]
        rest = lines[len(comments) :]
        if not rest and comments:
            steps.append(Step(comments, "", []))
            continue
        if len(rest) < 2 or rest[1] != RULER:
            raise ValueError(f"a step without {RULER}: {block}")
        steps.append(Step(comments, rest[0], rest[2:]))
    return steps


def played(text: str, play: Play) -> str:
    """Returns the script with what the machine does now."""
    blocks = []
    for step in parse(text):
        done = [step.event, RULER, *play(step.event)] if step.event else []
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
