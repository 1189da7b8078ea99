"""Exercises with one correct answer each. A lesson is a function from a random source to a question and its answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import NamedTuple

from tools.demo_model.texts import TEXTS


class Turn(NamedTuple):
    """`key` identifies the exercise independent of its wording; it decides whether the exam reserves it."""

    question: str
    answer: str
    key: str


Lesson = Callable[[Random], Turn]
Lessons = dict[str, tuple[float, Lesson]]

_MAX_OPERAND = 99
_MAX_COUNT_LENGTH = 20
_MAX_COUNT = 100


def add(rng: Random) -> Turn:
    a, b = rng.randint(0, _MAX_OPERAND), rng.randint(0, _MAX_OPERAND)
    wording = rng.choice(
        [
            "What is {a} + {b}?",
            "What is {a} plus {b}?",
            "{a} + {b} =",
            "Add {a} and {b}.",
            "How much is {a} + {b}?",
            "Please add {a} and {b}.",
        ]
    )
    return Turn(wording.format(a=a, b=b), f"{a} + {b} = {a + b}", f"add {a} {b}")


def subtract(rng: Random) -> Turn:
    a, b = sorted((rng.randint(0, _MAX_OPERAND), rng.randint(0, _MAX_OPERAND)), reverse=True)
    wording = rng.choice(
        [
            "What is {a} - {b}?",
            "What is {a} minus {b}?",
            "{a} - {b} =",
            "Subtract {b} from {a}.",
            "How much is {a} - {b}?",
            "Take {b} away from {a}.",
        ]
    )
    return Turn(wording.format(a=a, b=b), f"{a} - {b} = {a - b}", f"subtract {a} {b}")


def count_up(rng: Random, max_length: int = _MAX_COUNT_LENGTH) -> Turn:
    length = rng.randint(3, max_length)
    first = rng.randint(0, _MAX_COUNT - length)
    last = first + length
    wording = rng.choice(["Count from {a} to {b}.", "Count up from {a} to {b}.", "Please count from {a} to {b}."])
    return Turn(wording.format(a=first, b=last), _series(range(first, last + 1)), f"count {first} {last}")


def count_down(rng: Random, max_length: int = _MAX_COUNT_LENGTH) -> Turn:
    length = rng.randint(3, max_length)
    last = rng.randint(0, _MAX_COUNT - length)
    first = last + length
    wording = rng.choice(
        ["Count down from {a} to {b}.", "Count backwards from {a} to {b}.", "Count from {a} down to {b}."]
    )
    return Turn(wording.format(a=first, b=last), _series(range(first, last - 1, -1)), f"count {first} {last}")


def copy_words(rng: Random) -> Turn:
    words = _words(rng, 2, 12)
    wording = rng.choice(["Repeat these words: {}", "Say this again: {}", "Copy this: {}", "Repeat after me: {}"])
    return Turn(wording.format(words), words, f"copy {words}")


def reverse_words(rng: Random) -> Turn:
    words = _words(rng, 2, 7)
    wording = rng.choice(
        ["Reverse these words: {}", "Say these words backwards: {}", "Turn the order of these words around: {}"]
    )
    return Turn(wording.format(words), " ".join(reversed(words.split())), f"reverse {words}")


def sort_words(rng: Random) -> Turn:
    words = rng.sample(TEXTS.things, rng.randint(3, 5))
    wording = rng.choice(["Sort these words: {}", "Put these words in alphabetical order: {}", "Sort from A to Z: {}"])
    return Turn(wording.format(", ".join(words)), ", ".join(sorted(words)), f"sort {' '.join(words)}")


def sort_numbers(rng: Random) -> Turn:
    numbers = rng.sample(range(100), rng.randint(3, 6))
    given, downwards = ", ".join(map(str, numbers)), rng.random() < 0.3
    up = ["Sort these numbers: {}", "Sort from small to large: {}", "Put these numbers in order: {}"]
    down = ["Sort from large to small: {}", "Sort these numbers downwards: {}"]
    wording = rng.choice(down if downwards else up)
    return Turn(wording.format(given), _series(sorted(numbers, reverse=downwards)), f"sort {downwards} {given}")


def spell(rng: Random) -> Turn:
    word = rng.choice(TEXTS.things)
    wording = rng.choice(["Spell {}.", "How do you spell {}?", "Spell the word {}.", "Can you spell {}?"])
    return Turn(wording.format(word), "-".join(word), f"spell {wording} {word}")


def spell_backwards(rng: Random) -> Turn:
    word = rng.choice(TEXTS.things)
    wording = rng.choice(["Spell {} backwards.", "How do you spell {} backwards?", "Reverse the letters of {}."])
    return Turn(wording.format(word), "-".join(reversed(word)), f"spell {wording} {word}")


def _series(numbers: range | list[int]) -> str:
    return ", ".join(map(str, numbers))


def _words(rng: Random, least: int, most: int) -> str:
    return " ".join(rng.choice(TEXTS.things) for _ in range(rng.randint(least, most)))


LESSONS: Lessons = {
    "add": (2.5, add),
    "subtract": (2.5, subtract),
    "count up": (0.8, count_up),
    "count down": (0.8, count_down),
    "copy": (0.5, copy_words),
    "reverse": (1.2, reverse_words),
    "sort words": (3.5, sort_words),
    "sort numbers": (3.0, sort_numbers),
    "spell": (0.8, spell),
    "spell backwards": (1.0, spell_backwards),
}
"""Lessons with their weight in the training; harder ones weigh more."""

SHORT_COUNTS: Lessons = {
    "count up a little": (0.8, partial(count_up, max_length=5)),
    "count down a little": (0.8, partial(count_down, max_length=5)),
}
"""Short counts teach when to stop; long ones do so too rarely."""

HARD_LESSONS: Lessons = {
    "add": (2.0, add),
    "subtract": (1.0, subtract),
    "count up": (0.3, count_up),
    "count down": (0.3, count_down),
    "copy": (0.5, copy_words),
    "reverse": (0.4, reverse_words),
    "sort words": (5.0, sort_words),
    "sort numbers": (5.0, sort_numbers),
    "spell": (0.3, spell),
    "spell backwards": (0.3, spell_backwards),
}
"""Weights for the end of the training."""
