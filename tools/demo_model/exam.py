"""The demo model's exam: 500 fixed questions with one correct answer each.

Its exercises never occur in the training data. Small talk and facts do, because the model learns them by heart.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from tools.demo_model.chats import all_small_talk, exercise, is_kept_for_exam
from tools.demo_model.lessons import Turn
from tools.demo_model.memory import about_list, numbered_list
from tools.demo_model.stories import story

SEED = 500
EXERCISES = {
    "add": 50,
    "subtract": 50,
    "count up": 20,
    "count down": 20,
    "copy": 30,
    "reverse": 40,
    "sort words": 45,
    "sort numbers": 40,
    "spell": 30,
    "spell backwards": 30,
}
NUM_BY_HEART = 70
NUM_LISTS = 45
NUM_LONG = 30
TURNS_BETWEEN = 30
"""Turns between a list and a long-context question about it; at least 1,000 tokens."""


class Question(NamedTuple):
    """Messages of a chat request that ends with the user, and the exact answer expected."""

    subject: str
    messages: list[dict[str, str]]
    answer: str


def exam() -> list[Question]:
    """Returns the same 500 questions in the same order on every call."""
    rng = Random(SEED)
    questions: list[Question] = []
    for subject, number in EXERCISES.items():
        for _ in range(number):
            turn = exercise(rng, for_exam=True, name=subject)
            questions.append(Question(subject, [_user(turn.question)], turn.answer))
    for chat in rng.sample(list(all_small_talk()), NUM_BY_HEART):
        turn = chat.turns[0]
        before = [] if chat.system is None else [{"role": "system", "content": chat.system}]
        questions.append(Question("by heart", [*before, _user(turn.question)], turn.answer))
    questions += (_list_question(rng) for _ in range(NUM_LISTS))
    questions += (_long_question(rng) for _ in range(NUM_LONG))
    return questions


def _list_question(rng: Random) -> Question:
    """Gives a list, up to two other turns, and then a question about the list."""
    turn, items = numbered_list(rng)
    between = [exercise(rng) for _ in range(rng.randint(0, 2))]
    return _about_list("list", rng, items, [turn, *between])


def _long_question(rng: Random) -> Question:
    """Gives a list, TURNS_BETWEEN other turns, and then a question about the list."""
    turn, items = numbered_list(rng)
    between = [story(rng) if number % 10 == 9 else exercise(rng) for number in range(TURNS_BETWEEN)]
    return _about_list("long context", rng, items, [turn, *between])


def _about_list(subject: str, rng: Random, items: list[str], turns: list[Turn]) -> Question:
    while not is_kept_for_exam(asked := about_list(rng, items)):
        pass
    said = [message for each in turns for message in (_user(each.question), _assistant(each.answer))]
    return Question(subject, [*said, _user(asked.question)], asked.answer)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def score(questions: list[Question], answers: list[str]) -> dict[str, tuple[int, int]]:
    """Returns (number correct, number asked) by subject and for "all"."""
    right: dict[str, tuple[int, int]] = {}
    for question, answer in zip(questions, answers, strict=True):
        for subject in (question.subject, "all"):
            num_right, number = right.get(subject, (0, 0))
            right[subject] = (num_right + (answer == question.answer), number + 1)
    return right


def rows(scores: dict[str, tuple[int, int]]) -> Iterator[tuple[str, str, str]]:
    """Yields table rows: subject, correct of all, percentage."""
    for subject, (num_right, number) in scores.items():
        if subject != "all":
            yield subject, f"{num_right} of {number}", f"{100 * num_right / number:.0f}"
    num_right, number = scores["all"]
    yield "all", f"{num_right} of {number}", f"{100 * num_right / number:.1f}"
